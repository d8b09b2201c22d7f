"""Controllers of gamma: fixed, and adaptive to measured acceptance and costs.

Choosing gamma from past cycles alone keeps every verification method lossless.
"""

from __future__ import annotations

from gammaray.metrics import AcceptanceEstimator
from orchestrator.costs import CostModel
from orchestrator.cycle import Cycle, Shape

__all__ = ["AdaptiveGamma", "FixedGamma"]

HYSTERESIS = 1.03
"""Another gamma must promise this much more speed before it replaces the current one."""

FIRST_GAMMA = 4
"""Where to start when nothing is known of the costs."""

PROBE_LOSS = 0.01
"""Share of the time that probing a drafter that does not pay may cost."""

MIN_PROBE_GAP, MAX_PROBE_GAP = 4, 128
"""Bounds of the cycles between two probes while the best gamma is 0, before their cost is looked at."""

FLEET_STRENGTH = 8.0
"""Tested tokens that the other sessions' acceptance is worth at a session's start."""


class FixedGamma:
    """Always the same gamma; implements the cycle's GammaController.

    Args:
        gamma: The gamma.
        costs: Learns from these cycles too.
        max_nodes: Above `gamma` for trees.
    """

    def __init__(self, gamma: int, costs: CostModel, max_nodes: int = 0) -> None:
        self._shape, self._costs = Shape(gamma, max_nodes), costs

    def next_shape(self) -> Shape:
        """Return the shape of the next cycle's proposal."""
        return self._shape

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle."""
        self._costs.observe(cycle)


class AdaptiveGamma:
    """The gamma, 0 included, that promises most tokens per second; implements the cycle's GammaController.

    Expected tokens come from this session's acceptance by depth, starting from the fleet's; seconds come from
    the shared cost model. While the best gamma is 0, the best other one is probed now and then: more often
    while it succeeds, the rarer the more it costs. Otherwise plain decoding is measured now and then.

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

    def next_shape(self) -> Shape:
        """Return the shape of the next cycle's proposal: a chain."""
        return Shape(self._next_gamma())

    def _next_gamma(self) -> int:
        if self._max_gamma == 0:
            return 0
        speeds = self._speeds()
        if speeds is None:
            return min(FIRST_GAMMA, self._max_gamma)
        self._gamma = self._choose(speeds)
        if self._gamma > 0:
            self._cycles_at_zero = 0
            return 0 if self._costs.is_plain_due else self._gamma
        self._cycles_at_zero += 1
        probe = max(range(1, len(speeds)), key=speeds.__getitem__)
        # Each token of the probe costs (1 / its speed - 1 / plain speed) seconds more than a plain one.
        loss = (speeds[0] / speeds[probe] - 1) * self._tokens(probe)
        waited = max(self._cycles_at_zero, self._costs.cycles_since_draft)
        if waited < max(self._probe_gap, loss / PROBE_LOSS):
            return 0
        self._cycles_at_zero = 0
        return probe

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle."""
        self._acceptance.observe(cycle.num_tested, cycle.num_accepted)
        self._costs.observe(cycle)
        if self._gamma == 0 and cycle.num_tested > 0:
            factor = 0.5 if cycle.num_accepted > 0 else 2.0
            self._probe_gap = int(min(MAX_PROBE_GAP, max(MIN_PROBE_GAP, self._probe_gap * factor)))

    def _speeds(self) -> list[float] | None:
        """Return the expected tokens per second at gamma 0 ... `max_gamma`; None while costs are unknown."""
        tokens, speeds = 1.0, []
        for gamma, alive in enumerate((0.0, *self._acceptance.survival(self._max_gamma))):
            tokens += alive
            seconds = self._costs.cycle_s(gamma)
            if not seconds:
                return None
            speeds.append(tokens / seconds)
        return speeds

    def _choose(self, speeds: list[float]) -> int:
        best = max(range(len(speeds)), key=speeds.__getitem__)
        if best == 0 or self._gamma is None or speeds[best] > HYSTERESIS * speeds[self._gamma]:
            return best
        return self._gamma

    def _tokens(self, gamma: int) -> float:
        return 1.0 + sum(self._acceptance.survival(gamma))
