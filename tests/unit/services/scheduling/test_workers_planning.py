"""Planning of the next forward, and the session table; no model needed."""

import random
from dataclasses import replace

import pytest

from gammaray.errors import FailedPreconditionError, InvalidArgumentError
from gammaray.types import SamplingParams, VerificationMethod
from services.scheduling import sessions
from services.scheduling.planning import MIN_STEP_TOKENS, Limits, Running, StepBudget, plan
from services.scheduling.sessions import SessionCopy, SessionTable
from services.scheduling.tasks import NeedTokens, SessionSpec
from tests.support.vllm_helpers import Session

SPEC = SessionSpec(SamplingParams(seed=1), VerificationMethod.COUPLED, 1, ())


def task(session_id="s", tokens=(1, 2, 3), start=0, epoch=1, spec=SPEC):
    context = {"context_start": start, "context": list(tokens[start:]), "base_position": len(tokens)}
    return Session((), name=session_id, epoch=epoch).block(spec=spec, **context)


def block(name, num_committed, num_nodes=0, sample_index=0, is_scored=False):
    tokens = list(range(num_committed))
    session = SessionCopy(name, 1, replace(SPEC, params=replace(SPEC.params, sample_index=sample_index)))
    session.tokens = tokens
    nodes = [1000 + node for node in range(num_nodes)]
    return Running(task(name, tokens), session, nodes, num_logits=num_nodes + 1, is_scored=is_scored)


def shape(batch):
    return [(f.session_id, f.start, len(f.token_ids), f.num_logits) for _, f in batch]


def planned(blocks, cached=None, budget=100, chunk=32):
    return plan(blocks, lambda name: (cached or {}).get(name, 0), Limits(budget, chunk))


def test_plan_scored_prompts_ask_for_all_logits_of_few_rows_at_a_time():
    blocks = [block("a", 30, num_nodes=4, is_scored=True), block("b", 9, is_scored=True), block("c", 20)]
    cached, seen = {}, []
    while blocks:
        batch = plan(blocks, lambda name: cached.get(name, 0), Limits(100, 32, max_scored_rows=8))
        for running, feed in batch:
            cached[feed.session_id] = feed.start + len(feed.token_ids)
            assert running.fed_from == feed.start
            if cached[feed.session_id] == running.num_tokens:
                blocks.remove(running)
        rows = [feed for _, feed in batch if feed.session_id != "c"]
        assert all(feed.num_logits == len(feed.token_ids) for feed in rows)
        assert sum(feed.num_logits for feed in rows) <= 8
        seen.append({feed.session_id: len(feed.token_ids) for _, feed in batch})
    assert sum(step.get("a", 0) for step in seen) == 34
    assert sum(step.get("b", 0) for step in seen) == 9
    assert seen[0] == {"a": 8, "c": 20}  # the unscored block does not wait


def test_plan_runs_the_oldest_block_first_then_short_blocks_before_long_prompts():
    blocks = [block("old", 500), block("long", 500), block("b", 20, 4), block("c", 20, 4)]
    batch = planned(blocks, {"b": 19, "c": 19}, budget=64)
    assert shape(batch) == [("old", 0, 32, 0), ("b", 19, 5, 5), ("c", 19, 5, 5), ("long", 0, 22, 0)]


@pytest.mark.parametrize("budget", [16, 17, 33, 40])
def test_plan_stays_within_the_budget_and_every_block_gets_its_turn(budget):
    blocks = [block(f"s{index}", 40 + index, num_nodes=index) for index in range(8)]
    cached, done, num_steps = {}, [], 0
    while blocks:
        num_steps += 1
        batch = planned(blocks, cached, budget=budget, chunk=16)
        assert 0 < sum(len(feed.token_ids) for _, feed in batch) <= budget
        for running, feed in batch:
            cached[feed.session_id] = feed.start + len(feed.token_ids)
            if feed.num_logits:
                done.append(feed.session_id)
                blocks.remove(running)
        assert num_steps < 100
    assert sorted(done) == [f"s{index}" for index in range(8)]


@pytest.fixture
def table():
    dropped = []
    made = SessionTable(
        3, 50, "cpu", lambda name: name == "busy", lambda session: dropped.append(session.session_id)
    )
    made.dropped = dropped
    return made


@pytest.mark.parametrize(
    ("start", "context", "expected", "changed_from"),
    [
        (3, [4, 5], [1, 2, 3, 4, 5], 3),
        (1, [2, 3, 9], [1, 2, 3, 9], 3),
        (1, [7, 8], [1, 7, 8], 1),
        (2, [3], [1, 2, 3], 3),
        (0, [1], [1], 1),
        (2, [], [1, 2], 2),
    ],
    ids=["append", "overlap", "differ", "same", "shorter", "only truncate"],
)
def test_session_merge_keeps_what_agrees(start, context, expected, changed_from):
    session = SessionCopy("s", 1, SPEC)
    session.tokens = [1, 2, 3]
    session.merge(start, context)
    assert session.tokens == expected
    assert session.changed_from == changed_from
    assert session.num_confirmed == len(expected)


def test_table_admits_asks_and_fences(table):
    assert table.admit(task(start=1)) == NeedTokens(0)
    assert table.admit(task(spec=None)) == NeedTokens(0)
    session = table.admit(task(epoch=4))
    assert session.tokens == [1, 2, 3]
    assert table.admit(task(tokens=(1, 2, 3, 4, 5, 6), start=5, epoch=4)) == NeedTokens(3)
    with pytest.raises(FailedPreconditionError):
        table.admit(task(epoch=3))
    assert table.admit(task(tokens=(1, 2, 3, 4), start=3, epoch=5, spec=None)).tokens == [1, 2, 3, 4]


def test_table_base_inside_the_prompt_is_refused(table):
    table.admit(task(spec=SessionSpec(SPEC.params, SPEC.method, 3, ())))
    with pytest.raises(InvalidArgumentError, match="base_position"):
        table.admit(task(tokens=(1, 2), spec=None))


def test_table_drops_tokens_that_a_new_owner_did_not_send(table):
    session = table.admit(task())
    session.tokens += [8, 9]
    assert table.admit(task(tokens=(1, 2, 3, 8, 9), start=5, spec=None)).tokens == [1, 2, 3, 8, 9]
    session.tokens += [10]
    assert table.admit(task(tokens=(1, 2, 3, 8, 9, 10), start=6, spec=None, epoch=2)) == NeedTokens(5)


def test_table_drops_the_least_recently_used_idle_session(table):
    for name in ("busy", "a", "b"):
        table.admit(task(name))
    table.admit(task("a"))
    table.admit(task("c"))
    assert table.dropped == ["b"]
    assert set(table) == {"busy", "a", "c"}


def test_table_bounds_the_tokens_of_all_sessions(table, monkeypatch):
    monkeypatch.setattr(sessions, "MAX_TOKENS", 10)
    table.admit(task("a", tokens=range(6)))
    table.admit(task("b", tokens=range(4)))
    assert table.dropped == []
    table.admit(task("b", tokens=range(5), start=4, spec=None))
    assert table.dropped == ["a"]
    table.drop("b")
    table.admit(task("c", tokens=range(10)))
    assert table.dropped == ["a", "b"]


def test_table_noise_is_dropped_with_the_spec_and_bounded(monkeypatch):
    monkeypatch.setattr(sessions, "MIN_WITH_NOISE", 2)
    monkeypatch.setattr(sessions, "NOISE_BYTES", 0)
    table = SessionTable(9, 50, "cpu", lambda _: False, lambda _: None)
    a, b = table.admit(task("a")), table.admit(task("b"))
    first = a.noise
    assert table.admit(task("a")).noise is first
    assert table.admit(task("c")).noise is not None
    assert (a.noise is first, b.noise) == (True, None)
    assert table.admit(task("b")).noise is not None
    other = SessionSpec(SamplingParams(seed=2), SPEC.method, 1, ())
    assert table.admit(task("c", spec=other)).noise.seed == 2
    greedy = SessionSpec(SamplingParams(seed=2, temperature=0.0), SPEC.method, 1, ())
    assert table.admit(task("c", spec=greedy)).noise is None


def budget_of(num_tokens, token_s=0.0, limits=None):
    made = StepBudget(limits or Limits(1024, 256, max_step_s=0.05))
    made.num_tokens, made.token_s = num_tokens, token_s
    return made


@pytest.mark.parametrize("fixed_s", [0.002, 0.2])
@pytest.mark.parametrize("seed", range(5))
def test_budget_keeps_steps_near_the_limit_whatever_a_token_costs(seed, fixed_s):
    dice = random.Random(seed)
    limits = Limits(1024, 256, max_step_s=0.05)
    budget, token_s, longest = StepBudget(limits), 10 ** dice.uniform(-4, -3), []
    small_s = fixed_s + MIN_STEP_TOKENS * token_s
    limit_s = max(limits.max_step_s, 2 * small_s)
    for _ in range(100):
        num_tokens = min(budget.num_tokens, dice.choice([1, MIN_STEP_TOKENS, 300, 2000]))
        budget.observe(num_tokens, (fixed_s + num_tokens * token_s) * dice.uniform(0.8, 1.25))
        longest.append(fixed_s + budget.num_tokens * token_s)
    assert max(longest[50:]) < 1.6 * limit_s
    assert sum(longest[50:]) / 50 > 0.6 * min(limit_s, fixed_s + 1024 * token_s)


def test_steps_that_are_late_for_other_reasons_do_not_shrink_the_budget_for_good():
    """On a busy machine a step of few tokens takes as long as one of many."""
    dice, budget, seen = random.Random(3), budget_of(1024), []
    for _ in range(400):
        num_tokens = dice.choice([4, budget.num_tokens])
        budget.observe(num_tokens, dice.choice([0.02, 0.1, 0.3, 0.7]) + num_tokens * 1e-5)
        seen.append(budget.num_tokens)
    assert sorted(seen)[len(seen) // 2] > 8 * MIN_STEP_TOKENS


def served_steps(budget, num_large=100):
    """Return after how many steps a small block that comes last among large ones is served."""
    blocks = [block(f"large {i}", 50, num_nodes=8) for i in range(num_large)] + [block("small", 50)]
    for index, running in enumerate(blocks):
        running.task.arrived = 0.0001 * index
    cached = {running.task.session_id: 49 for running in blocks}
    limits = Limits(1024, 256)
    for step in range(1, 200):
        served = [feed.session_id for _, feed in plan(blocks, cached.__getitem__, limits, budget)]
        assert blocks[0].task.session_id in served  # the oldest never waits
        if "small" in served:
            return step
        blocks = [running for running in blocks if running.task.session_id not in served]
    raise AssertionError("never served")


def test_many_large_blocks_do_not_stall_a_small_one():
    assert served_steps(budget_of(126, 0.0004)) == 1
    assert served_steps(budget_of(126, 0.0)) == 8  # in order of arrival


def steps_until_served(name, blocks, token_s=0.001):
    """Return after how many steps of 32 tokens, which take as many ms, a block is served."""
    now_s, budget, step = 0.0, budget_of(MIN_STEP_TOKENS, token_s), 0
    while any(running.task.session_id == name for running in blocks):
        arrived = [running for running in blocks if running.task.arrived <= now_s]
        batch = plan(arrived, lambda _: 49, Limits(1024, 256), budget)
        blocks = [running for running in blocks if all(running is not other for other, _ in batch)]
        now_s, step = now_s + MIN_STEP_TOKENS * token_s, step + 1
    return step


@pytest.mark.parametrize("num_nodes", [0, 4])
def test_choices_of_one_request_do_not_stall_another_one(num_nodes):
    blocks = [block(f"choice {i}", 50, num_nodes, sample_index=i) for i in range(128)]
    for running in blocks:
        running.task.arrived = 0.0
    other = block("other", 50)
    other.task.arrived = 0.001  # in the first step
    num_steps = 128 * (1 + num_nodes) / MIN_STEP_TOKENS
    assert steps_until_served("other", [*blocks, other]) == 2
    assert steps_until_served("choice 127", [*blocks, other]) <= num_steps + 2
    for running in blocks:
        running.session.spec = SPEC  # requests of one choice each: in order of arrival
    other.session.spec = SPEC
    if num_nodes == 0:
        assert steps_until_served("other", [*blocks, other]) > 4


def test_small_blocks_do_not_stall_a_large_one_for_ever():
    large, cached = block("large", 50, num_nodes=99), {}
    blocks = [block("oldest", 50), large]
    budget, now_s, steps = budget_of(100, 0.0004), 0.0, 0
    for running in blocks:
        running.task.arrived = 0.0
    while large in blocks:
        blocks += [block(f"{steps}-{i}", 50) for i in range(60)]
        for running in blocks[-60:]:
            running.task.arrived, cached[running.task.session_id] = now_s, 49
        batch = plan(blocks, lambda name: cached.get(name, 49), Limits(1024, 256), budget)
        blocks = [running for running in blocks if all(running is not other for other, _ in batch)]
        now_s, steps = now_s + 0.04, steps + 1
        assert steps < 100


def test_oldest_prompt_leaves_half_of_the_budget_to_blocks_that_end():
    blocks = [block("prompt", 1000), *(block(f"b{i}", 20, 4) for i in range(30))]
    cached = {f"b{i}": 19 for i in range(30)}
    batch = plan(blocks, lambda name: cached.get(name, 0), Limits(1024, 256), budget_of(100))
    sizes = {feed.session_id: len(feed.token_ids) for _, feed in batch}
    assert (sizes.pop("prompt"), len(sizes), sum(sizes.values())) == (50, 10, 50)
    alone = plan(blocks[:1], lambda _: 0, Limits(1024, 256), budget_of(100))
    assert shape(alone) == [("prompt", 0, 100, 0)]


def test_proposal_beyond_the_budget_is_verified_when_it_is_the_oldest():
    ((_, feed),) = plan([block("a", 50, num_nodes=99)], lambda _: 49, Limits(1024, 256), budget_of(32))
    assert len(feed.token_ids) == feed.num_logits == 100
