"""Tool calls in chats over a scripted orchestrator: requests, whole and streamed responses, resuming."""

import json

import pytest

from tests.support.http_helpers import CHAT, complete, events_with_ids
from tests.support.openapi_helpers import document, validator
from tests.support.surface_helpers import ScriptedBackend
from tests.support.tool_helpers import BODY_TOOLS, LLAMA_CHAT, MISTRAL_CHAT, QWEN_CHAT

CHATS = "/v1/chat/completions"
TEXT = (
    'Sure 😀.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
FOUND = [("get_weather", '{"city": "Zürich"}'), ("now", "{}")]
NOW_TOOL = BODY_TOOLS[1]
SCHEMA = document()["paths"][CHATS]["post"]


class Backend(ScriptedBackend):
    max_context = 10_000


def backend(text=TEXT, size=5, **options):
    data = text.encode()
    return Backend(pieces=[data[at : at + size] for at in range(0, len(data), size)], **options)


async def answered(scripted=None, **body):
    answer = await complete(scripted or backend(), CHATS, **{"messages": CHAT, "tools": BODY_TOOLS, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(**body):
    scripted = backend()
    answer = await complete(scripted, CHATS, **{"messages": CHAT, "tools": BODY_TOOLS, **body})
    assert answer.status_code == 400, answer.text
    assert scripted.requests == []
    return answer.json()["error"]


def named(calls):
    assert all(one["type"] == "function" for one in calls)
    return [(one["function"]["name"], one["function"]["arguments"]) for one in calls]


def joined(choices):
    """Return the message that a client makes of a stream's choices, and the finish reason."""
    text, calls, reasons = "", [], []
    for choice in choices:
        delta = choice["delta"]
        text += delta.get("content") or ""
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(calls):
                assert set(piece) == {"index", "id", "type", "function"}
                assert piece["function"]["arguments"] == ""
                calls.append({**piece, "function": dict(piece["function"])})
            else:
                assert piece["index"] == len(calls) - 1
                assert set(piece) == {"index", "function"}
                assert set(piece["function"]) == {"arguments"}
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
        if choice["finish_reason"]:
            reasons.append(choice["finish_reason"])
    return text, calls, reasons


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
    text, calls, reasons = joined(
        choices_of(await events_with_ids(scripted(), CHATS, messages=CHAT, tools=BODY_TOOLS))
    )
    assert (text, calls, reasons) == ("café", [], ["stop"])


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
async def test_stream_has_the_calls_of_the_whole_message(size):
    whole = (await answered(backend(size=size)))["choices"][0]
    events = await events_with_ids(backend(size=size), CHATS, messages=CHAT, tools=BODY_TOOLS)
    choices = choices_of(events)
    assert choices[0]["delta"] == {"role": "assistant", "content": None}
    text, calls, reasons = joined(choices)
    assert (text, reasons) == (whole["message"]["content"], ["tool_calls"])
    assert [{key: one[key] for key in ("id", "type", "function")} for one in calls] == whole["message"][
        "tool_calls"
    ]
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert all(len(choice["delta"].get("tool_calls", [])) <= 1 for choice in choices)


async def test_call_that_is_cut_has_reason_length_and_the_part_of_its_arguments():
    for count in range(1, 31):
        (choice,) = (await answered(backend(), max_tokens=count))["choices"]
        assert choice["finish_reason"] == "length"
        assert "Sure 😀.".startswith(choice["message"]["content"] or "")
        calls = named(choice["message"].get("tool_calls", []))
        for (name, arguments), (whole_name, whole) in zip(calls, FOUND, strict=False):
            assert name == whole_name
            assert whole.startswith(arguments)
        events = await events_with_ids(backend(), CHATS, messages=CHAT, tools=BODY_TOOLS, max_tokens=count)
        text, streamed, reasons = joined(choices_of(events))
        assert (text or None, named(streamed), reasons) == (
            choice["message"]["content"] or None,
            calls,
            ["length"],
        )
    assert len(calls) == 2


async def test_nothing_follows_calls():
    for rest in (
        "\nDone.",
        "</tool_call>",
        '\n<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        "<tool",
    ):
        (choice,) = (await answered(backend(TEXT + rest)))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Sure 😀.", "tool_calls")
        assert named(choice["message"]["tool_calls"]) == FOUND


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
    streamed = [
        entry for one in choices_of(events) if one["logprobs"] for entry in one["logprobs"]["content"]
    ]
    assert streamed == whole
    assert b"".join(bytes(entry["bytes"]) for entry in whole) == TEXT.encode()


@pytest.mark.parametrize("size", [1, 4, 9])
async def test_resumed_stream_goes_on_with_the_same_calls(size):
    whole = await events_with_ids(backend(size=size), CHATS, messages=CHAT, tools=BODY_TOOLS)
    text, calls, _ = joined(choices_of(whole))
    seen = [
        position for position, (event_id, _) in enumerate(whole) if event_id and not event_id.endswith(":end")
    ]
    assert len(seen) > 5
    for position in seen:
        rest = await events_with_ids(
            backend(size=size), CHATS, last_id=whole[position][0], messages=CHAT, tools=BODY_TOOLS
        )
        again = choices_of(whole[: position + 1]) + choices_of(rest)
        assert joined(again) == (text, calls, ["tool_calls"])


FORCED = {
    "required": ("required", ["get_weather", "now"]),
    "named": ({"type": "function", "function": {"name": "now"}}, ["now"]),
}


@pytest.mark.parametrize(("choice", "names"), FORCED.values(), ids=FORCED)
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


async def test_one_call_where_they_are_not_parallel():
    (choice,) = (await answered(parallel_tool_calls=False))["choices"]
    assert named(choice["message"]["tool_calls"]) == FOUND[:1]
    several, single = backend(), backend()
    await answered(several, tool_choice="required")
    await answered(single, tool_choice="required", parallel_tool_calls=False)
    assert "{0,15}" in several.requests[0].sampling.grammar
    assert "{0,15}" not in single.requests[0].sampling.grammar


@pytest.mark.parametrize("fields", [{}, {"parallel_tool_calls": True}], ids=["default", "parallel"])
async def test_named_tool_is_called_once(fields):
    scripted = backend(2 * '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    now = {"type": "function", "function": {"name": "now"}}
    (choice,) = (await answered(scripted, tool_choice=now, **fields))["choices"]
    assert named(choice["message"]["tool_calls"]) == FOUND[1:]
    assert "{0,15}" not in scripted.requests[0].sampling.grammar


async def test_native_template_gets_the_tools():
    scripted = backend(chat_format=QWEN_CHAT)
    await answered(scripted)
    assert scripted.requests[0].prompt == "tool: get_weather\ntool: now\nuser: hi\n"


async def test_each_family_is_read_in_its_form():
    llama = '{"name": "get_weather", "parameters": {"city": "Zürich"}}'
    (choice,) = (await answered(backend(llama, chat_format=LLAMA_CHAT)))["choices"]
    assert named(choice["message"]["tool_calls"]) == FOUND[:1]
    mistral = backend('[{"name": "now", "arguments": {}}]', chat_format=MISTRAL_CHAT)
    (choice,) = (await answered(mistral, tool_choice="required"))["choices"]
    assert named(choice["message"]["tool_calls"]) == FOUND[1:]
    assert mistral.requests[0].prompt.endswith("[TOOL_CALLS]")


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
    function = {"name": "now", "arguments": {"a": [1]}}
    assert rendered[0] == rendered[1]
    assert rendered[0] == [
        *CHAT,
        {"role": "assistant", "content": "", "tool_calls": [{**told, "function": function}]},
        {"role": "tool", "content": "12:00", "tool_call_id": "call_1"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**told, "function": {"name": "now", "arguments": {}}}],
        },
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


def with_call(**fields):
    function = {"name": "f", "arguments": "{}"}
    own = {"id": "1", "function": {**function, **fields.pop("function", {})}, **fields}
    return [*CHAT, {"role": "assistant", "tool_calls": [own]}]


def tool_of(**fields):
    return {"type": "function", "function": {"name": "f", **fields}}


def nested(depth):
    schema = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


REFUSED = {
    "tools a text": ({"tools": "x"}, "tools"),
    "tool without type": ({"tools": [{"function": TOOL}]}, "tools.0.type"),
    "tool of another type": ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    "tool without function": ({"tools": [{"type": "function"}]}, "tools.0.function"),
    "tool with more": ({"tools": [{**NOW_TOOL, "x": 1}]}, "tools.0.x"),
    "function with more": ({"tools": [NOW_TOOL, tool_of(x=1)]}, "tools.1.function.x"),
    "function without name": ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
    "name empty": ({"tools": [tool_of(name="")]}, "tools.0.function.name"),
    "name with a space": ({"tools": [tool_of(name="a b")]}, "tools.0.function.name"),
    "name with a line": ({"tools": [tool_of(name="a\n")]}, "tools.0.function.name"),
    "name long": ({"tools": [tool_of(name="a" * 65)]}, "tools.0.function.name"),
    "name twice": ({"tools": [NOW_TOOL, tool_of(), NOW_TOOL]}, "tools.2.function.name"),
    "parameters a list": ({"tools": [tool_of(parameters=[])]}, "tools.0.function.parameters"),
    "parameters deep": ({"tools": [tool_of(parameters=nested(70))]}, "tools.0.function.parameters"),
    "parameters long": ({"tools": [tool_of(parameters={"x": "y" * 2**17})]}, "tools.0.function.parameters"),
    "many tools": ({"tools": [tool_of(name=f"f{n}") for n in range(129)]}, "tools"),
    "choice unknown": ({"tool_choice": "any"}, "tool_choice"),
    "choice empty": ({"tool_choice": {}}, "tool_choice"),
    "choice of another type": ({"tool_choice": {"type": "tool", "function": TOOL}}, "tool_choice"),
    "choice with more": ({"tool_choice": {"type": "function", "function": TOOL, "x": 1}}, "tool_choice"),
    "choice without name": ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
    "choice of an unknown function": ({"tool_choice": {"type": "function", "function": TOOL}}, "tool_choice"),
    "required without tools": ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    "named without tools": (
        {"tools": [], "tool_choice": {"type": "function", "function": TOOL}},
        "tool_choice",
    ),
    "call without id": ({"messages": with_call(id=None)}, "messages.1.tool_calls.0.id"),
    "call of another type": ({"messages": with_call(type="custom")}, "messages.1.tool_calls.0.type"),
    "null content of a user": (
        {"messages": [{"role": "user", "content": None, "tool_calls": []}]},
        "messages.0.content",
    ),
    "null result": (
        {"messages": [{"role": "tool", "tool_call_id": "x", "content": None}]},
        "messages.0.content",
    ),
    "structured outputs": ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    "ignore_eos": ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    "functions": ({"functions": [TOOL]}, "functions"),
}


BEYOND = (
    *("name twice", "parameters deep", "parameters long", "unknown function", "without tools"),
    *("structured outputs", "ignore_eos", "name with a line"),
)
"""What a schema cannot express; Python's `$` matches before a line's end too."""


async def test_wrong_field_is_named_and_forbidden_by_the_document(subtests):
    request = SCHEMA["requestBody"]["content"]["application/json"]["schema"]
    for name, (body, param) in REFUSED.items():
        with subtests.test(name):
            error = await refused(**body)
            assert error["param"] == param
            assert error["type"] == "invalid_request_error"
            is_valid = validator(request).is_valid({"messages": CHAT, "tools": BODY_TOOLS, **body})
            assert is_valid is any(part in name for part in BEYOND)


async def test_schema_that_the_grammar_does_not_take_is_an_error_of_the_tools():
    from gammaray.errors import InvalidArgumentError

    def refuse(request, number):
        raise InvalidArgumentError("grammar", "an unimplemented key", "a grammar that llguidance can compile")

    for stream in (False, True):
        scripted = Backend(refuse)
        body = {"messages": CHAT, "tools": BODY_TOOLS, "tool_choice": "required", "stream": stream}
        answer = await complete(scripted, CHATS, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


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
    messages = [
        *CHAT,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "17"},
    ]
    body = {
        "messages": messages,
        "tools": [*BODY_TOOLS, tool_of(description=None)],
        "tool_choice": "required",
    }
    body = {**body, "parallel_tool_calls": True, "logprobs": True}
    assert validator(SCHEMA["requestBody"]["content"]["application/json"]["schema"]).is_valid(body)
    content = SCHEMA["responses"]["200"]["content"]
    validator(content["application/json"]["schema"]).validate(await answered(backend(text), **body))
    piece = content["text/event-stream"]["schema"]["properties"]["data"]["anyOf"][1]["contentSchema"]
    for _, data in (await events_with_ids(backend(text), CHATS, **body))[:-1]:
        validator(piece).validate(json.loads(data))
