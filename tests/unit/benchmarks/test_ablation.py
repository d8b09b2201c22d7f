"""The ablation of adaptive gamma, and the bandit that it is compared with."""

from __future__ import annotations

import random

import pytest

from benchmarks.ablation import CONTROLLERS, ablation
from benchmarks.bandit import GAMMAS, Arms, BanditGamma
from benchmarks.simulation import Lone, drive
from benchmarks.worlds import World, candidates


def test_bandit_plays_the_best_of_its_gammas_most():
    world = World(alpha=0.9, spikes=0.0)
    controller, session = BanditGamma(8, Arms(random.Random(1))), Lone(random.Random(1))
    drive(controller, world, 600, session)
    run = drive(controller, world, 600, session, is_new=False)
    assert {shape.depth for shape in run.shapes} <= set(GAMMAS)
    assert run.speed >= 0.85 * world.speed(world.best(candidates(8, 0)))


@pytest.mark.slow
def test_ablation_takes_parts_out_and_puts_them_back():
    names = ["gamma 4", "adaptive, no forgetting", "adaptive"]
    rows = ablation(["turn"], names, 1, lambda: None)
    assert [row["controller"] for row in rows] == names
    assert rows[2]["then_mean"] > rows[1]["then_mean"]
    assert all(0.0 < row["then_worst"] <= row["then_tenth"] <= row["then_mean"] <= 1.0 for row in rows)
    for controller in CONTROLLERS.values():
        before = [getattr(module, name) for module, name, _ in controller.patches]
        with controller.patched():
            for module, name, value in controller.patches:
                assert getattr(module, name) == value
        assert [getattr(module, name) for module, name, _ in controller.patches] == before
