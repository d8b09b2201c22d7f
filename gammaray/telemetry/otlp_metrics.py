"""Push of a process's metrics over OTLP, configured by the standard `OTEL_*` variables.

The SDK's exporter sends them and reads endpoint, headers, certificates and timeout; the interval is
`OTEL_METRIC_EXPORT_INTERVAL` (milliseconds, 60,000 by default). Sums are cumulative.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.environment_variables import OTEL_METRIC_EXPORT_INTERVAL
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from gammaray import __version__
from gammaray.errors import InvalidArgumentError
from gammaray.telemetry import catalog as metric_catalog
from gammaray.telemetry.catalog import Kind
from gammaray.telemetry.meter import Histogram, Meter, Series
from gammaray.telemetry.otel import SHUTDOWN_TIMEOUT_S, process_resource

_log = logging.getLogger(__name__)

DEFAULT_INTERVAL_MS = 60_000.0
_CUMULATIVE = AggregationTemporality.CUMULATIVE


class MetricsPush:
    """Sends a meter's values periodically, in its own thread, and a last time when it is stopped.

    Args:
        meter: The meter to send.
        role: orchestrator, draft or target.

    Raises:
        InvalidArgumentError: `OTEL_METRIC_EXPORT_INTERVAL` is invalid.
    """

    def __init__(self, meter: Meter, role: str) -> None:
        self._meter, self._resource = meter, process_resource(role)
        self._scope, self._start_ns = InstrumentationScope("gammaray", __version__), time.time_ns()
        self._interval_s = _interval_s()
        self._exporter = OTLPMetricExporter()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-push", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send the current values and end; waits for at most two seconds."""
        self._stopped.set()
        self._thread.join(SHUTDOWN_TIMEOUT_S)
        self._exporter.shutdown(timeout_millis=0)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopped.wait(self._interval_s)
            try:
                self._exporter.export(self._data())
            except Exception:  # a failed export must not affect the process
                _log.exception("failed to export metrics")

    def _data(self) -> MetricsData:
        now = time.time_ns()
        metrics = [self._metric(metric, series, now) for metric, series in self._meter.read()]
        scope = ScopeMetrics(self._scope, metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def _metric(self, metric: metric_catalog.Metric, series: list[Series], now: int) -> Metric:
        data: Any
        if metric.kind is Kind.HISTOGRAM:
            data = HistogramData([self._histogram(*one, now) for one in series], _CUMULATIVE)
        else:
            points = [self._number(*one, now) for one in series]
            is_sum = metric.kind is Kind.COUNTER
            data = Sum(points, _CUMULATIVE, is_monotonic=True) if is_sum else Gauge(points)
        return Metric(metric.name, metric.meaning, metric.unit, data)

    def _number(self, labels: dict[str, str], value: Any, now: int) -> NumberDataPoint:
        number = value() if callable(value) else value.value
        return NumberDataPoint(labels, self._start_ns, now, number)

    def _histogram(self, labels: dict[str, str], value: Any, now: int) -> HistogramDataPoint:
        assert isinstance(value, Histogram)
        counts = list(value.counts)
        unknown: Any = None  # minimum and maximum are not recorded
        return HistogramDataPoint(
            *(labels, self._start_ns, now, sum(counts), value.total, counts, value.bounds),
            min=unknown,
            max=unknown,
        )


def _interval_s() -> float:
    text = os.environ.get(OTEL_METRIC_EXPORT_INTERVAL, "").strip()
    try:
        interval_ms = float(text) if text else DEFAULT_INTERVAL_MS
    except ValueError:
        interval_ms = 0.0
    if not 0 < interval_ms < float("inf"):
        raise InvalidArgumentError(OTEL_METRIC_EXPORT_INTERVAL, text, "milliseconds, above 0")
    return interval_ms / 1e3
