"""A generation's cycle log, sampled and not: which spans its cycles, calls and errors become."""

import asyncio
import logging
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gammaray.aio import BackgroundTasks
from gammaray.telemetry import names as t
from gammaray.telemetry.span_ids import SpanIds
from gammaray.types import DrafterKind, GenerationRequest, TokenOrigin, VerificationMethod
from gammaray.v1.target_service_pb2 import VerifyBlock
from orchestrator.access.caller import Caller
from orchestrator.cycle.types import Cycle
from orchestrator.telemetry.tracing import Tracing

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0"


def session():
    method = VerificationMethod.COUPLED
    return SimpleNamespace(session_id="s", epoch=7, turn=0, method=method, num_committed=12, calls=None)


def cycle():
    return Cycle(
        *(4, 0, 0, 0, (5,), (TokenOrigin.BONUS,), (), "x", None, 0.001, 0.002, 0.004),
        is_first=False,
        draft_failed=False,
        drafter=DrafterKind.NONE,
        started=time.perf_counter() - 0.004,
    )


async def generation(caller, error=None):
    """Return the spans and the first block to the target of a cycle, and of an unfinished one if it fails."""
    exporter, ids, block = InMemorySpanExporter(), SpanIds(), VerifyBlock()
    provider = TracerProvider(id_generator=ids, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = SimpleNamespace(tracer=provider.get_tracer("test"), span_ids=ids)
    tracing = Tracing(telemetry, None, "demo")
    background = BackgroundTasks(logging.getLogger(__name__), "the log could not be written")
    with pytest.raises(type(error)) if error is not None else nullcontext():
        async with tracing.request(GenerationRequest("Hi"), caller) as span:
            log = tracing.cycle_log(session(), span, background, is_stored=False)
            call = log.call("target", "h:1")
            call.sent(block)
            call.answered(None)
            log.observe(cycle())
            log.stored()
            if error is not None:
                log.call("target", "h:2").sent(second := VerifyBlock())
                assert second.trace.traceparent == call.following != block.trace.traceparent
            log.finish(error)
            await background.settled()
            if error is not None:
                raise error
    return exporter.get_finished_spans(), block


async def test_generation_that_is_not_sampled_has_no_span_and_sends_no_context():
    spans, block = await generation(Caller(traceparent=f"{CALLER}0"))
    assert (spans, block.trace.traceparent) == ((), "")


@pytest.mark.parametrize(
    "error", [RuntimeError("lost"), asyncio.CancelledError()], ids=["failed", "cancelled"]
)
async def test_unfinished_cycle_is_a_span_with_its_error(error):
    spans, _ = await generation(Caller(traceparent=f"{CALLER}1"), error)
    name = "RuntimeError" if isinstance(error, RuntimeError) else None
    cycles = [span.attributes for span in spans if span.name == t.SPAN_CYCLE]
    assert {one[t.CYCLE_INDEX]: one.get(t.ERROR_TYPE) for one in cycles} == {0: None, 1: name}
    (root,) = (span for span in spans if span.name == t.SPAN_GENERATE)
    assert root.attributes.get(t.ERROR_TYPE) == name
    assert root.attributes.get(t.FINISH_REASONS) == (None if name else ("cancelled",))
