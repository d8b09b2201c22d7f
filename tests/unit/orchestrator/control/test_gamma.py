"""Adaptive gamma in simulation, against an oracle of acceptance and costs; what the cost model learns."""

import itertools
import random
from dataclasses import replace

import pytest

from gammaray.blocks import Shape, VerifyTiming
from orchestrator.control.adaptive import AdaptiveGamma
from orchestrator.control.costs import CostModel
from orchestrator.control.fixed import FixedGamma, Reason
from orchestrator.control.row_costs import RowCosts
from tests.support.control_simulation import (
    MODEL_ONLY,
    UNIT_S,
    Lone,
    World,
    candidates,
    crowd,
    drive,
    make_cycle,
)

CHAINS, SHAPES = candidates(8, 0), candidates(8, 32)


def adaptive(seed: int, max_nodes: int = 0, world: World | None = None) -> AdaptiveGamma:
    costs = CostModel(random.Random(seed))
    if world is not None:
        costs.rows = RowCosts(world.forward_s)
    return AdaptiveGamma(8, costs, max_nodes)


FURTHER = {"draft": 0.01, "network": 0.0, "per_token": 0.03, "further": 0.12}
CHAIN_WORLDS = {
    "usual": World(),
    "easy text": World(alpha=0.95),
    "hard text": World(alpha=0.5),
    "falling acceptance": World(alpha=0.9, falling=0.9),
    "verification pays per token": World(per_token=0.3),
    "terribly slow draft": World(draft=5.0),
    "slow network": World(network=1.0),
    "drafted ahead": World(ahead=0.7, draft=0.15),
    "parallel draft": World(draft=0.3, falling=0.95, is_parallel=True),
    "slow parallel draft": World(alpha=0.85, draft=0.8, is_parallel=True),
}
TREE_WORLDS = {
    "wide trees are cheap": World(alpha=0.6, per_token=0.005),
    "small trees": World(alpha=0.6, per_token=0.02, draft=0.15),
    "chains are better": World(alpha=0.9, per_token=0.05),
    "siblings are worthless": World(alpha=0.8, rescue=(0.05, 0.05), per_token=0.02),
    "the second is nearly always it": World(alpha=0.6, rescue=(0.9,), per_token=0.02),
}
SETTLED = [
    *(pytest.param(world, 0, 3, 0.95, id=name) for name, world in CHAIN_WORLDS.items()),
    *(pytest.param(world, 32, 2, 0.91, id=name) for name, world in TREE_WORLDS.items()),
    pytest.param(World(alpha=0.6, **FURTHER), 0, 6, 0.975, id="further rows cost more"),
    pytest.param(World(alpha=0.8, **FURTHER), 0, 6, 0.975, id="further rows of easy text cost more"),
]


@pytest.mark.parametrize(("world", "max_nodes", "num_seeds", "least"), SETTLED)
def test_adaptive_gamma_reaches_a_share_of_the_oracles_speed(world, max_nodes, num_seeds, least):
    """In the 400 cycles that follow 200 of a fresh replica, whose drafter starts cold."""
    best, shares = world.speed(world.best(SHAPES if max_nodes else CHAINS)), []
    for seed in range(num_seeds):
        controller, session = adaptive(seed, max_nodes, world), Lone(random.Random(seed), cold_drafts=5)
        drive(controller, world, 200, session)
        shares.append(drive(controller, world, 400, session, is_new=False).speed / best)
    assert sum(shares) / len(shares) >= least, shares


def test_adaptive_gamma_from_cold_loses_little():
    world = World()
    run = drive(adaptive(3), world, 200, Lone(random.Random(3), cold_drafts=5))
    assert run.speed >= 0.88 * world.speed(world.best(CHAINS))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("before", "after", "within"),
    [
        pytest.param(World(alpha=0.3), World(alpha=0.9), 60, id="alpha-rises"),
        pytest.param(World(alpha=0.9), World(alpha=0.3), 60, id="alpha-falls"),
        pytest.param(World(slow_draft=10.0), World(), 150, id="drafter-was-slow"),
        pytest.param(World(), World(slow_draft=20.0), 30, id="drafter-becomes-slow"),
        pytest.param(World(slow=6.0, noise=0.8, spikes=0.1), World(), 40, id="machine-was-noisy"),
        pytest.param(World(network=1.0), World(network=0.0), 100, id="network-was-slow"),
    ],
)
def test_adaptive_gamma_recovers_from_drift_within(before, after, within, seed):
    controller, session = adaptive(seed), Lone(random.Random(seed), cold_drafts=5)
    drive(controller, before, 200, session)
    drive(controller, after, within, session, is_new=False)
    run = drive(controller, after, 100, session, is_new=False)
    assert run.speed >= 0.85 * after.speed(after.best(CHAINS)), [shape.depth for shape in run.shapes]


def test_adaptive_gamma_new_sessions_on_a_replica_that_started_badly_do_not_stay_plain():
    """Short sessions, each too short to find out by itself; within some 300 cycles of the replica."""
    world, costs, rng = World(), CostModel(random.Random(2)), random.Random(2)
    awful = World(slow_draft=10.0, noise=0.8, spikes=0.1)
    for _ in range(4):
        drive(AdaptiveGamma(8, costs), awful, 25, Lone(rng, cold_drafts=10))
    for _ in range(12):
        drive(AdaptiveGamma(8, costs), world, 25, Lone(rng))
    run = drive(AdaptiveGamma(8, costs), world, 25, Lone(rng))
    assert run.speed >= 0.85 * world.speed(world.best(CHAINS))


def test_adaptive_gamma_prompts_that_a_head_reads_do_not_stop_later_sessions():
    world = World(alpha=0.35, draft=0.03, network=0.0, per_token=0.02, catch_up=0.1, spikes=0.0)
    reading, costs, shapes = replace(world, catch_up=3.0), CostModel(random.Random(3)), []
    for number in range(20):
        controller, session, own = AdaptiveGamma(8, costs), Lone(random.Random(number)), []
        controller.observe(session.cycle(world, Shape(0), is_first=True)[0])  # there is nothing to read yet
        for _ in range(40):
            now = world if any(shape.depth for shape in own) else reading
            own += drive(controller, now, 1, session, is_new=False).shapes
        shapes += own
    assert costs.catch_up_s < 0.5 * costs.plain_cycle_s
    assert sum(shape.depth == 0 for shape in shapes[200:]) < 0.1 * len(shapes[200:])


def test_adaptive_gamma_respects_its_bounds():
    for depth, nodes in itertools.product((0, 1, 3), (0, 1, 4, 12)):
        controller = AdaptiveGamma(depth, CostModel(random.Random(1)), nodes)
        run = drive(controller, World(alpha=0.7, per_token=0.0), 150, Lone(random.Random(2)))
        assert max(shape.depth for shape in run.shapes) == depth
        assert all(shape.max_nodes <= nodes for shape in run.shapes)
        has_trees = any(shape.is_tree for shape in run.shapes)
        assert has_trees == (0 < depth < nodes)


def total(runs):
    return sum(run.tokens for run in runs) / runs[0].units


def test_adaptive_gamma_crowd_gives_tokens_to_those_whose_are_accepted():
    easy, hard = World(alpha=0.95, per_token=0.03, draft=0.03), World(alpha=0.25, per_token=0.03, draft=0.03)
    worlds, costs, rng = [easy, hard] * 6, CostModel(random.Random(3)), random.Random(3)
    controllers = [AdaptiveGamma(8, costs) for _ in worlds]
    before = crowd(controllers, worlds, 150, rng)
    runs = crowd(controllers, worlds, 200, rng, begins_at=before[0].units)
    depth = [sum(shape.depth for shape in run.shapes) / 200 for run in runs]
    assert min(depth[::2]) > 2 + max(depth[1::2])
    common = max(total(crowd([FixedGamma(g, CostModel()) for _ in worlds], worlds, 1, rng)) for g in range(9))
    assert total(runs) >= 1.02 * common


@pytest.mark.parametrize("num_sessions", [2, 8, 32])
@pytest.mark.parametrize("strain", [0.0, 0.6])
def test_adaptive_gamma_crowd_reaches_the_best_common_gamma(num_sessions, strain):
    """Each token costs everybody 4 %, and all steps are slower while sessions draft on shared cores."""
    world, rng = World(alpha=0.75, per_token=0.04, draft=0.03, spikes=0.0, strain=strain), random.Random(1)
    worlds, costs = [world] * num_sessions, CostModel(random.Random(1))
    controllers = [AdaptiveGamma(8, costs) for _ in worlds]
    before = crowd(controllers, worlds, 200, rng)
    got = total(crowd(controllers, worlds, 300, rng, begins_at=before[0].units))
    by_gamma = [total(crowd([FixedGamma(g, CostModel())] * num_sessions, worlds, 1, rng)) for g in range(9)]
    assert got >= 0.94 * max(by_gamma), (got, by_gamma)
    assert got >= 0.97 * by_gamma[0]


def test_adaptive_gamma_crowd_on_a_compute_bound_target_soon_stops_drafting():
    """A row costs a session alone less than it gains, and eight sessions together more."""
    world, shares = World(alpha=0.75, per_token=0.6, draft=0.03, spikes=0.0), []
    worlds = [world] * 8
    plain = total(crowd([FixedGamma(0, CostModel())] * 8, worlds, 1, random.Random(0)))
    for seed in range(4):
        costs, rng = CostModel(random.Random(seed)), random.Random(seed)
        controllers = [AdaptiveGamma(8, costs) for _ in worlds]
        alone = crowd(controllers[:1], worlds[:1], 400, rng)
        runs = crowd(controllers, worlds, 150, rng, begins_at=alone[0].units)
        shares.append(total(runs) / plain)
    assert sum(shares) / 4 > 0.9, shares


@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.5])
@pytest.mark.parametrize("max_nodes", [0, 32])
def test_adaptive_gamma_useless_and_expensive_draft_costs_less_than_two_per_cent(alpha, max_nodes):
    world, lost = World(alpha=alpha, draft=0.6, rescue=(0.05,)), []
    for seed in range(3):
        controller, session = adaptive(seed, max_nodes), Lone(random.Random(seed))
        drive(controller, world, 300, session)
        run = drive(controller, world, 1500, session, is_new=False)
        lost.append(1.0 - run.speed / world.speed(Shape(0)))
    assert sum(lost) / 3 < 0.02, lost


@pytest.mark.parametrize("max_nodes", [0, 32])
def test_adaptive_gamma_trials_after_plain_cycles_begin_small_and_double(max_nodes):
    controller = adaptive(1, max_nodes)
    session = Lone(random.Random(1))
    shapes = drive(controller, World(alpha=0.3, draft=0.4), 600, session).shapes
    good = World(alpha=0.9, per_token=0.005)
    shapes += drive(controller, good, 600, session, is_new=False).shapes
    largest, num_trials = 32, 0
    for before, shape in itertools.pairwise(shapes):
        rows = max(shape.depth, shape.max_nodes)
        largest = 1 if before.depth == 0 else max(largest, before.depth, before.max_nodes)
        assert rows <= 2 * largest
        num_trials += before.depth == 0 < shape.depth
    assert num_trials >= 2
    assert max(shape.depth for shape in shapes[-100:]) == 8


def test_adaptive_gamma_says_why():
    assert AdaptiveGamma(0, CostModel()).next_shape(MODEL_ONLY).reason == Reason.OFF.value
    run = drive(adaptive(1, 32), World(), 400, Lone(random.Random(1)))
    assert {shape.reason for shape in run.shapes} == {Reason.FIRST.value, Reason.BEST.value}
    assert FixedGamma(3, CostModel()).next_shape(MODEL_ONLY).reason == Reason.FIXED.value
    assert FixedGamma(0, CostModel()).next_shape(MODEL_ONLY).reason == Reason.OFF.value


def test_fixed_gamma_never_moves_and_still_measures():
    costs = CostModel(random.Random(4))
    run = drive(FixedGamma(3, costs), World(alpha=0.01), 100, Lone(random.Random(4)))
    assert set(run.shapes) == {Shape(3)}
    assert costs.tokens_per_s * UNIT_S == pytest.approx(World(alpha=0.01).speed(Shape(3)), rel=0.2)


GAMMAS = (0, 0, 0, 2, 4, 8)


def played(world: World, num_cycles: int, seed: int = 1) -> CostModel:
    """Return what is learned from gammas in turn, three cycles each."""
    costs, session, was_plain = CostModel(random.Random(seed)), Lone(random.Random(seed)), True
    for index in range(num_cycles):
        shape = Shape(GAMMAS[index // 3 % len(GAMMAS)])
        cycle, _ = session.cycle(world, shape, is_first=index == 0)
        costs.observe(cycle, was_plain=was_plain)
        was_plain = shape.depth == 0
    return costs


def seconds(costs: CostModel, depth: int) -> float:
    mean = costs.mean
    return mean.fixed + mean.draft + mean.forward * depth + mean.row * costs.added_rows[depth]


@pytest.mark.parametrize("world", [World(spikes=0.0), World(draft=0.4, per_token=0.1), World(network=1.0)])
def test_costs_tell_drafting_from_the_rest(world):
    costs = played(world, 900)
    # Hiccups, ten times as long in one of a hundred waits, are no part of the simulation's means.
    assert costs.plain_cycle_s == pytest.approx(world.cycle_s(Shape(0)) * UNIT_S, rel=0.15)
    for depth in (1, 4, 8):
        assert seconds(costs, depth) == pytest.approx(world.cycle_s(Shape(depth)) * UNIT_S, rel=0.15)


def test_costs_learn_what_catching_up_takes():
    costs = played(World(catch_up=2.0, spikes=0.0), 900)
    assert 0.5 * 2.0 * UNIT_S < costs.catch_up_s < 1.5 * 2.0 * UNIT_S
    assert played(World(catch_up=0.0, spikes=0.0), 900).catch_up_s < 0.2 * UNIT_S


def test_costs_learn_nothing_from_prefills_and_dead_drafters():
    costs = played(World(), 300)
    before = costs.mean
    slow = make_cycle(Shape(4), (), 0, draft=50.0, verify=1.1, other=0.1)
    for _ in range(50):
        costs.observe(replace(slow, draft_failed=True), was_plain=False)
        costs.observe(replace(slow, is_first=True), was_plain=False)
        costs.observe(slow, was_plain=True, is_entry=True)
    assert costs.mean == before


@pytest.mark.parametrize(
    ("levels", "counted"),
    [
        pytest.param([(1, 0)] * 3, (3, 3), id="chain-accepted"),
        pytest.param([(1, 0), (1, -1)], (2, 1), id="chain-rejected"),
        pytest.param([(2, 0), (3, 1), (2, 0)], (2, 1), id="tree-left-its-first-children"),
        pytest.param([], (0, 0), id="plain"),
    ],
)
def test_first_children_are_counted_up_to_the_first_failure(levels, counted):
    cycle = make_cycle(Shape(8), levels, 3, draft=0.1, verify=1.1, other=0.1)
    assert cycle.first_children == counted


def test_costs_keep_the_prompts_of_others_out_of_speed_and_rows():
    world = World(alpha=0.75, per_token=0.04, spikes=0.0)
    plain, busy = CostModel(random.Random(1)), CostModel(random.Random(1))
    for costs in (plain, busy):
        crowd([FixedGamma(3, costs) for _ in range(8)], [world] * 8, 100, random.Random(1))
    rng = random.Random(2)
    for index in range(2400):
        session, prompts = index % 8, 256 if index // 8 % 3 == 0 else 0
        for costs, others in ((plain, 0), (busy, prompts)):
            step = world.step_s(32 + others)
            timing = VerifyTiming(0.0, step * UNIT_S, 8, 32 + others, 32)
            levels = world.walk(Shape(3), random.Random(rng.random() if session else index))
            cycle = make_cycle(Shape(3), levels, 3, draft=0.1, verify=step, other=0.1, timing=timing)
            costs.observe(cycle, was_plain=False)
    assert busy.others_rows == pytest.approx(plain.others_rows, rel=0.05)
    assert busy.tokens_per_s == pytest.approx(plain.tokens_per_s, rel=0.25)
    assert busy.mean.others_prompt == pytest.approx(0.04 * UNIT_S, rel=0.25)


def test_costs_of_tokens_that_were_decoded_ahead_are_those_of_one_step():
    asked, ahead = CostModel(random.Random(1)), CostModel(random.Random(1))
    timing = VerifyTiming(0.0, UNIT_S, 4, 4, 4)
    cycle = make_cycle(Shape(0), [], 0, draft=0.0, verify=1.0, other=0.0, timing=timing)
    timing = VerifyTiming(0.0, 5 * UNIT_S, 4, 20, 20)
    several = replace(cycle, token_ids=(0,) * 5, total_s=0.1, ahead_s=UNIT_S, timing=timing)
    unknown = replace(several, ahead_s=0.0)
    for _ in range(40):
        asked.observe(cycle, was_plain=True)
        ahead.observe(several, was_plain=True)
        ahead.observe(unknown, was_plain=True)
    assert ahead.mean == pytest.approx(asked.mean, rel=0.01)
    assert ahead.others_rows == asked.others_rows == 0.0


def test_plain_cycles_bring_back_what_was_assumed_of_drafting():
    costs = CostModel(random.Random(1))
    drive(FixedGamma(4, costs), World(draft=5.0, alpha=0.05), 100, Lone(random.Random(1)))
    drive(FixedGamma(0, costs), World(), 50, Lone(random.Random(2)))
    dear, alpha = costs.mean.forward, costs.acceptance.alpha
    drive(FixedGamma(0, costs), World(), 2000, Lone(random.Random(2)))
    assert costs.mean.forward < 0.3 * dear
    assert costs.acceptance.alpha > 2 * alpha


def play_with_draft_ahead(controller, num_cycles: int, ahead: float) -> tuple[float, list[Shape]]:
    """Return tokens per unit with a dear draft, which prepares more often after a short proposal."""
    world, rng = World(alpha=0.7, draft=0.25, network=0.0, noise=0.0), random.Random(1)
    before, tokens, units, shapes = 0, 0, 0.0, []
    for _ in range(num_cycles):
        shape = controller.next_shape(MODEL_ONLY)
        is_ready = before > 0 and rng.random() < ahead / (ahead + before)
        before = shape.depth if is_ready else min(shape.depth, shape.drafted_depth or shape.depth)
        waits = {"draft": 0.0 if is_ready else world.draft * before, "verify": world.step_s(1 + before)}
        levels = world.walk(Shape(before), rng)
        cycle = make_cycle(shape, levels, before, **waits, other=world.other)
        controller.observe(replace(cycle, is_prepared=is_ready))
        tokens, units = tokens + len(cycle.token_ids), units + cycle.total_s / UNIT_S
        shapes.append(shape)
    return tokens / units, shapes


def test_adaptive_gamma_drafts_few_tokens_while_the_session_waits():
    fixed = max(play_with_draft_ahead(FixedGamma(g, CostModel()), 1500, 4.0)[0] for g in range(9))
    speed, shapes = play_with_draft_ahead(adaptive(1), 1500, 4.0)
    assert speed > 1.1 * fixed, (speed, fixed)
    assert sum(0 < shape.drafted_depth < shape.depth for shape in shapes[100:]) > 1200
    for controller, ahead in (
        (adaptive(1), 0.0),
        (AdaptiveGamma(8, CostModel(random.Random(1)), few=0), 4.0),
    ):
        _, shapes = play_with_draft_ahead(controller, 300, ahead)
        assert not any(shape.drafted_depth for shape in shapes)
