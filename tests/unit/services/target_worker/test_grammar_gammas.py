"""Under a grammar near its limits, every gamma gives the tokens of gamma 0, or fails where gamma 0 fails.

Cycles run with the real parts: the orchestrator's choice of drafter with a grammar state of its own, and the
target's masks, verification and cut. The model is a function of the tokens before.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from gammaray.errors import GammarayError, InvalidArgumentError
from gammaray.grammar.matcher import GrammarState
from gammaray.grammar.texts import json_schema_grammar
from gammaray.types import DrafterKind, Proposal, SamplingParams, VerificationMethod
from orchestrator.control.costs import CostModel
from orchestrator.control.fixed import FixedGamma
from orchestrator.cycle.run import run_cycle
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Match
from orchestrator.drafting.grammar import GrammarDrafter
from orchestrator.drafting.prediction import PredictionDrafter
from orchestrator.drafting.session_drafter import DrafterChoice, SessionDrafter
from services.engine.sampling.edits import row_paths
from services.engine.sampling.logits import edited_logits, processed_log_probs
from services.engine.sampling.noise import Noise
from services.scheduling.sessions import SessionCopy
from services.scheduling.tasks import SessionSpec
from services.verification.rules import cut_before, verify
from tests.support.cycle_helpers import PROMPT, make_session
from tests.support.processing_helpers import small_compiler

pytestmark = pytest.mark.slow

EOS = 0
TOKENS = ("<eos>", *"qxy", "qq", "xy", "yq", *'"[]{}:,01', "Ġ")  # the last one is a space
Q = 1
COUNT = 24


def ambiguous(num_symbols: int, start: str) -> str:
    """A grammar with a branch whose rows of the parser grow with each of its letters."""
    symbols = [f"s{number}" for number in range(num_symbols)]
    return "\n".join(
        [start, f"b: {' | '.join(symbols)}", *(f'{name}: "q" | {name} {name}' for name in symbols)]
    )


STARTS = (
    'start: a | "x" b\na: "y" a | ""',
    'start: (a | "x" b "x")*\na: "y" | "yx"',
    "start: b",
    'start: ("y" | "q" "x")* ("x" b)?',
)
OTHERS = (
    'start: a\na: "q" | a a | ""',
    'start: a\na: "q" a | "x" a | ""',
    "start: /([qxy]*q[qxy]{9}x|[qxy]*x[qxy]{7}y)*/",
    'start: "x"* ("y" c | "q" d)*\nc: /[xy]/ ("x"|"qx")\nd: /[xy]/ ("q"|"yx")',
    'start: x ("y" x)*\nx[suffix="q"]: /[xy]*/',
    json_schema_grammar({"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "array"}]}}),
    json_schema_grammar(
        {"type": "object", "properties": {name: {"enum": ["q", 1, [0]]} for name in ("q", "qx", "x", "y")}}
    ),
)
GRAMMARS = st.one_of(
    st.sampled_from(OTHERS), st.builds(ambiguous, st.integers(8, 80), st.sampled_from(STARTS))
)


def begin(grammar: str) -> GrammarState:
    return small_compiler(TOKENS, len(TOKENS), (EOS,)).begin(grammar)


@dataclass
class Target:
    """Verifies as the target's scheduler does, by a model that is a hash of the tokens before each row."""

    params: SamplingParams
    method: VerificationMethod
    seed: int
    num_cut: int = 0

    def __post_init__(self) -> None:
        spec = SessionSpec(self.params, self.method, len(PROMPT), (EOS,))
        self.copy = SessionCopy("s", 1, spec, begin(self.params.grammar))
        self.noise = Noise(self.seed, 0, len(TOKENS)) if self.params.temperature else None

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        rng = random.Random(f"{self.seed} {tokens[-4:]} {len(tokens)}")
        # Ends are rare, so that completions are long.
        return torch.tensor([rng.gauss(-3.0 if token == EOS else 0.0, 2.0) for token in range(len(TOKENS))])

    async def verify(self, session: Session, proposal: Proposal, drafts: object = None):
        self.copy.merge(0, list(session.token_ids))
        edits = self.copy.edits_for(self.params, len(TOKENS), "cpu")
        paths = row_paths(proposal)
        with suppress(GammarayError):
            edits.prepare(paths)
        rows = torch.stack([self.logits([*session.token_ids, *path]) for path in paths])
        if self.params.temperature:
            log_probs = processed_log_probs(rows, self.params, edits, paths)
        else:
            log_probs = edited_logits(rows, edits, paths)
        verdict = verify(self.method, log_probs, proposal, self.params, self.noise, len(session.token_ids))
        cut = cut_before(verdict, proposal, edits.unmasked_rows)
        self.num_cut += cut != verdict
        self.copy.tokens += [*(proposal.token_ids[node] for node in cut.accepted_path), cut.next_token_id]
        return cut


class Hostile:
    """Proposes by a function of the session's output."""

    kind = DrafterKind.SUFFIX

    def __init__(self, propose: Callable[[tuple[int, ...]], Sequence[int]]) -> None:
        self.propose = propose

    def look_up(self, session: Session, depth: int) -> Match | None:
        found = tuple(self.propose(tuple(session.token_ids[len(PROMPT) :])))[:depth]
        return Match(self.kind, found, 99, (1.0,) * len(found)) if found else None


class Unchecked(SessionDrafter):
    """Proposes without a grammar of its own, as an orchestrator does whose drafting by it has failed."""

    def __init__(self, texts) -> None:
        super().__init__(None, texts, 16)


def run(
    grammar: str, seed: int, temperature: float, gamma: int, texts=(), *, is_checked: bool = True
) -> tuple[list[int], str, int]:
    """Return the tokens, the error that ended them or "", and how many verdicts were cut."""
    method = VerificationMethod.COUPLED
    params = SamplingParams(temperature=temperature, seed=seed, grammar=grammar)
    session = make_session(eos=(EOS,), max_tokens=COUNT, temperature=temperature)
    session = replace(session, params=params)
    target = Target(params, method, seed)
    drafter = Unchecked(texts)
    if is_checked:
        drafter = SessionDrafter(None, texts, 16, GrammarDrafter(begin(grammar)), fixed=gamma)
    choice = DrafterChoice(session, drafter, FixedGamma(gamma, CostModel(random.Random(seed))))

    async def cycles() -> str:
        while session.finish_reason is None:
            try:
                await run_cycle(session, drafter, target, choice)
            except InvalidArgumentError as error:
                return str(error)
        return ""

    error = asyncio.run(cycles())
    return session.token_ids[len(PROMPT) :], error, target.num_cut


def texts_of(kind: str, expected: Sequence[int], grammar: str, seed: int) -> list:
    """Return the text drafters of one kind; `expected` are the tokens of gamma 0."""

    def legal(output: tuple[int, ...]) -> list[int]:
        """A walk through the grammar that takes an ambiguous letter where it can."""
        state, walk = begin(grammar), []
        state.extend(output)
        rng = random.Random(f"{seed} {len(output)}")
        with suppress(InvalidArgumentError):
            while len(walk) < 16 and not state.is_ended:
                (mask,) = state.masks([()])
                possible = [token for token in range(len(TOKENS)) if mask[token >> 3] >> (token & 7) & 1]
                walk.append(Q if Q in possible else rng.choice(possible))
                state.extend(walk[-1:])
        return walk

    def right_then_hostile(output: tuple[int, ...]) -> list[int]:
        rng = random.Random(f"{seed} {len(output)}")
        right = list(expected[len(output) : len(output) + rng.randrange(6)])
        return right + [rng.choice((Q, Q, 4, 2, 3)) for _ in range(16)]

    rng = random.Random(seed)
    return {
        "none": [],
        "legal": [Hostile(legal)],
        "right then hostile": [Hostile(right_then_hostile)],
        "random": [Hostile(lambda output: [rng.randrange(-1, len(TOKENS) + 2) for _ in range(8)])],
        "known": [Hostile(lambda output: expected[len(output) : len(output) + 16])],
        "prediction": [PredictionDrafter([*expected[: rng.randrange(COUNT)], *[Q] * 30])],
    }[kind]


KINDS = ("none", "legal", "right then hostile", "random", "known", "prediction")


@settings(max_examples=60)
@given(
    grammar=GRAMMARS,
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.0, 1.0]),
    gamma=st.sampled_from([1, 4, 16]),
    kind=st.sampled_from(KINDS),
    is_checked=st.booleans(),
)
def test_every_gamma_gives_the_tokens_of_gamma_0_or_fails_with_it(
    grammar, seed, temperature, gamma, kind, is_checked
):
    try:
        begin(grammar)
    except InvalidArgumentError:
        reject()  # at every gamma alike
    expected, error, _ = run(grammar, seed, temperature, 0)
    texts = texts_of(kind, expected, grammar, seed)
    found = run(grammar, seed, temperature, gamma, texts, is_checked=is_checked)
    assert found[:2] == (expected, error)


@pytest.mark.parametrize("is_checked", [True, False])
def test_proposals_reach_the_limits_that_gamma_0_does_not(is_checked):
    """Else the property above would say nothing."""
    outcomes = []
    for seed in range(12):
        grammar = ambiguous(70, STARTS[0])
        expected, error, _ = run(grammar, seed, 0.0, 0)
        hostile = [Hostile(lambda output: [2, *[Q] * 15] if not output else [Q] * 16)]
        outcomes.append((error, run(grammar, seed, 0.0, 16, hostile, is_checked=is_checked), expected))
    assert all(found[:2] == (expected, error) for error, found, expected in outcomes)
    assert any(error for error, _, _ in outcomes)
    assert any(not error for error, _, _ in outcomes)
    assert sum(found[2] for _, found, _ in outcomes) > 0
