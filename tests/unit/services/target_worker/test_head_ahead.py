"""Draft-ahead in the target worker: what is proposed and emitted is the same, only sooner."""

from __future__ import annotations

from typing import Any

import pytest

from gammaray.blocks import Shape
from gammaray.config import TargetSettings
from gammaray.types import SamplingParams, VerificationMethod
from services.engine.engine import Engine
from services.engine.loader import load_engine
from services.scheduling.planning import Limits
from services.scheduling.tasks import Release
from services.speculation.local_drafter import LocalDrafter
from services.target_worker.loading import load_local_drafter
from services.target_worker.scheduler import TargetScheduler
from tests.support.engine_helpers import random_tokens, tiny_model
from tests.support.head_helpers import DATA, bigram_head, bigram_target
from tests.support.target_helpers import Run

PROMPT = random_tokens(20, seed=3)


class Forwards:
    """Counts the forwards of a drafter's engine."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("step", "chain"):
            monkeypatch.setattr(engine, name, self._counted(getattr(engine, name)))

    def _counted(self, call: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            self.count += 1
            return call(*args, **options)

        return counted


@pytest.fixture(scope="module", params=["exact head", "random head", "draft model"])
def pair(request, tmp_path_factory):
    """A target and what drafts beside it."""
    folder = tmp_path_factory.mktemp("pair")
    if request.param == "exact head":
        target = bigram_target(folder / "target")
        drafter = bigram_head(folder / "head", target)
    else:
        target = tiny_model("llama", folder / "target", seed=3)
        if request.param == "random head":
            drafter = DATA / "llama"
        else:
            drafter = tiny_model("llama", folder / "draft", seed=4)
    return str(target), str(drafter)


def scheduler_of(pair: tuple[str, str], *, ahead: bool = True) -> tuple[TargetScheduler, LocalDrafter]:
    target, drafter = pair
    engine = load_engine(target)
    head = load_local_drafter(TargetSettings(model=target, head=drafter), engine)
    return TargetScheduler(engine, Limits(1024, 256), head=head, draft_ahead=ahead), head


def assert_same(ours: Run, theirs: Run) -> None:
    assert ours.proposals == theirs.proposals
    assert ours.tokens == theirs.tokens


@pytest.mark.parametrize("shape", [Shape(1), Shape(3), Shape(2, 5)], ids=["1", "3", "2x5"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_proposals_and_tokens_are_those_without_draft_ahead(pair, shape, temperature, monkeypatch):
    params = SamplingParams(temperature=temperature, seed=7)
    (ahead, head), (plain, _) = scheduler_of(pair), scheduler_of(pair, ahead=False)
    ours, theirs = Run(ahead, PROMPT, params), Run(plain, PROMPT, params)
    forwards = Forwards(head.engine, monkeypatch)
    for cycle in range(12):
        ours.cycle(shape)
        theirs.cycle(shape)
        assert not plain.has_work
        assert forwards.count == 0 or cycle == 0
        ours.idle()
        forwards.count = 0
    assert_same(ours, theirs)
    assert sum(map(len, ours.proposals)) >= 11
    assert ours.prepared == [False, *(len(proposal) > 0 for proposal in ours.proposals[1:])]
    assert not any(theirs.prepared)
    totals = ahead.meter.totals
    assert (totals.ahead_lookups, totals.ahead_hits) == (11, sum(ours.prepared))
    assert plain.meter.totals.ahead_lookups == 0


def test_proposal_that_needs_a_forward_is_not_marked_as_prepared(pair):
    (ahead, _), params = scheduler_of(pair), SamplingParams(seed=4)
    run = Run(ahead, PROMPT, params)
    run.cycle(Shape(1))
    run.cycle(Shape(1))  # without a pause: nothing could be prepared
    run.idle()
    run.cycle(Shape(1))
    assert run.prepared == [False, False, len(run.proposals[2]) > 0]
    assert ahead.meter.totals.ahead_lookups == 2


@pytest.mark.parametrize("method", ["rejection", "block", "naive"])
def test_other_methods_emit_the_same(pair, method):
    params = SamplingParams(temperature=1.0, seed=8)
    (ahead, _), (plain, _) = scheduler_of(pair), scheduler_of(pair, ahead=False)
    ours, theirs = (Run(one, PROMPT, params, VerificationMethod(method)) for one in (ahead, plain))
    for _ in range(10):
        ours.cycle(Shape(3))
        ours.idle()
        theirs.cycle(Shape(3))
    assert_same(ours, theirs)


def test_other_tokens_at_the_end_are_drafted_for_anew(pair):
    params = SamplingParams(temperature=1.0, seed=9)
    (ahead, _), (plain, _) = scheduler_of(pair), scheduler_of(pair, ahead=False)
    ours, theirs = Run(ahead, PROMPT, params), Run(plain, PROMPT, params)
    for run in (ours, theirs):
        for _ in range(4):
            run.cycle(Shape(3))
            run.idle()
        run.tokens[-1] = (run.tokens[-1] + 1) % 90  # what the orchestrator committed, as after a takeover
        run.held = 0
        for _ in range(3):
            run.cycle(Shape(3))
            run.idle()
    assert_same(ours, theirs)


def test_arriving_block_ends_draft_ahead(pair, monkeypatch):
    scheduler, head = scheduler_of(pair)
    run = Run(scheduler, PROMPT, SamplingParams(temperature=0.0, seed=1))
    forwards = Forwards(head.engine, monkeypatch)
    run.cycle(Shape(3))
    assert scheduler.has_work
    following = run.block(Shape(3))
    scheduler.preempt([following])
    forwards.count = 0
    assert scheduler.step() == []
    assert forwards.count == 0
    run.cycle(Shape(3))
    assert forwards.count > 0


def test_nothing_is_drafted_ahead_after_the_end(pair):
    scheduler, _ = scheduler_of(pair)
    run = Run(scheduler, PROMPT, SamplingParams(temperature=0.0, seed=1), eos_token_ids=tuple(range(97)))
    run.cycle(Shape(3))
    assert not scheduler.has_work
    other = Run(scheduler, PROMPT, SamplingParams(temperature=0.0, seed=1))
    other.cycle(Shape(3))
    assert scheduler.has_work
    scheduler.release([Release(other.name)])
    assert not scheduler.has_work
