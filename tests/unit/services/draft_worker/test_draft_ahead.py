"""Draft-ahead is memoisation: the same proposals, sooner. Runs, several tokens of a chain in one call of the
engine, give the tokens of single forwards.
"""

import random
from typing import Any

import pytest

from gammaray.types import SamplingParams, VerificationMethod
from services.engine.core.errors import EndedEarlyError
from services.own.lookahead import MANY_ROWS, SLOW_S, measure_ahead
from services.scheduling.tasks import Prepared, Release
from services.speculation.outcomes import AHEAD_ROWS, SESSION_ROWS
from services.speculation.proposals import RUN
from tests.support.draft_helpers import VOCAB, ChainingEngine, Drafter, ParallelEngine, TableEngine, outcome
from tests.support.vllm_helpers import answer

COUPLED, REJECTION = VerificationMethod.COUPLED, VerificationMethod.REJECTION
PROMPT = [1, 2, 3, 4]

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, seed=5),
    "plain": SamplingParams(seed=5),
    "cool": SamplingParams(temperature=0.6, top_p=0.95, seed=5),
    "penalties": SamplingParams(temperature=0.9, frequency_penalty=1.5, repetition_penalty=1.2, seed=5),
    "min-tokens": SamplingParams(temperature=0.0, presence_penalty=0.7, min_tokens=9, seed=5),
}


def savings(ahead: Drafter, fresh: Drafter, shapes, seed, params, method=COUPLED, eos=()) -> list[int]:
    """Check that proposals of these shapes are equal with draft-ahead; return the forwards that it saved.

    Over many cycles with budgets of ahead forwards from none to all.
    """
    rng, tokens, saved = random.Random(seed), list(PROMPT), []
    for _ in range(40):
        gamma, max_nodes = rng.choice(shapes)
        fields = {"max_nodes": max_nodes, "params": params, "method": method, "eos": eos}
        ours, theirs = (drafter.ask(tokens, gamma, **fields) for drafter in (ahead, fresh))
        assert ours.outcome == theirs.outcome
        assert len(ours.outcome) <= max(gamma, max_nodes)
        assert ours.outcome.depth <= gamma
        saved.append(theirs.timing.num_forwards - ours.timing.num_forwards)
        ahead.idle(rng.choice((0, 1, 3, 10**6)))
        tokens += outcome(ahead.engine, tokens, ours.outcome, rng, params, method)
    return saved


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("method", list(VerificationMethod))
@pytest.mark.parametrize("engine", [TableEngine, ChainingEngine, ParallelEngine])
def test_ahead_chains_are_those_that_are_drafted_on_demand(engine, method, params):
    ahead = Drafter(engine(spread=5.0), ahead_rows=3)
    fresh = Drafter(ParallelEngine(spread=5.0) if engine is ParallelEngine else TableEngine(spread=5.0))
    saved = savings(ahead, fresh, [(1, 0), (3, 0), *[(4, 0)] * 3], 3, params, method, (7, 8))
    assert sum(saved) > 0
    # A run may continue after the token at which the chain ends, or one that a filter drops.
    assert min(saved) >= -engine.can_chain * 2 * (RUN - 1)
    assert ahead.scheduler.queue.meter.ahead.lookups == 39


TREES = {
    **{f"{gamma}x{nodes}": [(gamma, nodes)] for gamma, nodes in ((4, 8), (3, 12), (6, 16), (2, 40))},
    "changing": [(1, 0), (4, 0), (4, 12), (6, 8), (2, 3)],
}


@pytest.mark.parametrize("shapes", TREES.values(), ids=TREES)
@pytest.mark.parametrize("name", ["greedy", "plain", "penalties"])
@pytest.mark.parametrize("engine", [TableEngine, ParallelEngine])
def test_ahead_trees_are_those_that_are_drafted_on_demand(engine, name, shapes):
    params = PARAMS[name]
    ahead, fresh = Drafter(engine(spread=5.0), ahead_rows=6), Drafter(engine(spread=5.0))
    saved = savings(ahead, fresh, shapes, 4, params)
    # `outcome` ignores penalties, and a parallel draft saves whole blocks only.
    assert sum(saved) > 0 or (engine is ParallelEngine and params.frequency_penalty)


def prepared_after(ahead: Drafter, gamma: int, **fields: Any) -> list[Prepared]:
    task = ahead.task(PROMPT, gamma, **fields)
    task.wants_ahead = True
    ahead.scheduler.submit([task])
    replies = []
    while ahead.scheduler.has_work:
        replies += [reply.outcome for _, reply in ahead.scheduler.step()]
    return replies[1:]


@pytest.mark.parametrize("method", [COUPLED, REJECTION])
def test_ahead_prepares_for_the_verification_after_the_running_one(method):
    """An orchestrator some milliseconds away needs it before this worker hears how the running one ended."""
    fields = {"method": method, "params": PARAMS["cool"]}
    ahead = Drafter(TableEngine(spread=9.0), ahead_rows=3)
    gamma = 2
    prepared = prepared_after(ahead, gamma, **fields)
    later = [one for one in prepared if len(one.token_ids) > gamma + 1]
    assert later
    for one in later:
        before = one.token_ids[: gamma + 1]
        assert any(other.token_ids == before for other in prepared)
        proposal = Drafter(TableEngine(spread=9.0)).ask([*PROMPT, *one.token_ids], gamma, **fields).outcome
        assert one.proposal == proposal
    one_level = Drafter(TableEngine(spread=9.0), ahead_rows=3, ahead_levels=1)
    first = prepared_after(one_level, gamma, **fields)
    assert max(len(one.token_ids) for one in first) == gamma + 1


@pytest.mark.parametrize("engine", [TableEngine, ChainingEngine])
@pytest.mark.parametrize(("method", "num"), [(COUPLED, 2), (REJECTION, 6)])
def test_few_tokens_of_a_chain_are_drafted_unless_they_were_prepared(engine, method, num):
    fields = {"method": method, "params": PARAMS["plain"]}
    ahead, fresh = Drafter(engine(spread=5.0), ahead_rows=4), Drafter(engine(spread=5.0))
    whole = fresh.ask(PROMPT, 6, **fields).outcome.token_ids
    few = ahead.ask(PROMPT, 6, drafted_depth=2, **fields)
    assert few.outcome.token_ids == whole[:num]
    assert few.timing.num_forwards == num
    assert ahead.idle() > 6
    for expected in ([*PROMPT, *whole[:3]], [*PROMPT, *whole[:3], VOCAB - 1]):
        ours = ahead.ask(expected, 6, drafted_depth=2, **fields)
        is_prepared = ours.timing.num_forwards == 0
        theirs = fresh.ask(expected, 6, **fields).outcome.token_ids
        assert ours.outcome.token_ids == theirs[: 6 if is_prepared else num]
        assert is_prepared == (len(expected) == 7 and method is COUPLED)


def test_a_slow_draft_sends_each_prepared_proposal_at_once(monkeypatch):
    first = []
    monkeypatch.setattr("services.own.lookahead.MIN_SENT", 0.9)
    for levels in (1, 2):
        ahead = Drafter(TableEngine(spread=2.0), ahead_rows=AHEAD_ROWS, ahead_levels=levels)
        task = ahead.task(PROMPT, 3, params=PARAMS["plain"])
        task.wants_ahead = True
        ahead.scheduler.submit([task])
        answer(ahead.scheduler, task)
        first.append(next(step for step in range(100) if ahead.scheduler.step()))
    assert first[0] < first[1]


@pytest.mark.parametrize(("levels", "others", "is_ended"), [(1, 0, True), (1, 1, False), (2, 0, False)])
def test_a_slow_forward_ends_for_the_block_of_its_session(levels, others, is_ended, monkeypatch):
    ahead = Drafter(TableEngine(spread=5.0), ahead_rows=4, ahead_levels=levels)
    for name in ("s", "t")[: 1 + others]:
        ahead.ask(PROMPT, 4, session_id=name)
    step, stops = ahead.engine.step, []

    def ends(feeds, idle_until=None, until=None):
        stops.append(until)
        if until is not None and until.value:
            raise EndedEarlyError
        return step(feeds)

    monkeypatch.setattr(ahead.engine, "step", ends)
    ahead.scheduler.queue.stop.value = 1  # a block is on its way
    ahead.scheduler.step()
    assert (stops[0] is not None) == is_ended
    assert ahead.scheduler.has_work
    fresh = Drafter(TableEngine(spread=5.0)).ask([*PROMPT, 9], 4).outcome
    assert ahead.ask([*PROMPT, 9], 4).outcome == fresh


def test_ahead_follows_more_outcomes_where_rows_are_free():
    drafters = [Drafter(TableEngine(spread=1.0), ahead_rows=rows) for rows in (AHEAD_ROWS, SESSION_ROWS)]
    few, many = (len(prepared_after(one, 3, params=PARAMS["plain"])) for one in drafters)
    assert many > 1.5 * few > 0


@pytest.mark.parametrize(("row", "wanted"), [(0.0, MANY_ROWS[0]), (0.02, MANY_ROWS[1]), (0.2, AHEAD_ROWS)])
@pytest.mark.parametrize(("forward_s", "levels"), [(SLOW_S / 2, 2), (SLOW_S * 2, 1)])
def test_ahead_has_free_rows_and_levels_it_can_afford(row, wanted, forward_s, levels, monkeypatch):
    engine, clock = TableEngine(), [0.0]
    step = engine.step

    def timed(feeds):
        clock[0] += forward_s * (1.0 + row * sum(len(feed.token_ids) for feed in feeds))
        return step(feeds)

    monkeypatch.setattr(engine, "step", timed)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    assert measure_ahead(engine) == (wanted, pytest.approx((1.0 + row * wanted) / (1.0 + row)), levels)
    assert not engine.caches


def test_tree_level_wider_than_a_forward_comes_in_several():
    narrow, wide = Drafter(TableEngine(), max_batch_tokens=2), Drafter(TableEngine())
    ours, theirs = narrow.ask(PROMPT, 4, max_nodes=40), wide.ask(PROMPT, 4, max_nodes=40)
    assert ours.outcome == theirs.outcome
    assert len(theirs.outcome) > 10
    assert ours.timing.num_forwards > theirs.timing.num_forwards == 4


def test_ahead_ends_by_itself_and_a_new_request_preempts_it():
    ahead = Drafter(TableEngine(), ahead_rows=1)
    ahead.ask(PROMPT, 6)
    num_ahead = ahead.idle()
    assert 6 < num_ahead < 100
    assert not ahead.scheduler.has_work
    ahead.ask([*PROMPT, 9], 6)
    ahead.idle(2)
    assert ahead.scheduler.has_work
    before = ahead.engine.num_steps
    # Another session's block runs in the very next forwards, undisturbed.
    reply = ahead.ask(PROMPT, 3, session_id="t")
    assert ahead.engine.num_steps - before == 3 == reply.timing.num_forwards
    assert ahead.idle() > 10


def test_ahead_release_ends_it_and_frees_everything():
    ahead = Drafter(TableEngine(), ahead_rows=4)
    for name in ("s", "t"):
        ahead.ask(PROMPT, 4, session_id=name)
    ahead.idle(2)
    ahead.scheduler.release([Release("s")])
    assert list(ahead.engine.caches) == ["t"]
    assert ahead.idle() > 0
    ahead.scheduler.release([Release("t")])
    assert not ahead.scheduler.has_work
    assert not ahead.engine.caches
    assert not ahead.scheduler.speculations


def test_ahead_prepares_nothing_for_a_crowd():
    ahead = Drafter(TableEngine(), ahead_rows=1)
    for name in ("s", "t", "u"):
        ahead.ask(PROMPT, 4, session_id=name)
    assert not ahead.scheduler.has_work
    ahead.scheduler.release([Release("t")])
    assert ahead.idle() > 0


def test_ahead_restarts_after_an_eviction():
    ahead, fresh = Drafter(TableEngine(), ahead_rows=4), Drafter(TableEngine())
    proposal = ahead.ask(PROMPT, 4).outcome
    ahead.idle(2)
    ahead.engine.release("s")
    assert ahead.idle() == 1  # it looks, and finds nothing to build on
    tokens = [*PROMPT, *proposal.token_ids[:2], 11]
    assert ahead.ask(tokens, 4).outcome == fresh.ask(tokens, 4).outcome


def test_drafting_continues_after_its_cache_is_evicted():
    drafter = Drafter(TableEngine())
    wanted = Drafter(TableEngine()).ask(PROMPT, 6).outcome
    drafter.scheduler.submit([drafter.task(PROMPT, 6)])
    for _ in range(3):
        assert drafter.scheduler.step() == []
    drafter.engine.release("s")
    replies = []
    for _ in range(20):
        replies += drafter.scheduler.step()
    assert [reply.outcome for _, reply in replies] == [wanted]


def test_ahead_evicts_no_other_session():
    ahead = Drafter(TableEngine(), ahead_rows=4)
    ahead.engine.has_space = False
    ahead.ask(PROMPT, 4)
    steps = ahead.engine.num_steps
    ahead.idle()
    assert ahead.engine.num_steps == steps


def test_ahead_failing_forward_costs_only_what_was_prepared():
    ahead = Drafter(TableEngine(), ahead_rows=4)
    ahead.ask(PROMPT, 4)
    step, ahead.engine.step = ahead.engine.step, lambda feeds: 1 / 0
    assert ahead.idle() == 1
    ahead.engine.step = step
    assert ahead.ask([*PROMPT, 9], 4).outcome == Drafter(TableEngine()).ask([*PROMPT, 9], 4).outcome


def test_a_run_on_demand_ends_when_another_block_arrives(monkeypatch):
    ours, lengths = Drafter(ChainingEngine()), []
    chain, feed = ours.engine.chain, ours.engine.feed_one

    def noted(*args, **options):
        token_ids, logits = chain(*args, **options)
        lengths.append(len(logits))
        return token_ids, logits

    def hurried(fed):
        ours.scheduler.queue.preempt([ours.task(PROMPT, 1, session_id="t")])
        return feed(fed)

    monkeypatch.setattr(ours.engine, "chain", noted)
    monkeypatch.setattr(ours.engine, "feed_one", hurried)
    reply = ours.ask(PROMPT, 4)
    assert set(lengths) == {1}
    assert reply.outcome == Drafter(TableEngine()).ask(PROMPT, 4).outcome


@pytest.mark.parametrize(("cost", "has_runs"), [(4.0, True), (1.01, False)], ids=["dear", "free"])
def test_outcomes_are_prepared_together_where_rows_cost_less_than_runs(cost, has_runs, monkeypatch):
    one, runs = Drafter(ChainingEngine(spread=3.0), ahead_rows=AHEAD_ROWS, rows_cost=cost), []
    one.ask(PROMPT, 3)
    chain = one.engine.chain
    monkeypatch.setattr(one.engine, "chain", lambda *given, **how: runs.append(1) or chain(*given, **how))
    one.idle(5)
    assert bool(runs) is has_runs


def test_runs_leave_room_in_the_context():
    engine = ChainingEngine()
    tokens = [index % VOCAB for index in range(engine.max_context - 4)]
    ahead = Drafter(engine, ahead_rows=3)
    assert len(ahead.ask(tokens, 6).outcome) == 4
    ahead.idle()
    assert engine.length("s") <= engine.max_context
