"""Spans of a worker's blocks: children of the caller's span, as documented."""

import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from gammaray.errors import DeadlineExceededError
from gammaray.telemetry import names as t
from services.scheduling.tasks import Reply, Timing
from services.streaming.tracing import record_answer, sampled_parent
from tests.support.vllm_helpers import Session

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TIMING = Timing(queue_us=10, compute_us=900, forward_us=800, batch_size=2, batch_tokens=9, num_forwards=1)


def test_failed_block_has_its_error_in_a_span_below_its_caller():
    """tests/integration/test_tracing_workers.py has those of other outcomes."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    task = Session([1, 2, 3]).block((5, 6), traceparent=PARENT)
    task.arrived = time.monotonic() - 0.05
    reply = Reply(task.request_id, task.session_id, DeadlineExceededError("late"), TIMING)
    record_answer(provider.get_tracer("test"), task, reply)
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind.name) == (t.SPAN_VERIFY, "SERVER")
    assert f"{span.context.trace_id:032x}-{span.parent.span_id:016x}" in PARENT
    assert 50_000_000 <= span.end_time - span.start_time < 5_000_000_000
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes[t.ERROR_TYPE], span.attributes[t.DRAFTED]) == ("DeadlineExceededError", 2)


@pytest.mark.parametrize("traceparent", ["", PARENT[:-1] + "0", PARENT.upper(), PARENT + "0"])
def test_block_that_is_not_sampled_has_no_parent(traceparent):
    assert sampled_parent(traceparent) == ""
    assert sampled_parent(PARENT) == PARENT
