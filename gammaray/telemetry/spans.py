"""Cheap spans: facts are collected while serving, and converted to spans later, in the export thread.

Spans of the SDK are expensive to create and more so to encode: the four of a cycle take the orchestrator
425 us instead of 61 us (2026-11-22). Serving therefore only does one `put`
of a `Bundle` into the SDK's batch processor, whose thread lets the bundle write its spans directly into the
OTLP message. Sampling, batching, retries and transport are the SDK's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from gammaray.telemetry import names as t

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
    from opentelemetry.trace import SpanContext

_STATUS_ERROR = 2


class Bundle(Protocol):
    """Collected facts that encode themselves as spans."""

    @property
    def context(self) -> SpanContext:
        """The sampled context of the spans, read by the processor."""

    def encode(self, spans: Any) -> None:
        """Append the spans to a repeated field of OTLP spans."""


def put(processor: SpanProcessor, bundle: Bundle) -> None:
    """Queue a bundle for export; takes about a microsecond."""
    processor.on_end(cast("ReadableSpan", bundle))


def set_attributes(message: Any, attributes: Mapping[str, str | bool | int | float]) -> None:
    """Add attributes to an OTLP message; None is not an allowed value."""
    entries = message.attributes
    for key, value in attributes.items():
        entry = entries.add(key=key).value
        if isinstance(value, str):
            entry.string_value = value
        elif isinstance(value, bool):
            entry.bool_value = value
        elif isinstance(value, int):
            entry.int_value = value
        else:
            entry.double_value = value


def set_error(span: Any, error: str) -> None:
    """Mark an OTLP span as failed with an error of the given class."""
    span.status.code = _STATUS_ERROR
    span.attributes.add(key=t.ERROR_TYPE).value.string_value = error
