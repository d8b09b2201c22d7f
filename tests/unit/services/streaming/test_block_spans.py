"""Spans of a worker's blocks: children of the caller's span, as documented."""

import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from docs.make_telemetry import SPANS
from gammaray.blocks import Shape
from gammaray.errors import DeadlineExceededError
from gammaray.telemetry import names as t
from gammaray.types import Proposal
from services.scheduling.tasks import NeedTokens, ProposeTask, Reply, Timing, VerifyTask
from services.streaming.tracing import BlockTracer, sampled_parent

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BLOCK = {
    "request_id": 1,
    "session_id": "s",
    "epoch": 7,
    "base_position": 3,
    "context_start": 0,
    "context": (1, 2, 3),
    "spec": None,
    "deadline": 0.0,
    "deliver": lambda task, reply: None,
    "traceparent": PARENT,
}
TIMING = Timing(queue_us=10, compute_us=900, forward_us=800, batch_size=2, batch_tokens=9, num_forwards=1)


def span_of(task, outcome):
    """Return the span of a block that arrived 50 ms ago and is answered now."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    task.arrived = time.monotonic() - 0.05
    BlockTracer(provider.get_tracer("test")).answered(task, Reply(1, "s", outcome, TIMING))
    (span,) = exporter.get_finished_spans()
    return span


def propose(**fields):
    return ProposeTask(**BLOCK, shape=Shape(4), **fields)


def verify():
    return VerifyTask(**BLOCK, proposal=Proposal((5, 6)), num_top_logprobs=None)


@pytest.mark.parametrize(
    ("task", "outcome", "name", "kind", "values"),
    [
        (propose(), Proposal((5,)), t.SPAN_PROPOSE, "SERVER", {t.GAMMA: 4, t.DRAFTED: 1}),
        (propose(is_notice=True), None, t.SPAN_PROPOSE, "CONSUMER", {t.DRAFT_AHEAD_HIT: True}),
        (verify(), NeedTokens(1), t.SPAN_VERIFY, "SERVER", {t.NEEDS_FROM: 1}),
        (verify(), DeadlineExceededError("late"), t.SPAN_VERIFY, "SERVER", {t.DRAFTED: 2}),
    ],
    ids=["proposal", "notice", "missing tokens", "error"],
)
def test_block_has_the_documented_span_below_its_caller(task, outcome, name, kind, values):
    span = span_of(task, outcome)
    assert (span.name, span.kind.name) == (name, kind)
    process = "draft" if name == t.SPAN_PROPOSE else "target"
    spec = next(one for one in SPANS if (one.name, one.kind, one.process) == (name, kind.lower(), process))
    assert set(spec.always) <= set(span.attributes) <= {*spec.always, *spec.sometimes}
    assert values.items() <= dict(span.attributes).items()
    assert f"{span.context.trace_id:032x}-{span.parent.span_id:016x}" in PARENT
    assert 50_000_000 <= span.end_time - span.start_time < 5_000_000_000
    is_error = isinstance(outcome, DeadlineExceededError)
    assert (span.status.status_code is StatusCode.ERROR) == is_error
    assert span.attributes.get(t.ERROR_TYPE) == ("DeadlineExceededError" if is_error else None)


@pytest.mark.parametrize("traceparent", ["", PARENT[:-1] + "0", PARENT.upper(), PARENT + "0"])
def test_block_that_is_not_sampled_has_no_parent(traceparent):
    assert sampled_parent(traceparent) == ""
    assert sampled_parent(PARENT) == PARENT
