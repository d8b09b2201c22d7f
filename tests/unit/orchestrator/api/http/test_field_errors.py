"""Each field of all bodies: a wrong type is an error that names it in JSON's words; its default is taken."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.http_helpers import BODIES, call, http_client
from tests.support.openapi_helpers import request_schema, resolved, validator
from tests.support.surface_helpers import ScriptedBackend

WRONG = [None, True, -7, "no such value!", [], [None], {"no such key": 1}]
FREE = ("json_schema", "schema", "parameters", "json")
"""Fields with a JSON schema, whose insides are the client's."""

CLASSES = re.compile(
    r"\b([A-Z][a-z]+[A-Z]\w*|dict|dictionary|str|int|bool|NoneType|instance|valid|Python|pydantic|"
    r"items or characters)\b"
)


def fields(schema: Any, path: tuple[str | int, ...] = (), depth: int = 0) -> Iterator[tuple[str | int, ...]]:
    """Yield the place of each field in a schema."""
    schema = resolved(schema)
    if depth > 6:
        return
    for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        if "properties" in resolved(inner) or resolved(inner).get("type") == "array":
            yield from fields(inner, path, depth + 1)
    for name, own in schema.get("properties", {}).items():
        yield (*path, name)
        if name not in FREE:
            yield from fields(own, (*path, name), depth + 1)
    if schema.get("type") == "array" and "items" in schema:
        yield (*path, 0)
        yield from fields(schema["items"], (*path, 0), depth + 1)


def example(schema: Any) -> Any:
    """Return a value that matches a schema."""
    schema = resolved(schema)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return example(schema[key][0])
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    match schema.get("type"):
        case "object" | ["object", *_]:
            names = {
                *schema.get("required", ()),
                *({"role", "content"} & schema.get("properties", {}).keys()),
            }
            return {name: example(schema["properties"][name]) for name in names}
        case "array":
            return [example(schema["items"])] * schema.get("minItems", 0)
        case "string":
            return "f"
        case "boolean":
            return False
        case _:
            return schema.get("minimum", 0)


def with_value(schema: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """Return the smallest value of a schema that has a value at a path."""
    if not path:
        return value
    step, *rest = path
    for inner in alternatives(schema):
        if isinstance(step, int) and inner.get("type") == "array":
            if rest and tuple(rest) not in fields(inner["items"]):
                continue
            return [with_value(inner["items"], tuple(rest), value)]
        if step in inner.get("properties", {}):
            # With `oneOf` the field itself is one of those of which exactly one has to be given.
            around = example(inner) if inner.get("type") == "object" and "oneOf" not in inner else {}
            # Outside of the case that a schema tells apart others are ignored or refused.
            case, own = inner.get("if", {}).get("properties", {}), inner.get("properties", {})
            around |= {name: example(own[name]) for name in inner.get("then", {}).get("required", ())}
            around |= {name: of["const"] for name, of in case.items()}
            return {**around, step: with_value(inner["properties"][step], tuple(rest), value)}
    raise AssertionError(path)


def alternatives(schema: Any) -> Iterator[Any]:
    schema = resolved(schema)
    yield schema
    for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from alternatives(inner)


@pytest.mark.parametrize("path", BODIES)
async def test_wrong_types_are_named_by_field_and_in_the_words_of_json(path):
    schema, num_refused = request_schema(path), 0
    is_valid = validator(schema).is_valid
    async with http_client(ScriptedBackend()) as client:
        for place in fields(schema):
            name = ".".join(map(str, place))
            for wrong in WRONG:
                body = with_value(schema, place, wrong)
                body |= {key: value for key, value in BODIES[path].items() if key != place[0]}
                if is_valid(body):
                    continue
                answer = await client.post(path, json=body)
                assert answer.status_code == 400, (body, answer.text)
                error = answer.json()["error"]
                words = error["message"].partition(": got ")[2].replace(str(wrong), "")
                assert not CLASSES.search(words), error["message"]
                assert f"{name}.".startswith(f"{error['param']}.") or error["param"].startswith(name), (
                    body,
                    error,
                )
                num_refused += 1
    assert num_refused > 100


@pytest.mark.parametrize("path", BODIES)
async def test_every_default_may_be_given(path):
    schema = request_schema(path)
    defaults = {
        name: own["default"] if "default" in own else own["enum"][0]
        for name, own in resolved(schema)["properties"].items()
        if name not in BODIES[path] and ("default" in own or "enum" in own)
    }
    assert {"temperature", "n" if path != "/v1/responses" else "top_logprobs", "reasoning"} <= defaults.keys()
    nulls = {name: None for name in resolved(schema)["properties"] if name not in BODIES[path]}
    for body in (defaults, nulls, *({name: value} for name, value in defaults.items())):
        answer = await call(ScriptedBackend(), path=path, json={**BODIES[path], **body})
        assert answer.status_code == 200, (body, answer.text)


OPENAI = {"temperature": 1, "top_p": 1, "stream": False, "user": "u"}
PENALTIES = {"frequency_penalty": 0, "presence_penalty": 0}
SAMPLES = {
    "n": 1,
    "logit_bias": {},
    "stop": None,
    "seed": None,
    "stream_options": None,
    **PENALTIES,
    **OPENAI,
}
COMPLETION = {"best_of": 1, "echo": False, "logprobs": None, "max_tokens": 16, "suffix": None, **SAMPLES}
TOOLS = {"tools": [], "tool_choice": "auto", "metadata": {}, "service_tier": "auto"}
CHAT = {
    **{"audio": None, "function_call": "auto", "functions": [], "logprobs": False, "top_logprobs": 0},
    **{"max_completion_tokens": None, "modalities": ["text"], "prediction": None, "store": False},
    **{"parallel_tool_calls": True, "response_format": {"type": "text"}, "verbosity": "medium"},
    **{"web_search_options": None, "prompt_cache_key": None, "safety_identifier": None, **TOOLS, **SAMPLES},
}
RESPONSE = {
    **{"background": False, "conversation": None, "include": [], "instructions": None, "prompt": None},
    **{"max_output_tokens": None, "max_tool_calls": None, "previous_response_id": None, "store": True},
    **{"text": {"format": {"type": "text"}, "verbosity": "medium"}, "truncation": "disabled"},
    **{"top_logprobs": 0, **TOOLS, **OPENAI},
}


@pytest.mark.parametrize(("path", "body"), [*zip(BODIES, (COMPLETION, CHAT, RESPONSE), strict=True)])
async def test_openais_defaults_may_be_given(path, body):
    answer = await call(ScriptedBackend(), path=path, json={**BODIES[path], **body})
    assert answer.status_code == 200, answer.text


USER = {"role": "user", "content": "x", "name": None, "tool_calls": None}
CALL = {"id": "c", "type": None, "function": {"name": "f", "arguments": "{}", "x": None}}
CALLS = {"role": "assistant", "content": None, "refusal": None, "tool_call_id": None, "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("path", "part", "refused"),
    [
        ("/v1/completions", {"logit_bias": {}, "stop": [], "stop_token_ids": []}, None),
        ("/v1/completions", {"stream_options": {}, "gammaray": {"gamma": 3, "max_gamma": None}}, None),
        (
            "/v1/completions",
            {"user": {"any": 1}, "best_of": 1, "tools": None, "logit_bias": {"5": -100}},
            None,
        ),
        ("/v1/completions", {"prediction": {"type": "content", "content": [], "index": None}}, None),
        ("/v1/completions", {"allowed_token_ids": []}, "allowed_token_ids"),
        ("/v1/completions", {"min_tokens": 17}, "min_tokens"),
        ("/v1/completions", {"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ("/v1/completions", {"min_tokens": 5, "max_tokens": 5}, None),
        ("/v1/completions", {"gammaray": {"gamma": 5, "max_gamma": 4}}, "gammaray.gamma"),
        ("/v1/chat/completions", {"allowed_token_ids": []}, "allowed_token_ids"),
        ("/v1/chat/completions", {"modalities": []}, "modalities"),
        ("/v1/chat/completions", {"min_tokens": 50, "max_completion_tokens": 5}, "min_tokens"),
        ("/v1/responses", {"allowed_token_ids": []}, "allowed_token_ids"),
        ("/v1/responses", {"min_tokens": 50, "max_output_tokens": 5}, "min_tokens"),
        ("/v1/responses", {"text": {}, "include": [], "tools": [], "reasoning": {}}, None),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": "x", "type": None, "id": None, "status": None}]},
            None,
        ),
        ("/v1/chat/completions", {"messages": [{**USER, "content": []}, CALLS]}, None),
    ],
    ids=str,
)
async def test_empty_null_and_contradictory_values_have_one_meaning(path, part, refused):
    answer = await call(ScriptedBackend(), path=path, json={**BODIES[path], **part})
    error = answer.json().get("error") or {"param": None}
    assert (answer.status_code, error["param"]) == (400 if refused else 200, refused), answer.text
