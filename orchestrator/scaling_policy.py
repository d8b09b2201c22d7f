"""Autoscaling policy for the number of orchestrators, called by Serve's controller."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gammaray.config import ScalingSettings
from gammaray.deploy.serve_config import SHRINK_MARGIN

IN_FLIGHT = "in_flight"
"""Metric under which a replica reports its running and waiting requests."""


def wanted_orchestrators(num_requests: float, num_now: int, settings: ScalingSettings) -> int:
    """Return how many orchestrators all running and waiting requests need; it shrinks by one at a time."""
    needed = max(1, math.ceil(num_requests / settings.orchestrator_load))
    if needed >= num_now:
        return needed
    fits = num_requests <= SHRINK_MARGIN * settings.orchestrator_load * (num_now - 1)
    return num_now - 1 if fits else num_now


class OrchestratorPolicy:
    """Policy that Serve creates once from JSON of ScalingSettings, and calls with an AutoscalingContext."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = ScalingSettings(**settings)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the wanted number of replicas and the state to keep."""
        reports = (context.aggregated_metrics or {}).get(IN_FLIGHT, {})
        running = [replica for replica in context.running_replicas if replica in reports]
        lowest, highest = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        if len(running) < context.target_num_replicas:  # some are starting: their load is unknown
            highest = min(highest, context.target_num_replicas)
            lowest = max(lowest, highest)
        number = wanted_orchestrators(
            sum(reports[replica] for replica in running), context.target_num_replicas, self._settings
        )
        return max(lowest, min(highest, number)), {}
