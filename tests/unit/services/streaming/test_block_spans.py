"""Spans of a worker's blocks: children of the caller's span, as documented."""

import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from gammaray.blocks import Verdict
from gammaray.errors import DeadlineExceededError
from gammaray.telemetry import names as t
from gammaray.types import TokenOrigin
from services.scheduling.tasks import NeedTokens, Release, Reply, Timing
from services.streaming.tracing import record_ahead, record_answer, sampled_parent
from tests.support.draft_helpers import Drafter, TableEngine
from tests.support.vllm_helpers import Session, answer

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TIMING = Timing(queue_us=10, compute_us=900, forward_us=800, batch_size=2, batch_tokens=9, num_forwards=1)


def recorded(record, task, outcome):
    """Return the spans that one of the functions under test records."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    record(provider.get_tracer("test"), task, outcome)
    return exporter.get_finished_spans()


def test_failed_block_has_its_error_in_a_span_below_its_caller():
    """tests/integration/test_tracing_workers.py has those of other outcomes."""
    task = Session([1, 2, 3]).block((5, 6), traceparent=PARENT)
    task.arrived = time.monotonic() - 0.05
    reply = Reply(task.request_id, task.session_id, DeadlineExceededError("late"), TIMING)
    (span,) = recorded(record_answer, task, reply)
    assert (span.name, span.kind.name) == (t.SPAN_VERIFY, "SERVER")
    assert f"{span.context.trace_id:032x}-{span.parent.span_id:016x}" in PARENT
    assert 50_000_000 <= span.end_time - span.start_time < 5_000_000_000
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes[t.ERROR_TYPE], span.attributes[t.DRAFTED]) == ("DeadlineExceededError", 2)


@pytest.mark.parametrize("traceparent", ["", PARENT[:-1] + "0", PARENT.upper(), PARENT + "0"])
def test_block_that_is_not_sampled_has_no_parent(traceparent):
    assert sampled_parent(traceparent) == ""
    assert sampled_parent(PARENT) == PARENT


def test_early_block_has_a_span_only_if_it_is_served():
    task = Session([1, 2, 3]).block((5, 6), traceparent=PARENT)
    verdict = Reply(task.request_id, task.session_id, Verdict((0,), 7, TokenOrigin.CORRECTION, 2), TIMING)
    for task.is_conditional in (False, True):
        (span,) = recorded(record_answer, task, verdict)
        assert span.attributes[t.EARLY] == task.is_conditional
    assert not recorded(record_answer, task, Reply(task.request_id, task.session_id, NeedTokens(3)))


def drafted_ahead(traceparent, num_steps=10**6):
    """Return the drafting task of a session that then ends, and what is reported of its draft-ahead."""
    ahead = Drafter(TableEngine(), ahead_rows=1)
    task = ahead.task([1, 2, 3, 4], 6)
    task.traceparent = traceparent
    ahead.scheduler.submit([task])
    answer(ahead.scheduler, task)
    before, replies = ahead.engine.num_steps, []
    while ahead.scheduler.has_work and ahead.engine.num_steps - before < num_steps:
        replies += ahead.scheduler.step()
    ahead.scheduler.release([Release(task.session_id)])
    while ahead.scheduler.has_work:
        replies += ahead.scheduler.step()
    return task, [reply.outcome for _, reply in replies], ahead.engine.num_steps - before


@pytest.mark.parametrize(("num_steps", "is_stopped"), [(2, True), (10**6, False)])
def test_draft_ahead_of_a_sampled_session_is_one_span(num_steps, is_stopped):
    start_ns = time.time_ns()
    task, (work,), num_forwards = drafted_ahead(PARENT, num_steps)
    (span,) = recorded(record_ahead, task, work)
    assert (span.name, f"{span.parent.span_id:016x}") == (t.SPAN_AHEAD, PARENT.split("-")[2])
    assert start_ns < span.start_time < span.end_time < time.time_ns()
    assert (span.attributes[t.STEPS], span.attributes[t.AHEAD_STOPPED]) == (num_forwards, is_stopped)
    assert num_forwards > 1


def test_draft_ahead_of_other_sessions_is_not_reported():
    task, reports, num_forwards = drafted_ahead("")
    assert (task.ahead, reports) == (None, [])
    assert num_forwards > 1
