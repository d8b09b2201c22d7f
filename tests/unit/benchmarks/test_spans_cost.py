"""The spans whose costs are compared are the same ones."""

from __future__ import annotations

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans

from benchmarks.spans_cost import Recorded, Sdk, make_variants


def described(spans):
    """Return name, kind, times, attributes and the parent's name of each span, in order of their names."""
    names = {span.span_id: span.name for span in spans}
    return sorted(
        (
            span.name,
            span.kind,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            sorted((entry.key, str(entry.value)) for entry in span.attributes),
            names.get(span.parent_span_id, ""),
        )
        for span in spans
    )


@pytest.mark.parametrize(("process", "num_spans"), [("orchestrator", 4), ("workers", 2)])
def test_both_variants_export_the_same_spans(process, num_spans):
    recorded, sdk = make_variants()
    getattr(sdk, process)(1)
    request = ExportTraceServiceRequest.FromString(Sdk.encode(sdk.take()))
    by_sdk = request.resource_spans[0].scope_spans[0].spans
    getattr(recorded, process)(1)
    by_records = ScopeSpans.FromString(Recorded.encode(recorded.take())).spans
    assert len(by_records) == num_spans
    if process == "workers":  # these are recorded when the answer is sent: now
        for span in (*by_sdk, *by_records):
            span.start_time_unix_nano = span.end_time_unix_nano = 0
    assert described(by_sdk) == described(by_records)
