"""Steps of a target worker that serves many sessions: bounded, fair to small blocks, the same tokens."""

import pytest

from gammaray.blocks import Shape
from gammaray.config import TargetSettings
from gammaray.types import Proposal, SamplingParams
from services.engine.loader import load_engine
from services.own.head_loading import load_local_drafter
from services.own.target_scheduler import TargetScheduler
from services.scheduling.planning import MIN_STEP_TOKENS, Limits
from tests.support.engine_helpers import random_tokens
from tests.support.head_helpers import bigram_head, bigram_target
from tests.support.target_helpers import Run


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = bigram_target(folder / "target")
    return str(target), str(bigram_head(folder / "head", target))


def served(pair, budget, monkeypatch, *, has_head):
    """Return the next tokens of twelve sessions with proposals of six tokens, and the tokens of each step."""
    target, drafter = pair
    engine = load_engine(target)
    head = load_local_drafter(TargetSettings(model=target, head=drafter), engine) if has_head else None
    scheduler = TargetScheduler(engine, Limits(1024, 128), head=head, draft_ahead=False)
    monkeypatch.setattr(scheduler.batcher.budget, "observe", lambda *_: None)
    scheduler.batcher.budget.num_tokens, scheduler.batcher.budget.token_s = budget, 0.001
    step, sizes, found = engine.step, [], {}

    def noted(feeds, **options):
        sizes.append(sum(len(feed.token_ids) for feed in feeds))
        return step(feeds, **options)

    monkeypatch.setattr(engine, "step", noted)
    runs = [Run(scheduler, random_tokens(20, seed=i), SamplingParams(seed=i)) for i in range(12)]
    shape, given = (Shape(6), Proposal()) if has_head else (Shape(0), Proposal((5, 6, 7, 8, 9, 10)))
    for blocks in ([run.block(Shape(0)) for run in runs], [run.block(shape, given) for run in runs]):
        sizes.clear()
        scheduler.submit(blocks)
        while not scheduler.queue.is_idle:
            found |= {reply.session_id: reply.outcome.next_token_id for _, reply in scheduler.step()}
    return [found[run.name] for run in runs], sizes


@pytest.mark.parametrize("has_head", [False, True])
def test_steps_of_many_large_blocks_are_bounded_and_tokens_stay(pair, has_head, monkeypatch):
    tokens, sizes = served(pair, MIN_STEP_TOKENS, monkeypatch, has_head=has_head)
    assert max(sizes) <= MIN_STEP_TOKENS
    assert len(sizes) >= 12 * 7 / MIN_STEP_TOKENS
    assert served(pair, 1024, monkeypatch, has_head=has_head) == (tokens, [12 * 7])


def test_long_block_is_not_starved_by_blocks_that_copy_prefixes(pair):
    scheduler = TargetScheduler(load_engine(pair[0]), Limits(64, 16))
    common = random_tokens(20, seed=0)
    short = [Run(scheduler, [*common, token_id], SamplingParams(seed=1), salt="s") for token_id in (5, 6)]
    short[0].cycle(Shape(0))
    scheduler.engine.budget_bytes = 2 * scheduler.queue.stats().cache_bytes
    short[1].cycle(Shape(0))
    long = Run(scheduler, random_tokens(60, seed=1), SamplingParams(seed=1))
    scheduler.submit([long.block(Shape(0))])
    served = []
    while long.name not in served:
        assert len(served) < 10, served
        run = short[len(served) % 2]
        scheduler.submit([run.block(Shape(0))])
        while run.name not in (answered := {reply.session_id: reply for _, reply in scheduler.step()}):
            served += answered
        served += answered
        run.held = len(run.tokens)
        run.tokens.append(answered[run.name].outcome.next_token_id)
