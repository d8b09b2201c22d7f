"""Tool calls in chats over a scripted orchestrator: requests, whole and streamed responses, resuming."""

import json

import pytest

from tests.support.http_helpers import CHAT, complete, events_with_ids
from tests.support.openapi_helpers import check_answer, check_events, check_refused, request_schema, validator
from tests.support.schema_helpers import nested
from tests.support.surface_helpers import ScriptedBackend
from tests.support.tool_helpers import BODY_TOOLS, QWEN_CHAT, joined

CHATS = "/v1/chat/completions"
TEXT = (
    'Sure 😀.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
FOUND = [("get_weather", '{"city": "Zürich"}'), ("now", "{}")]
NOW_TOOL = BODY_TOOLS[1]


class Backend(ScriptedBackend):
    max_context = 10_000

    def token_bytes(self, token_id):
        return self._pieces[token_id - 1]


def backend(text=TEXT, size=5, **options):
    data = text.encode()
    return Backend(pieces=[data[at : at + size] for at in range(0, len(data), size)], **options)


async def answered(scripted=None, **body):
    answer = await complete(scripted or backend(), CHATS, **{"messages": CHAT, "tools": BODY_TOOLS, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def named(calls):
    assert all(one["type"] == "function" for one in calls)
    return [(one["function"]["name"], one["function"]["arguments"]) for one in calls]


def choices_of(events, index=0):
    bodies = [json.loads(data) for _, data in events if data != "[DONE]"]
    return [choice for body in bodies for choice in body["choices"] if choice["index"] == index]


async def test_whole_message_has_calls_and_text():
    (choice,) = (await answered())["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["refusal"], named(message["tool_calls"])) == ("Sure 😀.", None, FOUND)
    ids = {one["id"] for one in message["tool_calls"]}
    assert len(ids) == 2
    assert all(one.startswith("call_") for one in ids)


async def test_content_is_null_where_there_are_only_calls():
    (choice,) = (await answered(backend(TEXT.partition("\n")[2])))["choices"]
    assert choice["message"]["content"] is None


async def test_message_without_a_call_is_as_without_tools():
    scripted = ScriptedBackend
    plain = (await complete(scripted(), CHATS, messages=CHAT)).json()["choices"]
    assert (await answered(scripted()))["choices"] == plain
    assert plain[0]["finish_reason"] == "stop"
    events = await events_with_ids(scripted(), CHATS, messages=CHAT, tools=BODY_TOOLS)
    assert joined(choices_of(events)) == ("café", [], ["stop"])


@pytest.mark.parametrize("max_tokens", [*range(1, 31), 100])
async def test_stream_has_the_calls_of_the_whole_message(max_tokens):
    """Where it is cut, the part of its arguments; test_http_history.py has other sizes of tokens."""
    (whole,) = (await answered(max_tokens=max_tokens))["choices"]
    reason, calls = "tool_calls" if max_tokens > 30 else "length", whole["message"].get("tool_calls", [])
    assert whole["finish_reason"] == reason
    for (name, arguments), (whole_name, whole_arguments) in zip(named(calls), FOUND, strict=False):
        assert name == whole_name
        assert whole_arguments.startswith(arguments)
    body = {"messages": CHAT, "tools": BODY_TOOLS, "max_tokens": max_tokens}
    choices = choices_of(await events_with_ids(backend(), CHATS, **body))
    assert choices[0]["delta"] == {"role": "assistant", "content": None}
    assert joined(choices) == (whole["message"]["content"] or "", calls, [reason])
    assert choices[-1]["finish_reason"] == reason
    assert all(len(choice["delta"].get("tool_calls", [])) <= 1 for choice in choices)


async def test_each_choice_has_calls_of_its_own():
    body = await answered(n=3)
    ids = [one["id"] for choice in body["choices"] for one in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 6
    events = await events_with_ids(backend(), CHATS, messages=CHAT, tools=BODY_TOOLS, n=3)
    for index in range(3):
        _, calls, reasons = joined(choices_of(events, index))
        assert [one["id"] for one in calls] == ids[2 * index : 2 * index + 2]
        assert reasons == ["tool_calls"]


async def test_logprobs_cover_every_token_once():
    (choice,) = (await answered(logprobs=True))["choices"]
    whole = choice["logprobs"]["content"]
    events = await events_with_ids(backend(), CHATS, messages=CHAT, tools=BODY_TOOLS, logprobs=True)
    pieces = [one["logprobs"]["content"] for one in choices_of(events) if one["logprobs"]]
    assert [entry for piece in pieces for entry in piece] == whole
    assert b"".join(bytes(entry["bytes"]) for entry in whole) == TEXT.encode()


@pytest.mark.parametrize("size", [1, 4, 9])
async def test_resumed_stream_goes_on_with_the_same_calls(size):
    whole = await events_with_ids(backend(size=size), CHATS, messages=CHAT, tools=BODY_TOOLS)
    text, calls, _ = joined(choices_of(whole))
    seen = [at for at, (event_id, _) in enumerate(whole) if event_id and not event_id.endswith(":end")]
    assert len(seen) > 5
    body = {"messages": CHAT, "tools": BODY_TOOLS}
    for at in seen:
        rest = await events_with_ids(backend(size=size), CHATS, last_id=whole[at][0], **body)
        again = choices_of(whole[: at + 1]) + choices_of(rest)
        assert joined(again) == (text, calls, ["tool_calls"])


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["get_weather", "now"]),
        ({"type": "function", "function": {"name": "now"}}, ["now"]),
    ],
)
async def test_forced_calls_have_a_grammar(choice, names):
    scripted = backend()
    await answered(scripted, tool_choice=choice)
    (request,) = scripted.requests
    assert [name for name in ("get_weather", "now") if name in request.sampling.grammar] == names
    assert "get_weather" in request.prompt


async def test_calls_of_the_models_own_choice_have_none():
    for body in ({}, {"tool_choice": "auto"}, {"tool_choice": None, "parallel_tool_calls": None}):
        scripted = backend()
        await answered(scripted, **body)
        assert scripted.requests[0].sampling.grammar == ""
        assert "get_weather" in scripted.requests[0].prompt


async def test_no_tools_where_none_may_be_called():
    for body in ({"tool_choice": "none"}, {"tools": []}, {"tools": None, "tool_choice": "auto"}):
        scripted = backend()
        (choice,) = (await answered(scripted, **body))["choices"]
        assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert scripted.requests[0].prompt == "user: hi\n"


NAMED = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}


@pytest.mark.parametrize(
    ("fields", "is_single"),
    [
        ({"tool_choice": "required"}, False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, True),
        (NAMED, True),
        ({**NAMED, "parallel_tool_calls": True}, True),
    ],
)
async def test_one_call_where_they_are_not_parallel_or_the_tool_is_named(fields, is_single):
    scripted = backend()
    (choice,) = (await answered(scripted, **fields))["choices"]
    assert named(choice["message"]["tool_calls"]) == (FOUND[:1] if is_single else FOUND)
    assert ("{0,15}" not in scripted.requests[0].sampling.grammar) is is_single


async def test_calls_and_results_in_messages_reach_the_template():
    scripted = backend(chat_format=QWEN_CHAT)
    rendered = []
    scripted.render_chat = lambda messages, tools=(): rendered.append(messages) or "prompt"
    told = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"a": [1]}'}}
    messages = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [told], "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "12:00"}]},
        {"role": "assistant", "tool_calls": [{**told, "function": {"name": "now", "arguments": ""}}]},
        {"role": "tool", "content": "unmatched"},
        {"role": "assistant", "content": "noon", "tool_calls": None},
        {"role": "user", "content": "ok", "tool_calls": "ignored", "tool_call_id": None},
    ]
    for body in ({"tools": BODY_TOOLS}, {"tools": None}):
        await answered(scripted, messages=messages, **body)
    function, empty = {"name": "now", "arguments": {"a": [1]}}, {"name": "now", "arguments": {}}
    assert rendered[0] == rendered[1]
    assert rendered[0] == [
        *CHAT,
        {"role": "assistant", "content": "", "tool_calls": [{**told, "function": function}]},
        {"role": "tool", "content": "12:00", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "", "tool_calls": [{**told, "function": empty}]},
        {"role": "tool", "content": "unmatched"},
        {"role": "assistant", "content": "noon"},
        {"role": "user", "content": "ok"},
    ]


async def test_response_format_is_an_alternative_to_calls():
    formats = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    free, forced, alone = backend(), backend(), backend()
    await answered(free, response_format=formats)
    await answered(forced, response_format=formats, tool_choice="required")
    await answered(alone, response_format=formats, tool_choice="none")
    assert "message: calls | answer" in free.requests[0].sampling.grammar
    assert '"integer"' in free.requests[0].sampling.grammar
    assert '"integer"' not in forced.requests[0].sampling.grammar
    assert alone.requests[0].sampling.grammar.startswith("start: %json")


TOOL = {"name": "f"}
NO_ID = {"role": "assistant", "tool_calls": [{"id": None, "function": {"name": "f", "arguments": "{}"}}]}


def tool_of(**fields):
    return {"type": "function", "function": {"name": "f", **fields}}


REFUSED = {
    "tool without type": ({"tools": [{"function": TOOL}]}, "tools.0.type"),
    "tool without function": ({"tools": [{"type": "function"}]}, "tools.0.function"),
    "tool with more": ({"tools": [{**NOW_TOOL, "x": 1}]}, "tools.0.x"),
    "function with more": ({"tools": [NOW_TOOL, tool_of(x=1)]}, "tools.1.function.x"),
    "function without name": ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
    "name with a line": ({"tools": [tool_of(name="a\n")]}, "tools.0.function.name"),
    "name long": ({"tools": [tool_of(name="a" * 65)]}, "tools.0.function.name"),
    "name twice": ({"tools": [NOW_TOOL, tool_of(), NOW_TOOL]}, "tools.2.function.name"),
    "parameters deep": ({"tools": [tool_of(parameters=nested(70))]}, "tools.0.function.parameters"),
    "parameters long": ({"tools": [tool_of(parameters={"x": "y" * 2**17})]}, "tools.0.function.parameters"),
    "many tools": ({"tools": [tool_of(name=f"f{n}") for n in range(129)]}, "tools"),
    "choice with more": ({"tool_choice": {"type": "function", "function": TOOL, "x": 1}}, "tool_choice"),
    "choice without name": ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
    "choice of an unknown function": ({"tool_choice": {"type": "function", "function": TOOL}}, "tool_choice"),
    "required without tools": ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    "call without id": ({"messages": [*CHAT, NO_ID]}, "messages.1.tool_calls.0.id"),
    "null of a user": ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    "null result": ({"messages": [{"role": "tool", "content": None}]}, "messages.0.content"),
    "structured outputs": ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    "ignore_eos": ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
}


BEYOND = (
    *("name twice", "parameters deep", "parameters long", "unknown function", "without tools"),
    *("structured outputs", "ignore_eos", "name with a line"),
)
"""What a schema cannot express; Python's `$` matches before a line's end too."""


async def test_wrong_field_is_named_and_forbidden_by_the_document(subtests):
    for name, (body, param) in REFUSED.items():
        with subtests.test(name):
            is_documented = not any(part in name for part in BEYOND)
            body = {"messages": CHAT, "tools": BODY_TOOLS, **body}
            await check_refused(CHATS, body, param, is_documented)


async def test_limits_are_inclusive():
    tools = [tool_of(name=f"f{n}", description=None, parameters=None, strict=None) for n in range(128)]
    schema = {"x": "y" * (2**17 - 12)}
    assert len(json.dumps(schema)) <= 2**17
    await answered(tools=tools)
    await answered(tools=[tool_of(parameters=schema)])
    await answered(tools=[tool_of(parameters=nested(60))])


@pytest.mark.parametrize(
    "text", [TEXT, TEXT.partition("\n")[2], "none", TEXT[:70]], ids=["both", "calls", "text", "cut"]
)
async def test_document_describes_requests_and_responses(text):
    call = {"id": "1", "function": {"name": "f", "arguments": ""}}
    result = {"role": "tool", "tool_call_id": "1", "content": "17"}
    body = {
        "messages": [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}, result],
        "tools": [*BODY_TOOLS, tool_of(description=None)],
        "tool_choice": "required",
        "parallel_tool_calls": True,
        "logprobs": True,
    }
    assert validator(request_schema(CHATS)).is_valid(body)
    check_answer(CHATS, await answered(backend(text), **body))
    events = await events_with_ids(backend(text), CHATS, **body)
    check_events(CHATS, [data for _, data in events[:-1]])
