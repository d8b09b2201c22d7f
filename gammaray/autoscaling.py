"""Serve's autoscaling options of a pool of replicas, for what deploys by hand and by configuration alike."""

from __future__ import annotations

from typing import Any

from gammaray.config import PoolSize, ScalingSettings

__all__ = ["autoscaling_config"]

_POLICIES = {
    "draft": "services.scaling_policy:DraftPolicy",
    "orchestrator": "orchestrator.scaling_policy:OrchestratorPolicy",
    "target": "services.scaling_policy:TargetPolicy",
}
_NUM_REPORTS = 10
"""Reports that a decision looks back on."""


def autoscaling_config(role: str, size: PoolSize, settings: ScalingSettings) -> dict[str, Any]:
    """Return a deployment's `autoscaling_config`, of JSON values.

    Args:
        role: "draft", "orchestrator" or "target".
        size: Bounds; where they are equal the pool reports its load and keeps its number.
        settings: Thresholds and delays.
    """
    return {
        "min_replicas": size.minimum,
        # A pool that may be empty begins with one, so that it can show whether it pays.
        "initial_replicas": max(1, size.minimum),
        "max_replicas": size.maximum,
        "metrics_interval_s": settings.report_interval_s,
        "look_back_period_s": _NUM_REPORTS * settings.report_interval_s,
        "upscale_delay_s": settings.scale_up_delay_s,
        "downscale_delay_s": settings.scale_down_delay_s,
        "policy": {
            "policy_function": _POLICIES[role],
            "policy_kwargs": {"settings": settings.model_dump(mode="json")},
        },
    }
