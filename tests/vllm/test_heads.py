"""vLLM's own drafters in the target: what they draft, that no text changes by them, and a session's life."""

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gammaray.blocks import Shape
from gammaray.config import TargetSettings
from gammaray.types import SamplingParams, VerificationMethod
from services.engine.loader import load_engine
from services.own.head_loading import load_local_drafter
from services.own.target_scheduler import TargetScheduler
from tests.support import vllm_head_helpers as heads
from tests.support.vllm_helpers import Session, ask, end, generate, run
from tests.vllm.conftest import LIMITS, start_vllm

BUDGET = 3 << 20
"""KV cache for 8 to 24 blocks of 128 tokens."""

MAKERS: dict[str, Callable[[Path, Path], Path]] = {
    "eagle3": heads.eagle3,
    "official eagle3": heads.official_eagle3,
    "eagle": heads.eagle,
    "medusa": heads.medusa,
    "dflash": heads.dflash,
    "draft_model": heads.itself,
}
KINDS = (*MAKERS, "mtp")
DEPTHS = {"medusa": 3, "dflash": 4}
"""Most tokens of a proposal where they are less than 8."""

EXACT = ("draft_model", "mtp")
"""Kinds whose drafter here has the target's distribution."""

FOREIGN = ("eagle", "medusa", "dflash", "mtp")
"""Kinds that the CPU engine does not have."""


@dataclass
class Pair:
    """vLLM and the CPU engine, the latter without a drafter of `FOREIGN` kinds, with the same target."""

    kind: str
    vllm: Any
    own: TargetScheduler
    sessions: list[Session] = field(default_factory=list)

    def open(self, prompts: Sequence[Sequence[int]], temperature: float, **changes: Any) -> list[Session]:
        """Return new sessions, which the test does not need to end."""
        opened = [
            Session(prompt, SamplingParams(temperature=temperature, seed=100 + at), **changes)
            for at, prompt in enumerate(prompts)
        ]
        self.sessions += opened
        return opened


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return heads.random_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module", params=KINDS)
def engines(request, target, tmp_path_factory):
    """Both engines with a drafter of one kind."""
    folder, kind = tmp_path_factory.mktemp(request.param), request.param
    if kind == "mtp":
        path, head = heads.mtp_target(folder / "mtp"), "mtp"
        own = TargetScheduler(load_engine(str(heads.wide_bigram(folder / "bigram"))), LIMITS)
    else:
        path, head = target, str(MAKERS[kind](folder / "head", target))
        engine, settings = load_engine(str(path)), TargetSettings(model=str(path), head=head)
        drafter = None if kind in FOREIGN else load_local_drafter(settings, engine)
        own = TargetScheduler(engine, LIMITS, head=drafter, draft_ahead=False)
    vllm = start_vllm(path, head=head, cache_budget_bytes=BUDGET, max_proposal=16)
    yield Pair(kind, vllm, own)
    vllm.close()


@pytest.fixture
def pair(engines):
    """The same, without sessions before and after a test."""
    yield engines
    for scheduler in (engines.vllm, engines.own):
        end(scheduler, *engines.sessions, forgets=True)
        assert scheduler.queue.is_idle
    engines.sessions.clear()


def prompts(count: int = 4) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(97) for _ in range(5 + 9 * at)] for at in range(count)]


def by_head(depth: int) -> Callable[[Session], dict[str, Any]]:
    """Return blocks that leave the proposal to the head."""
    return lambda session: {"head": Shape(depth)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_that_of_gamma_0_whatever_proposes(pair, temperature):
    """Blocks of the head in depths from below to above its own, of gamma 0, and proposals from elsewhere."""
    plain = generate(pair.vllm, pair.open(prompts(), temperature), 48)
    sessions, rng = pair.open(prompts(), temperature), random.Random(7)
    known = {session.name: text for session, text in zip(sessions, plain, strict=True)}

    def mixed(session: Session) -> dict[str, Any]:
        if (choice := rng.random()) < 0.6:
            return {"head": Shape(rng.choice((1, 2, 3, 5, 8, 12)))}
        if choice < 0.75:
            return {"head": Shape(0)} if choice < 0.7 else {}
        at = len(session.output)
        right = [token if rng.random() < 0.8 else 5 for token in known[session.name][at : at + 16]]
        return {"proposal": right[: rng.randint(1, 16)], "head": Shape(0)}

    cycles = run(pair.vllm, sessions, 48, mixed)
    assert [session.output[:48] for session in sessions] == plain
    drafted = [proposal for _, _, proposal, verdict in cycles if verdict.drafted is not None]
    assert max(map(len, drafted)) == DEPTHS.get(pair.kind, 8)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_drafts_are_those_of_the_cpu_engine_with_the_same_head(pair, temperature):
    """And so is the text, of all kinds, also after proposals from elsewhere and blocks of gamma 0.

    A drafter with the target's distribution is always right, with the same noise.
    """
    depth, found = DEPTHS.get(pair.kind, 4), {}

    def block(session: Session) -> dict[str, Any]:
        if pair.kind in EXACT or len(session.tokens) % 5 > 1:
            return {"head": Shape(depth)}
        return {"proposal": [5, 6] if len(session.tokens) % 5 else [], "head": Shape(0)}

    for scheduler in (pair.vllm, pair.own):
        sessions = pair.open(prompts(), temperature)
        cycles = run(scheduler, sessions, 40, block)
        drafts = {
            (sessions.index(session), position): proposal
            for session, position, proposal, verdict in cycles
            if verdict.drafted is not None
        }
        found[scheduler] = [session.output[:40] for session in sessions], drafts
        if scheduler is pair.vllm and pair.kind in EXACT:
            assert all(len(verdict.accepted_path) == len(proposal) for _, _, proposal, verdict in cycles)
            assert sum(map(len, drafts.values())) >= 4 * 28
    (text, drafts), (own_text, own_drafts) = found.values()
    assert text == own_text
    if pair.kind in (*EXACT, *FOREIGN):
        return  # blocks of exact drafters begin at other positions
    shared = [at for at in drafts.keys() & own_drafts.keys() if own_drafts[at] and drafts[at]]
    assert len(shared) >= 2 * len(drafts) // 3 > 20
    assert [drafts[at] for at in shared] == [own_drafts[at] for at in shared]


@pytest.mark.parametrize("kind", ["eagle", "medusa", "dflash"])
def test_a_head_that_knows_the_distribution_draws_the_tokens_of_the_target(kind, tmp_path):
    """With the noise of each position: the distribution is the same everywhere, the tokens are not."""
    target = heads.constant_target(tmp_path / "target")
    head = heads.constant_head(kind, tmp_path / "head", target)
    sessions = [
        Session(prompt, SamplingParams(temperature=1.0, seed=at)) for at, prompt in enumerate(prompts())
    ]
    with closing(start_vllm(target, head=str(head), cache_budget_bytes=BUDGET, max_proposal=16)) as vllm:
        cycles = run(vllm, sessions, 40, by_head(DEPTHS.get(kind, 4)))
    assert sum(len(proposal) for _, _, proposal, _ in cycles) >= 4 * 28
    assert all(len(verdict.accepted_path) == len(proposal) for _, _, proposal, verdict in cycles)
    assert all(len(set(session.output)) > 20 for session in sessions)


@pytest.mark.parametrize("method", [VerificationMethod.REJECTION, VerificationMethod.BLOCK])
def test_other_methods_take_a_draft_as_certain(pair, method):
    """The CPU engine gives the same verdict on the same tokens as a proposal without distributions."""
    sessions, twins = (pair.open(prompts(), 1.0, method=method) for _ in range(2))
    cycles = run(pair.vllm, sessions, 30, by_head(DEPTHS.get(pair.kind, 4)))
    assert sum(len(proposal) for _, _, proposal, _ in cycles) > 60
    if pair.kind in EXACT:
        assert sum(len(verdict.accepted_path) for _, _, _, verdict in cycles) > 20
    for session, twin in zip(sessions, twins, strict=True):
        for one, _, proposal, verdict in cycles:
            if one is session:
                again = ask(pair.own, twin, proposal)
                assert again.accepted_path == verdict.accepted_path
                assert again.next_token_id == verdict.next_token_id


def test_sessions_that_were_evicted_between_blocks_keep_their_text(pair):
    """Twenty sessions take turns in a cache that is too small for them."""
    many, before = prompts(20), pair.vllm.queue.stats().num_evictions
    plain = [generate(pair.own, [one], 12)[0] for one in pair.open(many, 1.0)]
    sessions = pair.open(many, 1.0)
    for length in (4, 8, 12):
        for at in range(0, 20, 5):
            run(pair.vllm, sessions[at : at + 5], length, by_head(3))
    assert [session.output[:12] for session in sessions] == plain
    assert pair.vllm.queue.stats().num_evictions > before


def test_near_the_end_of_the_context_drafts_do_no_harm(pair):
    """vLLM then proposes zeros for all sessions of the step; the session fills its context exactly."""
    length = pair.vllm.engine.max_context - 24
    both = [[random.Random(5).randrange(97) for _ in range(length)], prompts()[1]]
    plain = generate(pair.vllm, pair.open(both, 1.0), 24)
    sessions = pair.open(both, 1.0)
    run(pair.vllm, sessions, 24, lambda session: {"head": Shape(min(8, 24 - len(session.output)))})
    assert [session.output[:24] for session in sessions] == plain
    assert len(sessions[0].tokens) >= pair.vllm.engine.max_context
