"""Spans that cost little: facts are gathered while serving, spans made of them later, in the export thread.

A span of the SDK is dear to make and dearer to encode, and a cycle has five. So what happens while serving is
one `put` of a `Bundle` into the SDK's own batch processor; its thread has the bundle write its spans straight
into the OTLP message. Sampling, batching, retries and transport stay the SDK's.
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
"""Bundles encoded before other threads get their turn: the event loop must not wait for all of a batch."""


class Bundle(Protocol):
    """Facts of which spans are made."""

    @property
    def context(self) -> SpanContext:
        """The sampled context that the spans belong to; the processor asks for it."""

    def encode(self, spans: Any) -> None:
        """Add the spans to a repeated field of OTLP spans."""


def put(processor: SpanProcessor, bundle: Bundle) -> None:
    """Queue a bundle for export; takes about a microsecond."""
    processor.on_end(cast(ReadableSpan, bundle))


def set_attributes(message: Any, attributes: dict[str, str | bool | int | float]) -> None:
    """Add attributes to an OTLP message that has them; None is not allowed."""
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
        resource: What the process is.
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
