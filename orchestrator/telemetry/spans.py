"""The spans of one sampled session: their ids, and their encoding from the session's records."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from gammaray.telemetry import names as t
from gammaray.telemetry.spans import put, set_attributes, set_error
from gammaray.types import DrafterKind
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.enums import DRAFTERS_BACK, ORIGINS_BACK
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Call
from orchestrator.telemetry.records import worker_call

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span, SpanContext

_INTERNAL, _CLIENT, _PRODUCER = 1, 3, 4
_FLAGS = 0x101
"""W3C trace flag "sampled", and OTLP's flag for a parent known not to be remote."""

_CYCLE, _PROPOSE, _VERIFY, _COMMIT = range(4)
"""The spans of one cycle, by their offset among its four ids."""


class SessionTrace:
    """State shared by the spans of a session.

    The span ids of its cycles are consecutive numbers from a random start, so that a block can name its
    parent before the parent span exists.

    Args:
        span: The span of the generation.
        processor: Receives the other spans.
        started_ns: When the generation began, in nanoseconds since 1970.

    Attributes:
        span: The span of the generation.
        context: Its context.
        num_cycles: Number of cycles; set at the end.
        readings: Cycles whose propose span covers the prefill of a long prompt.
    """

    def __init__(self, span: Span, processor: SpanProcessor, started_ns: int) -> None:
        self.span, self.context = span, span.get_span_context()
        self.started_ns = started_ns
        self.num_cycles = 0
        self.readings: set[int] = set()
        self.common: dict[str, str | int] = {}
        self.verification = ""
        self._processor = processor
        self._first_id = secrets.randbits(64)
        self._trace_id = self.context.trace_id.to_bytes(16, "big")
        self._root_id = self.context.span_id.to_bytes(8, "big")
        self._prefix = f"00-{self.context.trace_id:032x}-"

    @property
    def traceparent(self) -> str:
        """The context of the generation's span, as sent to other processes."""
        return f"{self._prefix}{self.context.span_id:016x}-01"

    def bind(self, session: Session) -> None:
        """Set the session's attributes, once the session is known."""
        self.common = {t.SESSION_ID: session.session_id, t.EPOCH: session.epoch}
        self.verification = session.method.value
        self.span.set_attribute(t.SESSION_ID, session.session_id)
        self.span.set_attribute(t.CONVERSATION_ID, session.session_id)

    def put(self, bundle: CycleBundle | ReadingBundle) -> None:
        """Queue spans for export."""
        put(self._processor, bundle)

    def parent_of(self, role: str, index: int) -> str:
        """Return the `traceparent` for blocks to a worker in cycle number `index`."""
        return f"{self._prefix}{self._id(index, _PROPOSE if role == 'draft' else _VERIFY):016x}-01"

    def add(
        self, spans: Any, name: str, index: int, part: int, start_ns: int, end_ns: int, kind: int = _INTERNAL
    ) -> Any:
        """Add a span of cycle number `index` to a repeated field and return its attributes."""
        of_cycle = part in (_PROPOSE, _VERIFY) and name != t.SPAN_OPEN
        parent = self._id(index, _CYCLE).to_bytes(8, "big") if of_cycle else self._root_id
        return spans.add(
            trace_id=self._trace_id,
            span_id=self._id(index, part).to_bytes(8, "big"),
            parent_span_id=parent,
            name=name,
            kind=kind,
            start_time_unix_nano=start_ns,
            end_time_unix_nano=end_ns,
            flags=_FLAGS,
        )

    def _id(self, index: int, part: int) -> int:
        return (self._first_id + 4 * index + part) % 2**64 or 2**63


class CycleBundle:
    """The spans of one cycle.

    Args:
        trace: Their session's trace.
        index: Number of the cycle, from 0.
        record: Record of the cycle.
        stored_ns: When its tokens were stored, in nanoseconds since 1970; 0 when they were not.
        error: Class of the error that ended it, or empty.
    """

    __slots__ = ("_error", "_index", "_record", "_stored_ns", "_trace")

    def __init__(
        self, trace: SessionTrace, index: int, record: pb.CycleRecord, *, stored_ns: int = 0, error: str = ""
    ) -> None:
        self._trace, self._index, self._record = trace, index, record
        self._stored_ns, self._error = stored_ns, error

    @property
    def context(self) -> SpanContext:
        """Context of the generation's span."""
        return self._trace.context

    def encode(self, spans: Any) -> None:
        """Add the spans to a repeated field of OTLP spans."""
        trace, record = self._trace, self._record
        start = record.start_us * 1000
        end = start + record.total_us * 1000
        if self._index == 0:
            # Its id precedes those of the first cycle.
            opened = trace.add(
                spans, t.SPAN_OPEN, -1, _COMMIT, trace.started_ns, max(start, trace.started_ns)
            )
            set_attributes(opened, trace.common)
        self._encode_cycle(trace.add(spans, t.SPAN_CYCLE, self._index, _CYCLE, start, end))
        proposed = start + record.propose_us * 1000
        if record.HasField("draft") or (record.gamma and self._index not in trace.readings):
            kind = _INTERNAL
            if record.HasField("draft"):
                is_notice = record.draft_ahead_hit and not record.draft.HasField("timing")
                kind = _PRODUCER if is_notice else _CLIENT
            span = trace.add(spans, t.SPAN_PROPOSE, self._index, _PROPOSE, start, proposed, kind)
            if record.HasField("draft"):
                _write_call(span, record.draft)
                span.attributes.add(key=t.DRAFT_AHEAD_HIT).value.bool_value = record.draft_ahead_hit
        if record.HasField("target"):
            verified = proposed + record.verify_us * 1000
            span = trace.add(spans, t.SPAN_VERIFY, self._index, _VERIFY, proposed, verified, _CLIENT)
            _write_call(span, record.target)
        if self._stored_ns:
            span = trace.add(spans, t.SPAN_COMMIT, self._index, _COMMIT, end, max(end, self._stored_ns))
            set_attributes(span, {t.CYCLE_INDEX: self._index, t.EMITTED: record.emitted})

    def _encode_cycle(self, span: Any) -> None:
        trace, record = self._trace, self._record
        values: dict[str, str | int] = {
            **trace.common,
            t.CYCLE_INDEX: self._index,
            t.BASE_POSITION: record.base_position,
            t.VERIFICATION: trace.verification,
            t.GAMMA: record.gamma,
            t.GAMMA_REASON: record.gamma_reason,
            t.DRAFTER: DRAFTERS_BACK.get(record.drafter, DrafterKind.NONE).value,
            t.DRAFTED: record.drafted,
            t.TESTED: record.tested,
            t.ACCEPTED: record.accepted,
            t.EMITTED: record.emitted,
            t.DRAFT_FAILED: record.draft_failed,
        }
        if record.next_origin:
            values[t.NEXT_ORIGIN] = ORIGINS_BACK[record.next_origin].value
        set_attributes(span, values)
        if self._error:
            set_error(span, self._error)


class ReadingBundle:
    """The span of a draft worker that prefills a long prompt concurrently with the cycles.

    Args:
        trace: Its session's trace.
        index: Number of the cycle in which it began.
        call: The call to the worker.
        clock_ns: Nanoseconds since 1970 at which `time.perf_counter()` was 0.
    """

    __slots__ = ("_call", "_clock_ns", "_index", "_trace")

    def __init__(self, trace: SessionTrace, index: int, call: Call, clock_ns: int) -> None:
        self._trace, self._index, self._call, self._clock_ns = trace, index, call, clock_ns

    @property
    def context(self) -> SpanContext:
        """Context of the generation's span."""
        return self._trace.context

    def encode(self, spans: Any) -> None:
        """Add the span to a repeated field of OTLP spans."""
        call, trace = self._call, self._trace
        began = self._clock_ns + round(call.began * 1e9)
        ended = self._clock_ns + round((call.ended or call.began) * 1e9)
        span = trace.add(spans, t.SPAN_PROPOSE, self._index, _PROPOSE, began, ended, _CLIENT)
        span.parent_span_id = trace.context.span_id.to_bytes(8, "big")
        _write_call(span, worker_call(call))


def _write_call(span: Any, call: pb.WorkerCall) -> None:
    values: dict[str, str | int | float] = {
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
    set_attributes(span, values)
    if call.error:
        set_error(span, call.error)
