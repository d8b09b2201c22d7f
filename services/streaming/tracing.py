"""The worker's spans of sampled sessions: one per block, recorded after its answer was sent."""

from __future__ import annotations

import re
import time

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gammaray.blocks import Verdict
from gammaray.errors import GammarayError
from gammaray.telemetry import names as t
from gammaray.types import Proposal
from services.scheduling.tasks import AheadWork, NeedTokens, ProposeTask, Reply, Task, VerifyTask

_PROPAGATOR = TraceContextTextMapPropagator()
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f][13579bdf]")


def sampled_parent(traceparent: str) -> str:
    """Return a block's `traceparent`, or an empty string when it is not sampled or invalid."""
    return traceparent if _TRACEPARENT.fullmatch(traceparent) else ""


def record_answer(tracer: Tracer, task: Task, reply: Reply) -> None:
    """Record the span of a block of a sampled session that was answered now; early ones in vain have none."""
    if task.is_conditional and not isinstance(reply.outcome, Verdict):
        return
    end_ns, took_s = time.time_ns(), time.monotonic() - task.arrived
    span = tracer.start_span(
        t.SPAN_PROPOSE if isinstance(task, ProposeTask) else t.SPAN_VERIFY,
        context=_PROPAGATOR.extract({"traceparent": task.traceparent}, Context()),
        kind=SpanKind.CONSUMER if task.is_notice else SpanKind.SERVER,
        attributes=_attributes(task, reply),
        start_time=end_ns - round(took_s * 1e9),
    )
    if isinstance(reply.outcome, GammarayError):
        span.set_attribute(t.ERROR_TYPE, type(reply.outcome).__name__)
        span.set_status(Status(StatusCode.ERROR))
    span.end(end_ns)


def record_ahead(tracer: Tracer, task: Task, work: AheadWork) -> None:
    """Record the span of what was drafted ahead after a block of a sampled session."""
    zero_ns = time.time_ns() - time.monotonic_ns()
    span = tracer.start_span(
        t.SPAN_AHEAD,
        context=_PROPAGATOR.extract({"traceparent": task.traceparent}, Context()),
        attributes={
            t.SESSION_ID: task.session_id,
            t.EPOCH: task.epoch,
            t.BASE_POSITION: task.base_position,
            t.STEPS: work.num_forwards,
            t.AHEAD_STOPPED: work.is_stopped,
        },
        start_time=zero_ns + round(work.began * 1e9),
    )
    span.end(zero_ns + round(work.ended * 1e9))


def _attributes(task: Task, reply: Reply) -> dict[str, str | bool | int | float]:
    timing, outcome = reply.timing, reply.outcome
    values: dict[str, str | bool | int | float] = {
        t.SESSION_ID: task.session_id,
        t.EPOCH: task.epoch,
        t.BASE_POSITION: task.base_position,
        t.QUEUE_MS: timing.queue_us / 1e3,
        t.COMPUTE_MS: timing.compute_us / 1e3,
        t.FORWARD_MS: timing.forward_us / 1e3,
        t.STEPS: timing.num_forwards,
        t.BATCH_SIZE: timing.batch_size,
        t.BATCH_TOKENS: timing.batch_tokens,
        t.DRAFTED: len(outcome) if isinstance(outcome, Proposal) else 0,
    }
    if isinstance(task, ProposeTask):
        is_hit = isinstance(outcome, Proposal) and len(outcome) > 0 and timing.num_forwards == 0
        values[t.DRAFT_AHEAD_HIT] = is_hit or task.is_notice
        values[t.GAMMA] = task.shape.depth
    if isinstance(outcome, NeedTokens):
        values[t.NEEDS_FROM] = outcome.position
    elif isinstance(task, VerifyTask):
        values[t.DRAFTED], values[t.EARLY] = len(task.proposal), task.is_conditional
    if isinstance(outcome, Verdict):
        values[t.NEXT_ORIGIN] = outcome.next_origin.value
        values[t.TESTED] = outcome.num_tested
        values[t.ACCEPTED] = len(outcome.accepted_path)
    if timing.head_us:
        values[t.HEAD_MS] = timing.head_us / 1e3
    if timing.mask_us:
        values[t.MASK_MS] = timing.mask_us / 1e3
    return values
