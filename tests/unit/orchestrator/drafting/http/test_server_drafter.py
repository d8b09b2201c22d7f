"""Drafting of one session by a server, without HTTP: context, chains, health, what the server is asked."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from gammaray.blocks import Shape
from gammaray.draft_server import DraftServerUrl
from gammaray.types import DrafterKind, SamplingParams, VerificationMethod
from gammaray.vocabulary import Vocabulary
from orchestrator.cycle.session import Session
from orchestrator.drafting.http.client import DraftServerError, Failure
from orchestrator.drafting.http.dialects import Reply, dialect_of
from orchestrator.drafting.http.drafter import ContextText, ServerDrafter
from orchestrator.drafting.http.server import Identity
from orchestrator.workers.backoff import Backoff, Patience
from orchestrator.workers.drafter import LONG_CONTEXT, Readiness
from orchestrator.workers.protocol import Traffic
from tests.support.vocabulary_helpers import CODE, byte_fallback, byte_level

VOCAB = 100
EOS = 99


class Spelled:
    """A tokenizer whose token i is the byte i."""

    vocab_size = VOCAB

    def __init__(self, start=()):
        self.start, self.vocabulary = list(start), self

    def encode(self, text, *, is_start=True):
        return [*(self.start if is_start else ()), *(byte % VOCAB for byte in text.encode())]

    def continuation(self, committed, added):
        return [byte % VOCAB for byte in added]

    def decode(self, token_ids):
        return bytes(token_ids).decode()

    def token_bytes(self, token_id):
        return bytes([token_id])


class Answers:
    """A server that is asked without HTTP, and replies what it is told to."""

    def __init__(self, *, owner="vllm", has_ids=True, max_context=None, tokenizer=None):
        self.url = DraftServerUrl.parse("openai:http://draft:1")
        self.identity = Identity(dialect_of(owner), "m", max_context)
        self.tokenizer = tokenizer or Spelled()
        self.has_ids, self.is_up, self.number = has_ids, True, 1
        self.backoff, self.patience = Backoff(), Patience()
        self.failures: Counter[Failure] = Counter()
        self.traffic, self.num_sessions = Traffic(), 0
        self.asks = []
        self.slots = [0, 1]
        self.reply = lambda ask: Reply((1, 2, 3, 4, 5, 6, 7, 8)[: ask.depth], "")
        self.wait_s = 0.0

    @property
    def is_usable(self):
        return self.is_up and self.backoff.ready

    async def ask(self, ask, timeout_s, on_body):
        self.asks.append(ask)
        on_body(b"{}")
        await asyncio.sleep(self.wait_s)
        reply = self.reply(ask)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def note_failure(self, error):
        self.failures[error.failure] += 1

    def take_slot(self):
        return self.slots.pop(0) if self.slots else -1

    def give_slot(self, slot):
        self.slots.append(slot)


def drafter_of(server):
    return ServerDrafter(server, "salt", timeout_s=1.0, prefill_timeout_s=5.0)


class Silent:
    """A detokeniser that finds no stop string."""

    def push(self, token_id):
        return False

    def take(self, *, final):
        return ""


def session_of(num_tokens=3, **fields):
    fields = {
        "session_id": "s",
        "prompt": tuple(range(1, num_tokens + 1)),
        "params": SamplingParams(temperature=1.0, seed=1),
        "method": VerificationMethod.COUPLED,
        "max_tokens": 1000,
        "text": Silent(),
        "eos_token_ids": frozenset({EOS}),
        **fields,
    }
    return Session(**fields)


async def settled():
    """Let a prefill end."""
    for _ in range(8):
        await asyncio.sleep(0)


async def chain_of(server, depth=4, session=None):
    proposal = await drafter_of(server).propose(session or session_of(), Shape(depth))
    return proposal.token_ids


async def test_proposal_names_its_drafter():
    server = Answers()
    proposal = await drafter_of(server).propose(session_of(), Shape(4, drafter=DrafterKind.SERVER))
    assert proposal.token_ids == (1, 2, 3, 4)
    assert (proposal.drafter, proposal.worker) == (DrafterKind.SERVER, "draft:1")
    (ask,) = server.asks
    assert (list(ask.prompt), ask.depth, ask.model, ask.salt) == ([1, 2, 3], 4, "m", "salt")


@pytest.mark.parametrize(
    ("found", "depth", "chain"),
    [
        ((1, 2, 3), 2, (1, 2)),
        ((1, VOCAB, 3), 3, (1,)),
        ((1, -1, 3), 3, (1,)),
        ((1, 2**70), 3, (1,)),
    ],
)
async def test_chain_ends_before_other_token_ids_and_at_the_depth(found, depth, chain):
    server = Answers()
    server.reply = lambda ask: Reply(found, "")
    assert await chain_of(server, depth) == chain


@pytest.mark.parametrize("found", [(), (VOCAB,), (-5, 1)])
async def test_reply_without_a_token_is_a_counted_failure_of_its_session(found):
    server, session = Answers(), session_of()
    server.reply = lambda ask: Reply(found, "")
    one = drafter_of(server)
    with pytest.raises(DraftServerError):
        await one.propose(session, Shape(4))
    assert server.failures == {Failure.TOKENS: 1}
    assert one.prepare(session) is Readiness.ABSENT
    assert drafter_of(server).prepare(session_of()) is Readiness.READY


@pytest.mark.parametrize(
    ("found", "is_end", "chain"),
    [
        ((1, 2), True, (1, 2, EOS)),
        ((), True, (EOS,)),
        ((1, EOS), True, (1, EOS)),
        ((1, 2), False, (1, 2)),
        ((1, 2, 3, 4), True, (1, 2, 3, 4)),
        ((1, VOCAB), True, (1,)),
    ],
)
async def test_end_of_the_text_is_proposed(found, is_end, chain):
    server = Answers()
    server.reply = lambda ask: Reply(found, "", is_end)
    assert await chain_of(server, 4) == chain


async def test_end_is_not_proposed_where_it_does_not_end_the_completion():
    server = Answers()
    server.reply = lambda ask: Reply((1,), "", True)
    assert await chain_of(server, 4, session_of(eos_token_ids=frozenset())) == (1,)
    assert server.asks[0].ignores_eos


async def test_text_is_sent_and_encoded_for_another_vocabulary():
    server = Answers(has_ids=False)
    server.reply = lambda ask: Reply((5, 5), "AB")
    assert await chain_of(server) == (65, 66)
    assert server.asks[0].prompt == "\x01\x02\x03"


async def test_long_text_is_cut_before_it_is_encoded():
    server, lengths = Answers(has_ids=False), []
    server.tokenizer.continuation = lambda _, added: lengths.append(len(added)) or [1] * len(added)
    server.reply = lambda ask: Reply(None, "x" * 10_000_000)
    assert len(await chain_of(server, 4)) == 4
    assert max(lengths) <= 256


async def test_text_that_is_not_unicode_is_a_failure():
    server = Answers(has_ids=False)
    server.reply = lambda ask: Reply(None, "\ud800")
    with pytest.raises(DraftServerError):
        await chain_of(server)
    assert server.failures == {Failure.CONTENT: 1}


class Real:
    """A tokenizer of transformers, with what a server needs of it."""

    def __init__(self, tokenizer):
        self.tokenizer, self.vocabulary, self.vocab_size = tokenizer, Vocabulary(tokenizer), len(tokenizer)

    def encode(self, text, *, is_start=True):
        return self.tokenizer(text, add_special_tokens=is_start)["input_ids"]

    def token_bytes(self, token_id):
        return self.vocabulary.spellings[token_id]


TOKENIZERS = pytest.mark.parametrize(
    "tokenizer",
    [Real(byte_level(CODE, 300)), Real(byte_fallback(["▁def", "▁self", "return"]))],
    ids=["byte level", "byte fallback"],
)


async def text_chain(tokenizer, committed, reply, depth=8):
    """Return the bytes that a server's reply proposes after a committed text."""
    server = Answers(has_ids=False, tokenizer=tokenizer)
    server.reply = lambda ask: reply
    session = session_of(prompt=tuple(tokenizer.vocabulary.encode(committed)), eos_token_ids=frozenset({2}))
    return await chain_of(server, depth, session)


@TOKENIZERS
@pytest.mark.parametrize("text", [" self", "self", "\n    return", "é 🙂"])
async def test_text_becomes_tokens_that_continue_the_committed_ones(tokenizer, text):
    chain = await text_chain(tokenizer, b"class A:\n    def f", Reply(None, text), depth=64)
    assert tokenizer.vocabulary.bytes_of(chain) == text.encode()


async def test_text_continues_the_word_that_was_begun():
    tokenizer = Real(byte_level(CODE, 300))
    token_ids = tokenizer.vocabulary.encode(CODE.encode())
    for cut in range(1, len(token_ids), 7):
        begun, rest = (tokenizer.vocabulary.bytes_of(part) for part in (token_ids[:cut], token_ids[cut:]))
        if tokenizer.vocabulary.encode(begun) == token_ids[:cut]:
            chain = await text_chain(tokenizer, begun, Reply(None, rest.decode()), depth=6)
            assert list(chain) == token_ids[cut : cut + 6][: len(chain)]


@TOKENIZERS
@pytest.mark.parametrize("text", ["\ufffd", "", "\ufffdabc"])
async def test_text_without_a_whole_character_proposes_nothing(tokenizer, text):
    with pytest.raises(DraftServerError, match="without tokens"):
        await text_chain(tokenizer, b"def f", Reply(None, text))


@TOKENIZERS
async def test_text_ends_before_a_partial_character_and_its_end_is_not_proposed(tokenizer):
    whole = await text_chain(tokenizer, b"def f", Reply(None, " x", is_end=True))
    assert whole[-1] == 2
    cut = await text_chain(tokenizer, b"def f", Reply(None, " x\ufffd", is_end=True))
    assert cut == whole[:-1]


@TOKENIZERS
async def test_special_tokens_are_not_made_of_text(tokenizer):
    chain = await text_chain(tokenizer, b"def f", Reply(None, "<|end|></s>"), depth=64)
    assert not set(chain) & set(tokenizer.vocabulary.specials.values())
    assert tokenizer.vocabulary.bytes_of(chain) == b"<|end|></s>"


def test_context_leaves_out_what_servers_add_themselves():
    text = ContextText(Spelled(start=[1]))
    session = session_of()
    assert text.of(session) == "\x02\x03"
    session.commit([65])
    assert text.of(session) == "\x02\x03A"


def test_context_waits_for_the_rest_of_a_character():
    session = session_of(prompt=(65,), eos_token_ids=frozenset())
    text = ContextText(Spelled())
    session.token_ids.append(0xC3)
    assert text.of(session) is None
    session.token_ids.append(0xA4)
    assert text.of(session) == "Aä"


def test_context_replaces_bytes_that_are_no_text():
    session = session_of(prompt=(65, 0xFF, 66), eos_token_ids=frozenset())
    assert ContextText(Spelled()).of(session) == "A\ufffdB"


async def test_incomplete_character_gets_no_proposal_and_is_no_failure():
    server = Answers(has_ids=False)
    session = session_of(prompt=(65, 0xC3), eos_token_ids=frozenset())
    assert await chain_of(server, 4, session) == ()
    assert not server.asks
    assert not server.failures


async def test_proposal_ends_with_the_context_of_the_server():
    server = Answers(max_context=5)
    assert await chain_of(server, 4, session_of(3)) == (1, 2)
    assert await chain_of(server, 4, session_of(5)) == ()
    assert len(server.asks) == 1


@pytest.mark.parametrize("owner", ["gammaray", "vllm"])
@pytest.mark.parametrize("method", VerificationMethod)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sample_index", [0, 1])
async def test_noise_is_shared_only_where_both_sides_have_it(owner, method, temperature, sample_index):
    server = Answers(owner=owner)
    params = SamplingParams(temperature=temperature, seed=5, sample_index=sample_index)
    await chain_of(server, 4, session_of(params=params, method=method))
    shares = (owner, method, temperature, sample_index) == ("gammaray", VerificationMethod.COUPLED, 1.0, 0)
    assert (server.asks[0].sampling is not None) is shares


async def test_long_prompt_is_prefilled_in_the_background():
    server, session = Answers(), session_of(LONG_CONTEXT)
    drafter = drafter_of(server)
    assert drafter.prepare(session) is Readiness.READING
    assert await drafter.propose(session, Shape(4)) == await drafter.propose(session, Shape(4))
    await settled()
    assert drafter.prepare(session) is Readiness.READY
    assert len((await drafter.propose(session, Shape(4))).token_ids) == 4
    assert [ask.depth for ask in server.asks] == [1, 4]


async def test_prompt_is_prefilled_again_by_a_server_that_was_restarted():
    server, session = Answers(), session_of(LONG_CONTEXT)
    drafter = drafter_of(server)
    assert drafter.prepare(session) is Readiness.READING
    await settled()
    assert drafter.prepare(session) is Readiness.READY
    server.number += 1
    assert drafter.prepare(session) is Readiness.READING
    drafter.release(session)


async def test_released_session_gives_its_slot_back_and_ends_its_prefill():
    server, session = Answers(), session_of(LONG_CONTEXT)
    server.wait_s = 60.0
    drafter = drafter_of(server)
    drafter.prepare(session)
    await asyncio.sleep(0)
    assert (server.slots, server.num_sessions, len(server.asks)) == ([1], 1, 1)
    drafter.release(session)
    assert (server.slots, server.num_sessions) == ([1, 0], 0)
    drafter.release(session)
    assert server.num_sessions == 0


async def test_failure_pauses_the_server_for_all_sessions():
    server = Answers()
    server.reply = lambda ask: DraftServerError(Failure.TIMEOUT, "late")
    one, other = drafter_of(server), drafter_of(server)
    with pytest.raises(DraftServerError):
        await one.propose(session_of(), Shape(4))
    assert other.prepare(session_of()) is Readiness.ABSENT
    with pytest.raises(DraftServerError):
        await other.propose(session_of(), Shape(4))
    assert len(server.asks) == 1


async def test_refused_request_pauses_its_session_alone():
    server = Answers()
    server.reply = lambda ask: DraftServerError(Failure.STATUS, "status 400", 400)
    one, other = drafter_of(server), drafter_of(server)
    with pytest.raises(DraftServerError):
        await one.propose(session_of(), Shape(4))
    assert one.prepare(session_of()) is Readiness.ABSENT
    assert other.prepare(session_of()) is Readiness.READY


async def test_cancelled_proposal_is_no_failure():
    server = Answers()
    server.wait_s = 60.0
    task = asyncio.create_task(drafter_of(server).propose(session_of(), Shape(4)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not server.failures
    assert server.is_usable
