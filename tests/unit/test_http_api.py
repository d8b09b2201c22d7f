"""The OpenAI-compatible API over a scripted orchestrator: requests, responses, streams."""

import asyncio
import json

import httpx
import pytest
from surface_helpers import SUMMARY, ScriptedBackend

from gammaray.errors import UnavailableError
from gammaray.types import DrafterKind, GammaPolicy, SamplingParams, VerificationMethod
from orchestrator.http_api import create_app

GAMMARAY = {
    "session_id": "s0",
    "cycles": SUMMARY.cycles,
    "tokens_per_cycle": SUMMARY.tokens_per_cycle,
    "alpha": SUMMARY.alpha,
    "acceptance_rate": SUMMARY.acceptance_rate,
    "accepted_lengths": [1, 1],
    "gamma_mean": SUMMARY.gamma_mean,
    "origins": ["accepted"] * 3,
    "token_ids": [1, 2, 3],
    "time_ms": {"draft": 1.0, "verify": 2.0, "other": 0.5, "total": 3.5},
    "speedup_estimate": None,
    "cycles_by_drafter": {"model": 1, "ngram": 1, "none": 0},
    "fallback_cycles": 1,
    "draft_workers": 1,
}
CHAT = [{"role": "user", "content": "hi"}]


async def call(backend, method="POST", path="/v1/completions", **options):
    transport = httpx.ASGITransport(create_app(backend))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path, **options)


async def complete(backend, path="/v1/completions", **body):
    return await call(backend, path=path, json=body)


async def events(backend, path="/v1/completions", **body):
    answer = await complete(backend, path, stream=True, **body)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, end = answer.text.split("\n\n")
    assert end == ""
    assert all(part.startswith("data: ") for part in parts)
    return [part.removeprefix("data: ") for part in parts]


async def test_completion_returns_text_usage_and_gammaray():
    answer = await complete(ScriptedBackend(), prompt="x", model="scripted")
    body = answer.json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "scripted"
    choice = {"index": 0, "text": "café", "logprobs": None, "finish_reason": "stop"}
    assert body["choices"] == [choice]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "completion_tokens_details": {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 1},
    }
    assert body["gammaray"] == GAMMARAY


async def test_completion_every_option_reaches_the_orchestrator():
    backend = ScriptedBackend()
    answer = await complete(
        backend,
        prompt=[1, 2, 3],
        max_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={"7": -100, "8": 1.5},
        min_tokens=1,
        ignore_eos=True,
        stop_token_ids=[9],
        allowed_token_ids=[4, 7],
        stop=["a", "b"],
        seed=11,
        logprobs=3,
        user="u",
        metadata={"k": "v"},
        gammaray={
            "verification": "rejection",
            "gamma": 3,
            "max_nodes": 12,
            "drafter": "none",
            "session_id": "mine",
        },
    )
    assert answer.status_code == 200
    (request,) = backend.requests
    assert request.prompt == (1, 2, 3)
    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={7: -100, 8: 1.5},
        allowed_token_ids=(4, 7),
        min_tokens=1,
        seed=11,
    )
    assert (request.max_tokens, request.stop, request.stop_token_ids) == (2, ("a", "b"), (9,))
    assert request.ignore_eos
    assert request.num_top_logprobs == 3
    assert request.verification is VerificationMethod.REJECTION
    assert request.gamma == GammaPolicy(fixed=3, max_nodes=12)
    assert request.drafter is DrafterKind.NONE
    assert request.session_id == "mine"


async def test_completion_defaults_are_those_of_openai():
    backend = ScriptedBackend()
    await complete(backend, prompt="x", temperature=None, stop=None, gammaray={"gamma": None})
    (request,) = backend.requests
    assert request.max_tokens == 16
    assert request.sampling == SamplingParams()
    assert request.gamma == GammaPolicy()


@pytest.mark.parametrize("body", [{"max_tokens": 2}, {"max_completion_tokens": 2}])
async def test_max_tokens_under_either_name_bounds_the_completion(body):
    for path, prompt in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": CHAT})):
        answer = await complete(ScriptedBackend(), path, **prompt, **body)
        assert answer.json()["usage"]["completion_tokens"] == 2
        assert answer.json()["choices"][0]["finish_reason"] == "length"


async def test_chat_without_max_tokens_asks_for_the_context():
    backend = ScriptedBackend()
    await complete(backend, "/v1/chat/completions", messages=CHAT)
    assert backend.requests[0].max_tokens == backend.max_context


async def test_samples_have_their_index_and_their_own_gammaray():
    backend = ScriptedBackend()
    body = (await complete(backend, prompt="x", n=3, seed=5)).json()
    assert [request.sampling.sample_index for request in backend.requests] == [0, 1, 2]
    assert {request.sampling.seed for request in backend.requests} == {5}
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["gammaray"]["session_id"] for choice in body["choices"]] == ["s0", "s1", "s2"]
    assert body["gammaray"] == body["choices"][0]["gammaray"]
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 9


async def test_samples_run_at_once():
    waiting = asyncio.Barrier(3) if hasattr(asyncio, "Barrier") else None
    if waiting is None:
        pytest.skip("asyncio.Barrier is new in Python 3.11")
    backend = ScriptedBackend(lambda request, number: waiting.wait())
    answer = await asyncio.wait_for(complete(backend, prompt="x", n=3), 10)
    assert len(answer.json()["choices"]) == 3


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ],
    ids=["text", "texts", "tokens", "lists of tokens"],
)
async def test_prompt_each_form_gives_its_choices(prompt, expected):
    backend = ScriptedBackend()
    body = (await complete(backend, prompt=prompt)).json()
    assert [request.prompt for request in backend.requests] == expected
    assert len(body["choices"]) == len(expected)
    assert body["usage"]["prompt_tokens"] == 5 * len(expected)


@pytest.mark.parametrize(("prompt", "echo"), [("ab", "ab"), ([1, 2], "<1><2>")])
async def test_echo_puts_the_prompt_first(prompt, echo):
    body = (await complete(ScriptedBackend(), prompt=prompt, echo=True)).json()
    assert body["choices"][0]["text"] == echo + "café"
    first, *_ = await events(ScriptedBackend(), prompt=prompt, echo=True)
    assert json.loads(first)["choices"][0]["text"] == echo


async def test_completion_logprobs_have_offsets_and_partial_characters():
    body = (await complete(ScriptedBackend(), prompt="x", logprobs=2)).json()
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["caf", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [
            {"t0": -1.0, "t1": -2.0, token: -0.5} for token in ("caf", "bytes:\\xc3", "bytes:\\xa9")
        ],
        "text_offset": [0, 3, 4],
    }


async def test_chat_logprobs_have_bytes():
    answer = await complete(
        ScriptedBackend(), "/v1/chat/completions", messages=CHAT, logprobs=True, top_logprobs=1, max_tokens=1
    )
    (entry,) = answer.json()["choices"][0]["logprobs"]["content"]
    assert entry == {
        "token": "caf",
        "logprob": -0.5,
        "bytes": [99, 97, 102],
        "top_logprobs": [{"token": "t0", "logprob": -1.0, "bytes": [116, 48]}],
    }


async def test_chat_messages_go_through_the_template():
    backend = ScriptedBackend()
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": content, "name": "me"}]
    body = (await complete(backend, "/v1/chat/completions", messages=messages)).json()
    assert backend.requests[0].prompt == "system: be\nuser: ab\n"
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "café", "refusal": None}


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


async def test_stream_of_samples_interleaves_and_finishes_each():
    *chunks, done = await events(ScriptedBackend(), prompt="x", n=2)
    assert done == "[DONE]"
    parsed = [json.loads(chunk)["choices"][0] for chunk in chunks]
    for index in (0, 1):
        own = [choice for choice in parsed if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == "café"
        assert [choice["finish_reason"] for choice in own] == [None, "stop"]


async def test_stream_of_chat_begins_with_the_role():
    role, first, last, _ = await events(ScriptedBackend(), "/v1/chat/completions", messages=CHAT)
    deltas = [json.loads(event)["choices"][0]["delta"] for event in (role, first, last)]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "caf"}, {"content": "é"}]


async def test_stream_with_logprobs_tells_of_every_token():
    *chunks, _ = await events(ScriptedBackend(), prompt="x", logprobs=0)
    offsets = [json.loads(chunk)["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
    assert offsets == [[0], [3], [4]]


def fail_at(chunk):
    def before(request, number):
        if number == chunk:
            raise UnavailableError("no target worker")

    return before


async def test_stream_error_before_the_first_piece_is_an_ordinary_error():
    answer = await complete(ScriptedBackend(fail_at(0)), prompt="x", stream=True)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "no target worker"


async def test_stream_error_midway_is_the_last_event():
    first, error = await events(ScriptedBackend(fail_at(1)), prompt="x")
    assert json.loads(first)["choices"][0]["text"] == "caf"
    assert json.loads(error)["error"]["message"] == "no target worker"


async def test_failing_sample_stops_the_others():
    def before(request, number):
        if request.sampling.sample_index == 1:
            raise UnavailableError("gone")
        return asyncio.sleep(30)

    backend = ScriptedBackend(before)
    answer = await asyncio.wait_for(complete(backend, prompt="x", n=3), 10)
    assert answer.status_code == 503
    assert backend.num_open == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_vanished_client_ends_the_generation(stream):
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

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [],
    }
    serving = asyncio.create_task(create_app(backend)(scope, receive, send))
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


async def test_models_lists_the_one_served():
    listed = (await call(ScriptedBackend(), "GET", "/v1/models")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["scripted"]
    assert (await call(ScriptedBackend(), "GET", "/v1/models/scripted")).json()["id"] == "scripted"
    assert (await call(ScriptedBackend(), "GET", "/v1/models/other")).status_code == 404


async def test_health_needs_a_target_worker():
    assert (await call(ScriptedBackend(), "GET", "/health")).status_code == 200
    answer = await call(ScriptedBackend(healthy=False), "GET", "/health")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"


async def test_root_points_to_the_api():
    assert (await call(ScriptedBackend(), "GET", "/")).json()["model"] == "scripted"
