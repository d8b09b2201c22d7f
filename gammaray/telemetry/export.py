"""Export of a process's metrics, which Prometheus scrapes."""

from __future__ import annotations

import asyncio

from gammaray import __version__
from gammaray.telemetry.meter import Meter
from gammaray.telemetry.prometheus import MetricsServer


class MetricsExport:
    """Exports a meter until it is stopped; must be created in the process's event loop.

    Args:
        role: orchestrator, draft or target.
        listen: host:port of the Prometheus endpoint, see `MetricsServer`; empty: none.
        kernel: What computes a worker's model, see `ProcessStatus.kernel`; empty for an orchestrator.

    Attributes:
        address: host:port at which other machines reach the endpoint; empty without one.

    Raises:
        InvalidArgumentError: The address is malformed or in use.
    """

    def __init__(self, meter: Meter, *, role: str, model: str, listen: str, kernel: str = "") -> None:
        described = {"role": role, "model": model, "version": __version__, "kernel": kernel}
        meter.gauge("gammaray.info", lambda: 1.0, **described)
        loop = asyncio.get_running_loop()
        meter.gauge("gammaray.tasks", lambda: len(asyncio.all_tasks(loop)), role=role)
        self._server = MetricsServer(meter, listen) if listen else None
        self.address = self._server.address if self._server is not None else ""

    async def stop(self) -> None:
        """Stop serving; takes at most about a second."""
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)
            self._server = None
