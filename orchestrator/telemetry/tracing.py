"""The span of a generation: its parent, the sampling decision, and its final attributes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gammaray.aio import BackgroundTasks
from gammaray.telemetry import names as t
from gammaray.telemetry.otel import Telemetry
from gammaray.types import Chunk, FinishReason, GenerationRequest
from orchestrator.access.caller import Caller
from orchestrator.cycle.session import Session
from orchestrator.storage.trace_store import RedisTraceStore
from orchestrator.telemetry.cycle_log import CycleLog
from orchestrator.telemetry.spans import SessionTrace

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_PROPAGATOR = TraceContextTextMapPropagator()


class RequestSpan:
    """The span of one generation; without a `trace`, as it is not sampled, nothing is recorded."""

    def __init__(self, trace: SessionTrace | None) -> None:
        self.trace = trace
        self._last: Chunk | None = None

    def deliver(self, chunk: Chunk) -> None:
        self._last = chunk

    def compiled(self, seconds: float) -> None:
        """Note that the request's grammar was compiled."""
        if self.trace is not None:
            self.trace.span.set_attribute(t.COMPILE_MS, seconds * 1e3)

    def end(self, error: BaseException | None) -> None:
        """Set the final attributes from the last chunk or the error of the generation, and end the span."""
        if self.trace is None:
            return
        span: Span = self.trace.span
        last = self._last
        span.set_attribute(t.CYCLES, self.trace.num_cycles)
        if last is not None and last.finish_reason is not None:
            span.set_attribute(t.FINISH_REASONS, [last.finish_reason.value])
        elif isinstance(error, (GeneratorExit, asyncio.CancelledError)):
            span.set_attribute(t.FINISH_REASONS, [FinishReason.CANCELLED.value])
        elif error is not None:
            span.set_attribute(t.ERROR_TYPE, type(error).__name__)
            span.set_status(Status(StatusCode.ERROR, str(error)))
        if last is not None and last.usage is not None:
            span.set_attribute(t.INPUT_TOKENS, last.usage.prompt_tokens)
            span.set_attribute(t.OUTPUT_TOKENS, last.usage.completion_tokens)
        span.end()


class Tracing:
    """Starts the traces of an orchestrator and decides once per generation whether it is sampled."""

    def __init__(self, telemetry: Telemetry, store: RedisTraceStore, model_name: str) -> None:
        self.is_on = telemetry.tracer is not None
        self._telemetry = telemetry
        self._tracer, self._ids = telemetry.tracer, telemetry.span_ids
        self._store, self._model_name = store, model_name

    @asynccontextmanager
    async def request(self, request: GenerationRequest, caller: Caller) -> AsyncIterator[RequestSpan]:
        """Enter the span of a generation, which ends with the block and notes its error."""
        span = RequestSpan(self._begin(request, caller) if self.is_on else None)
        try:
            yield span
        except BaseException as error:
            span.end(error)
            raise
        span.end(None)

    def cycle_log(
        self, session: Session, span: RequestSpan, background: BackgroundTasks, *, is_stored: bool = True
    ) -> CycleLog:
        """Open the cycle log of a session; of one that is not stored it has spans only."""
        trace = span.trace
        if trace is not None:
            trace.bind(session)
        cycle_log = CycleLog(session, self._store if is_stored else None, background, trace)
        session.calls = cycle_log.call
        return cycle_log

    async def shutdown(self) -> None:
        """Export the queued spans, within a deadline."""
        await self._telemetry.shutdown()

    def _begin(self, request: GenerationRequest, caller: Caller) -> SessionTrace | None:
        assert self._tracer is not None
        assert self._ids is not None
        started_ns = time.time_ns()
        given = {"traceparent": caller.traceparent, "tracestate": caller.tracestate}
        parent = _PROPAGATOR.extract(given, Context())  # without a valid one, the span is a root
        span = self._tracer.start_span(t.SPAN_GENERATE, parent, SpanKind.SERVER, start_time=started_ns)
        if not span.is_recording():
            return None
        span.set_attributes(_request_attributes(request, self._model_name))
        return SessionTrace(span, self._tracer, self._ids, started_ns)


def _request_attributes(request: GenerationRequest, model_name: str) -> dict[str, Any]:
    sampling = request.sampling
    attributes: dict[str, Any] = {
        t.OPERATION_NAME: "text_completion",
        t.PROVIDER_NAME: "gammaray",
        t.RESPONSE_MODEL: model_name,
        t.REQUEST_MAX_TOKENS: request.max_tokens,
        t.REQUEST_TEMPERATURE: float(sampling.temperature),
        t.VERIFICATION: request.verification.value,
        t.TURN: request.turn,
    }
    if request.model:
        attributes[t.REQUEST_MODEL] = request.model
    if sampling.top_p < 1:
        attributes[t.REQUEST_TOP_P] = float(sampling.top_p)
    if sampling.top_k:
        attributes[t.REQUEST_TOP_K] = sampling.top_k
    if sampling.seed is not None:
        attributes[t.REQUEST_SEED] = str(sampling.seed)
    if request.resume_from:
        attributes[t.RESUMED_FROM] = request.resume_from
    return attributes
