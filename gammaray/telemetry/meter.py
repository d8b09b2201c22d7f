"""Counters, histograms and gauges of one process.

An update only adds to an attribute, and the values are converted when Prometheus or OTLP reads them: the
updates of a cycle and of two workers' steps take 0.24 % of a plain cycle of 2.09 ms, with counters and
histograms of prometheus_client 1.26 % (2026-11-22). A counter or
histogram has one writer thread and any readers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias, TypeVar

from gammaray.telemetry.catalog import BY_NAME, Kind, Metric

Source: TypeAlias = Callable[[], float]
_ValueT = TypeVar("_ValueT", bound="Counter | Histogram | Callable[[], float]")
Series: TypeAlias = "tuple[dict[str, str], Counter | Histogram | Source]"


class Counter:
    """A monotonic sum; add to `value`."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0


class Histogram:
    """Number of values per bucket, by its upper bound in `bounds`, and of larger ones; and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Meter:
    """The metrics of one process; callers request each series once and keep it."""

    def __init__(self) -> None:
        self._series: dict[str, dict[tuple[str, ...], Counter | Histogram | Source]] = {}

    def counter(self, name: str, **labels: str) -> Counter:
        return self._add(name, Kind.COUNTER, labels, Counter())

    def histogram(self, name: str, **labels: str) -> Histogram:
        return self._add(name, Kind.HISTOGRAM, labels, Histogram(BY_NAME[name].buckets))

    def gauge(self, name: str, read: Source, **labels: str) -> None:
        """Register a gauge; `read` returns its value and may be called in any thread."""
        self._add(name, Kind.GAUGE, labels, read)

    def observed(self, name: str, read: Source, **labels: str) -> None:
        """Register a counter whose value is kept elsewhere and returned by `read`."""
        self._add(name, Kind.COUNTER, labels, read)

    def read(self) -> Iterator[tuple[Metric, list[Series]]]:
        """Yield each metric that has series, together with them."""
        for name, series in list(self._series.items()):
            metric = BY_NAME[name]
            yield (
                metric,
                [(dict(zip(metric.labels, key, strict=True)), value) for key, value in list(series.items())],
            )

    def _add(self, name: str, kind: Kind, labels: Mapping[str, str], value: _ValueT) -> _ValueT:
        metric = BY_NAME[name]
        if metric.kind is not kind or set(labels) != set(metric.labels):
            raise ValueError(
                f"{name} is a {metric.kind.value} of {metric.labels}, not a {kind.value} of {labels}"
            )
        key = tuple(labels[label] for label in metric.labels)
        if key in self._series.setdefault(name, {}):
            raise ValueError(f"{name}{labels} already exists")
        self._series[name][key] = value
        return value
