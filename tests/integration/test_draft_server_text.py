"""Servers of another vocabulary draft by text: a second gammaray, and hostile ones; tokens stay the same."""

from __future__ import annotations

import itertools
import logging
from contextlib import asynccontextmanager

import pytest

from gammaray.errors import InvalidArgumentError
from gammaray.types import DrafterKind, GammaPolicy, GenerationRequest, SamplingParams, VerificationMethod
from orchestrator.drafting.http.client import Failure
from services.demo_pair import DRAFT_DIR
from tests.support.vocabulary_helpers import recoded
from tests.support.workers.draft_servers import fake_server, found, http, served
from tests.support.workers.scripted_workers import next_token, scripted
from tests.support.workers.service_helpers import PROMPTS, complete, running, tokens_of, worker_process

pytestmark = [pytest.mark.integration, pytest.mark.slow]

COUPLED, REJECTION, NAIVE, BLOCK = VerificationMethod
NAMES = (f"by-text-{number}" for number in itertools.count())
GAMMA = 4


def request_of(gamma, temperature=1.0, prompt=PROMPTS[0], drafter=DrafterKind.SERVER, **fields):
    fields = {"max_tokens": 48, "ignore_eos": True, "session_id": next(NAMES), **fields}
    sampling = SamplingParams(temperature=temperature, seed=1234)
    return GenerationRequest(prompt, sampling=sampling, gamma=GammaPolicy(gamma), drafter=drafter, **fields)


def kernel_of(processes):
    """Return how the server that drafts is asked, and whether it is used."""
    (process,) = (process for process in processes if process.role == "draft")
    return process.kernel, process.healthy


@pytest.fixture(scope="module")
def target():
    """Address of a target worker with the demo pair's target."""
    with worker_process("target") as (_, address):
        yield address


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The demo pair's draft model with other token ids, and the address of a target worker that serves it."""
    folder = str(recoded(DRAFT_DIR, tmp_path_factory.mktemp("recoded")))
    with worker_process("target", folder) as (_, address):
        yield folder, address


@asynccontextmanager
async def drafting(redis_server, target, other, **settings):
    """Yield an orchestrator for which a gammaray with another vocabulary drafts."""
    folder, address = other
    async with running(redis_server, address, "", model=folder) as second, served(second) as api:
        settings = {"draft_server": api.url, "propose_timeout_s": 30.0, **settings}
        async with running(redis_server, target, "", **settings) as orchestrator:
            yield orchestrator


@pytest.mark.parametrize(
    ("method", "temperature"), [(COUPLED, 0.0), (COUPLED, 1.0), (NAIVE, 1.0), (REJECTION, 0.0), (BLOCK, 0.0)]
)
async def test_tokens_equal_those_of_gamma_0(redis_server, target, other, method, temperature):
    async with drafting(redis_server, target, other) as orchestrator:
        assert kernel_of(await orchestrator.status()) == ("text", True)
        drafted = accepted = 0
        for prompt in (PROMPTS[0], PROMPTS[1], "# naïve café, 日本語 🙂\ns = '"):
            plain = await complete(orchestrator, request_of(0, temperature, prompt, verification=method))
            chunks = await complete(orchestrator, request_of(GAMMA, temperature, prompt, verification=method))
            assert tokens_of(chunks) == tokens_of(plain)
            summary = chunks[-1].summary
            assert summary.server_cycles > 0
            drafted, accepted = drafted + summary.drafted_tokens, accepted + summary.accepted_tokens
        assert accepted > (0.4 if temperature == 0 else 0.1) * drafted


async def test_texts_of_the_same_model_are_accepted(redis_server, other):
    """The target itself under other ids: a text that is tokenised wrongly would be rejected."""
    folder, address = other
    with worker_process("target", str(DRAFT_DIR)) as (_, same):
        async with running(redis_server, address, "", model=folder) as second, served(second) as api:
            settings = {"draft_server": api.url, "propose_timeout_s": 30.0, "model": str(DRAFT_DIR)}
            async with running(redis_server, same, "", **settings) as orchestrator:
                assert kernel_of(await orchestrator.status()) == ("text", True)
                for prompt in PROMPTS:
                    plain = await complete(orchestrator, request_of(0, 0.0, prompt))
                    chunks = await complete(orchestrator, request_of(GAMMA, 0.0, prompt))
                    assert tokens_of(chunks) == tokens_of(plain)
                    assert chunks[-1].summary.acceptance_rate > 0.9


async def test_rejection_is_refused_with_the_reason(redis_server, target, other):
    async with drafting(redis_server, target, other) as orchestrator:
        with pytest.raises(InvalidArgumentError, match="sends no draft distribution") as caught:
            await complete(orchestrator, request_of(GAMMA, verification=REJECTION))
        assert caught.value.field == "verification"


async def test_server_of_another_vocabulary_is_refused_where_token_ids_are_demanded(
    redis_server, target, other, caplog
):
    caplog.set_level(logging.WARNING)
    async with drafting(redis_server, target, other, vocabulary_mapping="tokens") as orchestrator:
        assert kernel_of(await orchestrator.status()) == ("text", False)
        plain = await complete(orchestrator, request_of(0))
        chunks = await complete(orchestrator, request_of(GAMMA))
        assert tokens_of(chunks) == tokens_of(plain)
        assert (chunks[-1].summary.server_cycles, chunks[-1].summary.fallback_cycles) == (0, 48)
    assert "vocabulary_mapping: got tokens, and" in caplog.text
    assert "allowed: auto or text for this server" in caplog.text


async def test_text_may_be_exchanged_with_a_server_of_the_same_vocabulary(redis_server, target):
    async with running(redis_server, target, "") as second, served(second) as api:
        settings = {"draft_server": api.url, "propose_timeout_s": 30.0, "vocabulary_mapping": "text"}
        async with running(redis_server, target, "", **settings) as orchestrator:
            assert kernel_of(await orchestrator.status()) == ("text", True)
            plain = await complete(orchestrator, request_of(0, 0.0))
            chunks = await complete(orchestrator, request_of(GAMMA, 0.0))
            assert tokens_of(chunks) == tokens_of(plain)
            assert chunks[-1].summary.acceptance_rate > 0.9


def completion(text, reason="length"):
    async def answer(call, writer):
        return found({"choices": [{"text": text, "finish_reason": reason}]})

    return answer


async def invalid_utf8(call, writer):
    return http(b'{"choices": [{"text": "a\xff\xfe", "finish_reason": "length"}]}')


async def lone_surrogate(call, writer):
    return http(b'{"choices": [{"text": "\\ud800x", "finish_reason": "length"}]}')


REFUSED = {
    "invalid UTF-8": (invalid_utf8, Failure.CONTENT),
    "lone surrogate": (lone_surrogate, Failure.CONTENT),
    "no text": (completion(None), Failure.CONTENT),
    "a list": (completion(["a"]), Failure.CONTENT),
    "nothing": (completion(""), Failure.TOKENS),
    "half a character": (completion("\ufffd"), Failure.TOKENS),
    "half a character and text": (completion("\ufffd def x"), Failure.TOKENS),
    "10 MB": (completion("x" * 10_000_000), Failure.SIZE),
}
STRANGE = {
    "a special token": completion("<|end|>"),
    "the end": completion("", "stop"),
    "control characters": completion("\x00\x1b[2J\r\n"),
    "text and half a character": completion(" x\ufffd", "stop"),
    "one long word": completion("x" * 30_000),
    "combining characters": completion("e\u0301" * 40),
    "many scripts": completion("日本語 עברית 🙂\u200d🙂"),
}


@pytest.fixture
async def scripted_target():
    async with scripted("target", vocab_size=2048, max_context=2048) as target:
        yield target


@asynccontextmanager
async def text_server(redis_server, scripted_target):
    """Yield a fake server that takes text alone, and an orchestrator that uses it."""
    async with fake_server() as server:
        server.models = lambda: found({"data": [{"id": "m", "owned_by": "someone"}]})
        settings = {"draft_server": server.url, "propose_timeout_s": 5.0}
        async with running(redis_server, scripted_target.address, "", **settings) as orchestrator:
            assert kernel_of(await orchestrator.status()) == ("text", True)
            yield server, orchestrator


@pytest.mark.parametrize("kind", REFUSED)
async def test_hostile_texts_are_counted_and_change_no_token(redis_server, scripted_target, kind):
    async with text_server(redis_server, scripted_target) as (server, orchestrator):
        plain = tokens_of(await complete(orchestrator, request_of(0)))
        server.answer, failure = REFUSED[kind]
        chunks = await complete(orchestrator, request_of(GAMMA))
        assert tokens_of(chunks) == plain
        assert (chunks[-1].summary.server_cycles, chunks[-1].summary.cycles) == (0, 48)
        assert set(orchestrator.draft_server.failures) == {failure}
        assert len(server.calls) < 48, "the server is paused"


@pytest.mark.parametrize("kind", STRANGE)
async def test_strange_texts_change_no_token(redis_server, scripted_target, kind):
    async with text_server(redis_server, scripted_target) as (server, orchestrator):
        plain = tokens_of(await complete(orchestrator, request_of(0, ignore_eos=False)))
        server.answer = STRANGE[kind]
        chunks = await complete(orchestrator, request_of(GAMMA, ignore_eos=False))
        assert tokens_of(chunks) == plain
        assert chunks[-1].summary.server_cycles > 0
        assert not orchestrator.draft_server.failures


async def test_text_of_the_target_is_accepted(redis_server, scripted_target):
    """What the target emits next, as text; bytes that are no text are replaced, as servers do."""
    async with text_server(redis_server, scripted_target) as (server, orchestrator):
        prompt = tuple(server.tokenizer.encode("def read_lines(path):\n"))
        plain = tokens_of(await complete(orchestrator, request_of(0, prompt=prompt)))
        following = [*prompt, *plain]
        while len(following) < len(prompt) + len(plain) + GAMMA:
            following.append(next_token(following))

        async def answer(call, writer):
            known = next(
                size
                for size in range(len(prompt), len(following))
                if b"".join(map(server.tokenizer.token_bytes, following[:size])).decode("utf-8", "replace")
                == call.json["prompt"]
            )
            text = server.tokenizer.decode(following[known : known + call.json["max_tokens"]])
            return found({"choices": [{"text": text, "finish_reason": "length"}]})

        server.answer = answer
        chunks = await complete(orchestrator, request_of(GAMMA, prompt=prompt))
        assert tokens_of(chunks) == plain
        assert chunks[-1].summary.accepted_tokens > 0
