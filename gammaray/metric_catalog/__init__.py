"""Every metric: name, unit, labels, meaning and the query it is for; docs/metrics.md is made of it.

Names are OpenTelemetry's; Prometheus sees underscores for dots, the unit behind them, and `_total` behind a
counter. The speculation counters are vLLM's (`vllm:spec_decode_num_drafts` and so on), with its definitions
and our prefix, but for one thing: an accepted token that stood behind the end of a completion was not emitted
and is not counted, so that the counters are sums of what the API's own summaries say.
"""

from __future__ import annotations

from gammaray.metric_catalog.metric import Kind, Metric, Role
from gammaray.metric_catalog.orchestrator import REQUESTS, SPECULATION, TIME, WORKERS
from gammaray.metric_catalog.worker import ENGINE, INFO

__all__ = ["CATALOG", "GROUPS", "Kind", "Metric", "Role", "by_name"]

GROUPS = {
    "Speculation": SPECULATION,
    "Where the time goes": TIME,
    "Requests": REQUESTS,
    "Orchestrator and its workers": WORKERS,
    "Workers": ENGINE,
    "Every process": INFO,
}
"""The metrics by what they are about."""

CATALOG = tuple(metric for group in GROUPS.values() for metric in group)
_BY_NAME = {metric.name: metric for metric in CATALOG}


def by_name(name: str) -> Metric:
    """Return the metric of OpenTelemetry's `name`."""
    return _BY_NAME[name]
