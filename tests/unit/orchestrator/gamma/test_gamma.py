"""Adaptive gamma in simulation, against the oracle that knows acceptance and costs."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from benchmarks.simulation import UNIT_S, Lone, crowd, drive, make_cycle
from benchmarks.worlds import World, candidates
from orchestrator.cycle.types import Shape
from orchestrator.gamma.adaptive import REFRESH_PLAIN, AdaptiveGamma, FixedGamma, Reason
from orchestrator.gamma.cost_model import CostModel
from orchestrator.gamma.shapes import Family, family

CHAINS, SHAPES = candidates(8, 0), candidates(8, 32)


def settled(world: World, seed: int, max_nodes: int = 0, num_cycles: int = 400):
    """Return the run that follows 200 cycles of a fresh replica, whose drafter starts cold."""
    session = Lone(random.Random(seed), cold_drafts=5)
    controller = AdaptiveGamma(8, CostModel(), max_nodes)
    drive(controller, world, 200, session)
    return drive(controller, world, num_cycles, session, is_new=False)


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(World(), id="usual"),
        pytest.param(World(alpha=0.95), id="easy-text"),
        pytest.param(World(alpha=0.5), id="hard-text"),
        pytest.param(World(alpha=0.9, falling=0.9), id="falling-acceptance"),
        pytest.param(World(draft=0.4), id="slow-draft"),
        pytest.param(World(per_token=0.3), id="verify-pays-per-token"),
        pytest.param(World(alpha=0.1, draft=0.3), id="useless-draft"),
        pytest.param(World(draft=5.0), id="terribly-slow-draft"),
        pytest.param(World(network=1.0), id="slow-network"),
        pytest.param(World(ahead=0.7, draft=0.15), id="drafted-ahead"),
    ],
)
def test_adaptive_gamma_chains_reach_95_per_cent_of_the_oracle_after_200_cycles(world):
    best = world.speed(world.best(CHAINS))
    shares = [settled(world, seed).speed / best for seed in range(3)]
    assert sum(shares) / len(shares) >= 0.95, shares


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(World(alpha=0.6, per_token=0.005), id="wide-trees-are-cheap"),
        pytest.param(World(alpha=0.6, per_token=0.02, draft=0.15), id="small-trees"),
        pytest.param(World(alpha=0.9, per_token=0.05), id="chains-are-better"),
        pytest.param(World(alpha=0.8, rescue=(0.05, 0.05), per_token=0.02), id="siblings-are-worthless"),
        pytest.param(World(alpha=0.6, rescue=(0.9,), per_token=0.02), id="the-second-is-nearly-always-it"),
        pytest.param(World(draft=5.0), id="terribly-slow-draft"),
    ],
)
def test_adaptive_gamma_trees_reach_91_per_cent_of_the_oracle_after_200_cycles(world):
    best = world.speed(world.best(SHAPES))
    shares = [settled(world, seed, max_nodes=32).speed / best for seed in range(2)]
    assert sum(shares) / len(shares) >= 0.91, shares


def test_adaptive_gamma_from_cold_loses_little():
    world = World()
    run = drive(AdaptiveGamma(8, CostModel()), world, 200, Lone(random.Random(3), cold_drafts=5))
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
    controller, session = AdaptiveGamma(8, CostModel()), Lone(random.Random(seed), cold_drafts=5)
    drive(controller, before, 200, session)
    drive(controller, after, within, session, is_new=False)
    run = drive(controller, after, 100, session, is_new=False)
    assert run.speed >= 0.85 * after.speed(after.best(CHAINS)), [shape.depth for shape in run.shapes]


def test_adaptive_gamma_new_sessions_on_a_replica_that_started_badly_do_not_stay_plain():
    """Short sessions, each too short to find out by itself; within some 300 cycles of the replica."""
    world, costs, rng = World(), CostModel(), random.Random(2)
    awful = World(slow_draft=10.0, noise=0.8, spikes=0.1)
    for _ in range(4):
        drive(AdaptiveGamma(8, costs), awful, 25, Lone(rng, cold_drafts=10))
    for _ in range(12):
        drive(AdaptiveGamma(8, costs), world, 25, Lone(rng))
    run = drive(AdaptiveGamma(8, costs), world, 25, Lone(rng))
    assert run.speed >= 0.85 * world.speed(world.best(CHAINS))


def test_adaptive_gamma_useless_drafter_costs_at_most_the_bound_of_probing():
    world = World(alpha=0.05, rescue=(0.05,), draft=1.0)
    controller = AdaptiveGamma(8, CostModel(), 32)
    session = Lone(random.Random(5))
    drive(controller, world, 300, session)
    run = drive(controller, world, 3000, session, is_new=False)
    assert run.speed >= 0.97 * world.speed(Shape(0))


def test_adaptive_gamma_measures_plain_decoding_and_probes_more_than_depth_one():
    session, controller = Lone(random.Random(1)), AdaptiveGamma(8, CostModel())
    drive(controller, World(alpha=0.95), 300, session)
    run = drive(controller, World(alpha=0.95), 600, session, is_new=False)
    assert 3 <= sum(shape.depth == 0 for shape in run.shapes) <= 12
    session, controller = Lone(random.Random(1)), AdaptiveGamma(8, CostModel())
    useless = drive(controller, World(alpha=0.1, draft=0.5), 800, session)
    depths = {shape.depth for shape in useless.shapes if shape.reason == Reason.PROBE_CHAIN.value}
    assert len(depths) >= 3


def test_adaptive_gamma_respects_its_bounds():
    for depth, nodes in itertools.product((0, 1, 3), (0, 1, 4, 12)):
        controller = AdaptiveGamma(depth, CostModel(), nodes)
        run = drive(controller, World(alpha=0.7, per_token=0.0), 150, Lone(random.Random(2)))
        assert max(shape.depth for shape in run.shapes) == depth
        assert all(shape.max_nodes <= nodes for shape in run.shapes)
        has_trees = any(family(shape) is Family.TREE for shape in run.shapes)
        assert has_trees == (0 < depth < nodes)


def test_adaptive_gamma_says_why():
    off = AdaptiveGamma(0, CostModel())
    assert off.next_shape().reason == Reason.OFF.value
    controller, session = AdaptiveGamma(8, CostModel(), 32), Lone(random.Random(1))
    reasons = {shape.reason for shape in drive(controller, World(), 400, session).shapes}
    assert reasons >= {
        reason.value
        for reason in (Reason.FIRST, Reason.BEST, Reason.PROBE_PLAIN, Reason.PROBE_CHAIN, Reason.EXPLORE)
    }
    assert FixedGamma(3, CostModel()).next_shape().reason == Reason.FIXED.value
    assert FixedGamma(0, CostModel()).next_shape().reason == Reason.OFF.value


def test_adaptive_gamma_hysteresis_holds_on_to_nearly_best():
    controller, session = AdaptiveGamma(8, CostModel()), Lone(random.Random(7))
    drive(controller, World(), 300, session)
    run = drive(controller, World(), 300, session, is_new=False)
    kept = [shape for shape in run.shapes if shape.reason in (Reason.BEST.value, Reason.HELD.value)]
    switches = sum(one != other for one, other in itertools.pairwise(kept))
    assert switches <= 30


def test_adaptive_gamma_new_session_starts_from_the_fleet():
    costs, rng = CostModel(), random.Random(4)
    drive(AdaptiveGamma(8, costs), World(alpha=0.95), 300, Lone(rng))
    assert AdaptiveGamma(8, costs).next_shape().depth >= 5


def test_adaptive_gamma_dead_drafter_is_no_cost_information():
    costs, rng, world = CostModel(), random.Random(4), World()
    controller = AdaptiveGamma(8, costs)
    drive(controller, world, 200, Lone(rng))
    before = costs.cycle_s(Shape(4), 4)
    for _ in range(100):
        shape = controller.next_shape()
        controller.observe(make_cycle(shape, (), 0, draft=50.0, verify=1.1, other=0.1, draft_failed=True))
    assert costs.cycle_s(Shape(4), 4) == pytest.approx(before, rel=0.3)


def test_fixed_gamma_never_moves_and_still_measures():
    costs = CostModel()
    run = drive(FixedGamma(3, costs), World(alpha=0.01), 100, Lone(random.Random(4)))
    assert set(run.shapes) == {Shape(3)}
    assert costs.cycle_s(Shape(3), 3) == pytest.approx(World().cycle_s(Shape(3)) * UNIT_S, rel=0.2)


def total(runs):
    return sum(run.tokens for run in runs) / runs[0].units


@pytest.mark.parametrize("num_sessions", [2, 8, 32])
def test_adaptive_gamma_crowd_reaches_the_best_common_gamma(num_sessions):
    """Each token costs everybody 4 %: the more sessions, the less is worth proposing, down to nothing."""
    world, rng = World(alpha=0.75, per_token=0.04, draft=0.03, spikes=0.0), random.Random(1)
    worlds, costs = [world] * num_sessions, CostModel()
    controllers = [AdaptiveGamma(8, costs) for _ in worlds]
    before = crowd(controllers, worlds, 100, rng)
    got = total(crowd(controllers, worlds, 200, rng, begins_at=before[0].units))
    by_gamma = [total(crowd([FixedGamma(g, CostModel())] * num_sessions, worlds, 1, rng)) for g in range(9)]
    assert got >= 0.94 * max(by_gamma), (got, by_gamma)
    assert got >= 0.97 * by_gamma[0]


def test_adaptive_gamma_crowd_gives_tokens_to_those_whose_are_accepted():
    easy, hard = World(alpha=0.95, per_token=0.03, draft=0.03), World(alpha=0.25, per_token=0.03, draft=0.03)
    worlds, costs, rng = [easy, hard] * 6, CostModel(), random.Random(3)
    controllers = [AdaptiveGamma(8, costs) for _ in worlds]
    before = crowd(controllers, worlds, 150, rng)
    runs = crowd(controllers, worlds, 200, rng, begins_at=before[0].units)
    depth = [sum(shape.depth for shape in run.shapes) / 200 for run in runs]
    assert min(depth[::2]) > 2 + max(depth[1::2])
    common = max(total(crowd([FixedGamma(g, CostModel()) for _ in worlds], worlds, 1, rng)) for g in range(9))
    assert total(runs) >= 1.02 * common


def test_adaptive_gamma_lone_session_pays_no_burden():
    costs = CostModel()
    drive(AdaptiveGamma(8, costs), World(), 200, Lone(random.Random(1)))
    assert costs.burden_s(8) == pytest.approx(0.0, abs=1e-9)
    assert replace(Shape(1), reason="x") == Shape(1), "the reason is no part of a shape"


@pytest.mark.parametrize(
    ("current", "other", "gain", "leaves"),
    [(0, 3, 1.08, False), (0, 3, 1.12, True), (3, 5, 1.02, False), (3, 5, 1.05, True), (3, 0, 1.01, True)],
)
def test_adaptive_gamma_leaves_plain_decoding_for_a_clear_gain_and_comes_back_for_any(
    monkeypatch, current, other, gain, leaves
):
    controller = AdaptiveGamma(8, CostModel(), ends_early=False)
    speeds = {Shape(0): 1.0, Shape(current): 100.0, Shape(other): 90.0}
    monkeypatch.setattr(controller, "evaluate", lambda: speeds)
    controller.next_shape()
    speeds[Shape(other)] = 100.0 * gain
    controller.num_cycles = REFRESH_PLAIN
    chosen = controller.next_shape()
    assert chosen.depth == (other if leaves else current)
    held = Reason.BEST if leaves else Reason.HELD
    assert chosen.reason == held.value


@pytest.mark.parametrize(("share", "chosen"), [(0.9, 3), (0.97, 8)])
@pytest.mark.parametrize("ends_early", [True, False])
def test_adaptive_gamma_asks_for_the_longest_chain_that_is_nearly_best_when_the_draft_ends_chains(
    monkeypatch, share, chosen, ends_early
):
    controller = AdaptiveGamma(8, CostModel(), 12, ends_early=ends_early)
    speeds = {Shape(0): 50.0, Shape(3): 100.0, Shape(8): 100.0 * share, Shape(8, 12): 99.0}
    monkeypatch.setattr(controller, "evaluate", lambda: speeds)
    assert controller.next_shape().depth == (chosen if ends_early else 3)


@pytest.mark.parametrize(("gain", "chosen"), [(1.03, 0), (1.07, 4)])
def test_adaptive_gamma_drafts_only_for_a_gain_that_its_errors_leave(monkeypatch, gain, chosen):
    controller = AdaptiveGamma(8, CostModel())
    monkeypatch.setattr(controller, "evaluate", lambda: {Shape(0): 100.0, Shape(4): 100.0 * gain})
    assert controller.next_shape().depth == chosen
