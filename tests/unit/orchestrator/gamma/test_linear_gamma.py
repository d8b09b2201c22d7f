"""The rivals of today's adaptive gamma in simulation, against the oracle that knows acceptance and costs."""

from __future__ import annotations

import random

import pytest

from benchmarks.ablation import CONTROLLERS, ablation
from benchmarks.simulation import UNIT_S, Lone, crowd, drive, make_cycle
from benchmarks.worlds import World, candidates
from orchestrator.cycle.types import Shape
from orchestrator.gamma.bandit import GAMMAS, Arms, BanditGamma
from orchestrator.gamma.cost_model import CostModel
from orchestrator.gamma.fixed import FixedGamma, Reason
from orchestrator.gamma.linear import LinearGamma
from orchestrator.gamma.linear_costs import LinearCosts

CHAINS, SHAPES = candidates(8, 0), candidates(8, 32)


def linear(seed: int, max_nodes: int = 0) -> LinearGamma:
    return LinearGamma(8, LinearCosts(random.Random(seed)), max_nodes)


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(World(), id="usual"),
        pytest.param(World(alpha=0.95), id="easy-text"),
        pytest.param(World(alpha=0.5), id="hard-text"),
        pytest.param(World(draft=0.4), id="slow-draft"),
        pytest.param(World(per_token=0.3), id="verify-pays-per-token"),
        pytest.param(World(alpha=0.3, draft=0.6), id="useless-and-expensive-draft"),
        pytest.param(World(alpha=0.6, draft=0.4, network=0.0), id="plain-and-drafting-nearly-equal"),
        pytest.param(World(network=1.0), id="slow-network"),
        pytest.param(World(ahead=0.7, draft=0.15), id="drafted-ahead"),
    ],
)
def test_linear_gamma_chains_reach_95_per_cent_of_the_oracle_after_200_cycles(world):
    shares = []
    for seed in range(3):
        controller, session = linear(seed), Lone(random.Random(seed), cold_drafts=5)
        drive(controller, world, 200, session)
        shares.append(drive(controller, world, 400, session, is_new=False).speed)
    assert sum(shares) / 3 >= 0.95 * world.speed(world.best(CHAINS)), shares


@pytest.mark.parametrize("alpha", [0.3, 0.5])
def test_linear_gamma_useless_and_expensive_draft_costs_less_than_two_per_cent(alpha):
    world, lost = World(alpha=alpha, draft=0.6), []
    for seed in range(3):
        controller, session = linear(seed), Lone(random.Random(seed))
        drive(controller, world, 300, session)
        run = drive(controller, world, 1500, session, is_new=False)
        lost.append(1.0 - run.speed / world.speed(Shape(0)))
    assert sum(lost) / 3 < 0.02, lost


def test_linear_gamma_tries_a_useless_draft_again():
    controller, session = linear(1), Lone(random.Random(1))
    drive(controller, World(alpha=0.05, draft=0.5), 300, session)
    drive(controller, World(alpha=0.9), 1500, session, is_new=False)
    run = drive(controller, World(alpha=0.9), 100, session, is_new=False)
    assert run.speed >= 0.9 * World(alpha=0.9).speed(World(alpha=0.9).best(CHAINS))


def test_linear_costs_tell_drafting_from_the_rest():
    world, rng = World(spikes=0.0), random.Random(2)
    costs, session = LinearCosts(random.Random(0)), Lone(rng)
    before = 0
    for index in range(900):
        shape = Shape((0, 0, 0, 2, 4, 8)[index // 3 % 6])
        cycle, _ = session.cycle(world, shape, is_first=index == 0)
        costs.learn(cycle, was_plain=before == 0)
        before = shape.depth
    assert costs.plain_cycle_s == pytest.approx(world.cycle_s(Shape(0)) * UNIT_S, rel=0.1)
    for depth in (2, 8):
        x = (1.0, 1.0, float(depth), float(depth), 0.0, 0.0)
        expected = sum(a * b for a, b in zip(x, costs.mean, strict=True))
        assert expected == pytest.approx(world.cycle_s(Shape(depth)) * UNIT_S, rel=0.1)


def test_linear_costs_of_plain_cycles_are_unknown_before_anything_was_measured():
    assert LinearCosts().plain_cycle_s is None
    assert LinearCosts().tokens_per_s == 0


def test_linear_costs_dead_drafter_is_no_cost_information():
    controller, session = linear(4), Lone(random.Random(4))
    drive(controller, World(), 200, session)
    costs = controller._costs
    before = list(costs.mean)
    for _ in range(100):
        shape = controller.next_shape()
        controller.observe(make_cycle(shape, (), 0, draft=50.0, verify=1.1, other=0.1, draft_failed=True))
    assert costs.mean == before


@pytest.mark.parametrize("num_sessions", [2, 8, 32])
@pytest.mark.parametrize("strain", [0.0, 0.3])
def test_linear_gamma_crowd_reaches_the_best_common_gamma(num_sessions, strain):
    world, rng = World(alpha=0.75, per_token=0.04, draft=0.03, spikes=0.0, strain=strain), random.Random(1)
    worlds, costs = [world] * num_sessions, LinearCosts(random.Random(1))
    controllers = [LinearGamma(8, costs) for _ in worlds]
    before = crowd(controllers, worlds, 100, rng)
    runs = crowd(controllers, worlds, 200, rng, begins_at=before[0].units)
    got = sum(run.tokens for run in runs) / runs[0].units
    common = []
    for gamma in range(9):
        fixed = crowd([FixedGamma(gamma, CostModel())] * num_sessions, worlds, 1, rng)
        common.append(sum(run.tokens for run in fixed) / fixed[0].units)
    assert got >= 0.94 * max(common), (got, common)


def test_linear_gamma_respects_its_bounds_and_says_why():
    for depth, nodes in ((0, 0), (1, 4), (3, 0), (3, 12)):
        controller = LinearGamma(depth, LinearCosts(random.Random(1)), nodes)
        shapes = drive(controller, World(per_token=0.0), 150, Lone(random.Random(2))).shapes
        assert max(shape.depth for shape in shapes) == depth
        assert all(shape.max_nodes <= nodes for shape in shapes)
        reasons = {shape.reason for shape in shapes}
        expected = (Reason.FIRST, Reason.BEST) if depth else (Reason.OFF,)
        assert reasons == {reason.value for reason in expected}


@pytest.mark.parametrize(
    "world", [World(alpha=0.6, per_token=0.005), World(alpha=0.8, rescue=(0.05, 0.05))], ids=["wide", "chain"]
)
def test_linear_gamma_trees_reach_93_per_cent_of_the_oracle(world):
    controller, session = linear(1, 32), Lone(random.Random(1), cold_drafts=5)
    drive(controller, world, 200, session)
    run = drive(controller, world, 400, session, is_new=False)
    assert run.speed >= 0.93 * world.speed(world.best(SHAPES))


def test_bandit_plays_the_best_of_its_gammas_most():
    world = World(alpha=0.9, spikes=0.0)
    controller, session = BanditGamma(8, Arms(random.Random(1))), Lone(random.Random(1))
    drive(controller, world, 600, session)
    run = drive(controller, world, 600, session, is_new=False)
    assert {shape.depth for shape in run.shapes} <= set(GAMMAS)
    assert run.speed >= 0.85 * world.speed(world.best(CHAINS))


def test_ablation_takes_parts_out_and_puts_them_back():
    rows = ablation(["text"], ["gamma 4", "adaptive, no probes", "linear"], 1, lambda: None)
    assert [row["controller"] for row in rows] == ["gamma 4", "adaptive, no probes", "linear"]
    assert rows[2]["then_mean"] > rows[0]["then_mean"]
    for controller in CONTROLLERS.values():
        before = [getattr(module, name) for module, name, _ in controller.patches]
        with controller.patched():
            for module, name, value in controller.patches:
                assert getattr(module, name) == value
        assert [getattr(module, name) for module, name, _ in controller.patches] == before
