"""The OpenAPI document says what the HTTP API does: its paths, the edges of its fields, its answers."""

import json
import re
from dataclasses import replace

import pytest
from jsonschema import Draft202012Validator

from gammaray.sampling import SAMPLING_RULES
from orchestrator.api.http.auth import DOCUMENT_PATH
from orchestrator.api.http.models import (
    HTTP_SAMPLING,
    ChatRequest,
    CompletionRequest,
    GammarayOptions,
    StreamOptions,
)
from orchestrator.api.http.server.app import create_app
from tests.support.http_helpers import CHAT, call, complete, events
from tests.support.openapi_helpers import document, request_schema, validator
from tests.support.surface_helpers import ScriptedBackend

SCHEMAS = document()["components"]["schemas"]
BODIES = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": CHAT}}


def test_document_has_the_paths_and_methods_that_the_application_has():
    app = create_app(ScriptedBackend())
    served = {
        (re.sub(r":path}", "}", route.path), method.lower())
        for route in app.routes
        for method in route.methods - {"HEAD"}
    }
    described = {(path, method) for path, methods in document()["paths"].items() for method in methods}
    assert described == served


async def test_document_is_served_as_it_is():
    answer = await call(ScriptedBackend(), "GET", DOCUMENT_PATH)
    assert answer.json() == json.loads(json.dumps(document()))


def test_schemas_are_valid(subtests):
    for name in sorted(SCHEMAS):
        with subtests.test(name):
            Draft202012Validator.check_schema(SCHEMAS[name])


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest])
def test_sampling_parameters_have_the_range_and_meaning_of_their_declaration(model, subtests):
    for name in HTTP_SAMPLING:
        with subtests.test(str(name)[:80]):
            properties, rule = SCHEMAS[model.__name__]["properties"], SAMPLING_RULES[name]
            if name == "top_k":  # -1 is off as well, as in vLLM
                rule = replace(rule, low=-1, meaning="Keep this many most likely tokens; 0 and -1 are off.")
            least = {"minItems": 1} if name == "allowed_token_ids" else {}
            assert properties[name]["anyOf"] == [{**rule.schema, **least}, {"type": "null"}]
            assert properties[name]["description"] == rule.meaning


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest, GammarayOptions, StreamOptions])
def test_every_field_of_requests_is_described(model):
    assert model.model_fields.keys() <= SCHEMAS[model.__name__]["properties"].keys()
    assert all(SCHEMAS[model.__name__]["properties"][name]["description"] for name in model.model_fields)


def bounded(schema):
    """Return the schema of a number within an optional field's, None when it is no number."""
    choices = [schema, *schema.get("anyOf", [])]
    return next((one for one in choices if one.get("type") in ("integer", "number")), None)


def edges():
    """Yield each number of the request bodies: path, name, where it is, and its schema."""
    for path, model in (("/v1/completions", "CompletionRequest"), ("/v1/chat/completions", "ChatRequest")):
        for holder, name in ((None, model), ("gammaray", "GammarayOptions")):
            for field, schema in SCHEMAS[name]["properties"].items():
                number = bounded(schema)
                assert number is None or "exclusiveMaximum" not in number, "such edges are not tested"
                if number is not None and "maximum" in number:
                    yield path, holder, field, number


def body_with(path, holder, field, value):
    # What else must be there for a field to make sense.
    extra = {"top_logprobs": {"logprobs": True}, "min_tokens": {"max_tokens": 2**31}}.get(field, {})
    options = {"session_id": "s"} if field == "turn" else {}
    if holder is None:
        return {**BODIES[path], **extra, field: value}
    return {**BODIES[path], "gammaray": {**options, field: value}}


async def test_numbers_are_accepted_only_within_their_bounds(subtests):
    for path, holder, field, number in edges():
        with subtests.test(f"{path} {holder} {field}"):
            low = number.get("minimum", number.get("exclusiveMinimum"))
            step = 1 if number["type"] == "integer" else 1e-6
            inside = [low + step * ("exclusiveMinimum" in number), number["maximum"]]
            outside = [low - step * ("minimum" in number), number["maximum"] + step]
            if (path, field) == ("/v1/chat/completions", "turn"):
                inside, outside = [0], [1, *outside]  # described in words: a chat has no turns
            for value in inside:
                body = body_with(path, holder, field, value)
                answer = await complete(ScriptedBackend(), path, **body)
                assert answer.status_code == 200, answer.text
                assert validator(request_schema(path)).is_valid(body)
            for value in outside:
                answer = await complete(ScriptedBackend(), path, **body_with(path, holder, field, value))
                assert answer.status_code == 400, (value, answer.text)


def with_more(value):
    """Yield copies of a JSON value that have one more field, each in another object of known fields."""
    if isinstance(value, dict):
        if not any(re.fullmatch(r"[0-9]+|bytes:.*|t[0-9]|caf", key) for key in value):  # keys that are data
            yield {**value, "no_such_field": 1}
        for key, entry in value.items():
            yield from ({**value, key: more} for more in with_more(entry))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from ([*value[:index], more, *value[index + 1 :]] for more in with_more(entry))


OTHERS = {
    **{"stop": "x", "user": {"any": "thing"}, "best_of": 1, "tools": None, "stop_token_ids": []},
    **{"logit_bias": {"5": -100, "12": 1.5}, "seed": None, "temperature": 0},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("tells_tokens", [None, False, True], ids=["whole", "stream", "stream of tokens"])
async def test_answers_have_all_fields_of_the_document_and_no_others(path, tells_tokens):
    with_logprobs = {"logprobs": 2} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 2}
    body = {**BODIES[path], **with_logprobs, **OTHERS, "prompt_logprobs": 1, "n": 2}
    assert validator(request_schema(path)).is_valid({**body, "gammaray": {"gamma": 3, "max_gamma": None}})
    content = document()["paths"][path]["post"]["responses"]["200"]["content"]
    if tells_tokens is None:
        found = [(await complete(ScriptedBackend(), path, **body)).json()]
        schema = content["application/json"]["schema"]
    else:
        names = ("include_usage", "continuous_usage_stats", "include_obfuscation")
        options = {"stream_options": dict.fromkeys(names, True), "gammaray": {"stream_tokens": tells_tokens}}
        *pieces, last = await events(ScriptedBackend(), path, **body, **options)
        found = [json.loads(piece) for piece in pieces]
        done, described = content["text/event-stream"]["schema"]["properties"]["data"]["anyOf"]
        assert last == done["const"]
        schema = described["contentSchema"]
    check = validator(schema)
    changed = [more for answer in found for more in with_more(answer)]
    assert len(changed) > 10
    assert all(check.is_valid(answer) for answer in found)
    assert not any(check.is_valid(answer) for answer in changed)


@pytest.mark.parametrize(
    ("path", "is_healthy"),
    [("/", True), ("/health", True), ("/health", False), ("/v1/models", True), ("/metrics/targets", True)],
)
async def test_information_responses_match_the_document(path, is_healthy):
    answer = await call(ScriptedBackend(healthy=is_healthy), "GET", path)
    assert answer.status_code == (200 if is_healthy else 503)
    described = document()["paths"][path]["get"]["responses"][str(answer.status_code)]
    validator(described["content"]["application/json"]["schema"]).validate(answer.json())
    assert all(name in answer.headers for name in described.get("headers", ()))
