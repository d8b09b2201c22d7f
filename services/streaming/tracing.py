"""The worker's spans of sampled sessions: one per block, recorded after its answer was sent."""

from __future__ import annotations

import re
import secrets
import time
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import SpanContext, TraceFlags

from gammaray.blocks import Verdict
from gammaray.errors import GammarayError
from gammaray.telemetry import names as t
from gammaray.telemetry.spans import put, set_attributes, set_error
from gammaray.types import Proposal
from services.scheduling.tasks import NeedTokens, ProposeTask, Reply, Task, VerifyTask

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f][13579bdf]")
_SAMPLED = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
_SERVER, _CONSUMER = 2, 5


def sampled_parent(traceparent: str) -> str:
    """Return a block's `traceparent`, or an empty string when it is not sampled or invalid."""
    return traceparent if _TRACEPARENT.fullmatch(traceparent) else ""


class BlockTracer:
    """Queues the spans of blocks for export.

    Args:
        processor: Span processor of the process.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        self._processor = processor

    def answered(self, task: Task, reply: Reply) -> None:
        """Record that a block of a sampled session was answered now."""
        put(self._processor, _BlockBundle(task, reply, time.time_ns(), time.monotonic()))


class _BlockBundle:
    """The span of one block.

    Args:
        task: The block.
        reply: Its answer.
        end_ns: When it was answered, in nanoseconds since 1970.
        ended: The same as `time.monotonic()`.
    """

    __slots__ = ("_end_ns", "_ended", "_reply", "_task")

    context = _SAMPLED

    def __init__(self, task: Task, reply: Reply, end_ns: int, ended: float) -> None:
        self._task, self._reply, self._end_ns, self._ended = task, reply, end_ns, ended

    def encode(self, spans: Any) -> None:
        """Add the span to a repeated field of OTLP spans."""
        task, timing, outcome = self._task, self._reply.timing, self._reply.outcome
        is_notice = isinstance(task, ProposeTask) and task.is_notice
        span = spans.add(
            trace_id=bytes.fromhex(task.traceparent[3:35]),
            span_id=secrets.token_bytes(8),
            parent_span_id=bytes.fromhex(task.traceparent[36:52]),
            name=t.SPAN_PROPOSE if isinstance(task, ProposeTask) else t.SPAN_VERIFY,
            kind=_CONSUMER if is_notice else _SERVER,
            start_time_unix_nano=self._end_ns - round((self._ended - task.arrived) * 1e9),
            end_time_unix_nano=self._end_ns,
            flags=0x301,  # sampled, and the parent is known to be remote
        )
        values: dict[str, str | int | float] = {
            t.SESSION_ID: task.session_id,
            t.QUEUE_MS: timing.queue_us / 1e3,
            t.COMPUTE_MS: timing.compute_us / 1e3,
            t.FORWARD_MS: timing.forward_us / 1e3,
            **_counts(task, self._reply),
        }
        if isinstance(task, ProposeTask):
            is_hit = isinstance(outcome, Proposal) and len(outcome) > 0 and timing.num_forwards == 0
            values[t.DRAFT_AHEAD_HIT] = is_hit or is_notice
        elif isinstance(outcome, Verdict):
            values[t.NEXT_ORIGIN] = outcome.next_origin.value
        if timing.head_us:
            values[t.HEAD_MS] = timing.head_us / 1e3
        if timing.mask_us:
            values[t.MASK_MS] = timing.mask_us / 1e3
        set_attributes(span, values)
        if isinstance(outcome, GammarayError):
            set_error(span, type(outcome).__name__)


def _counts(task: Task, reply: Reply) -> dict[str, int]:
    timing, outcome = reply.timing, reply.outcome
    counts: dict[str, int] = {
        t.EPOCH: task.epoch,
        t.BASE_POSITION: task.base_position,
        t.STEPS: timing.num_forwards,
        t.BATCH_SIZE: timing.batch_size,
        t.BATCH_TOKENS: timing.batch_tokens,
        t.DRAFTED: len(outcome) if isinstance(outcome, Proposal) else 0,
    }
    if isinstance(task, ProposeTask):
        counts[t.GAMMA] = task.shape.depth
    if isinstance(outcome, NeedTokens):
        counts[t.NEEDS_FROM] = outcome.position
    elif isinstance(task, VerifyTask):
        counts[t.DRAFTED] = len(task.proposal)
        if isinstance(outcome, Verdict):
            counts[t.TESTED] = outcome.num_tested
            counts[t.ACCEPTED] = len(outcome.accepted_path)
    return counts
