"""The OpenAI-compatible API over a scripted orchestrator: streams, and generations that end early."""

import asyncio
import json
from unittest.mock import Mock

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray.errors import ResourceExhaustedError, UnavailableError
from gammaray.maths.acceptance import SpeculationCounters
from gammaray.types import TokenOrigin
from orchestrator.api.http import stream as stream_module
from orchestrator.api.http.responses import speculative_decoding
from orchestrator.api.http.server.app import create_app
from orchestrator.api.http.stream import EVENT_BYTES
from tests.support.http_helpers import BODIES, CHAT, GAMMARAY, complete, events, events_with_ids, scope_of
from tests.support.response_helpers import client
from tests.support.surface_helpers import PIECES, ScriptedBackend


async def test_stream_holds_partial_characters_and_ends_with_gammaray_and_done():
    *chunks, done = await events(ScriptedBackend(), prompt="x")
    first, last = map(json.loads, chunks)
    assert done == "[DONE]"
    assert [first["choices"][0]["text"], last["choices"][0]["text"]] == ["caf", "é"]
    assert first["choices"][0]["finish_reason"] is None
    assert last["choices"][0]["finish_reason"] == "stop"
    assert "gammaray" not in first
    assert last["gammaray"] == GAMMARAY
    assert first["id"] == last["id"]


async def test_stream_with_continuous_usage_counts_each_choice_so_far():
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, whole, _ = await events(ScriptedBackend(), prompt="x", n=2, stream_options=options)
    parsed = [json.loads(chunk) for chunk in chunks]
    for index in (0, 1):
        own = [event["usage"] for event in parsed if event["choices"][0]["index"] == index]
        assert own == [
            {"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count} for count in (1, 3)
        ]
    assert json.loads(whole)["usage"]["completion_tokens"] == 6


async def test_continuous_usage_needs_include_usage_as_with_vllm():
    chunks = await events(ScriptedBackend(), prompt="x", stream_options={"continuous_usage_stats": True})
    assert not any("usage" in json.loads(chunk) for chunk in chunks[:-1])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_obfuscated_events_have_sizes_that_do_not_follow_the_text(path):
    pieces = [b"a" * length for length in range(1, 100)]

    async def deltas(**options):
        backend = ScriptedBackend(pieces=pieces)
        found = await events_with_ids(backend, path, **BODIES[path], max_tokens=64, stream_options=options)
        # Ends before the last piece, which carries the summary.
        return [(event_id, json.loads(data), data) for event_id, data in found if data != "[DONE]"][:-1]

    def sizes(found):
        heads = [len(f"id: {event_id}\n") if event_id else 0 for event_id, _, _ in found]
        return {len(f"data: {data}\n\n") + head for (_, _, data), head in zip(found, heads, strict=True)}

    plain, padded = await deltas(), await deltas(include_obfuscation=True)
    assert len(sizes(plain)) >= 60
    assert all(size % EVENT_BYTES == 0 for size in sizes(padded))
    assert len(sizes(padded)) <= 2
    assert not any("obfuscation" in event for _, event, _ in plain)
    assert [event["choices"] for _, event, _ in padded] == [event["choices"] for _, event, _ in plain]


async def test_stream_contains_requested_tokens():
    *chunks, _ = await events(ScriptedBackend(), prompt="x", gammaray={"stream_tokens": True})
    parsed = [json.loads(chunk) for chunk in chunks]
    assert [token for event in parsed for token in event["gammaray"]["tokens"]] == [
        {"id": number + 1, "origin": "accepted", "drafter": "suffix", "bytes": list(piece)}
        for number, piece in enumerate(PIECES)
    ]
    assert {name: value for name, value in parsed[-1]["gammaray"].items() if name != "tokens"} == GAMMARAY


async def test_stream_of_chat_begins_with_the_role():
    role, first, last, _ = await events(ScriptedBackend(), "/v1/chat/completions", messages=CHAT)
    deltas = [json.loads(event)["choices"][0]["delta"] for event in (role, first, last)]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "caf"}, {"content": "é"}]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("failing", [0, 1, 15])
async def test_failing_sample_stops_the_others(failing, stream):
    def before(request, number):
        if request.sampling.sample_index == failing:
            raise UnavailableError("gone")
        return asyncio.sleep(30)

    backend = ScriptedBackend(before)
    answer = await asyncio.wait_for(complete(backend, prompt="x", n=16, stream=stream), 10)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "gone"
    assert backend.num_open == 0


@pytest.mark.parametrize("n", [1, 4])
async def test_stream_of_samples_ends_with_the_failure_of_the_first(n):
    def before(request, number):
        if request.sampling.sample_index == 0 and number == 1:
            raise UnavailableError("gone")
        return asyncio.sleep(30 * number)

    backend = ScriptedBackend(before)
    *pieces, error = await asyncio.wait_for(events(backend, prompt="x", n=n), 10)
    assert len(pieces) == n
    assert {json.loads(piece)["choices"][0]["text"] for piece in pieces} == {"caf"}
    assert json.loads(error)["error"]["message"] == "gone"
    assert backend.num_open == 0


class Call:
    """A request whose client reads what is sent, until it leaves."""

    def __init__(self, backend, path, **body):
        self._asked = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self._left = asyncio.Event()
        self.sent, self.has_comments = [], asyncio.Event()
        self.serving = asyncio.create_task(create_app(backend)(scope_of(path), self._receive, self._send))

    async def _receive(self):
        if self._asked:
            return self._asked.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        self.sent.append(message)
        if self.text.count(": waiting\n\n") >= 3:
            self.has_comments.set()

    @property
    def text(self):
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    async def leave(self):
        self._left.set()
        await asyncio.wait_for(self.serving, 10)


@pytest.mark.parametrize("moment", ["admission", "prompt", "tokens"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", BODIES)
async def test_client_that_leaves_ends_the_generations(path, stream, moment):
    count = 1 if path == "/v1/responses" else 2
    reached = [asyncio.Event() for _ in range(count)]

    def before(request, number):
        if number == (moment == "tokens"):
            reached[request.sampling.sample_index].set()
            return asyncio.sleep(30)

    backend = ScriptedBackend(before, opens=moment != "admission")
    call = Call(backend, path, stream=stream, **BODIES[path], **({"n": count} if count > 1 else {}))
    for sample in reached:
        await asyncio.wait_for(sample.wait(), 10)
    await call.leave()
    assert backend.num_open == 0
    if path == "/v1/responses" and stream and moment == "tokens":
        (stored,) = backend.responses.kept.values()
        kept = json.loads(stored.response)
        assert (kept["status"], kept["output"][0]["status"]) == ("cancelled", "incomplete")
        assert kept["output"][0]["content"][0]["text"] == "caf"


@pytest.mark.parametrize(
    ("path", "begin"),
    [
        ("/v1/completions", ": waiting\n\n"),
        ("/v1/chat/completions", "id: s0:0:0\ndata: "),
        ("/v1/responses", "event: response.created\ndata: "),
    ],
)
async def test_stream_begins_at_admission_and_has_comments_while_it_waits(path, begin, monkeypatch):
    monkeypatch.setattr(stream_module, "COMMENT_PERIOD_S", 0.05)
    computed = asyncio.Event()
    backend = ScriptedBackend(lambda request, number: computed.wait(), opens=True)
    call = Call(backend, path, stream=True, **BODIES[path])
    await asyncio.wait_for(call.has_comments.wait(), 10)
    assert call.sent[0]["status"] == 200
    assert call.text.startswith(begin)
    computed.set()
    await asyncio.wait_for(call.serving, 10)
    data = [json.loads(line[6:]) for line in call.text.split("\n") if line.startswith("data: {")]
    assert "caf" in json.dumps(data)


async def test_comments_never_split_an_event(monkeypatch):
    monkeypatch.setattr(stream_module, "COMMENT_PERIOD_S", 0.01)
    sent, halves = [], [b'data: {"a', b'": 1}\n\n', b"data: 2\n\n"]

    async def events():
        for half in halves:
            yield half
            await asyncio.sleep(0.1)

    async def send(message):
        sent.append(message.get("body", b""))

    async def receive():
        await asyncio.sleep(30)

    await stream_module.EventStream(b"data: 0\n\n", events())({"type": "http"}, receive, send)
    text = b"".join(sent)
    assert text.count(stream_module.COMMENT) >= 3
    assert text.replace(stream_module.COMMENT, b"") == b"data: 0\n\n" + b"".join(halves)


async def test_failure_after_admission_is_an_event_that_openai_raises():
    before = Mock(side_effect=UnavailableError("gone"))
    async with client(ScriptedBackend(before, opens=True)) as ai:
        chunks = await ai.chat.completions.create(model="scripted", messages=CHAT, stream=True)
        with pytest.raises(openai.APIError, match="gone"):
            [chunk async for chunk in chunks]
        kinds = [event async for event in await ai.responses.create(input="x", stream=True)]
        assert [event.type for event in kinds][-1] == "response.failed"
        assert kinds[-1].response.error.message == "gone"
    async with client(ScriptedBackend(before)) as ai:  # not admitted
        with pytest.raises(openai.InternalServerError, match="gone"):
            await ai.chat.completions.create(model="scripted", messages=CHAT, stream=True)


async def test_sample_that_is_not_admitted_is_an_error_response():
    class Full(ScriptedBackend):
        async def check(self, request):
            if request.sampling.sample_index == 1:
                await asyncio.sleep(0.1)
                raise ResourceExhaustedError("the queue is full")

    backend = Full(lambda request, number: asyncio.sleep(30), opens=True)
    answer = await complete(backend, prompt="x", n=2, stream=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert backend.num_open == 0


async def test_continuous_usage_begins_with_the_prompt():
    options = {"include_usage": True, "continuous_usage_stats": True}
    backend = ScriptedBackend(opens=True)
    first, *_ = await events(backend, "/v1/chat/completions", messages=CHAT, stream_options=options)
    assert json.loads(first)["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}


METRICS = {
    "speculative_decoding": {
        "acceptance_histogram": [1, 1],
        "num_spec_steps": 2,
        "mean_acceptance_length": 1.5,
        "draft_acceptance_rate": 0.5,
        "num_accepted_draft_tokens": 1,
        "num_draft_tokens": 2,
    }
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("with_usage", [False, True])
async def test_the_object_is_at_the_root_of_a_response_and_in_the_last_chunk_of_a_stream(path, with_usage):
    answer = await complete(ScriptedBackend(), path, **BODIES[path])
    assert answer.json()["metrics"] == METRICS
    options = {"stream_options": {"include_usage": with_usage}}
    *chunks, _ = await events(ScriptedBackend(), path, **BODIES[path], **options)
    parsed = [json.loads(chunk) for chunk in chunks]
    # AIPerf drops the object when two chunks have it.
    assert [event.get("metrics") for event in parsed] == [None] * (len(parsed) - 1) + [METRICS]
    last = parsed[-1]
    assert last["gammaray"] == GAMMARAY
    if with_usage:
        assert (last["choices"], last["usage"]["total_tokens"]) == ([], 8)


async def test_responses_of_several_choices_have_no_such_object_as_with_vllm():
    answer = await complete(ScriptedBackend(), prompt="x", n=2)
    assert "metrics" not in answer.json()
    chunks = await events(ScriptedBackend(), prompt="x", n=2, stream_options={"include_usage": True})
    assert not any("metrics" in json.loads(chunk) for chunk in chunks[:-1])


CYCLES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12)


@given(CYCLES, st.lists(st.sampled_from(TokenOrigin), max_size=9))
def test_the_object_agrees_with_itself_whatever_the_cycles_were(cycles, before):
    counters = SpeculationCounters()
    counters.catch_up(before)  # a former owner emitted these
    for gamma, wanted in cycles:
        accepted = min(gamma, wanted)
        tested = min(gamma, accepted + 1)
        counters.observe(
            gamma=gamma, tested=tested, accepted=accepted, emitted=accepted + 1, draft_s=0.0, verify_s=0.0
        )
    found = speculative_decoding(counters.summary(1.0))
    histogram = found["acceptance_histogram"]
    drafted = [cycle for cycle in cycles if cycle[0] > 0]
    assert min(histogram) >= 0
    assert found["num_spec_steps"] == sum(histogram) == len(drafted)
    accepted = sum(length * count for length, count in enumerate(histogram))
    assert found["num_accepted_draft_tokens"] == accepted == sum(map(min, drafted))
    assert found["num_draft_tokens"] == sum(gamma for gamma, _ in drafted)
    if drafted:
        assert found["mean_acceptance_length"] == 1 + accepted / len(drafted)
        assert found["draft_acceptance_rate"] == accepted / found["num_draft_tokens"]
    else:
        assert (found["mean_acceptance_length"], found["draft_acceptance_rate"]) == (1.0, 0.0)
