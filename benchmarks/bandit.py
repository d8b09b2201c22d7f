"""A bandit that chooses gamma, for comparison: the gamma with the most tokens per second at each load."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from gammaray.blocks import Shape
from orchestrator.control.fixed import Reason
from orchestrator.cycle.types import Candidates, Cycle

GAMMAS = (0, 2, 4, 6, 8, 12)
"""The gammas that are compared."""

HOLD = 8
"""Cycles for which one choice is kept: the first proposal after plain cycles makes the drafter catch up."""

MEMORY = 200.0
"""Cycles at a load after which a measurement has 1 / e of its weight."""

NOISE = 0.7
"""Relative standard deviation of one cycle's speed: at alpha 0.8 and gamma 4 the number of tokens varies by
half of its mean, and waits by as much again where some proposals are prepared."""


@dataclass
class _Arm:
    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0


class Arms:
    """Tokens and seconds by load and gamma, shared by the sessions of a replica.

    Args:
        rng: Source of the posterior samples.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._arms: dict[int, dict[int, _Arm]] = {}
        self._load = 0

    def observe(self, cycle: Cycle) -> None:
        """Count a cycle for its gamma and for the load of its step."""
        size = 1 if cycle.timing is None else max(1, cycle.timing.batch_size)
        self._load = round(math.log2(size))
        arms = self._arms.setdefault(self._load, {})
        for arm in arms.values():
            fading = 1.0 - 1.0 / (MEMORY * size)
            arm.weight, arm.tokens, arm.seconds = (
                arm.weight * fading,
                arm.tokens * fading,
                arm.seconds * fading,
            )
        arm = arms.setdefault(cycle.gamma, _Arm())
        arm.weight += 1.0 / size
        arm.tokens += cycle.num_accepted + 1
        arm.seconds += cycle.total_s

    def choose(self, max_gamma: int) -> int:
        """Return the best gamma under a sample of the speeds; a gamma that was never tried comes first."""
        arms, best, highest = self._arms.get(self._load, {}), 0, -math.inf
        for gamma in sorted({min(gamma, max_gamma) for gamma in GAMMAS}):
            arm = arms.get(gamma)
            if arm is None:
                return gamma
            spread = NOISE / math.sqrt(arm.weight * HOLD) if arm.weight > 0 else 1.0
            speed = arm.tokens / arm.seconds * math.exp(spread * self._rng.gauss(0.0, 1.0))
            if speed > highest:
                best, highest = gamma, speed
        return best


class BanditGamma:
    """Plays the gamma that the replica's bandit chooses.

    Args:
        max_gamma: Upper bound of the depth.
        arms: Shared by the sessions of this replica.
    """

    def __init__(self, max_gamma: int, arms: Arms) -> None:
        self._max_gamma, self._arms = max_gamma, arms
        self._gamma, self._left = 0, 0
        self._was_plain = True

    def next_shape(self, candidates: Candidates) -> Shape:
        """Return the shape of the next cycle's proposal."""
        if self._left == 0:
            self._gamma, self._left = self._arms.choose(self._max_gamma), HOLD
        return Shape(self._gamma, reason=(Reason.BEST if self._max_gamma else Reason.OFF).value)

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle."""
        self._left = max(0, self._left - 1)
        catches_up = cycle.num_drafted > 0 and self._was_plain
        if not cycle.is_first and not catches_up and not cycle.draft_failed and cycle.total_s > 0:
            self._arms.observe(cycle)
        self._was_plain = cycle.num_drafted == 0
