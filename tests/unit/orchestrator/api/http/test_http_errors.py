"""Bad requests to the OpenAI-compatible API: each gets OpenAI's error object, which names the field."""

from unittest.mock import Mock

import pytest

from gammaray.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from orchestrator.api.http.bodies import MAX_BODY_BYTES
from tests.support.http_helpers import call, complete
from tests.support.openapi_helpers import check_refused
from tests.support.surface_helpers import ScriptedBackend

# test_openapi.py has the bounds of each number, test_field_errors.py wrong types and names of each field.
COMPLETIONS = {
    "no prompt": ({}, "prompt"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "one empty prompt of two": ({"prompt": ["a", ""]}, "prompt"),
    "prompt with a lone surrogate": ({"prompt": "\ud800"}, "body"),
    "prompt too long": ({"prompt": "x" * (2**20 + 1)}, "prompt"),
    "temperature NaN": ({"prompt": "x", "temperature": float("nan")}, "temperature"),
    "temperature infinite": ({"prompt": "x", "temperature": float("inf")}, "temperature"),
    "max_tokens twice": ({"prompt": "x", "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    "n times prompts too large": ({"prompt": ["x", "y"], "n": 65}, "n"),
    "stop empty": ({"prompt": "x", "stop": ""}, "stop"),
    "stop too many": ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
    "logit_bias beyond 100": ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias[1]"),
    "logit_bias too many": ({"prompt": "x", "logit_bias": {str(n): 1 for n in range(301)}}, "logit_bias"),
    "stop_token_ids too many": ({"prompt": "x", "stop_token_ids": [1] * 4097}, "stop_token_ids"),
    "unknown field": ({"prompt": "x", "temprature": 1}, "temprature"),
    "unknown field of no Unicode": ({"prompt": "x", "\ud800": 1}, "body"),
    "session_id illegal": ({"prompt": "x", "gammaray": {"session_id": "a b"}}, "gammaray.session_id"),
    "cache_salt too long": ({"prompt": "x", "gammaray": {"cache_salt": "x" * 65}}, "gammaray.cache_salt"),
    "session_id for two": ({"prompt": "x", "n": 2, "gammaray": {"session_id": "a"}}, "gammaray.session_id"),
    "not an object": ([1], "body"),
    "malformed JSON": (b'{"prompt": "x"', "body"),
}


def predicted(content, **more):
    return {"prompt": "x", "prediction": {"type": "content", "content": content} | more}


COMPLETIONS |= {
    "prediction without content": ({"prompt": "x", "prediction": {"type": "content"}}, "prediction"),
    "prediction with more": (predicted("y", index=1), "prediction"),
    "prediction of an image": (predicted([{"type": "text", "text": "y"}, {"type": "image"}]), "prediction"),
    "prediction of surrogates": (predicted("\ud800"), "body"),
    "prediction too long": (predicted("y" * (2**16 + 1)), "prediction"),
    "prediction of many parts": (predicted([{"type": "text", "text": "y" * 2**12}] * 17), "prediction"),
}

HI = [{"role": "user", "content": "hi"}]
IMAGE = [{"type": "image_url", "image_url": {"url": "data:"}}]
CHATS = {
    "no messages": ({}, "messages"),
    "message without role": ({"messages": [{"content": "x"}]}, "messages.0.role"),
    "messages too many": ({"messages": HI * 16385}, "messages"),
    "no content": ({"messages": [{"role": "user"}]}, "messages.0.content"),
    "an image": ({"messages": [{"role": "user", "content": IMAGE}]}, "messages.0.content"),
    "refused by the template": ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
    "top_logprobs without logprobs": ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
}
BEYOND = (
    *("prompt with a lone surrogate", "prediction of surrogates", "prediction of many parts"),
    *("temperature NaN", "max_tokens twice", "n times prompts too large", "session_id for two"),
    *("refused by the template", "top_logprobs without logprobs"),
)
"""What the document cannot express."""


async def test_bad_request_names_the_field(subtests):
    for path, table in (("/v1/completions", COMPLETIONS), ("/v1/chat/completions", CHATS)):
        for name, (body, param) in table.items():
            with subtests.test(name):
                await check_refused(path, body, param, name not in BEYOND)


async def test_unknown_field_that_is_null_is_ignored():
    outputs = {"regex": "a+", "structural_tag": None, "whitespace_pattern": None}
    answer = await complete(ScriptedBackend(), prompt="x", temprature=None, structured_outputs=outputs)
    assert answer.status_code == 200, answer.text


async def test_too_large_body_is_413():
    answer = await complete(ScriptedBackend(), prompt="x" * (MAX_BODY_BYTES + 1))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", "/v2", 404, None),
        ("GET", "/v1/completions", 405, "POST"),
        ("OPTIONS", "/v1/responses/x", 405, "DELETE, GET, HEAD"),
    ],
)
async def test_unknown_path_or_method_is_an_error_object(method, path, status, allowed):
    answer = await call(ScriptedBackend(), method, path)
    assert (answer.status_code, answer.headers.get("allow")) == (status, allowed)
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_after"),
    [
        (UnauthenticatedError("no key"), 401, "authentication_error", None),
        (FailedPreconditionError("it exists"), 409, "invalid_request_error", None),
        (ResourceExhaustedError("full", retry_after_s=2.5), 429, "rate_limit_error", "3"),
        (InternalError("bug"), 500, "server_error", None),
        (UnavailableError("unknown"), 503, "server_error", "1"),
        (DeadlineExceededError("slow"), 504, "server_error", None),
        (ZeroDivisionError("secret"), 500, "server_error", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@pytest.mark.parametrize("stream", [False, True])
async def test_failure_has_its_status(error, status, kind, retry_after, stream):
    answer = await complete(ScriptedBackend(Mock(side_effect=error)), prompt="x", stream=stream)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == kind
    assert answer.headers.get("retry-after") == retry_after
    assert "secret" not in answer.text
