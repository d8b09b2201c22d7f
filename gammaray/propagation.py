"""The trace that a call belongs to, for metadata: of applications that trace, and at no cost for others."""

from __future__ import annotations

import sys

__all__ = ["trace_metadata"]


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Return `traceparent` and `tracestate` of the current span; nothing when there is none."""
    if "opentelemetry.trace" not in sys.modules:  # nobody can have begun a span
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
