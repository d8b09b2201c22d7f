"""Traces of real processes, as a real OTLP receiver gets them, also over a takeover and of a failure."""

import asyncio
import dataclasses
import signal
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path

import pytest

from benchmarks.otlp_receiver import ReceivedSpan, receiving
from docs.make_telemetry import ATTRIBUTES, SPANS
from gammaray.errors import NotFoundError, UnavailableError
from gammaray.telemetry import names as t
from gammaray.types import DrafterKind, GammaPolicy, GenerationRequest, SamplingParams
from gammaray.v1 import types_pb2
from gammaray.wire.cycles import cycles_from_proto
from orchestrator.access.caller import ANONYMOUS, Caller
from services.demo_pair import TARGET_DIR
from tests.support.head_helpers import bigram_head
from tests.support.workers.redis_helpers import running_redis
from tests.support.workers.scripted_workers import until_so
from tests.support.workers.service_helpers import PROMPTS, complete, running, tokens_of, worker_process
from tests.support.workers.workers_helpers import Link, verify_block

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400), pytest.mark.slow]

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER_SPAN = "b7ad6b7169203331"
SAMPLED, ALSO_SAMPLED = (Caller(traceparent=f"00-{one}-{CALLER_SPAN}-01") for one in (TRACE_ID, "1" * 32))
TIMEOUT_S = 60.0
MICROSECOND_NS = 1000
ASKING, SERVING = ("client", "producer"), ("server", "consumer")


@contextmanager
def exporting_worker(role: str, environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a worker with the demo pair; yields its process and address. Ends it with SIGTERM."""
    with worker_process(role, environment=environment) as (process, address):
        yield process, address
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT_S)


def of_trace(spans: Sequence[ReceivedSpan], trace_id: str) -> list[ReceivedSpan]:
    return [span for span in spans if span.trace_id == trace_id]


def named(spans: Sequence[ReceivedSpan], name: str, kind: str | None = None) -> list[ReceivedSpan]:
    found = [span for span in spans if span.name == name and kind in (None, span.kind)]
    return sorted(found, key=lambda span: span.start_ns)


def is_whole(spans: Sequence[ReceivedSpan]) -> bool:
    """Return whether a generation has ended, and its cycles and the workers' sides of them have come."""
    roots = named(spans, t.SPAN_GENERATE)
    if not roots or len(named(spans, t.SPAN_CYCLE)) != roots[0].attributes[t.CYCLES]:
        return False
    asked = [span for span in spans if span.kind in ASKING and not span.is_error]
    num_served = sum(span.kind in SERVING for span in spans if span.name != t.SPAN_GENERATE)
    return num_served >= sum(span.attributes[t.BLOCKS] for span in asked)


def assert_nested(spans: Sequence[ReceivedSpan]) -> None:
    """Every span that is waited for lies within its parent, to the microsecond that records are kept in."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    for span in spans:
        assert span.start_ns <= span.end_ns, span
        parent = by_id.get(span.parent_id)
        is_apart = span.kind == "consumer" or span.name == t.SPAN_AHEAD or span.attributes.get(t.EARLY)
        if parent is not None and not is_apart:
            assert parent.start_ns - MICROSECOND_NS <= span.start_ns, (span, parent)
            assert span.end_ns <= parent.end_ns + MICROSECOND_NS, (span, parent)


def assert_as_documented(span: ReceivedSpan) -> None:
    """The span is one of the catalogue, with all of its attributes that it must have and no other."""
    spec = next(spec for spec in SPANS if (spec.name, spec.kind) == (span.name, span.kind))
    assert span.resource["service.name"] == f"gammaray-{spec.process}"
    names = set(span.attributes)
    assert set(spec.always) <= names, set(spec.always) - names
    assert names <= {*spec.always, *spec.sometimes}, names - {*spec.always, *spec.sometimes}
    types = {"string": str, "boolean": bool, "int": int, "double": float, "string[]": list}
    for name in names:
        attribute = next(known for known in ATTRIBUTES if known.name == name)
        assert type(span.attributes[name]) is types[attribute.type], name


def request(seed=1, **fields) -> GenerationRequest:
    fields |= {"sampling": SamplingParams(temperature=0.7, seed=seed), "gamma": GammaPolicy(fixed=2)}
    return GenerationRequest(PROMPTS[0], max_tokens=96, ignore_eos=True, **fields)


async def test_records_of_a_session_are_those_of_its_cycles(redis_server, workers):
    async with running(redis_server, *workers) as orchestrator:
        chunks = await complete(orchestrator, request(seed=9, session_id="recorded"))

        async def all_records():
            found = cycles_from_proto((await orchestrator.sessions.trace("recorded", ANONYMOUS)).cycles)
            return found if len(found) == chunks[-1].summary.cycles else ()

        records = await until_so(all_records, TIMEOUT_S)
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


REQUEST = GenerationRequest(
    PROMPTS[0],
    model="demo",
    sampling=SamplingParams(temperature=0.7, seed=11, top_p=0.95, top_k=100),
    max_tokens=96,
    stop=("\x00 a secret",),
    ignore_eos=True,
    gamma=GammaPolicy(fixed=2),
    session_id="reported",
)


@pytest.mark.nightly
async def test_every_attribute_of_the_catalogue_is_emitted(monkeypatch, tmp_path):
    with running_redis() as redis, receiving() as (endpoint, receiver):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with exporting_worker("draft", {}) as (_, draft), exporting_worker("target", {}) as (_, survivor):
            addresses, offset = await _survive_a_target_and_resume(redis, survivor, draft)
            async with running(redis, survivor, draft) as orchestrator:
                chunks = await complete(orchestrator, request(), SAMPLED)
            await _follow_a_grammar(redis, survivor, draft)
            await _draft_by_a_head(redis, tmp_path)
            await _ask_without_the_tokens(survivor)
            await _fail(redis)
            try:
                spans = await asyncio.to_thread(receiver.wait, is_complete, TIMEOUT_S)
            except TimeoutError:
                spans = list(receiver.spans)
    assert missing(spans) == set()
    for span in spans:
        assert_as_documented(span)
        assert "a secret" not in repr(span)
    _check_cycles(of_trace(spans, TRACE_ID), chunks)
    _check_takeover(spans, addresses, offset)
    (failed,) = [s for s in named(spans, t.SPAN_GENERATE) if t.ERROR_TYPE in s.attributes]
    assert failed.is_error
    assert (failed.attributes[t.ERROR_TYPE], failed.attributes[t.CYCLES]) == ("UnavailableError", 0)


def missing(spans):
    return {attribute.name for attribute in ATTRIBUTES}.difference(*(span.attributes for span in spans))


def is_complete(spans):
    return not missing(spans) and len(turns(spans)) == 2 and is_whole(of_trace(spans, TRACE_ID))


def turns(spans):
    """Return the two generations of the session that was resumed, the earlier one first."""
    roots = named(spans, t.SPAN_GENERATE)
    return [root for root in roots if root.attributes.get(t.SESSION_ID) == REQUEST.session_id]


def _check_cycles(spans, chunks):
    """The trace of a caller has every cycle, with its client and worker spans, of three processes."""
    assert_nested(spans)
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
    below = defaultdict(list)
    for span in spans:
        below[span.parent_id].append(span)
    for cycle in cycles[:-1]:  # the last one may have no room for a proposal
        propose, verify = sorted(below[cycle.span_id], key=lambda span: span.start_ns)
        assert (propose.name, verify.name) == (t.SPAN_PROPOSE, t.SPAN_VERIFY)
        assert propose.kind in ASKING
        assert verify.kind == "client"
        for client in (propose, verify):
            served = [side for side in below[client.span_id] if side.name != t.SPAN_AHEAD]
            assert len(served) == client.attributes[t.BLOCKS]
            kind = SERVING[ASKING.index(client.kind)]
            assert all((side.name, side.kind) == (client.name, kind) for side in served)
            assert {side.resource["process.pid"] for side in served} != {root.resource["process.pid"]}
    assert len({span.resource["process.pid"] for span in spans}) == 3


def _check_takeover(spans, addresses, offset):
    """The first turn goes on at the other target; the second is of another owner, in a trace of its own."""
    before, after = turns(spans)
    assert before.attributes[t.FINISH_REASONS] == ["cancelled"]
    assert after.attributes[t.FINISH_REASONS] == ["length"]
    assert after.attributes[t.RESUMED_FROM] == offset
    assert after.trace_id != before.trace_id
    own = [span for turn in (before, after) for span in of_trace(spans, turn.trace_id)]
    assert len({span.attributes[t.EPOCH] for span in named(own, t.SPAN_CYCLE)}) == 2
    found = [span.attributes[t.WORKER_ADDRESS] for span in named(own, t.SPAN_VERIFY, "client")]
    assert found == sorted(found, key=addresses.index)
    assert set(found) == set(addresses)
    assert not after.is_error


async def _survive_a_target_and_resume(redis, survivor, draft):
    """Return the addresses of both targets, and the number of tokens of the first turn's client."""
    received = []
    with exporting_worker("target", {}) as (process, victim):
        async with running(redis, victim, draft) as orchestrator:
            async with aclosing(orchestrator.generate(REQUEST, Caller())) as chunks:
                async for chunk in chunks:
                    if chunk.tokens and not received:  # the survivor knows nothing of the session
                        orchestrator.fleet.targets.announce({survivor})
                        await orchestrator.fleet.targets.wait_until_connected(TIMEOUT_S)
                        process.kill()
                    received += tokens_of([chunk])
                    if len(received) > 48:
                        break
    async with running(redis, survivor, draft) as successor:
        await complete(successor, dataclasses.replace(REQUEST, resume_from=len(received)))
    return [victim, survivor], len(received)


async def _follow_a_grammar(redis, target, draft):
    sampling = SamplingParams(temperature=0.7, seed=11, grammar='start: "x" /[a-z ]{20}/')
    request = dataclasses.replace(REQUEST, sampling=sampling, stop=(), ignore_eos=False, session_id="")
    async with running(redis, target, draft) as orchestrator:
        await complete(orchestrator, request, ALSO_SAMPLED)


async def _draft_by_a_head(redis, folder):
    head = bigram_head(folder / "head", Path(TARGET_DIR))
    request = dataclasses.replace(REQUEST, session_id="", drafter=DrafterKind.HEAD)
    with exporting_worker("target", {"GAMMARAY_HEAD": str(head)}) as (_, target):
        async with running(redis, target, "") as orchestrator:
            await complete(orchestrator, request, ALSO_SAMPLED)


async def _ask_without_the_tokens(target):
    """Workers keep the tokens of evicted sessions: only a worker new to a session lacks tokens."""
    link = Link(target, "target")
    try:
        block = verify_block(
            [1, 2, 3],
            session_id="stranger",
            context=types_pb2.TokenSpan(start=2, token_ids=[3]),
            trace=types_pb2.TraceContext(traceparent=ALSO_SAMPLED.traceparent),
        )
        assert (await link.ask(block)).need.position == 0
    finally:
        await link.close()


async def _fail(redis):
    async with running(redis, "127.0.0.1:1", "", worker_wait_s=0.2) as orchestrator:
        with pytest.raises(UnavailableError):
            await complete(orchestrator, dataclasses.replace(REQUEST, session_id=""))
