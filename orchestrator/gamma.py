"""Controllers of gamma: fixed, and adaptive to measured acceptance and costs.

Choosing gamma from past cycles alone keeps every verification method lossless.
"""

from __future__ import annotations

from gammaray.metrics import AcceptanceEstimator
from orchestrator.costs import CostModel
from orchestrator.cycle import Cycle

__all__ = ["AdaptiveGamma", "FixedGamma"]

HYSTERESIS = 1.03
"""Another gamma must promise this much more speed before it replaces the current one."""

PLAIN_PERIOD = 100
"""Cycles of all sessions between two measurements of plain decoding."""

FIRST_GAMMA = 4
"""Where to start when nothing is known of the costs."""

PROBE_LOSS = 0.01
"""Share of the time that probing a drafter that does not pay may cost."""

MIN_PROBE_GAP, MAX_PROBE_GAP = 4, 128
"""Bounds, in cycles, of the time between two probes at gamma 1 while the best gamma is 0."""

FLEET_STRENGTH = 8.0
"""Tested tokens that the other sessions' acceptance is worth at a session's start."""


class FixedGamma:
    """Always the same gamma; implements the cycle's GammaController.

    Args:
        gamma: The gamma.
        costs: Learns from these cycles too.
    """

    def __init__(self, gamma: int, costs: CostModel) -> None:
        self._gamma, self._costs = gamma, costs

    def next_gamma(self) -> int:
        """Return the gamma of the next cycle."""
        return self._gamma

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle."""
        self._costs.observe(cycle)


class AdaptiveGamma:
    """The gamma, 0 included, that promises most tokens per second; implements the cycle's GammaController.

    Expected tokens come from this session's acceptance by depth, starting from the fleet's; seconds come from
    the shared cost model. While the best gamma is 0, gamma 1 is probed now and then, more often while it
    succeeds and the rarer the more it costs; while it is not, plain decoding is measured now and then.

    Args:
        max_gamma: Upper bound.
        costs: Shared by the sessions of this replica.
    """

    def __init__(self, max_gamma: int, costs: CostModel) -> None:
        self._max_gamma, self._costs = max_gamma, costs
        self._acceptance = AcceptanceEstimator(
            prior_alpha=costs.acceptance.alpha, prior_strength=FLEET_STRENGTH
        )
        self._gamma: int | None = None
        self._probe_gap = MAX_PROBE_GAP // 2
        self._cycles_at_zero = 0

    def next_gamma(self) -> int:
        """Return the gamma of the next cycle."""
        if self._max_gamma == 0:
            return 0
        speeds = self._speeds()
        if speeds is None:
            return min(FIRST_GAMMA, self._max_gamma)
        self._gamma = self._choose(speeds)
        if self._gamma > 0:
            self._cycles_at_zero = 0
            return 0 if self._costs.cycles_since_plain >= PLAIN_PERIOD else self._gamma
        self._cycles_at_zero += 1
        waited = max(self._cycles_at_zero, self._costs.cycles_since_draft)
        if waited < max(self._probe_gap, self._affordable_gap(speeds)):
            return 0
        self._cycles_at_zero = 0
        return 1

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle."""
        self._acceptance.observe(cycle.num_tested, cycle.num_accepted)
        self._costs.observe(cycle)
        if self._gamma == 0 and cycle.num_tested > 0:
            factor = 0.5 if cycle.num_accepted > 0 else 2.0
            self._probe_gap = int(min(MAX_PROBE_GAP, max(MIN_PROBE_GAP, self._probe_gap * factor)))

    def _speeds(self) -> list[float] | None:
        """Return the expected tokens per second at gamma 0 ... `max_gamma`; None while costs are unknown."""
        seconds = [self._costs.cycle_s(gamma) for gamma in range(self._max_gamma + 1)]
        tokens = [1.0]
        for alive in self._acceptance.survival(self._max_gamma):
            tokens.append(tokens[-1] + alive)
        speeds = [t / s for t, s in zip(tokens, seconds, strict=True) if s]
        return speeds if len(speeds) == len(tokens) else None

    def _choose(self, speeds: list[float]) -> int:
        best = max(range(len(speeds)), key=speeds.__getitem__)
        if best == 0 or self._gamma is None or speeds[best] > HYSTERESIS * speeds[self._gamma]:
            return best
        return self._gamma

    def _affordable_gap(self, speeds: list[float]) -> float:
        """Return the cycles between probes that keep their loss below PROBE_LOSS of the time."""
        plain_s = 1 / speeds[0]
        tokens = 1 + self._acceptance.survival(1)[0]
        lost_s = tokens / speeds[1] - tokens * plain_s
        return lost_s / (PROBE_LOSS * plain_s)
