"""OpenTelemetry traces of one process, configured by the standard `OTEL_*` variables only.

Spans are exported if an endpoint (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`) or the
exporter (`OTEL_TRACES_EXPORTER=otlp`) is set. The SDK itself reads everything else, such as sampler, headers,
certificates and batching. The provider belongs to the process's `Telemetry` and is never global, since Ray
Serve may already have set a global one, which would take precedence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from typing import TYPE_CHECKING

from gammaray.errors import InvalidArgumentError

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

    from gammaray.telemetry.span_ids import SpanIds

_log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 2.0
"""Upper bound of the wait for the last spans to be sent at shutdown, in seconds."""

MAX_QUEUED = 16_384
"""Upper bound of queued spans, unless OTEL_BSP_MAX_QUEUE_SIZE is set."""


def exports_traces() -> bool:
    """Return whether the environment asks for OTLP export; InvalidArgumentError if for another one."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if exporter not in ("", "otlp", "none"):
        raise InvalidArgumentError("OTEL_TRACES_EXPORTER", exporter, "otlp or none")
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if exporter == "none" or not (exporter or any(os.environ.get(variable) for variable in endpoints)):
        return False
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(variable, "").strip().lower()
        if protocol not in ("", "grpc"):
            raise InvalidArgumentError(variable, protocol, "grpc")
        if protocol:
            break
    return True


def process_resource(role: str) -> Resource:
    """Return this process's resource: service `gammaray-<role>` unless the environment names another."""
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
    """Trace export of a process; created once, before it serves."""

    def __init__(self, role: str) -> None:
        # None if traces are not exported; else sampled according to `OTEL_TRACES_SAMPLER`.
        self.tracer: Tracer | None = None
        self.span_ids: SpanIds | None = None
        self._provider: TracerProvider | None = None
        if exports_traces():
            self._set_up(role)

    async def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> bool:
        """Send queued spans and close the exporter; return whether that was done in time.

        Spans that are not sent by then, because a collector does not answer, are lost when the process ends.
        """
        provider, self._provider = self._provider, None
        if provider is None:
            return True
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def run() -> None:
            try:
                provider.shutdown()
            except Exception:
                _log.exception("failed to close telemetry")
            with contextlib.suppress(RuntimeError):  # the event loop has closed already
                loop.call_soon_threadsafe(done.set)

        # A daemon thread, since threads of an executor would keep the process from ending.
        threading.Thread(target=run, name="telemetry-shutdown", daemon=True).start()
        try:
            await asyncio.wait_for(done.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    def _set_up(self, role: str) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from gammaray import __version__
        from gammaray.telemetry.span_ids import SpanIds

        queued = None if "OTEL_BSP_MAX_QUEUE_SIZE" in os.environ else MAX_QUEUED
        self.span_ids = SpanIds()
        self._provider = TracerProvider(
            resource=process_resource(role), id_generator=self.span_ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), max_queue_size=queued))
        self.tracer = self._provider.get_tracer("gammaray", __version__)
