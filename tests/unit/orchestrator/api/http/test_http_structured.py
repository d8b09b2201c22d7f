"""`response_format` and `structured_outputs`: the grammars that they become, and errors that name them."""

import json
from unittest.mock import Mock

import pytest

from gammaray.demo_pair import resolve_model
from gammaray.errors import InvalidArgumentError
from gammaray.grammar.texts import choice_grammar, json_schema_grammar, regex_grammar
from orchestrator.text.tokenizer import Tokenizer
from tests.support.http_helpers import CHAT, call, complete, events
from tests.support.openapi_helpers import check_refused, request_schema, validator
from tests.support.surface_helpers import ScriptedBackend
from tests.support.tool_helpers import BODY_TOOLS

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BODIES = {COMPLETIONS: {"prompt": "x"}, CHATS: {"messages": CHAT}}
both = pytest.mark.parametrize("path", BODIES)

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
NAMED = {"name": "person", "schema": SCHEMA}
LARK = 'start: "yes" | NO\nNO: /no+/'
OBJECT = json_schema_grammar({"type": "object"})
FORMAT, OUTPUTS = "response_format", "structured_outputs"


def schema_with(**fields):
    return {FORMAT: {"type": "json_schema", "json_schema": fields}}


def outputs(**fields):
    return {OUTPUTS: fields}


OTHERS_OF_VLLM = {**dict.fromkeys(("json", "choice", "grammar")), "json_object": False}
FORMS = {
    "text": ({"response_format": {"type": "text"}}, ""),
    "object": ({"response_format": {"type": "json_object"}}, OBJECT),
    "schema": (schema_with(**NAMED), json_schema_grammar(SCHEMA)),
    "schema with more": (schema_with(**NAMED, strict=True, description="A."), json_schema_grammar(SCHEMA)),
    "schema with nulls": (
        {**schema_with(**NAMED, strict=None, description=None), OUTPUTS: None},
        json_schema_grammar(SCHEMA),
    ),
    "schema true": (schema_with(name="any", schema=True), json_schema_grammar(True)),
    "json": (outputs(json=SCHEMA), json_schema_grammar(SCHEMA)),
    "json text": (outputs(json=json.dumps(SCHEMA)), json_schema_grammar(SCHEMA)),
    "json_object": (outputs(json_object=True), OBJECT),
    "regex": (outputs(regex=r"\d+/\d+"), regex_grammar(r"\d+/\d+")),
    "choice": (outputs(choice=["a", 'b"']), choice_grammar(["a", 'b"'])),
    "grammar": (outputs(grammar=LARK), LARK),
    "vLLM's other fields": (outputs(regex="a+", **OTHERS_OF_VLLM), regex_grammar("a+")),
    "text with outputs": ({FORMAT: {"type": "text"}, **outputs(regex="a+")}, regex_grammar("a+")),
}


@both
async def test_form_becomes_the_grammar_of_every_choice(path, subtests):
    for name, (fields, grammar) in FORMS.items():
        with subtests.test(name):
            backend = ScriptedBackend()
            body = {**BODIES[path], **fields, "n": 2}
            assert validator(request_schema(path)).is_valid(body)
            answer = await complete(backend, path, **body)
            assert answer.status_code == 200, answer.text
            assert [request.sampling.grammar for request in backend.requests] == [grammar] * 2


# Fields, the field that the error names, and whether the document forbids them as well.
WRONG = {
    "format without type": ({FORMAT: {}}, f"{FORMAT}.type", True),
    "schema missing": ({FORMAT: {"type": "json_schema"}}, f"{FORMAT}.json_schema", True),
    "schema of an object": (
        {FORMAT: {"type": "json_object", "json_schema": NAMED}},
        f"{FORMAT}.json_schema",
        True,
    ),
    "schema without name": (schema_with(schema=SCHEMA), f"{FORMAT}.json_schema.name", True),
    "schema of a bad name": (schema_with(name="a b", schema=SCHEMA), f"{FORMAT}.json_schema.name", True),
    "schema without schema": (schema_with(name="a"), f"{FORMAT}.json_schema.schema", True),
    "schema with more": (schema_with(**NAMED, examples=[]), f"{FORMAT}.json_schema.examples", True),
    "schema too large": (schema_with(name="a", schema={"enum": ["x" * 2**18]}), FORMAT, False),
    "schema refused": (schema_with(name="a", schema={"const": 2**60}), f"{FORMAT}.json_schema.schema", False),
    "both": ({FORMAT: {"type": "json_object"}, OUTPUTS: {"json_object": True}}, FORMAT, False),
    "outputs empty": (outputs(), OUTPUTS, True),
    "outputs of nulls": (outputs(json=None, regex=None), OUTPUTS, True),
    "outputs without an object": (outputs(json_object=False), OUTPUTS, True),
    "two outputs": (outputs(regex="a", choice=["a"]), OUTPUTS, True),
    "two outputs, one an object": (outputs(regex="a", json_object=True), OUTPUTS, True),
    "structural_tag": (outputs(structural_tag="{}"), f"{OUTPUTS}.structural_tag", True),
    "whitespace_pattern": (outputs(json={}, whitespace_pattern=" "), f"{OUTPUTS}.whitespace_pattern", True),
    "json malformed": (outputs(json="{"), f"{OUTPUTS}.json", False),
    "json of a list": (outputs(json="[1]"), f"{OUTPUTS}.json", False),
    "regex empty": (outputs(regex=""), f"{OUTPUTS}.regex", False),
    "regex of a surrogate": (outputs(regex="\ud800"), "body", False),
    "choice empty": (outputs(choice=[]), f"{OUTPUTS}.choice", False),
    "grammar empty": (outputs(grammar=" \n"), f"{OUTPUTS}.grammar", False),
    "grammar of a surrogate": (outputs(grammar='start: "\ud800"'), "body", False),
    "grammar too long": (outputs(grammar="start: " + '"a" ' * 2**17), OUTPUTS, False),
}


@both
async def test_wrong_form_names_the_field(path, subtests):
    for name, (fields, param, is_documented) in WRONG.items():
        with subtests.test(name):
            await check_refused(path, {**BODIES[path], **fields}, param, is_documented)


async def test_ignore_eos_names_both_fields():
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "a"}}):
        answer = await complete(ScriptedBackend(), prompt="x", ignore_eos=True, **fields)
        (field,) = fields
        assert answer.json()["error"]["param"] == "ignore_eos"
        assert field in answer.json()["error"]["message"]
    harmless = {"response_format": {"type": "text"}}
    answer = await complete(ScriptedBackend(), prompt="x", ignore_eos=True, **harmless)
    assert answer.status_code == 200


FUNCTION = {"type": "function", "name": "now"}
REFUSED = [
    (COMPLETIONS, {"prompt": "x", FORMAT: {"type": "json_object"}}, FORMAT),
    (COMPLETIONS, {"prompt": "x", OUTPUTS: {"regex": "a"}}, OUTPUTS),
    (CHATS, {"messages": CHAT, FORMAT: {"type": "json_object"}}, FORMAT),
    (CHATS, {"messages": CHAT, OUTPUTS: {"regex": "a"}}, OUTPUTS),
    (CHATS, {"messages": CHAT, "tools": BODY_TOOLS, "tool_choice": "required"}, "tools"),
    (RESPONSES, {"input": "x", "text": {"format": {"type": "json_object"}}}, "text.format"),
    (RESPONSES, {"input": "x", "tools": [FUNCTION], "tool_choice": "required"}, "tools"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
async def test_grammar_that_is_refused_names_the_field_that_asked_for_it(path, body, param):
    """Refused by the orchestrator's compiler before the first token, or by a worker later."""

    def refusing(at):
        def before(request, number):
            if number == at and request.sampling.grammar:
                raise InvalidArgumentError("grammar", "Unimplemented keys: not", "a grammar that compiles")

        return ScriptedBackend(before)

    for samples in ({}, {"n": 3}) if path != RESPONSES else ({},):
        for stream in (False, True):
            answer = await complete(refusing(0), path, **body, **samples, stream=stream)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert error["message"] == (
                f"{param}: got Unimplemented keys: not, allowed: a grammar that compiles"
            )
        if path != RESPONSES:  # there it is an event of its own form, without a field
            *_, last = await events(refusing(1), path, **body, **samples)
            assert json.loads(last)["error"]["param"] == param


async def test_other_errors_keep_their_field():
    refusing = ScriptedBackend(Mock(side_effect=InvalidArgumentError("prompt", "too much", "less")))
    answer = await complete(refusing, prompt="x", response_format={"type": "json_object"})
    assert answer.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    "more",
    [
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"prompt_logprobs": 1, "logprobs": 2},
        {"stop": ["x"], "min_tokens": 2, "logit_bias": {"5": 1}, "temperature": 0},
        {"prediction": {"type": "content", "content": "{}"}},
    ],
    ids=str,
)
async def test_form_goes_with_other_fields(backend, more):
    answer = await complete(backend, prompt=[1, 2], response_format={"type": "json_object"}, **more)
    assert answer.status_code == 200, answer.text
    assert backend.requests[0].sampling.grammar == OBJECT


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
