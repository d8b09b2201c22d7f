"""Steps of a target worker that serves many sessions: bounded, fair to small blocks, the same tokens."""

import pytest

from gammaray.blocks import Shape, Verdict
from gammaray.config import TargetSettings
from gammaray.types import Proposal, SamplingParams
from services.engine.loader import load_engine
from services.own.head_loading import load_local_drafter
from services.own.target_scheduler import TargetScheduler
from services.scheduling.planning import MIN_STEP_TOKENS, Limits
from tests.support.engine_helpers import random_tokens
from tests.support.head_helpers import bigram_head, bigram_target
from tests.support.target_helpers import Run

SLOW = Limits(1024, 128)  # with the least budget


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = bigram_target(folder / "target")
    return str(target), str(bigram_head(folder / "head", target))


class Steps:
    """A scheduler that notes the tokens of each step."""

    def __init__(self, pair, limits, monkeypatch, *, has_head=False):
        target, drafter = pair
        engine = load_engine(target)
        head = load_local_drafter(TargetSettings(model=target, head=drafter), engine) if has_head else None
        self.scheduler = TargetScheduler(engine, limits, head=head, draft_ahead=False)
        if limits is SLOW:
            monkeypatch.setattr(self.scheduler.budget, "observe", lambda *_: None)
            self.scheduler.budget.num_tokens = MIN_STEP_TOKENS
            self.scheduler.budget.token_s = 0.001
        self.sizes = []
        step = engine.step

        def noted(feeds, **options):
            self.sizes.append(sum(len(feed.token_ids) for feed in feeds))
            return step(feeds, **options)

        monkeypatch.setattr(engine, "step", noted)

    def serve(self, blocks):
        """Return the verdicts by session, in the order of their steps."""
        self.sizes.clear()
        self.scheduler.submit(blocks)
        found = []
        while not self.scheduler.is_idle:
            found += [(reply.session_id, reply.outcome) for _, reply in self.scheduler.step()]
        assert all(isinstance(outcome, Verdict) for _, outcome in found), found
        return found


def sessions(scheduler, count):
    return [Run(scheduler, random_tokens(20, seed=i), SamplingParams(seed=i)) for i in range(count)]


@pytest.mark.parametrize("has_head", [False, True])
def test_steps_of_many_large_blocks_are_bounded_and_tokens_stay(pair, has_head, monkeypatch):
    tokens = []
    for limits in (SLOW, Limits(1024, 256)):
        steps = Steps(pair, limits, monkeypatch, has_head=has_head)
        runs = sessions(steps.scheduler, 12)
        steps.serve([run.block(Shape(0)) for run in runs])
        shape, given = (Shape(6), Proposal()) if has_head else (Shape(0), Proposal((5, 6, 7, 8, 9, 10)))
        verdicts = dict(steps.serve([run.block(shape, given) for run in runs]))
        tokens.append([verdicts[run.name].next_token_id for run in runs])
        assert len(verdicts) == 12
        if limits is SLOW:
            assert steps.scheduler.budget.num_tokens == MIN_STEP_TOKENS
            assert max(steps.sizes) <= MIN_STEP_TOKENS
            assert len(steps.sizes) >= 12 * 7 / MIN_STEP_TOKENS
        else:
            assert steps.sizes == [12 * 7]
    assert tokens[0] == tokens[1]


def test_long_block_is_not_starved_by_blocks_that_copy_prefixes(pair):
    scheduler = TargetScheduler(load_engine(pair[0]), Limits(64, 16))
    common = random_tokens(20, seed=0)
    short = [Run(scheduler, [*common, token_id], SamplingParams(seed=1), salt="s") for token_id in (5, 6)]
    short[0].cycle(Shape(0))
    scheduler.engine.budget_bytes = 2 * scheduler.stats().cache_bytes
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
