"""The promises of docs/api.md, sentence by sentence in its order, against the HTTP and gRPC APIs.

An orchestrator in this process serves the demo pair. Promises that need a cluster (several orchestrators, a
dead one) or that other tests prove in full (fields that are refused by name, codes of errors, formats of tool
calls, hosts, keys, metrics) are left to those.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import httpx
import jsonschema
import pytest

from gammaray.types import DrafterKind, GenerationRequest
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.convert import chunk_from_proto
from orchestrator.api.grpc_servicer import GenerationServicer
from orchestrator.api.http.server.app import create_app
from tests.support.grpc_helpers import Context
from tests.support.http_helpers import CHAT
from tests.support.workers.service_helpers import running

pytestmark = pytest.mark.integration

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PROMPT = "def read_lines(path):\n"
SCHEMA = {
    "type": "object",
    "properties": {"b": {"type": "integer", "minimum": 0, "maximum": 9}, "a": {"type": "boolean"}},
    "required": ["b", "a"],
    "additionalProperties": False,
}


class Api:
    def __init__(self, orchestrator, http: httpx.AsyncClient) -> None:
        self.orchestrator, self.http = orchestrator, http

    async def post(self, path: str, body: dict, **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body, headers=headers, timeout=120)

    async def complete(self, **body) -> dict:
        answer = await self.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 12, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def text(self, **body) -> str:
        return (await self.complete(**body))["choices"][0]["text"]

    async def chat(self, **body) -> dict:
        answer = await self.post(CHATS, {"messages": CHAT, "max_tokens": 12, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def respond(self, **body) -> dict:
        answer = await self.post(RESPONSES, {"input": "hi", "max_output_tokens": 12, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def refused(self, path: str, body: dict, status: int = 400) -> dict:
        given = {COMPLETIONS: {"prompt": PROMPT}, CHATS: {"messages": CHAT}, RESPONSES: {"input": "hi"}}[path]
        answer = await self.post(path, {**given, **body})
        assert answer.status_code == status, (body, answer.text[:300])
        return answer.json()["error"]

    async def events(self, path: str = COMPLETIONS, **body) -> list:
        given = {COMPLETIONS: {"prompt": PROMPT}, CHATS: {"messages": CHAT}, RESPONSES: {"input": "hi"}}[path]
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        answer = await self.post(path, {**given, limit: 12, "stream": True, **body})
        assert answer.status_code == 200, answer.text
        found = re.findall(r"^data: (.*)$", answer.text, re.MULTILINE)
        return [json.loads(data) if data != "[DONE]" else data for data in found]


@asynccontextmanager
async def served(redis_server, workers) -> AsyncIterator[Api]:
    async with running(redis_server, *workers) as orchestrator:
        transport = httpx.ASGITransport(create_app(orchestrator))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield Api(orchestrator, http)


@pytest.fixture
async def api(redis_server, workers):
    async with served(redis_server, workers) as found:
        yield found


# HTTP


async def test_request_headers(api):
    late = await api.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 500}, **{"gammaray-timeout-ms": "1"})
    assert late.status_code == 504
    for priority, status in (("-10", 200), ("10", 200), ("11", 400), ("-11", 400), ("x", 400)):
        answer = await api.post(
            COMPLETIONS, {"prompt": "a", "max_tokens": 1}, **{"gammaray-priority": priority}
        )
        assert answer.status_code == status, priority
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = await api.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, traceparent=trace)
    assert answer.status_code == 200


RANGES = {
    # field: (values in the range, values out of it)
    "temperature": ([0, 100], [-0.1, 100.1]),
    "top_p": ([0.001, 1], [0, 1.1]),
    "top_k": ([0, -1, 2**31], [-2, 2**31 + 1]),
    "min_p": ([0, 1], [-0.1, 1.1]),
    "repetition_penalty": ([0.01, 100], [0, 100.1]),
    "presence_penalty": ([-2, 2], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 2], [-2.1, 2.1]),
    "logit_bias": (
        [{"5": -100}, {"5": 100}, {str(n): 1 for n in range(300)}],
        [{"5": 101}, {str(n): 1 for n in range(301)}],
    ),
    "allowed_token_ids": ([[5, 6]], [[-1], [2**31]]),
    "min_tokens": ([0, 1], [-1]),
    "ignore_eos": ([True, False], ["yes", 1]),
    "stop_token_ids": ([[5], [7] * 4096], [[-1], [7] * 4097]),
    "seed": ([0, 2**64 - 1], [-1, 2**64]),
    "n": ([1, 2], [0, 129]),
    "prediction": (
        [{"type": "content", "content": "a" * 65_536}],
        [{"type": "content", "content": "a" * 65_537}, "a"],
    ),
    "store": ([True, False], ["no"]),
    "prompt_logprobs": ([0, 20], [-1, 21]),
    "logprobs": ([0, 20], [-1, 21]),
}


async def test_sampling_fields_have_their_ranges(api):
    for field, (right, wrong) in RANGES.items():
        for value in right:
            await api.complete(**{field: value, "max_tokens": 1})
        for value in wrong:
            param = (await api.refused(COMPLETIONS, {field: value}))["param"]
            assert re.split(r"[.\[]", param)[0] == field, value


async def test_sampling_fields_have_their_defaults(api):
    given = {
        "temperature": 1,
        "top_p": 1,
        "top_k": 0,
        "min_p": 0,
        "repetition_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "min_tokens": 0,
        "ignore_eos": False,
        "n": 1,
        "store": True,
    }
    assert await api.text(seed=3) == await api.text(seed=3, **given)


async def test_greedy_completion_has_the_most_likely_tokens(api):
    (choice,) = (await api.complete(temperature=0, logprobs=1))["choices"]
    for token, top in zip(
        choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"], strict=True
    ):
        assert token == max(top.values())
    assert await api.text(temperature=0, seed=1) == await api.text(temperature=0, seed=2)
    assert await api.text(top_k=1, seed=1) == await api.text(temperature=0)


async def test_allowed_tokens_bias_and_least_tokens_hold(api):
    allowed = [5, 6, 7]
    found = await api.complete(allowed_token_ids=allowed, seed=1)
    assert set(found["gammaray"]["token_ids"]) <= set(allowed)
    found = await api.complete(logit_bias={"9": 100}, temperature=0)
    assert set(found["gammaray"]["token_ids"]) == {9}
    (eos,) = api.orchestrator.tokenizer.eos_token_ids
    ended = await api.complete(logit_bias={str(eos): 100}, temperature=0, max_tokens=5)
    assert (ended["usage"]["completion_tokens"], ended["choices"][0]["finish_reason"]) == (1, "stop")
    least = await api.complete(logit_bias={str(eos): 100}, temperature=0, max_tokens=5, min_tokens=3)
    assert least["usage"]["completion_tokens"] == 4
    on = await api.complete(logit_bias={str(eos): 100}, temperature=0, max_tokens=5, ignore_eos=True)
    assert (on["usage"]["completion_tokens"], on["choices"][0]["finish_reason"]) == (5, "length")


async def test_stop_token_ends_the_completion(api):
    token_ids = (await api.complete(seed=5))["gammaray"]["token_ids"]
    found = await api.complete(seed=5, stop_token_ids=[token_ids[3]])
    assert found["gammaray"]["token_ids"] == token_ids[: token_ids.index(token_ids[3]) + 1]
    assert found["choices"][0]["finish_reason"] == "stop"


async def test_drawn_seed_is_below_2_to_the_53_and_reproduces_the_tokens(api):
    seeds = []
    for call in (api.complete, api.chat, api.respond):
        for _ in range(8):
            found = (await call())["gammaray"]
            seeds.append(found["seed"])
        again = (await call(seed=found["seed"]))["gammaray"]
        assert again["token_ids"] == found["token_ids"]
    chunks = [chunk async for chunk in api.orchestrator.generate(GenerationRequest(PROMPT, max_tokens=1))]
    chunks += (await generate(api, text=PROMPT, max_tokens=1))[0]
    seeds += [chunk.seed for chunk in chunks]
    assert all(0 <= seed < 2**53 for seed in seeds)
    assert len(set(seeds)) == len(seeds)


async def test_samples_are_separate_sessions_and_each_is_its_own_function_of_the_seed(api):
    choices = (await api.complete(n=3, seed=1))["choices"]
    texts = [choice["text"] for choice in choices]
    assert len({choice["gammaray"]["session_id"] for choice in choices}) == len(set(texts)) == 3
    assert await api.text(seed=1) == texts[0]
    streamed = ["", "", ""]
    for event in (await api.events(n=3, seed=1))[:-1]:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts


async def test_prediction_changes_the_speed_only(api):
    text = await api.text(seed=4, max_tokens=40)
    for content in (text, "another text", [{"type": "text", "text": text}]):
        body = {"seed": 4, "max_tokens": 40, "prediction": {"type": "content", "content": content}}
        assert await api.text(**body) == text


# Structured output


FORMS = {
    "text": ({"response_format": {"type": "text"}}, None),
    "object": ({"response_format": {"type": "json_object"}}, None),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        SCHEMA,
    ),
    "strict": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
            }
        },
        SCHEMA,
    ),
    "json": ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
    "json text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, SCHEMA),
}


async def test_completion_has_the_form_of_its_schema_written_as_json_dumps_does(api):
    texts = set()
    for name, (form, schema) in FORMS.items():
        (choice,) = (await api.complete(**form, max_tokens=100, seed=3))["choices"]
        if schema is not None:
            value = json.loads(choice["text"])
            jsonschema.validate(value, schema)
            assert choice["text"] == json.dumps(value), name  # a space after comma and colon, no line breaks
            assert list(value) == ["b", "a"], name  # the order of the schema
            assert choice["finish_reason"] == "stop"
            texts.add(choice["text"])
    assert len(texts) == 1  # text and seed mean the same, and `strict` changes nothing


async def test_other_forms(api):
    text = await api.text(structured_outputs={"regex": "[0-9]{3}-[a-f]{2}"}, max_tokens=60)
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", text)
    assert await api.text(structured_outputs={"choice": ["left", "right"]}, max_tokens=60) in (
        "left",
        "right",
    )
    lark = 'start: "a" b\nb: "x" | "y"'
    assert await api.text(structured_outputs={"grammar": lark}, max_tokens=60) in ("ax", "ay")
    gbnf = 'root ::= "a" b\nb ::= "x" | "y"'
    assert await api.text(structured_outputs={"grammar": gbnf}, max_tokens=60) in ("ax", "ay")


async def test_speculation_does_not_change_structured_tokens(api):
    form = {**FORMS["schema"][0], "max_tokens": 100}
    call = {"tools": [WEATHER, NOW], "tool_choice": "required", "parallel_tool_calls": False}
    for seed in range(3):
        texts, calls = set(), set()
        for gamma in (0, 3, "adaptive"):
            texts.add(await api.text(**form, seed=seed, gammaray={"gamma": gamma}))
            found = await api.chat(**call, max_tokens=400, seed=seed, gammaray={"gamma": gamma})
            (made,) = found["choices"][0]["message"]["tool_calls"]
            calls.add((made["function"]["name"], made["function"]["arguments"]))
        assert len(texts) == len(calls) == 1


async def test_wrong_forms_are_refused_by_name(api):
    for keyword in ({"not": {}}, {"if": {}, "then": {"minLength": 2}}):
        schema = {"type": "object", "properties": {"a": {"type": "string", **keyword}}}
        error = await api.refused(COMPLETIONS, {"structured_outputs": {"json": schema}})
        assert next(iter(keyword)) in error["message"]
    for grammar in ("start: /a/ & /b/", "start: ~/a/", "start: <[5]>"):
        await api.refused(COMPLETIONS, {"structured_outputs": {"grammar": grammar}})
    none_left = {"structured_outputs": {"regex": "a"}, "allowed_token_ids": [0]}
    assert (await api.refused(COMPLETIONS, none_left))["param"] == "structured_outputs"


async def test_form_is_cut_at_max_tokens_and_ends_before_min_tokens(api):
    form = FORMS["schema"][0]
    (choice,) = (await api.complete(**form, max_tokens=2))["choices"]
    assert choice["finish_reason"] == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice["text"])
    (choice,) = (await api.complete(**form, max_tokens=100, min_tokens=90))["choices"]
    assert choice["finish_reason"] == "stop"
    json.loads(choice["text"])


# Log-probabilities


async def test_echo_and_prompt_logprobs(api):
    (choice,) = (await api.complete(echo=True, logprobs=1, max_tokens=0))["choices"]
    assert choice["text"] == PROMPT
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert "".join(choice["logprobs"]["tokens"]) == PROMPT
    found = await api.complete(prompt_logprobs=2)
    first, *rest = found["choices"][0]["prompt_logprobs"]
    assert first is None
    for entry in rest:
        assert 2 <= len(entry) <= 3
        assert {one["rank"] for one in entry.values()} >= {1, 2}
        assert all(token_id.isdigit() and one["decoded_token"] for token_id, one in entry.items())
        assert all(one["logprob"] <= 0 for one in entry.values())
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    chat = await api.chat(prompt_logprobs=0)
    assert chat["prompt_logprobs"][0] is None
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


async def test_resume_from_token_0_with_prompt_logprobs_is_refused(api):
    answer = await api.post(
        COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4, "stream": True, "prompt_logprobs": 0}
    )
    event_id = re.search(r"^id: (\S+)$", answer.text, re.MULTILINE)[1]
    session, turn = event_id.split(":")[:2]
    body = {"prompt": PROMPT, "max_tokens": 4, "stream": True, "prompt_logprobs": 0}
    again = await api.post(COMPLETIONS, body, **{"Last-Event-ID": f"{session}:{turn}:0"})
    assert again.status_code == 409


# Tool calls


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"enum": ["c", "f"]},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["unit", "days"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


async def test_forced_calls_follow_their_schema(api):
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, most in (("required", 16), (named, 1)):
        body = {"tools": [WEATHER, NOW], "tool_choice": choice, "max_tokens": 1500, "seed": 2}
        (found,) = (await api.chat(**body))["choices"]
        assert found["finish_reason"] == "tool_calls"
        assert found["message"]["content"] is None
        calls = found["message"]["tool_calls"]
        assert 1 <= len(calls) <= most
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "get_weather":
                jsonschema.validate(arguments, WEATHER["function"]["parameters"])
            else:
                assert arguments == {}
    (found,) = (await api.chat(tools=[WEATHER, NOW], tool_choice="none"))["choices"]
    assert "tool_calls" not in found["message"]
    body = {
        "tools": [WEATHER, NOW],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 400,
    }
    (found,) = (await api.chat(**body))["choices"]
    assert len(found["message"]["tool_calls"]) == 1


async def test_call_that_is_cut_has_its_name_and_goes_back(api):
    named = {"type": "function", "function": {"name": "get_weather"}}
    body = {"tools": [WEATHER], "tool_choice": named, "seed": 2}
    (whole,) = (await api.chat(**body, max_tokens=400))["choices"]
    arguments = whole["message"]["tool_calls"][0]["function"]["arguments"]
    for limit in (2, 20, 40, 60):
        (found,) = (await api.chat(**body, max_tokens=limit))["choices"]
        (call,) = found["message"]["tool_calls"]
        assert (found["message"]["content"], call["function"]["name"]) == (None, "get_weather")
        assert arguments.startswith(call["function"]["arguments"])
        assert found["finish_reason"] == "length" or call["function"]["arguments"] == arguments
        result = {"role": "tool", "tool_call_id": call["id"], "content": "not run"}
        await api.chat(messages=[*CHAT, found["message"], result], tools=[WEATHER])


def calls_of(events: list) -> list:
    """Return id, name and arguments of the calls whose pieces are in the events of a stream."""
    calls: list[list[str]] = []
    for piece in (p for event in events for p in event["choices"][0]["delta"].get("tool_calls", ())):
        if piece["index"] == len(calls):
            calls.append([piece["id"], piece["function"]["name"], ""])
        else:
            calls[piece["index"]][2] += piece["function"]["arguments"]
    return calls


async def test_stream_resumed_after_any_event_has_the_same_calls(api):
    named = {"type": "function", "function": {"name": "get_weather"}}
    body = {"messages": CHAT, "tools": [WEATHER, NOW], "tool_choice": named, "max_tokens": 400, "seed": 7}
    body |= {"stream": True, "gammaray": {"gamma": 0}}

    async def events(**headers) -> list[tuple[str, dict]]:
        text = (await api.post(CHATS, body, **headers)).text
        found = re.findall(r"^(?:id: (.*)\n)?data: ({.*})$", text, re.MULTILINE)
        return [(event_id, json.loads(data)) for event_id, data in found]

    whole = await events()
    expected = calls_of([event for _, event in whole])
    json.loads(expected[0][2])
    places = [place for place, (event_id, _) in enumerate(whole) if event_id]
    assert len(places) > 3
    for place in places[:-1]:
        again = whole[: place + 1] + await events(**{"Last-Event-ID": whole[place][0]})
        assert calls_of([event for _, event in again]) == expected
        assert again[-1][1]["choices"][0]["finish_reason"] == "tool_calls"


# Responses API


async def test_call_of_a_response_that_is_cut_is_incomplete_and_continues(api):
    tool = {"type": "function", **WEATHER["function"]}
    body = {"tools": [tool], "tool_choice": {"type": "function", "name": "get_weather"}}
    found = await api.respond(**body, max_output_tokens=35, seed=2)
    (item,) = found["output"]
    assert (found["status"], item["type"], item["status"]) == ("incomplete", "function_call", "incomplete")
    await api.respond(input="on", previous_response_id=found["id"])
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "not run"}
    await api.respond(input=[result], previous_response_id=found["id"])


# Request and response object `gammaray`


async def test_options_have_their_ranges_and_change_no_token(api):
    text = await api.text(seed=7)
    absent = {DrafterKind.HEAD}
    for kind in absent:
        error = await api.refused(COMPLETIONS, {"gammaray": {"drafter": kind.value}})
        assert error["param"] == "gammaray.drafter"
    same = (
        {"gamma": 0},
        {"gamma": 64},
        {"gamma": "adaptive", "max_gamma": 64},
        {"max_gamma": 0, "max_nodes": 256},
        *({"drafter": kind.value} for kind in DrafterKind if kind not in absent),
        {"keep_cache_s": 3600.0},
        {"cache_salt": "s" * 64},
        {"stream_tokens": True},
    )
    for options in same:
        assert await api.text(seed=7, gammaray=options) == text, options
    for method in ("coupled", "rejection", "naive", "block"):
        await api.complete(gammaray={"verification": method})
    wrong = {
        "verification": ["other"],
        "gamma": [-1, 65, "fast"],
        "max_gamma": [-1, 65],
        "max_nodes": [-1, 257],
        "drafter": ["other"],
        "session_id": ["a/b", "a" * 129],
        "turn": [-1, 2**31],
        "keep_cache_s": [-1.0, 3601.0],
        "cache_salt": ["s" * 65],
    }
    for field, values in wrong.items():
        for value in values:
            error = await api.refused(COMPLETIONS, {"gammaray": {field: value}})
            assert error["param"] == f"gammaray.{field}"
    assert (await api.refused(CHATS, {"gammaray": {"turn": 1}}))["param"] == "gammaray.turn"
    named = {"gammaray": {"session_id": "one"}, "n": 2}
    assert (await api.refused(COMPLETIONS, named))["param"] == "gammaray.session_id"


async def test_object_gammaray_agrees_with_the_usage(api):
    found = await api.complete(seed=1, gammaray={"gamma": 3})
    own, usage = found["gammaray"], found["usage"]
    emitted = usage["completion_tokens"]
    assert len(own["token_ids"]) == len(own["origins"]) == emitted
    assert set(own["origins"]) <= {"accepted", "correction", "bonus"}
    assert sum(own["accepted_lengths"]) == own["cycles"]
    assert own["tokens_per_cycle"] == pytest.approx(emitted / own["cycles"])
    assert own["acceptance_rate"] == pytest.approx(own["accepted_tokens"] / own["drafted_tokens"])
    assert own["acceptance_rate"] <= own["alpha"] <= 1
    times = own["time_ms"]
    assert times["draft"] + times["verify"] + times["other"] == pytest.approx(times["total"], rel=0.01)
    assert set(own["cycles_by_drafter"]) == {kind.value for kind in DrafterKind}
    assert sum(own["cycles_by_drafter"].values()) == own["cycles"]
    metrics = found["metrics"]["speculative_decoding"]
    assert sum(metrics["acceptance_histogram"]) == metrics["num_spec_steps"]
    assert metrics["num_accepted_draft_tokens"] == own["accepted_tokens"]
    assert metrics["num_draft_tokens"] == own["drafted_tokens"]
    assert "num_spec_tokens" not in metrics
    plain = (await api.complete(gammaray={"gamma": 0}))["gammaray"]
    assert (plain["alpha"], plain["acceptance_rate"], plain["drafted_tokens"]) == (None, None, 0)


# Errors


async def test_context_overflow_has_openais_code_and_words(api):
    limit = api.orchestrator.max_context
    long = "word " * (2 * limit)
    for path, body, param in (
        (CHATS, {"messages": [{"role": "user", "content": long}]}, "messages"),
        (CHATS, {"messages": [{"role": "user", "content": long}], "n": 2}, "messages"),
        (COMPLETIONS, {"prompt": long}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * limit}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * limit, "echo": True}, "prompt"),
        (RESPONSES, {"input": long}, "input"),
        (RESPONSES, {"input": "x", "instructions": long}, "input"),
    ):
        for stream in (False, True):
            error = await api.refused(path, {**body, "stream": stream})
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert error["type"] == "invalid_request_error"
            # What LiteLLM and LangChain look for.
            assert f"This model's maximum context length is {limit} tokens" in error["message"]
            assert "Input tokens exceed the configured limit" in error["message"]
    _, context = await generate(api, text=long)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (context.error.field, context.error.allowed.split()[:3]) == (
        "prompt",
        ["at", "most", str(limit - 1)],
    )


async def test_session_that_does_not_exist_has_its_own_code(api):
    body = {"prompt": "a", "stream": True}
    gone = await api.post(COMPLETIONS, body, **{"Last-Event-ID": "no-such-session:0:1"})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "session_not_found")


# gRPC


async def generate(api, **fields):
    context = Context()
    responses = GenerationServicer(api.orchestrator).generate(pb.GenerateRequest(**fields), context)
    return [chunk_from_proto(response) async for response in responses], context


async def test_grpc_fields_have_their_ranges_and_defaults(api):
    chunks, _ = await generate(api, text=PROMPT, sampling={"seed": 3, "temperature": 0.0})
    assert sum(len(chunk.tokens) for chunk in chunks) == 128 or chunks[-1].finish_reason.value == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].summary is not None
    wrong = (
        {"text": ""},
        {"text": "a" * (2**20 + 1)},
        {"text": "a", "model": "other"},
        {"text": "a", "stop": ["b"] * 17},
        {"text": "a", "stop": ["b" * 257]},
        {"text": "a", "num_top_logprobs": 21},
        {"text": "a", "num_prompt_logprobs": 21},
        {"text": "a", "sampling": {"grammar": "start: <[5]>"}},
    )
    for fields in wrong:
        found, context = await generate(api, **fields)
        expected = grpc.StatusCode.NOT_FOUND if "model" in fields else grpc.StatusCode.INVALID_ARGUMENT
        assert (found, context.code) == ([], expected), str(fields)[:80]


async def test_grpc_and_http_give_the_same_tokens(api):
    chunks, _ = await generate(api, text=PROMPT, max_tokens=12, sampling={"seed": 9})
    assert "".join(chunk.text for chunk in chunks) == await api.text(seed=9)
