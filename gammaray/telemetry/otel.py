"""OpenTelemetry of one process, configured by the standard `OTEL_*` variables only; disabled without them.

A signal is exported if its endpoint is set (`OTEL_EXPORTER_OTLP_ENDPOINT`, or the variable with the signal's
name) or its exporter (`OTEL_TRACES_EXPORTER=otlp`). The SDK itself reads everything else, such as sampler,
headers, certificates, batching and `OTEL_SDK_DISABLED`. Providers belong to the process's `Telemetry` and are
never global, since Ray Serve may already have set a global one, which would take precedence.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from gammaray.errors import InvalidArgumentError

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.trace import Tracer

    from gammaray.telemetry.span_ids import SpanIds

_log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 2.0
"""Upper bound of the wait for the last spans and samples to be sent at shutdown, in seconds."""

MAX_QUEUED = 16_384
"""Upper bound of queued spans, unless OTEL_BSP_MAX_QUEUE_SIZE is set."""

Signal = Literal["traces", "metrics"]


def exports(signal: Signal) -> bool:
    """Return whether the environment enables the OTLP export of a signal.

    Raises:
        InvalidArgumentError: It names an exporter or protocol that is not supported.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    name = signal.upper()
    exporter = os.environ.get(f"OTEL_{name}_EXPORTER", "").strip().lower()
    if exporter not in ("", "otlp", "none") and signal == "traces":
        raise InvalidArgumentError(f"OTEL_{name}_EXPORTER", exporter, "otlp or none")
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT")
    is_wanted = exporter == "otlp" or (
        not exporter and any(os.environ.get(variable) for variable in endpoints)
    )
    if is_wanted:
        _check_protocol(name)
    return is_wanted


def _check_protocol(name: str) -> None:
    for variable in (f"OTEL_EXPORTER_OTLP_{name}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(variable, "").strip().lower()
        if protocol not in ("", "grpc"):
            raise InvalidArgumentError(variable, protocol, "grpc")
        if protocol:
            return


def process_resource(role: str) -> Resource:
    """Return this process's resource; `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` take precedence.

    Args:
        role: orchestrator, draft or target; the default service name is `gammaray-<role>`.
    """
    from opentelemetry.sdk.resources import Attributes, OTELResourceDetector, Resource

    from gammaray import __version__

    host, pid = socket.gethostname(), os.getpid()
    own: Attributes = {
        "service.name": f"gammaray-{role}",
        "service.namespace": "gammaray",
        "service.version": __version__,
        "service.instance.id": f"{host}:{pid}",
        "host.name": host,
        "process.pid": pid,
    }
    return Resource.create(own).merge(OTELResourceDetector().detect())


class Telemetry:
    """Trace export of a process; created once, before it serves.

    Args:
        role: orchestrator, draft or target.

    Attributes:
        tracer: Creates spans, sampled according to `OTEL_TRACES_SAMPLER`; None if traces are not exported.
        span_ids: Ids of the tracer's spans; None if traces are not exported.

    Raises:
        InvalidArgumentError: The environment names an unsupported exporter or protocol.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self.tracer: Tracer | None = None
        self.span_ids: SpanIds | None = None
        self._endings: list[Callable[[], object]] = []
        if exports("traces"):
            self._set_up_traces()

    def on_shutdown(self, ending: Callable[[], object]) -> None:
        """Register a function that flushes and closes one provider; it is called at shutdown, in a thread."""
        self._endings.append(ending)

    async def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> bool:
        """Send queued data and close the exporters; return whether that was done in time.

        Data that is not sent by then, because a collector does not answer, is lost when the process ends.
        """
        endings, self._endings = self._endings, []
        if not endings:
            return True
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def run() -> None:
            for ending in endings:
                try:
                    ending()
                except Exception:
                    _log.exception("failed to close telemetry")
            try:
                loop.call_soon_threadsafe(done.set)
            except RuntimeError:  # the event loop has closed already
                return

        # A daemon thread, since threads of an executor would keep the process from ending.
        threading.Thread(target=run, name="telemetry-shutdown", daemon=True).start()
        try:
            await asyncio.wait_for(done.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    def _set_up_traces(self) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from gammaray import __version__
        from gammaray.telemetry.span_ids import SpanIds

        queued = None if "OTEL_BSP_MAX_QUEUE_SIZE" in os.environ else MAX_QUEUED
        self.span_ids = SpanIds()
        provider = TracerProvider(
            resource=process_resource(self.role), id_generator=self.span_ids, shutdown_on_exit=False
        )
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), max_queue_size=queued))
        self.tracer = provider.get_tracer("gammaray", __version__)
        self.on_shutdown(provider.shutdown)
