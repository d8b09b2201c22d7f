"""The Prometheus endpoint of a process: an HTTP server in its own thread."""

from __future__ import annotations

import asyncio
import itertools
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


class MetricsExport:
    """Serves a process's meter, and its memory, CPU time and open files, until it is stopped.

    Must be created in the process's event loop. Port 0 of `listen` is any free port, a range `first-last` the
    first free one, "" none; InvalidArgumentError if the address is invalid or no port of it is free. `kernel`
    is that of `ProcessStatus`, empty for an orchestrator.
    """

    def __init__(self, meter: Meter, *, role: str, model: str, listen: str, kernel: str = "") -> None:
        described = {"role": role, "model": model, "version": __version__, "kernel": kernel}
        meter.gauge("gammaray.info", lambda: 1.0, **described)
        loop = asyncio.get_running_loop()
        meter.gauge("gammaray.tasks", lambda: len(asyncio.all_tasks(loop)), role=role)
        self.address = ""  # for other machines
        self._running: tuple[WSGIServer, threading.Thread] | None = None
        if listen:
            self._running = _serve(meter, listen)
            host, _ = metrics_address(listen)
            self.address = join_address(_reachable(host), self._running[0].server_port)

    async def stop(self) -> None:
        """Stop serving; takes at most about a second."""
        if self._running is not None:
            (server, thread), self._running = self._running, None
            threading.Thread(target=server.shutdown, daemon=True).start()
            await asyncio.to_thread(thread.join, 1.0)
            server.server_close()


def _serve(meter: Meter, listen: str) -> tuple[WSGIServer, threading.Thread]:
    """Serve on the first free port; the server runs in the thread."""
    from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

    host, ports = metrics_address(listen)
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Collector(meter))
    for port in ports:
        try:
            return start_http_server(port, host, registry)
        except OSError as error:
            failure = error
    raise InvalidArgumentError("metrics_listen", listen, f"a free port ({failure})") from failure


class _Collector:
    def __init__(self, meter: Meter) -> None:
        self._meter = meter

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
    totals = map(float, itertools.accumulate(histogram.counts))
    return list(zip((*map(str, histogram.bounds), "+Inf"), totals, strict=True))


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
