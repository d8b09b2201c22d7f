"""POST /v1/responses over a scripted orchestrator: what reaches the orchestrator, and what comes back."""

from unittest.mock import Mock

import pytest

from gammaray.errors import UnavailableError
from gammaray.types import DrafterKind, GammaPolicy
from tests.support.http_helpers import GAMMARAY
from tests.support.openapi_helpers import request_schema, resolved
from tests.support.response_helpers import check_response, events, get, respond
from tests.support.surface_helpers import ScriptedBackend

INTEGER = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOL = {"type": "function", "name": "f", "parameters": INTEGER}
CALL = [b"Well <tool", b'_call>\n{"name": "f", "argu', b'ments": {"x":', b" 3}}\n</tool_call>"]
FORMAT = {"type": "json_schema", "name": "size", "schema": {"type": "object", "properties": {"n": {}}}}


async def test_response_has_every_field(backend):
    answer = await respond(
        backend, input="x", instructions="be", model="scripted", metadata={"k": "v"}, temperature=0.5
    )
    body = check_response(answer)
    (item,) = body["output"]
    part = {"type": "output_text", "text": "café", "annotations": [], "logprobs": []}
    message = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
    assert item == {"id": item["id"], **message}
    assert body["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 8,
    }
    assert body["gammaray"] == {**GAMMARAY, "session_id": body["id"]}
    own = {"id", "created_at", "completed_at", "output", "usage", "gammaray"}
    assert {name: value for name, value in body.items() if name not in own} == {
        "object": "response",
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": "be",
        "max_output_tokens": None,
        "metadata": {"k": "v"},
        "model": "scripted",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
    }


async def test_options_reach_the_orchestrator(backend):
    options = {"gamma": 3, "drafter": "none", "cache_salt": "apart"}
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 11, "logit_bias": {"7": 1.5}}
    answer = await respond(backend, input="x", max_output_tokens=2, gammaray=options, user="u", **sampling)
    (request,) = backend.requests
    assert request.session_id == answer.json()["id"]
    assert request.max_tokens == 2
    assert (request.gamma, request.drafter) == (GammaPolicy(fixed=3), DrafterKind.NONE)
    assert request.cache_salt == "apart"
    assert (request.sampling.top_p, request.sampling.top_k, request.sampling.seed) == (0.9, 5, 11)
    assert request.sampling.logit_bias == {7: 1.5}


async def test_items_become_the_messages_of_a_conversation(backend):
    answer = {"type": "output_text", "text": "b", "annotations": [], "logprobs": []}
    items = [
        {"role": "developer", "content": "be"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}] * 2},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [answer]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "7"}]},
        {"role": "user", "content": "c"},
    ]
    body = check_response(await respond(backend, input=items, instructions="first"))
    called = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    called += '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    assert backend.requests[0].prompt == (
        f"system: first\ndeveloper: be\nuser: aa\nassistant: b\n{called}\n"
        "user: <tool_response>\n7\n</tool_response>\nuser: c\n"
    )
    listed = (await get(backend, f"{body['id']}/input_items", order="asc")).json()["data"]
    kinds = [*["message"] * 3, *["function_call"] * 2, "function_call_output", "message"]
    assert [item["type"] for item in listed] == kinds
    assert listed[2]["id"] == "msg_1"


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"text": {"format": {**FORMAT, "strict": True}}, "metadata": {"k": "v"}, "instructions": "be"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 3},
        {"store": False, "reasoning": {"summary": "auto"}, "temperature": 0, "top_p": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_response_is_taken_back_as_the_next_request(asked, is_streamed):
    backend = ScriptedBackend(pieces=CALL if "tools" in asked else (b"a", b"b"))
    if is_streamed:
        body = (await events(backend, input="x", **asked))[-1]["response"]
    else:
        body = check_response(await respond(backend, input="x", **asked))
    known = resolved(request_schema("/v1/responses"))["properties"]
    again = {name: value for name, value in body.items() if name in known and name != "gammaray"}
    assert {"reasoning", "text", "tools", "tool_choice", "metadata", "truncation"} <= set(again)
    items = [{"role": "user", "content": "x"}, *body["output"], {"role": "user", "content": "y"}]
    second = check_response(await respond(backend, **again, input=items))
    own = {"id", "created_at", "completed_at", "output", "usage", "gammaray"}
    assert {name: value for name, value in second.items() if name not in own} == {
        name: value for name, value in body.items() if name not in own
    }


async def test_tools_of_other_kinds_are_left_out():
    others = [{"type": "namespace", "name": "n", "tools": [TOOL]}, {"type": "web_search", "index": 1}]
    backend, alone = ScriptedBackend(), ScriptedBackend()
    body = check_response(await respond(backend, input="x", tools=[others[0], TOOL, others[1]]))
    check_response(await respond(alone, input="x", tools=[TOOL]))
    assert backend.requests[0].prompt == alone.requests[0].prompt
    assert [tool["name"] for tool in body["tools"]] == ["f"]


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        (None, ""),
        ({"type": "text"}, ""),
        ({"type": "json_object"}, 'start: %json {"type": "object"'),
        (FORMAT, 'start: %json {"type": "object", "properties": {"n": {}}'),
        ({**FORMAT, "strict": True, "description": None}, '"n": {}'),
    ],
    ids=str,
)
async def test_text_format_becomes_the_grammar(backend, asked, part):
    body = check_response(await respond(backend, input="x", text={"format": asked}))
    grammar = backend.requests[0].sampling.grammar
    assert part in grammar
    assert bool(part) == bool(grammar)
    assert body["text"]["format"]["type"] == (asked or {"type": "text"})["type"]


async def test_length_makes_the_response_incomplete():
    last = (await events(ScriptedBackend(), input="x", max_output_tokens=2))[-1]
    assert last["type"] == "response.incomplete"
    whole = check_response(await respond(ScriptedBackend(), input="x", max_output_tokens=2))
    for body in (last["response"], whole):
        assert body["status"] == body["output"][0]["status"] == "incomplete"
        assert body["incomplete_details"] == {"reason": "max_output_tokens"}
        assert body["completed_at"] is None
    cut = await respond(ScriptedBackend(pieces=CALL), input="x", tools=[TOOL], max_output_tokens=3)
    assert [item["status"] for item in check_response(cut)["output"]] == ["completed", "incomplete"]


async def test_stream_has_the_events_in_order(backend):
    found = await events(backend, input="x")
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 2,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event["delta"] for event in found if "delta" in event) == "café"
    assert found[0]["response"]["status"] == "in_progress"
    assert found[0]["response"]["output"] == []
    last = found[-1]["response"]
    assert last["output"] == [found[-2]["item"]]
    assert (await get(backend, last["id"])).json() == last


async def test_response_without_text_has_an_empty_message():
    found = await events(ScriptedBackend(pieces=[b""]), input="x")
    (item,) = found[-1]["response"]["output"]
    assert item["content"][0]["text"] == ""
    assert "response.output_text.delta" not in {event["type"] for event in found}


async def test_calls_are_items_with_events_of_their_own():
    backend = ScriptedBackend(pieces=CALL)
    found = await events(backend, input="x", tools=[TOOL])
    body = found[-1]["response"]
    message, call = body["output"]
    assert message["content"][0]["text"] == "Well"
    own = {"type": "function_call", "name": "f", "arguments": '{"x": 3}', "status": "completed"}
    assert call == {"id": call["id"], "call_id": call["call_id"], **own}
    assert [event["type"].removeprefix("response.") for event in found[8:]] == [
        "output_item.added",
        *["function_call_arguments.delta"] * 2,
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert {event["output_index"] for event in found[8:-1]} == {1}
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert body["tools"] == [{**TOOL, "description": None, "strict": None}]
    whole = check_response(await respond(ScriptedBackend(pieces=CALL), input="x", tools=[TOOL]))
    assert [item["type"] for item in whole["output"]] == ["message", "function_call"]


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["tool_call"]),
        ({"tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False}, ["tool_call"]),
        ({"text": {"format": FORMAT}}, ["tool_call", '"n": {}']),
    ],
    ids=str,
)
async def test_forced_calls_and_free_ones_with_a_format_have_a_grammar(asked, parts):
    backend = ScriptedBackend(pieces=CALL)
    body = check_response(await respond(backend, input="x", tools=[TOOL], **asked))
    assert all(part in backend.requests[0].sampling.grammar for part in parts)
    assert body["tool_choice"] == asked.get("tool_choice", "auto")
    assert body["parallel_tool_calls"] is asked.get("parallel_tool_calls", True)


async def test_logprobs_are_in_deltas_and_in_the_text():
    include = ["message.output_text.logprobs"]
    backend = ScriptedBackend()
    found = await events(backend, input="x", include=include, top_logprobs=1)
    body = found[-1]["response"]
    whole = body["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in whole] == ["caf", "bytes:\\xc3", "bytes:\\xa9"]
    assert [len(entry["top_logprobs"]) for entry in whole] == [1, 1, 1]
    assert [entry for event in found if "delta" in event for entry in event["logprobs"]] == whole
    stored = (await get(backend, body["id"])).json()
    assert stored["output"][0]["content"][0]["logprobs"] == []
    answer = await get(backend, body["id"], include=include[0])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "include")


async def test_output_that_does_not_fit_the_store_fails_and_is_not_stored(backend):
    backend.responses.is_full = True
    found = await events(backend, input="x")
    last = found[-1]["response"]
    assert found[-1]["type"] == "response.failed"
    assert last["error"]["code"] == "rate_limit_exceeded"
    assert last["output"][0]["content"][0]["text"] == "café"
    stored = (await get(backend, last["id"])).json()
    assert (stored["status"], stored["output"], stored["error"]) == ("failed", [], last["error"])
    assert check_response(await respond(backend, input="x"))["error"] == last["error"]


async def test_failed_stream_keeps_its_output_so_far():
    backend = ScriptedBackend(Mock(side_effect=[None, None, UnavailableError("no target worker")]))
    found = await events(backend, input="x")
    last = found[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "no target worker"}
    assert last["response"]["output"][0]["content"][0]["text"] == "caf"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert (await get(backend, last["response"]["id"])).json() == last["response"]
    again = ScriptedBackend()
    again.responses = backend.responses
    check_response(await respond(again, input="y", previous_response_id=last["response"]["id"]))
    assert again.requests[0].prompt == "user: x\nassistant: caf\nuser: y\n"


async def test_failure_of_a_whole_response_is_an_error():
    for stream in (False, True):
        backend = ScriptedBackend(Mock(side_effect=UnavailableError("no target worker")))
        answer = await respond(backend, input="x", stream=stream)
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "no target worker")
        assert backend.responses.kept == {}


async def test_next_response_continues_the_items_without_instructions(backend):
    first = (await respond(backend, input="a", instructions="be")).json()
    second = (await respond(backend, input="b", previous_response_id=first["id"])).json()
    third = check_response(await respond(backend, previous_response_id=second["id"], input=[]))
    prompts = [request.prompt for request in backend.requests]
    assert prompts == [
        "system: be\nuser: a\n",
        "user: a\nassistant: café\nuser: b\n",
        "user: a\nassistant: café\nuser: b\nassistant: café\n",
    ]
    assert third["previous_response_id"] == second["id"]
    listed = (await get(backend, f"{third['id']}/input_items", order="asc")).json()
    assert [item["role"] for item in listed["data"]] == ["user", "assistant"] * 2
    assert listed["data"][1] == first["output"][0]


async def test_response_that_is_not_stored_leaves_nothing(backend):
    body = check_response(await respond(backend, input="x", store=False))
    assert body["store"] is False
    assert backend.responses.kept == {}
    assert (backend.requests[0].store, backend.requests[0].session_id) == (False, "")
    assert (await get(backend, body["id"])).status_code == 404
    answer = await respond(backend, input="y", previous_response_id=body["id"])
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "previous_response_not_found"


async def test_store_that_fails_fails_the_response():
    def fail(request, number):
        backend.responses.failure = UnavailableError("Redis cannot be reached") if number == 2 else None

    backend = ScriptedBackend(fail)
    found = await events(backend, input="x")
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["error"]["message"] == "Redis cannot be reached"
    assert (await respond(backend, input="x")).status_code == 503


@pytest.mark.parametrize("padded", [False, True])
async def test_obfuscation_pads_events(padded):
    options = {"include_obfuscation": padded}
    answer = await respond(ScriptedBackend(), input="x", stream=True, stream_options=options)
    sizes = {(len(part) + 2) % 256 for part in answer.content.split(b"\n\n")[:-2]}
    assert (sizes == {0}) == padded
