"""What is known of one metric, and the buckets that histograms share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = [
    "ALL",
    "BOTH_WORKERS",
    "DRAFT",
    "GAMMAS",
    "ORCHESTRATOR",
    "REQUEST_S",
    "SIZES",
    "TOKEN_S",
    "WAIT_S",
]
__all__ += ["Kind", "Metric", "Role"]

_FAST_S = (0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.004, 0.005, 0.006, 0.008)
TOKEN_S = (*_FAST_S, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Per token and per cycle: fine below 10 ms, where they lie."""

WAIT_S = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.006, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0)
REQUEST_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
GAMMAS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0, 64.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)

_SUFFIXES = {"s": "seconds", "By": "bytes"}


class Kind(str, Enum):
    """What a metric is."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Role(str, Enum):
    """Processes that have metrics."""

    ORCHESTRATOR = "orchestrator"
    DRAFT = "draft"
    TARGET = "target"


ORCHESTRATOR = (Role.ORCHESTRATOR,)
DRAFT = (Role.DRAFT,)
BOTH_WORKERS = (Role.DRAFT, Role.TARGET)
ALL = tuple(Role)


@dataclass(frozen=True)
class Metric:
    """One metric.

    Args:
        name: OpenTelemetry's.
        kind: What it is.
        unit: In UCUM, as OpenTelemetry wants it: s, By, or what is counted in braces.
        roles: Processes that have it.
        meaning: What is counted or measured.
        query: PromQL that it is for.
        answers: What the query's result is.
        labels: Names of its labels.
        buckets: Upper bounds of a histogram's buckets.
    """

    name: str
    kind: Kind
    unit: str
    roles: tuple[Role, ...]
    meaning: str
    query: str
    answers: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def family(self) -> str:
        """Prometheus's name, without the `_total` of counters."""
        base = self.name.replace(".", "_")
        suffix = _SUFFIXES.get(self.unit)
        return f"{base}_{suffix}" if suffix else base

    @property
    def samples(self) -> tuple[str, ...]:
        """Names of Prometheus's samples."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.family}_{part}" for part in ("bucket", "count", "sum"))
        return (f"{self.family}_total",) if self.kind is Kind.COUNTER else (self.family,)
