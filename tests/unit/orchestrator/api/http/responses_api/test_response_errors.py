"""Requests for responses that are refused, each with the field that is wrong."""

import pytest

from tests.support.openapi_helpers import check_refused, request_schema, validator
from tests.support.response_helpers import PATH, get, respond
from tests.support.schema_helpers import nested
from tests.support.surface_helpers import ScriptedBackend

TOOL = {"type": "function", "name": "f"}
MESSAGE = {"role": "user", "content": "x"}
SCHEMA = {"type": "json_schema", "name": "a", "schema": {}}
CALL = {"type": "function_call", "call_id": "c", "name": "f"}


WRONG = [
    ({"no_such_field": 1}, "no_such_field"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"moderation": {}}, "moderation"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"mode": "deep"}}, "reasoning.mode"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"tools": [{"type": "web_search"}, {"name": "f"}]}, "tools.1.type"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
    ({"input": [MESSAGE, {"type": "computer_call"}]}, "input.1"),
    ({"input": [{"role": "user"}]}, "input.0.content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
    ({"input": [{**CALL, "call_id": None, "arguments": "{}"}]}, "input.0.call_id"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "text", "name": "a"}}}, "text.format.name"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"text": {"tone": "calm"}}, "text.tone"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ({"gammaray": {"gamma": 65}}, "gammaray.gamma"),
]
BEYOND = [
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": "x" * (2**20 + 1)}, "input"),
    ({"input": "\ud800"}, "body"),
    ({"input": [MESSAGE] * (2**14 + 1)}, "input"),
    ({"tools": [{"type": "web_search"}, TOOL, TOOL]}, "tools.2.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
    ({"include": ["message.output_text.logprobs"], "tools": [TOOL]}, "include"),
    ({"gammaray": {"session_id": "mine"}}, "gammaray.session_id"),
    ({"gammaray": {"stream_tokens": True}}, "gammaray.stream_tokens"),
    ({"instructions": "\ud800"}, "body"),
]
"""What the document cannot express."""

HOSTILE = [
    ({"text": {f"k{number}": 0 for number in range(50_000)}}, "text.k0"),
    ({"input": [{}] * 50_000}, "input.0"),
    ({"text": {"format": {**SCHEMA, "schema": {"enum": [nested(500)]}}}}, "body"),
    ({"input": [{**CALL, "arguments": "[" * (2**20 + 1)}]}, "input.0.arguments"),
    ({"tools": [{**TOOL, "name": f"f{n}"} for n in range(20_000)]}, "tools"),
]


async def test_wrong_field_is_named_soon_and_forbidden_by_the_document(subtests):
    for table, is_documented in ((WRONG, True), (BEYOND, False), (HOSTILE, None)):
        for wrong, param in table:
            with subtests.test(str((wrong, param))[:80]):
                await check_refused(PATH, {"input": "x", **wrong}, param, is_documented)


@pytest.mark.parametrize(
    "right",
    [
        {"prompt_cache_key": "k", "safety_identifier": "s", "service_tier": "auto", "max_tool_calls": 3},
        {"prompt_cache_options": "x", "prompt_cache_retention": "x", "user": "x"},
        {"background": False, "truncation": "disabled", "reasoning": {}, "top_logprobs": 2},
        {"reasoning": {"effort": None, "summary": "auto"}, "client_metadata": {"window": "1"}},
        {"include": ["reasoning.encrypted_content"], "tools": [], "tool_choice": "none"},
        {"include": ["message.output_text.logprobs"], "tools": [{"type": "local_shell"}]},
        {"text": None, "metadata": None, "stream_options": None, "instructions": None},
        {"tools": [{**TOOL, "parameters": None, "strict": None, "description": None}]},
        {"text": {"format": None, "verbosity": "medium"}},
    ],
    ids=str,
)
async def test_neutral_fields_are_accepted(right):
    body = {"input": "x", **right}
    answer = await respond(ScriptedBackend(), **body)
    assert answer.status_code == 200, answer.text
    assert validator(request_schema(PATH)).is_valid(body)


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("", {"stream": "true"}, "stream"),
        ("", {"colour": "red"}, "colour"),
        ("", {"include[]": "everything"}, "include"),
        ("/input_items", {"limit": "0"}, "limit"),
        ("/input_items", {"limit": "101"}, "limit"),
        ("/input_items", {"order": "up"}, "order"),
        ("/input_items", {"after": "msg_none"}, "after"),
    ],
)
async def test_wrong_parameter_is_named(backend, path, query, param):
    response_id = (await respond(backend, input="x")).json()["id"]
    answer = await get(backend, f"{response_id}{path}", **query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
