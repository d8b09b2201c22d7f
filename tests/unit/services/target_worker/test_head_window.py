"""A head that begins after a prompt reads the newest positions, and continues from there."""

from __future__ import annotations

import pytest

from gammaray.blocks import Shape
from gammaray.config import TargetSettings
from gammaray.types import SamplingParams
from services.engine.loader import load_engine
from services.scheduling.planning import Limits
from services.speculation.head_drafter import MAX_FEATURES
from services.target_worker import loading
from services.target_worker.loading import load_local_drafter
from services.target_worker.scheduler import TargetScheduler
from tests.support.engine_helpers import random_tokens
from tests.support.head_helpers import bigram_head, bigram_target
from tests.support.target_helpers import Run

PROMPT = random_tokens(200, seed=3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = bigram_target(folder / "target")
    return target, bigram_head(folder / "head", target)


def session(target, head):
    """Return a run without draft-ahead, and the engine of its head."""
    engine = load_engine(str(target))
    drafter = load_local_drafter(TargetSettings(model=str(target), head=str(head)), engine)
    scheduler = TargetScheduler(engine, Limits(1024, 256), head=drafter, draft_ahead=False)
    return Run(scheduler, PROMPT, SamplingParams(temperature=0.0)), drafter.engine


def reading(engine, monkeypatch):
    """Return a list of how many tokens each forward of the head will read."""
    step, counts = engine.step, []

    def watched(feeds):
        counts.append(sum(len(feed.token_ids) for feed in feeds))
        return step(feeds)

    monkeypatch.setattr(engine, "step", watched)
    return counts


@pytest.fixture
def of_window(monkeypatch):
    """Return a function that bounds what heads read of a prompt."""
    return lambda window: monkeypatch.setattr(loading, "MAX_FEATURES", window)


@pytest.mark.parametrize("window", [MAX_FEATURES, 32, 100])
def test_head_reads_the_newest_positions_of_a_prompt(pair, window, monkeypatch, of_window):
    of_window(window)
    run, engine = session(*pair)
    run.cycle(Shape(0))
    counts = reading(engine, monkeypatch)
    run.cycle(Shape(1))
    assert sum(counts) == min(window, len(PROMPT))
    counts.clear()
    committed = len(run.tokens)
    run.cycle(Shape(1))
    assert sum(counts) == 2, "the tokens since"
    assert engine.length(run.name) == committed
    assert list(map(len, run.proposals)) == [0, 1, 1]


def test_exact_head_is_accepted_whatever_it_has_read(pair, of_window):
    lengths = []
    for window in (MAX_FEATURES, 32):
        of_window(window)
        run, _ = session(*pair)
        run.cycle(Shape(0))
        for _ in range(8):
            run.cycle(Shape(3))
        lengths.append(len(run.tokens))
    assert lengths == [len(PROMPT) + 1 + 8 * 4] * 2
