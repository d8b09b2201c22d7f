"""The linear cost model: what it learns, and what tells it nothing."""

import random
from dataclasses import replace

import pytest

from gammaray.blocks import Shape, VerifyTiming
from orchestrator.control.costs import CostModel
from orchestrator.control.fixed import FixedGamma
from tests.support.control_simulation import UNIT_S, Lone, World, crowd, drive, make_cycle

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
    return mean.fixed + mean.draft + mean.forward * depth + mean.rows_s(depth)


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


def test_plain_cycles_bring_back_what_was_assumed_of_drafting():
    costs = CostModel(random.Random(1))
    drive(FixedGamma(4, costs), World(draft=5.0, alpha=0.05), 100, Lone(random.Random(1)))
    drive(FixedGamma(0, costs), World(), 50, Lone(random.Random(2)))
    dear, alpha = costs.mean.forward, costs.acceptance.alpha
    drive(FixedGamma(0, costs), World(), 2000, Lone(random.Random(2)))
    assert costs.mean.forward < 0.3 * dear
    assert costs.acceptance.alpha > 2 * alpha
