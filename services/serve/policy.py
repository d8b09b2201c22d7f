"""Policies of `services.serve.autoscaling`, called by Serve's controller with the workers' reports.

Both pools' policies run in the controller's process. The draft pool must know whether there are sessions to
draft for even while it has no worker, so the target pool's policy stores its load in `services.serve.demand`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gammaray.config import ScalingSettings
from services.scheduling.load import LoadReport
from services.serve import demand
from services.serve.autoscaling import Pool, wanted_drafters, wanted_targets


class _Policy:
    """Base: constructed once by Serve from JSON of ScalingSettings, called with an AutoscalingContext."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = ScalingSettings(**settings)


class TargetPolicy(_Policy):
    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        pool = _pool(context)
        demand.in_flight = pool.in_flight
        return wanted_targets(pool, self._settings), {}


class DraftPolicy(_Policy):
    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        return wanted_drafters(_pool(context), demand.in_flight, self._settings), {}


def _pool(context: Any) -> Pool:
    by_name = context.aggregated_metrics or {}
    names = [field.name for field in fields(LoadReport)]
    reports = [
        LoadReport(**{name: by_name[name][replica] for name in names})
        for replica in context.running_replicas
        if all(replica in by_name.get(name, ()) for name in names)
    ]
    return Pool(
        wanted=context.target_num_replicas,
        reports=reports,
        minimum=context.capacity_adjusted_min_replicas,
        maximum=context.capacity_adjusted_max_replicas,
    )
