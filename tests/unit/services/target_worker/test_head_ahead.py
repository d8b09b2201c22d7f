"""A head in the target worker: draft-ahead changes nothing but times; it reads the newest positions."""

from typing import Any

import pytest

from gammaray.blocks import Shape
from gammaray.config import TargetSettings
from gammaray.types import SamplingParams, VerificationMethod
from services.engine.engine import Engine
from services.engine.loader import load_engine
from services.own import head_loading
from services.own.head_loading import load_local_drafter
from services.own.target_scheduler import TargetScheduler
from services.scheduling.planning import Limits
from services.speculation import head_drafter
from services.speculation.head_drafter import MAX_FEATURES
from services.speculation.local_drafter import LocalDrafter
from tests.support.engine_helpers import random_tokens, tiny_model
from tests.support.head_helpers import DATA, bigram_head, bigram_target
from tests.support.target_helpers import Run

PROMPT = random_tokens(20, seed=3)


def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of tokens of each forward from now on."""
    counts: list[int] = []

    def noting(call: Any) -> Any:
        def noted(feeds: Any, *args: Any, **options: Any) -> Any:
            counts.append(
                sum(len(feed.token_ids) for feed in (feeds if isinstance(feeds, list) else [feeds]))
            )
            return call(feeds, *args, **options)

        return noted

    for name in ("step", "chain"):
        monkeypatch.setattr(engine, name, noting(getattr(engine, name)))
    return counts


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
    forwards = watched(head.engine, monkeypatch)
    for cycle in range(12):
        ours.cycle(shape)
        theirs.cycle(shape)
        assert not plain.has_work
        assert forwards == [] or cycle == 0
        ours.idle()
        forwards.clear()
    assert_same(ours, theirs)
    assert sum(map(len, ours.proposals)) >= 11
    assert ours.prepared == [False, *(len(proposal) > 0 for proposal in ours.proposals[1:])]
    assert not any(theirs.prepared)
    totals = ahead.queue.meter.totals
    assert (totals.ahead_lookups, totals.ahead_hits) == (11, sum(ours.prepared))
    assert plain.queue.meter.totals.ahead_lookups == 0


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


def test_features_made_together_are_those_made_one_by_one(pair, monkeypatch):
    params = SamplingParams(temperature=1.0, seed=9)
    ours, theirs = (Run(scheduler_of(pair)[0], PROMPT, params) for _ in range(2))
    for run, together in ((ours, head_drafter.FUSED_TOGETHER), (theirs, 1)):
        monkeypatch.setattr(head_drafter, "FUSED_TOGETHER", together)
        for gamma in (0,) * 40 + (3, 3, 0, 2):
            run.cycle(Shape(gamma))
    assert_same(ours, theirs)


def test_arriving_block_ends_draft_ahead(pair, monkeypatch):
    scheduler, head = scheduler_of(pair)
    run = Run(scheduler, PROMPT, SamplingParams(temperature=0.0, seed=1))
    forwards = watched(head.engine, monkeypatch)
    run.cycle(Shape(3))
    assert scheduler.has_work
    following = run.block(Shape(3))
    scheduler.queue.preempt([following])
    forwards.clear()
    assert scheduler.step() == []
    assert forwards == []
    run.cycle(Shape(3))
    assert forwards != []


LONG_PROMPT = random_tokens(200, seed=3)


@pytest.mark.parametrize("window", [MAX_FEATURES, 32, 100])
def test_head_reads_the_newest_positions_of_a_prompt_and_is_right(window, tmp_path, monkeypatch):
    monkeypatch.setattr(head_loading, "MAX_FEATURES", window)
    target = bigram_target(tmp_path / "target")
    pair = str(target), str(bigram_head(tmp_path / "head", target))
    scheduler, drafter = scheduler_of(pair, ahead=False)
    run = Run(scheduler, LONG_PROMPT, SamplingParams(temperature=0.0))
    run.cycle(Shape(0))
    counts = watched(drafter.engine, monkeypatch)
    run.cycle(Shape(1))
    assert sum(counts) == min(window, len(LONG_PROMPT))
    counts.clear()
    committed = len(run.tokens)
    run.cycle(Shape(1))
    assert sum(counts) == 2, "the tokens since"
    assert drafter.engine.length(run.name) == committed
    assert list(map(len, run.proposals)) == [0, 1, 1]
    for _ in range(8):
        run.cycle(Shape(3))
    assert len(run.tokens) == len(LONG_PROMPT) + 1 + 2 * 2 + 8 * 4, "each proposal is accepted whole"
