"""Exports spans over OTLP/gRPC: those of the SDK, and bundles (`gammaray.telemetry.spans`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from gammaray import __version__
from gammaray.telemetry.spans import Bundle, set_attributes

_SLICE = 4
"""Bundles encoded before the thread yields, so that the event loop does not wait for a whole batch."""


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
