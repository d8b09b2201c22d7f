"""Export of a process's metrics: scraped by Prometheus, and pushed over OTLP if configured."""

from __future__ import annotations

import asyncio

from gammaray import __version__
from gammaray.telemetry.meter import Meter
from gammaray.telemetry.otel import exports
from gammaray.telemetry.prometheus import MetricsServer


class MetricsExport:
    """Exports a meter until it is stopped; must be created in the process's event loop.

    Args:
        meter: Meter of the process.
        role: orchestrator, draft or target.
        model: Name of the served model.
        listen: host:port of the Prometheus endpoint, see `MetricsServer`; empty: none.
        kernel: What computes a worker's model, see `ProcessStatus.kernel`; empty for an orchestrator.

    Attributes:
        address: host:port at which other machines reach the endpoint; empty without one.

    Raises:
        InvalidArgumentError: The address is malformed or in use, or an `OTEL_*` variable is invalid.
    """

    def __init__(self, meter: Meter, *, role: str, model: str, listen: str, kernel: str = "") -> None:
        described = {"role": role, "model": model, "version": __version__, "kernel": kernel}
        meter.gauge("gammaray.info", lambda: 1.0, **described)
        loop = asyncio.get_running_loop()
        meter.gauge("gammaray.tasks", lambda: len(asyncio.all_tasks(loop)), role=role)
        is_pushed = exports("metrics")
        self._server = MetricsServer(meter, listen) if listen else None
        self.address = self._server.address if self._server is not None else ""
        self._push = None
        if is_pushed:
            from gammaray.telemetry.otlp_metrics import MetricsPush  # the SDK is slow to import

            self._push = MetricsPush(meter, role)

    async def stop(self) -> None:
        """Push a last time and stop; takes at most about three seconds."""
        for part in (self._push, self._server):
            if part is not None:
                await asyncio.to_thread(part.stop)
        self._push = self._server = None
