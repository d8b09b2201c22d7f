"""A tool's schema that cannot be followed: the error names the tool, and the place in its schema."""

import pytest

from gammaray.demo_pair import resolve_model
from orchestrator.text.tokenizer import Tokenizer
from tests.support.http_helpers import CHAT, call
from tests.support.surface_helpers import ScriptedBackend

PLACES = [
    ({"not": {}}, ".properties.a.not"),
    ({"type": "array", "items": {"type": "string", "not": {}}}, ".properties.a.items.not"),
    ({"anyOf": [{"type": "string"}, {"if": {}}]}, ".properties.a.anyOf.1.if"),
    ({"$ref": "#/$defs/it"}, ".$defs.it.contains"),
    ({"$ref": "#/nope"}, ".properties.a.$ref"),
    ({"type": "nonsense"}, ".properties.a.type"),
    ({"minimum": "x"}, ".properties.a.minimum"),
    ({"enum": 3}, ".properties.a.enum"),
    ({"type": "string", "pattern": "a("}, ".properties.a.pattern"),
    ({"type": "string", "pattern": "^(?!x)a$"}, ".properties.a.pattern"),
    ({"minProperties": 3}, ".properties.a"),
    ({"oneOf": [{}, {}]}, ".properties.a"),
    ({"const": 2**60}, ".properties.a"),
    ({"type": "object", "properties": {"not": {}, "b": {"not": {}}}}, ".properties.a.properties.b.not"),
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(resolve_model("demo"))


@pytest.mark.parametrize(("schema", "place"), PLACES, ids=str)
async def test_error_names_the_tool_and_the_place(tokenizer, schema, place):
    def before(request, number):
        tokenizer.begin_grammar(request.sampling.grammar)

    good = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a+$"}}}
    bad = {"type": "object", "properties": {"a": schema}, "$defs": {"it": {"contains": {}}}}
    tools = [{"name": "good", "parameters": good}, {"name": "bad", "parameters": bad}]
    flat = {"input": "x", "tools": [{"type": "function", **tool} for tool in tools]}
    chat = {"messages": CHAT, "tools": [{"type": "function", "function": tool} for tool in tools]}
    for path, body, field in (
        ("/v1/responses", flat, "tools.1"),
        ("/v1/chat/completions", chat, "tools.1.function"),
    ):
        for stream in (False, True):
            asked = {**body, "tool_choice": "required", "stream": stream}
            answer = await call(ScriptedBackend(before), path=path, json=asked)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, f"{field}.parameters{place}")
            assert "at 4(" not in error["message"]
