"""Traces of real processes, as a real OTLP receiver gets them."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest

from benchmarks.otlp_receiver import receiving
from gammaray.errors import NotFoundError, UnavailableError
from gammaray.telemetry import names as t
from gammaray.types import DrafterKind, GammaPolicy, GenerationRequest, SamplingParams
from gammaray.wire.cycles import cycles_from_proto
from orchestrator.access.caller import ANONYMOUS, Caller
from tests.support.workers.service_helpers import PROMPTS, complete, running, tokens_of
from tests.support.workers.tracing_helpers import (
    ASKING,
    SERVING,
    assert_as_documented,
    assert_nested,
    children,
    covered_s,
    exporting_worker,
    is_whole,
    named,
    of_trace,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.slow]

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER_SPAN = "b7ad6b7169203331"
SAMPLED = Caller(traceparent=f"00-{TRACE_ID}-{CALLER_SPAN}-01")
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def collector():
    with receiving() as (endpoint, receiver):
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_METRICS_EXPORTER": "none",
        }
        yield environment, receiver


@pytest.fixture(scope="module")
def workers(collector):
    environment, _ = collector
    with exporting_worker("target", environment) as (_, target):
        with exporting_worker("draft", environment) as (_, draft):
            yield target, draft


@pytest.fixture
def exporting(collector, monkeypatch):
    environment, receiver = collector
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    receiver.spans.clear()
    return receiver


def request(seed=1, **fields) -> GenerationRequest:
    return GenerationRequest(
        **{
            "prompt": PROMPTS[0],
            "sampling": SamplingParams(temperature=0.7, seed=seed),
            "max_tokens": 96,
            "gamma": GammaPolicy(fixed=2),
            "ignore_eos": True,
            **fields,
        }
    )


async def generate(orchestrator, request, caller=SAMPLED):
    return [chunk async for chunk in orchestrator.generate(request, caller)]


async def whole_trace(receiver, trace_id=TRACE_ID):
    spans = await asyncio.to_thread(
        receiver.wait, lambda spans: is_whole(of_trace(spans, trace_id)), TIMEOUT_S
    )
    return of_trace(spans, trace_id)


async def test_trace_has_every_cycle_with_client_and_worker_spans(redis_server, workers, exporting):
    async with running(redis_server, *workers) as orchestrator:
        chunks = await generate(orchestrator, request())
        spans = await whole_trace(exporting)
    (root,) = named(spans, t.SPAN_GENERATE)
    assert root.parent_id == CALLER_SPAN
    assert root.attributes[t.OUTPUT_TOKENS] == len(tokens_of(chunks)) == 96
    cycles = named(spans, t.SPAN_CYCLE)
    assert len(cycles) == chunks[-1].summary.cycles >= 20
    assert [cycle.attributes[t.CYCLE_INDEX] for cycle in cycles] == list(range(len(cycles)))
    assert sum(cycle.attributes[t.EMITTED] for cycle in cycles) == 96
    below = children(spans)
    for cycle in cycles[:-1]:  # the last one may have no room for a proposal
        propose, verify = sorted(below[cycle.span_id], key=lambda span: span.start_ns)
        assert (propose.name, verify.name) == (t.SPAN_PROPOSE, t.SPAN_VERIFY)
        assert propose.kind in ASKING
        assert verify.kind == "client"
        for client in (propose, verify):
            served = below[client.span_id]
            assert len(served) == client.attributes[t.BLOCKS]
            kind = SERVING[ASKING.index(client.kind)]
            assert all((side.name, side.kind) == (client.name, kind) for side in served)
            assert {side.resource["process.pid"] for side in served} != {root.resource["process.pid"]}
    assert len({span.resource["process.pid"] for span in spans}) == 3


async def test_trace_spans_nest_and_cover_the_wall_time(redis_server, workers, exporting):
    explained = []
    async with running(redis_server, *workers) as orchestrator:
        # Where this machine stalls between two spans is chance; what no span tells of lacks in each of them.
        for trace_id in (digit * 32 for digit in "12345"):
            caller = Caller(traceparent=f"00-{trace_id}-{CALLER_SPAN}-01")
            await generate(orchestrator, request(seed=2), caller)
            spans = await whole_trace(exporting, trace_id)
            assert_nested(spans)
            explained.append(shares_explained(spans))
            if explained[-1][0] >= 0.95 and explained[-1][1] >= 0.9:
                return
    raise AssertionError(f"parts of generations, calls of cycles: {explained}")


def shares_explained(spans):
    """Return how much of a generation its parts explain, and how much of its cycles their calls."""
    (root,) = named(spans, t.SPAN_GENERATE)
    assert len(named(spans, t.SPAN_OPEN)) == 1
    # A commit overlaps the next cycle, and counts where no cycle runs: a cycle may have to wait for it.
    parts = children(spans)[root.span_id]
    assert {part.name for part in parts} == {t.SPAN_OPEN, t.SPAN_CYCLE, t.SPAN_COMMIT}
    cycles_s = sum(cycle.duration_s for cycle in named(spans, t.SPAN_CYCLE))
    calls_s = sum(span.duration_s for span in spans if span.kind in ASKING)
    assert calls_s <= cycles_s
    return covered_s(parts) / root.duration_s, calls_s / cycles_s


async def test_trace_attributes_are_those_of_the_catalogue(redis_server, workers, exporting):
    long_prompt = "".join(PROMPTS) * 8  # the draft worker prefills it during the first cycles
    async with running(redis_server, *workers) as orchestrator:
        await generate(orchestrator, request(seed=3, stop=("\x00 a secret",), prompt=long_prompt))
        spans = await whole_trace(exporting)
    for span in spans:
        assert_as_documented(span)
        assert "a secret" not in repr(span)
    (root,) = named(spans, t.SPAN_GENERATE)
    assert root.attributes[t.REQUEST_SEED] == "3"
    assert root.attributes[t.FINISH_REASONS] == ["length"]
    cycles = named(spans, t.SPAN_CYCLE)
    cycle = next(cycle for cycle in cycles if cycle.attributes[t.DRAFTER] == "model")  # once it has read it
    assert cycle.attributes[t.GAMMA] == 2
    assert cycle.attributes[t.VERIFICATION] == "coupled"
    assert cycle.attributes[t.SESSION_ID] == root.attributes[t.SESSION_ID]


@pytest.mark.parametrize("caller", [Caller(traceparent=SAMPLED.traceparent[:-1] + "0"), Caller()])
async def test_trace_unsampled_session_leaves_no_span(redis_server, workers, exporting, monkeypatch, caller):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    async with running(redis_server, *workers) as orchestrator:
        await generate(orchestrator, request(seed=4), caller)
        await generate(orchestrator, request(seed=4))  # what came before it was sent before it
        spans = await whole_trace(exporting)
    assert len(named(spans, t.SPAN_GENERATE)) == 1
    assert {span.trace_id for span in exporting.spans} <= {TRACE_ID, *(number * 32 for number in "1234")}


async def test_disabled_tracing_loads_no_sdk_and_gives_the_same_tokens(redis_server, workers, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    async with running(redis_server, *workers) as orchestrator:
        assert not orchestrator.tracing.is_on
        chunks = await complete(orchestrator, request(seed=5))
    assert len(tokens_of(chunks)) == 96


async def test_trace_shows_the_replacement_of_a_dead_target_in_the_same_cycle(
    redis_server, workers, collector, exporting
):
    environment, _ = collector
    survivor, draft = workers
    dying = "4" * 32  # a separate trace, since its worker may send spans late
    caller = Caller(traceparent=f"00-{dying}-{CALLER_SPAN}-01")
    with exporting_worker("target", environment) as (process, victim):
        async with running(redis_server, victim, draft) as orchestrator:
            chunks = []
            async for chunk in orchestrator.generate(request(seed=6), caller):
                chunks.append(chunk)
                if len(chunks) == 5:
                    orchestrator.fleet.targets.announce({survivor})
                    await orchestrator.fleet.targets.wait_until_connected(5.0)
                    process.kill()
            spans = await asyncio.to_thread(
                exporting.wait,
                lambda spans: (
                    len(named(of_trace(spans, dying), t.SPAN_CYCLE)) == chunks[-1].summary.cycles
                    and bool(named(of_trace(spans, dying), t.SPAN_GENERATE))
                    and bool(served_by_survivor(of_trace(spans, dying), survivor))
                ),
                TIMEOUT_S,
            )
    spans = of_trace(spans, dying)
    assert len(tokens_of(chunks)) == 96
    addresses = [span.attributes[t.WORKER_ADDRESS] for span in named(spans, t.SPAN_VERIFY, "client")]
    assert addresses == sorted(addresses, key=[victim, survivor].index)
    assert set(addresses) == {victim, survivor}
    (root,) = named(spans, t.SPAN_GENERATE)
    assert not root.is_error


def served_by_survivor(spans, address):
    """Return the survivor's side of the first verification that it took over."""
    waited = [
        span for span in named(spans, t.SPAN_VERIFY, "client") if span.attributes[t.WORKER_ADDRESS] == address
    ]
    return waited and children(spans)[waited[0].span_id]


async def test_trace_resumed_by_another_orchestrator_is_one_trace_and_linked(
    redis_server, workers, exporting
):
    first = request(seed=7, session_id="traced", resume_from=0)
    async with running(redis_server, *workers) as orchestrator:
        received = []
        stream = orchestrator.generate(first, Caller())
        async for chunk in stream:
            received += tokens_of([chunk])
            if len(received) > 20:
                break
        await stream.aclose()
    async with running(redis_server, *workers) as successor:
        rest = await generate(successor, dataclasses.replace(first, resume_from=len(received)), Caller())
    assert len(received) + len(tokens_of(rest)) == 96
    spans = await asyncio.to_thread(
        exporting.wait, lambda spans: len(named(spans, t.SPAN_GENERATE)) == 2, TIMEOUT_S
    )
    before, after = named(spans, t.SPAN_GENERATE)
    assert before.attributes[t.FINISH_REASONS] == ["cancelled"]
    assert after.attributes[t.FINISH_REASONS] == ["length"]
    assert after.attributes[t.RESUMED_FROM] == len(received)
    assert after.trace_id == before.trace_id
    assert after.parent_id == before.span_id
    assert after.links == (f"{before.trace_id}:{before.span_id}",)
    epochs = {span.attributes[t.EPOCH] for span in named(spans, t.SPAN_CYCLE)}
    assert len(epochs) == 2


async def test_trace_of_a_failure_names_the_error(redis_server, exporting):
    async with running(redis_server, "127.0.0.1:1", "", worker_wait_s=0.2) as orchestrator:
        with pytest.raises(UnavailableError):
            await generate(orchestrator, request(seed=8))
    spans = await asyncio.to_thread(
        exporting.wait, lambda spans: bool(named(spans, t.SPAN_GENERATE)), TIMEOUT_S
    )
    (root,) = named(spans, t.SPAN_GENERATE)
    assert root.is_error
    assert root.attributes[t.ERROR_TYPE] == "UnavailableError"
    assert root.attributes[t.CYCLES] == 0


async def test_records_of_a_session_are_those_of_its_cycles(redis_server, workers):
    async with running(redis_server, *workers) as orchestrator:
        chunks = await complete(orchestrator, request(seed=9, session_id="recorded"))
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            records = cycles_from_proto((await orchestrator.sessions.trace("recorded", ANONYMOUS)).cycles)
            if len(records) == chunks[-1].summary.cycles:
                break
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        with pytest.raises(NotFoundError):
            await orchestrator.sessions.trace("unknown", ANONYMOUS)
    assert [sum(cycle.emitted for cycle in records), records[-1].base_position + records[-1].emitted] == [
        96,
        chunks[-1].usage.prompt_tokens + 96,
    ]
    assert sum(cycle.accepted for cycle in records) >= chunks[-1].summary.accepted_tokens
    assert all(cycle.propose_s + cycle.verify_s <= cycle.total_s for cycle in records)
    assert all(cycle.target.compute_s > 0 for cycle in records)
    assert DrafterKind.MODEL in {cycle.drafter for cycle in records}
