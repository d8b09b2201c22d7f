"""Traces of real processes, as a real OTLP receiver gets them."""

from __future__ import annotations

import asyncio
import time

import pytest

from gammaray.errors import NotFoundError
from gammaray.telemetry import names as t
from gammaray.types import DrafterKind, GammaPolicy, GenerationRequest, SamplingParams
from gammaray.wire.cycles import cycles_from_proto
from orchestrator.access.caller import ANONYMOUS, Caller
from tests.support.otlp_receiver import receiving
from tests.support.workers.service_helpers import PROMPTS, complete, running, tokens_of
from tests.support.workers.tracing_helpers import (
    ASKING,
    SERVING,
    assert_as_documented,
    assert_nested,
    children,
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
        chunks = await generate(orchestrator, request(stop=("\x00 a secret",)))
        spans = await whole_trace(exporting)
    assert_nested(spans)
    for span in spans:
        assert_as_documented(span)
        assert "a secret" not in repr(span)
    (root,) = named(spans, t.SPAN_GENERATE)
    assert root.parent_id == CALLER_SPAN
    assert root.attributes[t.OUTPUT_TOKENS] == len(tokens_of(chunks)) == 96
    assert root.attributes[t.REQUEST_SEED] == "1"
    cycles = named(spans, t.SPAN_CYCLE)
    assert len(cycles) == chunks[-1].summary.cycles >= 20
    cycle = next(cycle for cycle in cycles if cycle.attributes[t.DRAFTER] == "model")
    assert (cycle.attributes[t.GAMMA], cycle.attributes[t.VERIFICATION]) == (2, "coupled")
    assert cycle.attributes[t.SESSION_ID] == root.attributes[t.SESSION_ID]
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
