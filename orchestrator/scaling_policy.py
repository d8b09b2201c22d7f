"""How many orchestrators there should be, as Serve asks for it in its controller."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gammaray.config import ScalingSettings

__all__ = ["IN_FLIGHT", "OrchestratorPolicy", "wanted_orchestrators"]

IN_FLIGHT = "in_flight"
"""Name under which a replica reports its requests that run or wait."""

SHRINK_MARGIN = 0.7
"""Share of the load from which on another one is wanted that the rest must be able to carry for one to go."""


def wanted_orchestrators(num_requests: float, num_now: int, settings: ScalingSettings) -> int:
    """Return how many orchestrators carry the requests of all; they go one at a time.

    Args:
        num_requests: Requests that run or wait, over all orchestrators.
        num_now: Orchestrators that were decided on last.
        settings: Thresholds.
    """
    needed = max(1, math.ceil(num_requests / settings.orchestrator_load))
    if needed >= num_now:
        return needed
    fits = num_requests <= SHRINK_MARGIN * settings.orchestrator_load * (num_now - 1)
    return num_now - 1 if fits else num_now


class OrchestratorPolicy:
    """Made once by Serve from JSON values, then called with an AutoscalingContext.

    Args:
        settings: Fields of ScalingSettings.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = ScalingSettings(**settings)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the wanted number of replicas and the state to keep."""
        reports = (context.aggregated_metrics or {}).get(IN_FLIGHT, {})
        running = [replica for replica in context.running_replicas if replica in reports]
        lowest, highest = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        if len(running) < context.target_num_replicas:  # some start: their share is not known yet
            highest = min(highest, context.target_num_replicas)
            lowest = max(lowest, highest)
        number = wanted_orchestrators(
            sum(reports[replica] for replica in running), context.target_num_replicas, self._settings
        )
        return max(lowest, min(highest, number)), {}
