"""HTTP headers and gRPC metadata that gammaray reads."""

from __future__ import annotations

import sys

APPLICATION = "gammaray"
"""Name of the Ray Serve application with the API; Serve's proxies route by the `application` metadata."""

TIMEOUT_HEADER = "gammaray-timeout-ms"
"""Header and metadata with the caller's timeout in milliseconds, in [1, MAX_TIMEOUT_MS]."""

MAX_TIMEOUT_MS = 7 * 24 * 3600 * 1000


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Return `traceparent` and `tracestate` of the current span; empty if there is none."""
    if "opentelemetry.trace" not in sys.modules:  # no cost for applications without tracing
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
