"""The spans of one sampled session, made from the records of its cycles."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    set_span_in_context,
)

from gammaray.telemetry import names as t
from gammaray.types import DrafterKind
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.enums import DRAFTERS_BACK, ORIGINS_BACK
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Call
from orchestrator.telemetry.records import worker_call

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

    from gammaray.telemetry.span_ids import SpanIds

_CYCLE, _PROPOSE, _VERIFY, _COMMIT = range(4)
"""The spans of one cycle, by their offset among its four ids."""

_Values = Mapping[str, str | bool | int | float]


class SessionTrace:
    """Makes the spans of a session, whose generation began at `started_ns` since 1970.

    The span ids of its cycles are consecutive numbers from a random start, so that a block can name its
    parent before the parent span exists. In the cycles `readings` a draft worker prefilled a long prompt.
    """

    def __init__(self, span: Span, tracer: Tracer, ids: SpanIds, started_ns: int) -> None:
        self.span, self.num_cycles = span, 0
        self.readings: set[int] = set()
        self._tracer, self._ids, self._started_ns = tracer, ids, started_ns
        self._context, self._root = span.get_span_context(), set_span_in_context(span, Context())
        self._first_id = secrets.randbits(64)
        self._common: dict[str, str | int] = {}
        self._verification = ""

    def bind(self, session: Session) -> None:
        """Set the session's attributes, once the session is known."""
        self._common = {t.SESSION_ID: session.session_id, t.EPOCH: session.epoch}
        self._verification = session.method.value
        self.span.set_attribute(t.SESSION_ID, session.session_id)
        self.span.set_attribute(t.CONVERSATION_ID, session.session_id)

    def parent_of(self, role: str, index: int) -> str:
        """Return the `traceparent` for blocks to a worker in cycle number `index`."""
        span_id = self._id(index, _PROPOSE if role == "draft" else _VERIFY)
        return f"00-{self._context.trace_id:032x}-{span_id:016x}-01"

    def add_cycle(self, index: int, record: pb.CycleRecord, *, stored_ns: int = 0, error: str = "") -> None:
        """Add the spans of cycle number `index`; `stored_ns` is 0 if its tokens were not stored."""
        start = record.start_us * 1000
        end = start + record.total_us * 1000
        if index == 0:
            opened = max(start, self._started_ns)
            self._add(t.SPAN_OPEN, 0, self._root, self._started_ns, opened, self._common)
        cycle_id = self._id(index, _CYCLE)
        values = self._cycle_values(index, record)
        self._add(t.SPAN_CYCLE, cycle_id, self._root, start, end, values, error=error)
        cycle = self._as_parent(cycle_id)
        proposed = start + record.propose_us * 1000
        if record.HasField("draft"):
            is_notice = record.draft_ahead_hit and not record.draft.HasField("timing")
            kind = SpanKind.PRODUCER if is_notice else SpanKind.CLIENT
            values = {**_call_values(record.draft), t.DRAFT_AHEAD_HIT: record.draft_ahead_hit}
            propose_id, failed = self._id(index, _PROPOSE), record.draft.error
            self._add(t.SPAN_PROPOSE, propose_id, cycle, start, proposed, values, kind, failed)
        elif record.gamma and index not in self.readings:
            self._add(t.SPAN_PROPOSE, self._id(index, _PROPOSE), cycle, start, proposed, {})
        if record.HasField("target"):
            verified, values = proposed + record.verify_us * 1000, _call_values(record.target)
            verify_id, failed = self._id(index, _VERIFY), record.target.error
            self._add(t.SPAN_VERIFY, verify_id, cycle, proposed, verified, values, SpanKind.CLIENT, failed)
        if stored_ns:
            values = {t.CYCLE_INDEX: index, t.EMITTED: record.emitted}
            ended = max(end, stored_ns)
            self._add(t.SPAN_COMMIT, self._id(index, _COMMIT), self._root, end, ended, values)

    def add_reading(self, index: int, call: Call, clock_ns: int) -> None:
        """Add the span of a long prompt's prefill by a draft worker, begun in cycle number `index`."""
        began = clock_ns + round(call.began * 1e9)
        ended = clock_ns + round((call.ended or time.perf_counter()) * 1e9)
        record, span_id = worker_call(call), self._id(index, _PROPOSE)
        values, kind = _call_values(record), SpanKind.CLIENT
        self._add(t.SPAN_PROPOSE, span_id, self._root, began, ended, values, kind, record.error)

    def _add(
        self,
        name: str,
        span_id: int,
        parent: Context,
        start_ns: int,
        end_ns: int,
        values: _Values,
        kind: SpanKind = SpanKind.INTERNAL,
        error: str = "",
    ) -> None:
        self._ids.next_id = span_id
        span = self._tracer.start_span(name, parent, kind, values, start_time=start_ns)
        if error:
            span.set_attribute(t.ERROR_TYPE, error)
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)

    def _as_parent(self, span_id: int) -> Context:
        flags = self._context.trace_flags
        context = SpanContext(self._context.trace_id, span_id, is_remote=False, trace_flags=flags)
        return set_span_in_context(NonRecordingSpan(context), Context())

    def _id(self, index: int, part: int) -> int:
        return (self._first_id + 4 * index + part) % 2**64 or 2**63

    def _cycle_values(self, index: int, record: pb.CycleRecord) -> dict[str, str | bool | int | float]:
        drafter = DRAFTERS_BACK.get(record.drafter, DrafterKind.NONE)
        values: dict[str, str | bool | int | float] = {
            **self._common,
            t.CYCLE_INDEX: index,
            t.BASE_POSITION: record.base_position,
            t.VERIFICATION: self._verification,
            t.GAMMA: record.gamma,
            t.GAMMA_REASON: record.gamma_reason,
            t.DRAFTER: drafter.value,
            t.DRAFTED: record.drafted,
            t.TESTED: record.tested,
            t.ACCEPTED: record.accepted,
            t.EMITTED: record.emitted,
            t.DRAFT_FAILED: record.draft_failed,
        }
        if drafter.is_model:
            values[t.DRAFTER_VERSION] = record.drafter_version
        if record.next_origin:
            values[t.NEXT_ORIGIN] = ORIGINS_BACK[record.next_origin].value
        return values


def _call_values(call: pb.WorkerCall) -> dict[str, str | bool | int | float]:
    values: dict[str, str | bool | int | float] = {
        t.WORKER_ADDRESS: call.address,
        t.BLOCKS: call.blocks,
        t.REFED_TOKENS: call.refed_tokens,
        t.REQUEST_BYTES: call.request_bytes,
        t.RESPONSE_BYTES: call.response_bytes,
    }
    if call.HasField("timing"):
        timing = call.timing
        values[t.BATCH_SIZE], values[t.BATCH_TOKENS] = timing.batch_size, timing.batch_tokens
        values[t.QUEUE_MS], values[t.COMPUTE_MS] = timing.queue_us / 1e3, timing.compute_us / 1e3
        values[t.FORWARD_MS] = timing.forward_us / 1e3
    return values
