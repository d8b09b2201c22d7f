"""Spans of a sampled session: made from records, with the ids that blocks named before."""

from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from docs.make_telemetry import SPANS
from gammaray.telemetry import names as t
from gammaray.telemetry.span_ids import SpanIds
from gammaray.types import VerificationMethod
from gammaray.v1 import generation_service_pb2 as pb
from orchestrator.cycle.types import Call
from orchestrator.telemetry.spans import SessionTrace

START_US = 1_700_000_000_000_000
SESSION = SimpleNamespace(session_id="s", epoch=7, method=VerificationMethod.COUPLED)


class Traced:
    """A session's trace with what it exports.

    Attributes:
        trace: The trace.
        root: The span of the generation.
    """

    def __init__(self):
        ids, self._exporter = SpanIds(), InMemorySpanExporter()
        provider = TracerProvider(id_generator=ids, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        tracer = provider.get_tracer("test")
        self.root = tracer.start_span(t.SPAN_GENERATE)
        self.trace = SessionTrace(self.root, tracer, ids, (START_US - 500) * 1000)
        self.trace.bind(SESSION)

    @property
    def spans(self):
        """The ended spans, by name."""
        return {span.name: span for span in self._exporter.get_finished_spans()}


def call(error="", *, is_answered=True):
    record = pb.WorkerCall(address="h:1", blocks=1, request_bytes=20, response_bytes=10, error=error)
    if is_answered:
        record.timing.compute_us = 900
    return record


def cycle(*, draft=None, target=None, **fields):
    values = {"start_us": START_US, "total_us": 3000, "propose_us": 1000, "verify_us": 1900, "gamma": 4}
    record = pb.CycleRecord(**{**values, **fields})
    for name, one in (("draft", draft), ("target", target)):
        if one is not None:
            getattr(record, name).CopyFrom(one)
    return record


def id_in(traceparent):
    return int(traceparent.split("-")[2], 16)


def assert_as_documented(span):
    kind = span.kind.name.lower()
    spec = next(
        one for one in SPANS if (one.name, one.kind, one.process) == (span.name, kind, "orchestrator")
    )
    names = set(span.attributes)
    assert set(spec.always) <= names <= {*spec.always, *spec.sometimes}


def test_cycle_has_the_documented_spans_below_the_generation():
    traced = Traced()
    named = {role: id_in(traced.trace.parent_of(role, 0)) for role in ("draft", "target")}
    record = cycle(draft=call(), target=call())
    traced.trace.add_cycle(0, record, stored_ns=(START_US + 3200) * 1000)
    spans = traced.spans
    assert list(spans) == [t.SPAN_OPEN, t.SPAN_CYCLE, t.SPAN_PROPOSE, t.SPAN_VERIFY, t.SPAN_COMMIT]
    for span in spans.values():
        assert_as_documented(span)
        assert span.context.trace_id == traced.root.get_span_context().trace_id
    root, own = traced.root.get_span_context().span_id, spans[t.SPAN_CYCLE].context.span_id
    parents = {name: span.parent.span_id for name, span in spans.items()}
    assert parents == {
        **dict.fromkeys((t.SPAN_OPEN, t.SPAN_CYCLE, t.SPAN_COMMIT), root),
        **dict.fromkeys((t.SPAN_PROPOSE, t.SPAN_VERIFY), own),
    }
    assert spans[t.SPAN_PROPOSE].context.span_id == named["draft"]
    assert spans[t.SPAN_VERIFY].context.span_id == named["target"]
    times = {
        name: (one.start_time // 1000 - START_US, one.end_time // 1000 - START_US)
        for name, one in spans.items()
    }
    assert times == {
        t.SPAN_OPEN: (-500, 0),
        t.SPAN_CYCLE: (0, 3000),
        t.SPAN_PROPOSE: (0, 1000),
        t.SPAN_VERIFY: (1000, 2900),
        t.SPAN_COMMIT: (3000, 3200),
    }


def test_ids_are_unique_and_random_again_after_those_of_cycles():
    traced = Traced()
    for index in range(3):
        traced.trace.add_cycle(index, cycle(draft=call(), target=call()), stored_ns=START_US * 1000)
    named = {id_in(traced.trace.parent_of(role, index)) for role in ("draft", "target") for index in range(3)}
    assert len(named) == 6
    ids = SpanIds()
    ids.next_id = 5
    assert ids.generate_span_id() == 5
    assert ids.generate_span_id() != ids.generate_span_id()


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (cycle(draft=call(), draft_ahead_hit=True), "CLIENT"),
        (cycle(draft=call(is_answered=False), draft_ahead_hit=True), "PRODUCER"),
        (cycle(), "INTERNAL"),
    ],
    ids=["asked", "notified", "no draft worker"],
)
def test_proposal_has_the_kind_of_its_source(record, kind):
    traced = Traced()
    traced.trace.add_cycle(1, record)
    assert_as_documented(traced.spans[t.SPAN_PROPOSE])
    assert traced.spans[t.SPAN_PROPOSE].kind.name == kind


def test_plain_cycle_and_prefilling_one_have_no_span_of_a_proposal():
    traced = Traced()
    traced.trace.readings.add(2)
    traced.trace.add_cycle(1, cycle(gamma=0))
    traced.trace.add_cycle(2, cycle())
    assert set(traced.spans) == {t.SPAN_CYCLE}


def test_errors_are_marked_on_their_span():
    traced = Traced()
    traced.trace.add_cycle(1, cycle(draft=call("UnavailableError"), target=call()), error="InternalError")
    failed = {name: span.attributes.get(t.ERROR_TYPE) for name, span in traced.spans.items()}
    assert failed == {t.SPAN_CYCLE: "InternalError", t.SPAN_PROPOSE: "UnavailableError", t.SPAN_VERIFY: None}
    for name, error in failed.items():
        assert (traced.spans[name].status.status_code is StatusCode.ERROR) == (error is not None)


def test_concurrent_prefill_is_a_span_below_the_generation():
    traced, prefill = Traced(), Call(parent="")
    prefill.address, prefill.began, prefill.ended = "h:1", 1.0, 3.5
    traced.trace.add_reading(0, prefill, clock_ns=START_US * 1000)
    span = traced.spans[t.SPAN_PROPOSE]
    assert_as_documented(span)
    assert span.context.span_id == id_in(traced.trace.parent_of("draft", 0))
    assert span.parent.span_id == traced.root.get_span_context().span_id
    assert span.end_time - span.start_time == 2_500_000_000
