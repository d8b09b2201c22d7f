"""The Prometheus endpoint of a process: an HTTP server in its own thread."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIServer

from gammaray import __version__
from gammaray.checks import is_wildcard, join_address
from gammaray.errors import InvalidArgumentError
from gammaray.telemetry.catalog import Kind
from gammaray.telemetry.meter import Histogram, Meter

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family

_FORM = re.compile(r"(?P<host>.+):(?P<first>\d{1,5})(?:-(?P<last>\d{1,5}))?")
_ALLOWED = "host:port or host:first-last, or nothing"


def metrics_address(listen: str) -> tuple[str, range]:
    """Return the host of the setting `metrics_listen` and its ports, of which the first free one is used."""
    match = _FORM.fullmatch(listen)
    first = int(match["first"]) if match else 0
    last = int(match["last"] or first) if match else 0
    if match is None or not 0 <= first <= last <= 65535:
        raise InvalidArgumentError("metrics_listen", listen, _ALLOWED)
    return match["host"].strip("[]"), range(first, last + 1)


class MetricsServer:
    """Serves a meter's values, and those of the process itself (memory, CPU time, open files).

    Args:
        listen: host:port; port 0 takes any free port, a range `first-last` the first free one.

    Raises:
        InvalidArgumentError: The address is invalid, or no port of it is free.
    """

    def __init__(self, meter: Meter, listen: str) -> None:
        from prometheus_client import start_http_server

        host, ports = metrics_address(listen)
        self._server: WSGIServer
        self._thread: threading.Thread
        for port in ports:
            try:
                self._server, self._thread = start_http_server(port, host, registry(meter))
                break
            except OSError as error:
                if port == ports[-1]:
                    raise InvalidArgumentError("metrics_listen", listen, f"a free port ({error})") from error
        self.address = join_address(_reachable(host), self._server.server_port)

    def stop(self) -> None:
        """Stop serving; waits for at most one second."""
        threading.Thread(target=self._server.shutdown, daemon=True).start()
        self._thread.join(1.0)
        self._server.server_close()


class MetricsExport:
    """Exports a process's meter until it is stopped; must be created in the process's event loop.

    Args:
        listen: host:port of the endpoint, see `MetricsServer`; empty: none.
        kernel: What computes a worker's model, see `ProcessStatus.kernel`; empty for an orchestrator.
    """

    def __init__(self, meter: Meter, *, role: str, model: str, listen: str, kernel: str = "") -> None:
        described = {"role": role, "model": model, "version": __version__, "kernel": kernel}
        meter.gauge("gammaray.info", lambda: 1.0, **described)
        loop = asyncio.get_running_loop()
        meter.gauge("gammaray.tasks", lambda: len(asyncio.all_tasks(loop)), role=role)
        self._server = MetricsServer(meter, listen) if listen else None
        self.address = self._server.address if self._server is not None else ""  # for other machines

    async def stop(self) -> None:
        """Stop serving; takes at most about a second."""
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)
            self._server = None


def registry(meter: Meter) -> CollectorRegistry:
    """Return the registry for prometheus_client, with the values of `meter` and of the process."""
    from prometheus_client import CollectorRegistry, ProcessCollector

    found = CollectorRegistry()
    ProcessCollector(registry=found)
    found.register(_Collector(meter))
    return found


class _Collector:
    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def describe(self) -> Iterator[Family]:
        """Return nothing, so that registration does not read gauges whose owners do not exist yet."""
        return iter(())

    def collect(self) -> Iterator[Family]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for metric, series in self._meter.read():
            names = metric.labels
            if metric.kind is Kind.HISTOGRAM:
                histogram = HistogramMetricFamily(metric.family, metric.meaning, labels=names)
                for labels, value in series:
                    assert isinstance(value, Histogram)
                    histogram.add_metric(list(labels.values()), _buckets(value), value.total)
                yield histogram
                continue
            kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
            family = kind(metric.family, metric.meaning, labels=names)
            for labels, value in series:
                assert not isinstance(value, Histogram)
                family.add_metric(list(labels.values()), value() if callable(value) else value.value)
            yield family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    total, pairs = 0, []
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), list(histogram.counts), strict=True):
        total += count
        pairs.append((bound, float(total)))
    return pairs


def _reachable(host: str) -> str:
    """Return the host at which other machines reach a server that listens on `host`."""
    if not is_wildcard(host):
        return host
    name = socket.gethostname()
    try:
        family = socket.AF_UNSPEC if ":" in host else socket.AF_INET
        return str(socket.getaddrinfo(name, None, family)[0][4][0])
    except OSError:
        return name
