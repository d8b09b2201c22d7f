"""Cheap spans: facts are collected while serving, and converted to spans later, in the export thread.

Spans of the SDK are expensive to create and more so to encode: the four of a cycle take the orchestrator
425 us instead of 61 us (`python -m benchmarks.spans_cost`, 2026-11-22). Serving therefore only does one `put`
of a `Bundle` into the SDK's batch processor, whose thread lets the bundle write its spans directly into the
OTLP message. Sampling, batching, retries and transport are the SDK's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol, cast

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import SpanContext

from gammaray import __version__

__all__ = ["Bundle", "Exporter", "put", "set_attributes"]

_SLICE = 4
"""Bundles encoded before the thread yields, so that the event loop does not wait for a whole batch."""


class Bundle(Protocol):
    """Collected facts that encode themselves as spans."""

    @property
    def context(self) -> SpanContext:
        """The sampled context of the spans, read by the processor."""

    def encode(self, spans: Any) -> None:
        """Append the spans to a repeated field of OTLP spans."""


def put(processor: SpanProcessor, bundle: Bundle) -> None:
    """Queue a bundle for export; takes about a microsecond."""
    processor.on_end(cast(ReadableSpan, bundle))


def set_attributes(message: Any, attributes: dict[str, str | bool | int | float]) -> None:
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


class Exporter(OTLPSpanExporter):
    """The SDK's OTLP/gRPC exporter, which also takes bundles.

    Args:
        resource: Resource of the process.
    """

    def __init__(self, resource: Resource) -> None:
        super().__init__()
        self._resource = resource_pb2.Resource()
        set_attributes(self._resource, cast(Any, resource.attributes))
        self._scope = common_pb2.InstrumentationScope(name="gammaray", version=__version__)

    def _translate_data(self, data: Sequence[ReadableSpan | Bundle]) -> ExportTraceServiceRequest:
        request = encode_spans([span for span in data if isinstance(span, ReadableSpan)])
        bundles = [bundle for bundle in data if not isinstance(bundle, ReadableSpan)]
        if bundles:
            scope_spans = request.resource_spans.add(resource=self._resource).scope_spans.add(
                scope=self._scope
            )
            for number, bundle in enumerate(bundles, start=1):
                bundle.encode(scope_spans.spans)
                if number % _SLICE == 0:
                    time.sleep(0)
        return request
