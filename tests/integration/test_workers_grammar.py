"""Grammars in draft and target workers: the tokens of gamma 0 whatever is proposed, and valid documents."""

import itertools
import json
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jsonschema
import pytest

from gammaray.grammar.matcher import GrammarCompiler, grammar_identity
from gammaray.grammar.texts import json_schema_grammar
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from gammaray.v1 import types_pb2 as types
from gammaray.wire.blocks import proposal_from_proto
from services.engine.sampling.edits import row_paths
from services.scheduling.grammars import Grammars
from tests.support.drafter_helpers import make_drafter
from tests.support.engine_helpers import random_tokens, tiny_model
from tests.support.processing_helpers import ids_of
from tests.support.vocabulary_helpers import CODE, PROSE, byte_level
from tests.support.workers.workers_helpers import (
    Driver,
    block_of,
    propose_block,
    running,
    spec_message,
    verify_block,
)

pytestmark = pytest.mark.integration

COUPLED, REJECTION, NAIVE, BLOCK = VerificationMethod
INVALID_ARGUMENT, FAILED_PRECONDITION = 3, 9
SPECIALS = ("<|end|>", "<|user|>", "<|tool|>")
END, USER, TOOL = range(3)
NUM_UNUSED = 8
PROMPT = random_tokens(12, seed=3)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {
            "type": "array",
            "items": {"type": "integer", "minimum": -50, "maximum": 5000},
            "maxItems": 4,
        },
        "kind": {"enum": ["fox", "dog", None, 7]},
        "is_open": {"type": "boolean"},
    },
    "required": ["name", "sizes", "kind"],
}
GRAMMAR = json_schema_grammar(SCHEMA)
COUNT = 120


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level(f'{CODE}{PROSE} [1, -20, 300] "name": "sizes"', 400, specials=SPECIALS)


@pytest.fixture(scope="module")
def size(tokenizer):
    return len(tokenizer) + NUM_UNUSED


@pytest.fixture(scope="module")
def compiler(tokenizer, size):
    return GrammarCompiler(tokenizer.backend_tokenizer.to_str(), size, [END])


@pytest.fixture(scope="module")
def models(tmp_path_factory, tokenizer, size):
    """A target and an unlike draft, whose logits are extreme enough to repeat themselves."""
    made = []
    for seed in range(2):
        directory = tiny_model(
            "llama",
            tmp_path_factory.mktemp("grammar"),
            seed=seed,
            vocab_size=size,
            max_position_embeddings=512,
        )
        tokenizer.save_pretrained(directory)
        made.append(directory)
    return made


@pytest.fixture
async def target(models):
    async with running("target", models[0], deterministic=True) as (link, _):
        info = await link.info()
        assert info.grammar_identity == grammar_identity()
        assert len(info.forward_s) == 5
        assert min(info.forward_s) > 0
        yield link


def params(temperature: float, seed: int = 1, **others) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, grammar=GRAMMAR, **others)


Drafter = Callable[[Sequence[int]], Proposal]
_numbers = itertools.count()


@dataclass
class Drafted(Driver):
    """Gets its proposals from a function of the tokens so far, or from `draft`."""

    drafter: Drafter | None = None

    async def propose(self) -> Proposal:
        return await super().propose() if self.drafter is None else self.drafter(self.tokens)


def driver_of(target, made: SamplingParams, draft=None, **options) -> Drafted:
    name, options = f"s{next(_numbers)}", {"gamma": 4, **options}
    if draft is None and "drafter" in options:
        draft = target  # not asked
    return Drafted(target, draft, PROMPT, made, session_id=name, eos_token_ids=(END,), **options)


async def decode(target, made: SamplingParams, **options) -> list[int]:
    return await driver_of(target, made, **options).generate(COUNT)


def assert_valid(tokenizer, tokens: Sequence[int]) -> None:
    assert tokens[-1] == END
    assert not {END, USER, TOOL} & set(tokens[:-1])
    jsonschema.validate(json.loads(tokenizer.decode(tokens[:-1])), SCHEMA)


def lookup(tokens: Sequence[int]) -> Proposal:
    """Propose what followed the last token before."""
    for at in range(len(tokens) - 2, 0, -1):
        if tokens[at] == tokens[-1]:
            return Proposal(tuple(tokens[at + 1 : at + 5]))
    return Proposal()


def random_chain(tokens: Sequence[int]) -> Proposal:
    rng = random.Random(len(tokens))
    return Proposal(tuple(rng.randrange(300) for _ in range(5)))


def random_tree(tokens: Sequence[int]) -> Proposal:
    rng = random.Random(len(tokens))
    parents = tuple(sorted(rng.randrange(-1, node) for node in range(10)))
    return Proposal(tuple(rng.randrange(300) for _ in parents), parents)


# The tokenizer has fewer than 400 tokens, and the model has some more.
HOSTILE: dict[str, Drafter] = {
    "ends": lambda _: Proposal((END,) * 4),
    "specials": lambda _: Proposal((TOOL, USER, END, TOOL)),
    "random": random_chain,
    "random tree": random_tree,
    "tree of ends": lambda _: Proposal((END, USER, 5, END, TOOL), (-1, -1, -1, 0, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_coupled_tokens_do_not_depend_on_the_drafter(target, models, tokenizer, temperature, seed):
    made = params(temperature, seed)
    expected = await decode(target, made)
    assert_valid(tokenizer, expected)
    for model in models:  # the target's own weights, and others
        async with running("draft", model) as (draft, _):
            for nodes in (0, 12):
                driver = driver_of(target, made, draft, max_nodes=nodes)
                assert await driver.generate(COUNT) == expected
                assert driver.accepted > 5
    assert await decode(target, made, drafter=lookup) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_hostile_proposals_change_no_token(target, tokenizer, size, temperature):
    made = params(temperature, seed=5)
    expected = await decode(target, made)
    assert_valid(tokenizer, expected)
    unused = Proposal((size - 1, size - NUM_UNUSED, END))
    for name, drafter in {**HOSTILE, "unused": lambda _: unused}.items():
        assert await decode(target, made, drafter=drafter) == expected, name


SYMBOLS = [f"s{number}" for number in range(70)]
AMBIGUOUS = "\n".join(
    [
        'start: ("y" | "z" b "z")*',
        f"b: {' | '.join(SYMBOLS)}",
        *(f'{name}: "q" | {name} {name}' for name in SYMBOLS),
    ]
)


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_proposals_beyond_the_limits_of_the_grammar_change_no_token(
    target, tokenizer, temperature, shape
):
    y, z, q = (tokenizer.convert_tokens_to_ids(letter) for letter in "yzq")
    # The target hardly ever begins what the proposals, all of them possible, go on with.
    biases = {END: -100.0, z: -6.0}
    made = SamplingParams(temperature=temperature, seed=2, grammar=AMBIGUOUS, logit_bias=biases)
    hostile = Proposal((z, *[q] * 14))
    if shape == "tree":
        hostile = Proposal((z, y, *[q] * 12), (-1, -1, 0, *range(2, 13)))
    count = 30
    expected = await driver_of(target, made, gamma=0).generate(count)
    assert len(expected) == count
    assert {y} <= set(expected)
    found = driver_of(target, made, gamma=16, max_nodes=16, drafter=lambda _: hostile)
    assert await found.generate(count) == expected


async def test_ids_beyond_the_vocabulary_are_refused_and_the_session_goes_on(target, size):
    made = params(1.0, seed=3)
    expected = await decode(target, made)
    spec = spec_message(made, prompt_length=len(PROMPT), eos_token_ids=[END])
    for at in (0, 4):
        tokens = [*PROMPT, *expected[:at]]
        for wrong in ([size], [expected[at], 2**32 - 1]):
            assert (await target.ask(verify_block(tokens, wrong, spec=spec))).error.code == INVALID_ARGUMENT
        result = await target.ask(verify_block(tokens, [expected[at], END], spec=spec))
        assert list(result.verdict.accepted_path) == [0]
        assert result.verdict.next_token_id == expected[at + 1]


@pytest.mark.parametrize("num_kept", [0, 1, 7])
async def test_a_new_owner_that_knows_fewer_tokens_gets_the_same_ones(target, num_kept):
    made = params(1.0, seed=4)
    driver = driver_of(target, made)
    expected = await driver.generate(COUNT)
    tokens = [*PROMPT, *expected[:num_kept]]
    spec = spec_message(made, prompt_length=len(PROMPT), eos_token_ids=[END])
    block = verify_block(
        tokens, expected[num_kept : num_kept + 6], spec=spec, session_id=driver.session_id, epoch=2
    )
    verdict = (await target.ask(block)).verdict
    assert list(verdict.accepted_path) == list(range(6))
    assert verdict.next_token_id == expected[num_kept + 6]


def possible(compiler, output: Sequence[int]) -> set[int]:
    state = compiler.begin(GRAMMAR)
    state.extend(output)
    (mask,) = state.masks([()])
    return set(ids_of(mask))


@pytest.mark.parametrize(
    ("method", "nodes"), [(COUPLED, 0), (COUPLED, 12), (REJECTION, 0), (NAIVE, 0), (BLOCK, 0)]
)
async def test_draft_proposes_possible_tokens_only(models, compiler, size, method, nodes):
    """Rejection relies on it: a sampled token that is dropped as impossible would bias what follows."""
    checked = 0
    async with running("draft", models[1]) as (draft, _):
        for seed in range(6):
            made, output = params(1.0, seed), []
            spec = spec_message(made, method, len(PROMPT), [END])
            while END not in output and len(output) < COUNT:
                block = propose_block(
                    [*PROMPT, *output], 6, max_nodes=nodes, spec=spec, session_id=f"s{seed}"
                )
                answer = await draft.ask(block)
                assert answer.WhichOneof("outcome") == "proposal", answer
                proposal = proposal_from_proto(answer.proposal, size)
                assert proposal.token_ids
                paths = row_paths(proposal)
                for row, token_id in enumerate(proposal.token_ids):
                    before = paths[row + 1][:-1]
                    allowed = possible(compiler, [*output, *before])
                    assert token_id in allowed
                    if proposal.draft_distributions is not None:
                        assert set(proposal.draft_distributions[row].token_ids) <= allowed
                    checked += 1
                output += max(paths, key=len)
    assert checked > 50


DRAFTERS = {
    "parallel": {"pard_token": 4},
    "parallel-reduced": {"pard_token": 4, "draft_vocab_size": 60, "shares_embedding": True},
    "reduced": {"draft_vocab_size": 60},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", [COUPLED, REJECTION, BLOCK])
@pytest.mark.parametrize("kind", DRAFTERS)
async def test_drafters_without_the_grammars_tokens_go_on(target, models, tokenizer, tmp_path, kind, method):
    drafter = make_drafter(models[0], tmp_path / "drafter", **DRAFTERS[kind])
    async with running("draft", drafter, target=str(models[0])) as (draft, _):
        for seed in range(3):
            made = params(1.0, seed)
            driver = driver_of(target, made, draft, method=method)  # asserts that no answer is an error
            tokens = await driver.generate(COUNT)
            assert_valid(tokenizer, tokens)
            assert driver.accepted > 0
            if method is COUPLED:
                assert tokens == await decode(target, made)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", list(VerificationMethod))
async def test_draft_proposes_where_masks_leave_no_token(models, tokenizer, temperature, method):
    """The target is the one to refuse; here only one of two texts leads to such a place."""
    a, b, x = (tokenizer.convert_tokens_to_ids(letter) for letter in "abx")
    async with running("draft", models[1]) as (draft, _):
        for number, biases in enumerate(({a: 100.0}, {b: 100.0})):
            made = SamplingParams(
                temperature=temperature,
                seed=1,
                grammar='start: "ax" | "by"',
                banned_token_ids=(x,),
                logit_bias=biases,
            )
            spec = spec_message(made, method, len(PROMPT), [END])
            answer = await draft.ask(propose_block(PROMPT, 5, spec=spec, session_id=f"s{number}"))
            assert answer.WhichOneof("outcome") == "proposal", answer
            assert answer.proposal.token_ids[0] == (a, b)[number]
            if number:
                assert tokenizer.decode(list(answer.proposal.token_ids)).startswith("by")


async def test_request_with_a_wrong_grammar_fails_alone(target, models):
    expected = await decode(target, params(0.0))
    spec = spec_message(params(0.0), prompt_length=len(PROMPT), eos_token_ids=[END])
    wrong = SamplingParams(temperature=0.0, seed=1, grammar="start: missing")
    impossible = SamplingParams(
        temperature=1.0, seed=1, grammar=GRAMMAR, allowed_token_ids=(END, 5, 6), repetition_penalty=1.1
    )
    prompt = {"prompt_length": len(PROMPT), "eos_token_ids": [END]}
    specs = {
        "wrong": spec_message(wrong, **prompt),
        "endless": spec_message(params(0.0), prompt_length=len(PROMPT)),
        "no token left": spec_message(impossible, **prompt),
        "not of the grammar": spec_message(params(0.0), prompt_length=len(PROMPT) - 1, eos_token_ids=[END]),
    }
    blocks = [verify_block(PROMPT, [5], spec=one, session_id=name) for name, one in specs.items()]
    *failed, good = await target.ask(
        *blocks, verify_block(PROMPT, expected[:2], spec=spec, session_id="good")
    )
    assert [result.error.code for result in failed] == [INVALID_ARGUMENT] * 4
    assert good.verdict.next_token_id == expected[2]
    async with running("draft", models[1]) as (draft, _):
        blocks = [propose_block(PROMPT, 3, spec=one, session_id=name) for name, one in specs.items()]
        *failed, good = await draft.ask(*blocks, propose_block(PROMPT, 3, spec=spec, session_id="good"))
        for result, name in zip(failed, specs, strict=True):
            # Nothing to propose is no failure; the target tells what is wrong.
            is_empty = name == "no token left" and result.WhichOneof("outcome") == "proposal"
            assert is_empty or result.error.code == INVALID_ARGUMENT, (name, result)
        assert len(good.proposal.token_ids) == 3


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_model_without_a_tokenizer_refuses_grammars_only(tmp_path, role):
    bare = tiny_model("llama", tmp_path, max_position_embeddings=256)
    async with running(role, bare) as (link, _):
        spec = spec_message(params(0.0), prompt_length=len(PROMPT), eos_token_ids=[END])
        answer = await link.ask(block_of(role, PROMPT, spec=spec))
        assert answer.error.code == FAILED_PRECONDITION
        assert "tokenizer" in answer.error.message
        free = await link.ask(block_of(role, PROMPT, session_id="free"))
        assert free.WhichOneof("outcome") in ("verdict", "proposal")


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_sessions_released_while_their_grammar_compiles_are_not_begun(models, role, monkeypatch):
    is_released = threading.Event()
    begin = Grammars.begin

    def begin_late(grammars, *given):
        assert is_released.wait(60)
        return begin(grammars, *given)

    monkeypatch.setattr(Grammars, "begin", begin_late)
    async with running(role, models[0]) as (link, _):
        spec = spec_message(params(1), prompt_length=len(PROMPT), eos_token_ids=(END,))
        for number in range(4):  # the first one also waits for the tokenizer
            name = f"released-{number}"
            is_released.clear()
            (answer,) = await link.send([block_of(role, PROMPT, session_id=name, spec=spec)])
            await link.release(name)
            assert (await answer).error.message == f"session {name} was released"
            is_released.set()
        assert (await link.info()).num_sessions == 0


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_choices_compile_their_grammar_one_at_a_time_and_not_after_their_deadline(
    models, role, monkeypatch
):
    goes_on, begun = threading.Event(), []
    begin = Grammars.begin

    def begin_late(grammars, grammar, ends):
        begun.append(grammar)
        assert grammar == "start: BOOL\nBOOL: /true|false/" or goes_on.wait(60)
        return begin(grammars, grammar, ends)

    monkeypatch.setattr(Grammars, "begin", begin_late)
    other = SamplingParams(temperature=0.0, seed=1, grammar="start: BOOL\nBOOL: /true|false/")

    def block(name, sampling, timeout_ms=60_000):
        spec = spec_message(sampling, prompt_length=len(PROMPT), eos_token_ids=(END,))
        return block_of(role, PROMPT, session_id=name, spec=spec, timeout_ms=timeout_ms)

    async with running(role, models[0]) as (link, _):
        choices = await link.send([block(f"choice {number}", params(1)) for number in range(5)])
        assert not (await link.ask(block("other", other))).error.message
        assert begun == [GRAMMAR, other.grammar]  # the other choices wait for the first one
        (expired,) = await link.send([block("expired", params(1), 1)])
        goes_on.set()
        assert not any([(await answer).error.message for answer in choices])
        assert "not finished within" in (await expired).error.message
        assert begun.count(GRAMMAR) == len(choices)


async def test_blocks_of_a_session_wait_for_its_grammar_in_their_order(target):
    spec = spec_message(params(1), prompt_length=len(PROMPT), eos_token_ids=(END,))
    first = verify_block(PROMPT, session_id="ordered", spec=spec)
    (before,) = await target.send([first])
    rest = types.TokenSpan(start=len(PROMPT))
    again = verify_block(PROMPT, session_id="ordered", context=rest, spec=None)
    (after,) = await target.send([again])
    assert not (await before).error.message
    assert (await after).verdict == (await before).verdict
