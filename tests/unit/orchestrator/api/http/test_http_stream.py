"""The OpenAI-compatible API over a scripted orchestrator: streams, and generations that end early."""

import asyncio
import json

import pytest

from gammaray.errors import UnavailableError
from orchestrator.api.http.server.app import create_app
from orchestrator.api.http.stream import EVENT_BYTES
from tests.support.http_helpers import CHAT, GAMMARAY, complete, events, events_with_ids, scope_of
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


async def test_stream_with_usage_ends_with_usage():
    *_, usage, done = await events(ScriptedBackend(), prompt="x", stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert json.loads(usage)["choices"] == []
    assert json.loads(usage)["usage"]["total_tokens"] == 8
    assert json.loads(usage)["gammaray"] == GAMMARAY


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


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": CHAT})],
)
async def test_obfuscated_events_have_sizes_that_do_not_follow_the_text(path, body):
    pieces = [b"a" * length for length in range(1, 100)]

    async def deltas(**options):
        backend = ScriptedBackend(pieces=pieces)
        found = await events_with_ids(backend, path, **body, max_tokens=64, stream_options=options)
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


def fail_at(chunk):
    def before(request, number):
        if number == chunk:
            raise UnavailableError("no target worker")

    return before


async def test_stream_error_midway_is_the_last_event():
    first, error = await events(ScriptedBackend(fail_at(1)), prompt="x")
    assert json.loads(first)["choices"][0]["text"] == "caf"
    assert json.loads(error)["error"]["message"] == "no target worker"


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


async def test_stream_of_samples_ends_with_the_failure_of_the_first():
    def before(request, number):
        if request.sampling.sample_index == 0 and number == 1:
            raise UnavailableError("gone")
        return asyncio.sleep(30 * number)

    backend = ScriptedBackend(before)
    *pieces, error = await asyncio.wait_for(events(backend, prompt="x", n=4), 10)
    assert {json.loads(piece)["choices"][0]["text"] for piece in pieces} == {"caf"}
    assert json.loads(error)["error"]["message"] == "gone"
    assert backend.num_open == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnected_client_ends_the_generation(stream):
    running = [asyncio.Event(), asyncio.Event()]

    def before(request, number):
        if number == 1:
            running[request.sampling.sample_index].set()
            return asyncio.sleep(30)

    backend = ScriptedBackend(before)
    body = json.dumps({"prompt": "x", "n": 2, "stream": stream}).encode()
    gone, started = asyncio.Event(), asyncio.Event()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        started.set()

    serving = asyncio.create_task(create_app(backend)(scope_of("/v1/completions"), receive, send))
    for sample in running:
        await asyncio.wait_for(sample.wait(), 10)
    if stream:
        await asyncio.wait_for(started.wait(), 10)
        gone.set()
        await asyncio.wait_for(serving, 10)
    else:  # before the response begins it is the server that watches the connection
        serving.cancel()
        await asyncio.wait([serving], timeout=10)
    assert backend.num_open == 0
