"""The OpenAPI document of the HTTP API: `GET /openapi.json`, or `python -m orchestrator.api.http.openapi`.

Schemas of requests are generated from the models that parse them. Schemas of responses are closed, so that
tests detect an undocumented field.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeAlias

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from gammaray import __version__
from gammaray.checks import MAX_TOKEN_IDS
from gammaray.types import (
    MAX_CACHE_SALT,
    MAX_GAMMA,
    MAX_KEEP_CACHE_S,
    MAX_LOGIT_BIAS,
    MAX_NODES,
    MAX_PREDICTION,
    MAX_STOP,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    DrafterKind,
)
from gammaray.wire.metadata import MAX_TIMEOUT_MS, TIMEOUT_HEADER
from orchestrator.access.caller import MAX_PRIORITY, PRIORITY_HEADER
from orchestrator.api.http.models import (
    IGNORED,
    MAX_CHOICES,
    MAX_MESSAGES,
    NEUTRAL,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GammarayOptions,
    StreamOptions,
)

__all__ = [
    "PATH",
    "REQUEST_SCHEMAS",
    "RESPONSE_SCHEMAS",
    "STREAM_SCHEMAS",
    "Schema",
    "add_document",
    "document",
]

Schema: TypeAlias = dict[str, Any]


def _integer(low: int, high: int, meaning: str = "") -> Schema:
    return _described({"type": "integer", "minimum": low, "maximum": high}, meaning)


def _number(low: float, high: float, meaning: str = "", *, open_low: bool = False) -> Schema:
    bound = "exclusiveMinimum" if open_low else "minimum"
    return _described({"type": "number", bound: low, "maximum": high}, meaning)


def _boolean(meaning: str = "") -> Schema:
    return _described({"type": "boolean"}, meaning)


def _described(schema: Schema, meaning: str) -> Schema:
    return {**schema, "description": meaning} if meaning else schema


_MAX_COUNT = 2**31
_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
_TOKEN_IDS = {"type": "array", "items": _TOKEN_ID, "maxItems": MAX_TOKEN_IDS}
_PROMPT = {
    "anyOf": [{"type": "string", "minLength": 1, "maxLength": 2**20}, {**_TOKEN_IDS, "minItems": 1}],
}
_STOP = {"type": "string", "minLength": 1, "maxLength": 256}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}

_COMMON: dict[str, Schema] = {
    "model": {"type": "string", "description": "Name of the served model, or empty."},
    "n": _integer(1, MAX_CHOICES, "Samples per prompt; each is a separate session."),
    "stream": _boolean("Whether to stream the response as server-sent events."),
    "stream_options": {"$ref": "#/components/schemas/StreamOptions"},
    "max_tokens": _integer(1, _MAX_COUNT),
    "max_completion_tokens": _integer(
        1, _MAX_COUNT, "Same as max_tokens; if both are given they must be equal."
    ),
    "stop": {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP}]},
    "seed": _integer(0, 2**64 - 1, "Seed for reproducible tokens."),
    "temperature": _number(0, 100, "Divides the logits; 0 is greedy."),
    "top_p": _number(0, 1, "Keep the smallest set of likely tokens with this mass.", open_low=True),
    "top_k": _integer(-1, _MAX_COUNT, "Keep this many likely tokens; 0 and -1 are off."),
    "min_p": _number(0, 1, "Drop tokens below this fraction of the highest probability."),
    "repetition_penalty": _number(0, 100, "Applies to prompt and output.", open_low=True),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "logit_bias": {
        "type": "object",
        "patternProperties": {"^[0-9]{1,9}$": {"type": "number", "minimum": -100, "maximum": 100}},
        "additionalProperties": False,
        "maxProperties": MAX_LOGIT_BIAS,
    },
    "min_tokens": _integer(0, _MAX_COUNT, "Mask end-of-sequence tokens before this many tokens."),
    "ignore_eos": _boolean("Continue after end-of-sequence tokens."),
    "stop_token_ids": {
        **_TOKEN_IDS,
        "maxItems": MAX_STOP_TOKEN_IDS,
        "description": "Stop after one of these tokens.",
    },
    "allowed_token_ids": {**_TOKEN_IDS, "description": "If not empty, only these tokens are produced."},
    "prompt_logprobs": _integer(
        0, MAX_TOP_LOGPROBS, "Return log-probabilities of the prompt's tokens and this many alternatives."
    ),
    "prediction": {
        "type": "object",
        "properties": {
            "type": {"const": "content"},
            "content": {
                "anyOf": [
                    {"type": "string", "maxLength": MAX_PREDICTION},
                    {"type": "array", "items": _PART},
                ]
            },
        },
        "required": ["type", "content"],
        "additionalProperties": False,
        "description": "Text that the completion is expected to resemble; it affects speed only.",
    },
    "gammaray": {"$ref": "#/components/schemas/GammarayOptions"},
}
_FIELDS: dict[type[BaseModel], dict[str, Schema]] = {
    StreamOptions: {
        "include_usage": _boolean("Whether the last event contains the usage."),
        "continuous_usage_stats": _boolean(
            "With include_usage: whether each event contains its choice's usage so far."
        ),
        "include_obfuscation": _boolean("Whether events are padded to hide the size of their text."),
    },
    GammarayOptions: {
        "verification": {"enum": ["coupled", "rejection", "naive"]},
        "gamma": {"anyOf": [_integer(0, MAX_GAMMA), {"const": "adaptive"}]},
        "max_gamma": _integer(0, MAX_GAMMA, "Upper bound of an adaptive gamma; 0 is the server's bound."),
        "max_nodes": _integer(0, MAX_NODES, "Upper bound of a proposal's nodes; 0 is the server's choice."),
        "drafter": {"enum": ["model", "ngram", "suffix", "prediction", "none"]},
        "session_id": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{0,128}$"},
        "turn": _integer(
            0, 2**31 - 1, "Above 0, continues the session's previous turn, which must be finished."
        ),
        "keep_cache_s": _number(
            0, MAX_KEEP_CACHE_S, "Seconds for which workers keep caches for the next turn."
        ),
        "cache_salt": {
            "type": "string",
            "maxLength": MAX_CACHE_SALT,
            "description": "Caches are shared only with requests of the same salt.",
        },
        "stream_tokens": _boolean("Whether each streamed piece contains its tokens."),
    },
    ChatMessage: {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
    },
    CompletionRequest: {
        **_COMMON,
        "prompt": {
            "anyOf": [
                *_PROMPT["anyOf"],
                {"type": "array", "items": _PROMPT, "minItems": 1, "maxItems": MAX_CHOICES},
            ]
        },
        "logprobs": _integer(0, MAX_TOP_LOGPROBS, "With echo, those of the prompt as well."),
        "echo": _boolean("Whether the text begins with the prompt; max_tokens may then be 0 as well."),
    },
    ChatRequest: {
        **_COMMON,
        "messages": {
            "type": "array",
            "items": {"$ref": "#/components/schemas/ChatMessage"},
            "minItems": 1,
            "maxItems": MAX_MESSAGES,
        },
        "logprobs": _boolean(),
        "top_logprobs": _integer(0, MAX_TOP_LOGPROBS, "Requires logprobs."),
    },
}
_NULL_IS_ABSENT = (CompletionRequest, ChatRequest, GammarayOptions)
_OPEN = (ChatMessage,)


def _schema(model: type[BaseModel]) -> Schema:
    """Return the schema of a model's objects."""
    described = dict(_FIELDS[model])
    properties: dict[str, Schema] = {}
    required = []
    for name, field in model.model_fields.items():
        schema = described.pop(name)
        if field.is_required():
            required.append(name)
        elif model in _NULL_IS_ABSENT:
            schema = {"anyOf": [schema, {"type": "null"}]}
        if isinstance(field.default, str | int | float):
            schema = {**schema, "default": field.default}
        assert field.default is not PydanticUndefined or field.is_required()
        properties[name] = schema
    assert not described, f"{model.__name__} has no {', '.join(described)}"
    if model in (CompletionRequest, ChatRequest):
        properties |= _unsupported()
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": model in _OPEN,
    }


def _unsupported() -> dict[str, Schema]:
    """Return OpenAI's fields that are ignored, and those that accept only values without effect."""
    ignored: dict[str, Schema] = {name: {"description": "Ignored."} for name in sorted(IGNORED)}
    return ignored | {name: {"enum": [*values, None]} for name, values in NEUTRAL.items()}


REQUEST_SCHEMAS: dict[str, Schema] = {model.__name__: _schema(model) for model in _FIELDS}
"""Schemas of requests by model name."""


_STRING: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_AMOUNT: Schema = {"type": "number", "minimum": 0}
_SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
_BYTES: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}}
_ORIGIN: Schema = {"enum": ["accepted", "correction", "bonus"]}
_DRAFTER: Schema = {"enum": [*(kind.value for kind in DrafterKind if kind is not DrafterKind.NONE), None]}
_FINISH: Schema = {"enum": ["stop", "length", "cancelled"]}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: dict[str, Schema], optional: tuple[str, ...] = ()) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


_SUMMARY: dict[str, Schema] = {
    "session_id": _STRING,
    "seed": _COUNT,
    "cycles": _COUNT,
    "tokens_per_cycle": _AMOUNT,
    "alpha": _or_null(_SHARE),
    "acceptance_rate": _or_null(_SHARE),
    "accepted_lengths": _array(_COUNT),
    "gamma_mean": _AMOUNT,
    "drafted_tokens": _COUNT,
    "accepted_tokens": _COUNT,
    "origins": _array(_ORIGIN),
    "token_ids": _array(_COUNT),
    "time_ms": _object(dict.fromkeys(("draft", "verify", "other", "total"), _AMOUNT)),
    "speedup_estimate": _or_null(_AMOUNT),
    "cycles_by_drafter": _object(dict.fromkeys(("model", "ngram", "suffix", "prediction", "none"), _COUNT)),
    "fallback_cycles": _COUNT,
    "draft_workers": _COUNT,
}
_METRICS = _object(
    {
        "speculative_decoding": _object(
            {
                "acceptance_histogram": _array(_COUNT),
                "num_spec_steps": _COUNT,
                "mean_acceptance_length": {"type": "number", "minimum": 1},
                "draft_acceptance_rate": _SHARE,
                "num_accepted_draft_tokens": _COUNT,
                "num_draft_tokens": _COUNT,
            }
        )
    }
)
_PIECE_TOKEN = _object({"id": _COUNT, "origin": _ORIGIN, "drafter": _DRAFTER, "bytes": _BYTES})
_CHAT_ENTRY: dict[str, Schema] = {"token": _STRING, "logprob": _NUMBER, "bytes": _BYTES}
_CHAT_LOGPROBS = _object(
    {
        "content": _array(_object({**_CHAT_ENTRY, "top_logprobs": _array(_object(_CHAT_ENTRY))})),
        "refusal": {"type": "null"},
    }
)
_COMPLETION_LOGPROBS = _object(
    {
        "tokens": _array(_STRING),
        "token_logprobs": _array(_or_null(_NUMBER)),
        "top_logprobs": _array(_or_null({"type": "object", "additionalProperties": _NUMBER})),
        "text_offset": _array(_COUNT),
    }
)
_RANKED = _object({"logprob": _NUMBER, "rank": {"type": "integer", "minimum": 1}, "decoded_token": _STRING})
_PROMPT_LOGPROBS = _array(_or_null({"type": "object", "additionalProperties": _RANKED}))
_MESSAGE = _object({"role": {"const": "assistant"}, "content": _STRING, "refusal": {"type": "null"}})
_DELTA = _object({"role": {"const": "assistant"}, "content": _STRING}, optional=("role", "content"))


def _choice(content: dict[str, Schema], logprobs: Schema, finish: Schema, *extra: str) -> Schema:
    fields = {
        "index": _COUNT,
        **content,
        "logprobs": _or_null(logprobs),
        "finish_reason": finish,
        **{name: _ref("GammarayResult") for name in extra},
        "prompt_logprobs": _PROMPT_LOGPROBS,
    }
    return _object(fields, optional=(*extra, "prompt_logprobs"))


def _whole(kind: str, choice: Schema) -> Schema:
    head = {"id": _STRING, "object": {"const": kind}, "created": _COUNT, "model": _STRING}
    rest = {"choices": _array(choice), "usage": _ref("Usage"), "gammaray": _ref("GammarayResult")}
    more = {"metrics": _METRICS, "prompt_logprobs": _PROMPT_LOGPROBS}
    return _object({**head, **rest, **more}, optional=tuple(more))


def _piece(kind: str, choice: Schema) -> Schema:
    """Return the schema of an event; `gammaray` may have the tokens, the summary, both, or be absent."""
    piece = _whole(kind, choice)
    own = _object({**_SUMMARY, "tokens": _array(_PIECE_TOKEN)}, optional=(*_SUMMARY, "tokens"))
    usage = {"anyOf": [_ref("Usage"), _TOKEN_COUNTS]}
    piece["properties"] |= {"gammaray": own, "usage": usage, "obfuscation": _STRING}
    piece["required"] = [name for name in piece["required"] if name not in ("usage", "gammaray")]
    return piece


_COUNTS = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _COUNT)
_TOKEN_COUNTS = _object(_COUNTS)
_USAGE = _object(
    {
        **_COUNTS,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
        "completion_tokens_details": _object(
            {"accepted_prediction_tokens": _COUNT, "rejected_prediction_tokens": _COUNT}
        ),
    }
)
_MODEL = _object(
    {
        "id": _STRING,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": {"const": "gammaray"},
        "max_model_len": {"type": "integer", "minimum": 1},
    }
)
_ERROR = _object(
    {
        "message": _STRING,
        "type": {
            "enum": ["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]
        },
        "param": {"type": ["string", "null"], "description": "The invalid field."},
        "code": {"type": ["string", "null"]},
    }
)
_TARGETS = _array(
    _object({"targets": _array(_STRING), "labels": _object({"process": _STRING, "pid": _STRING})})
)

RESPONSE_SCHEMAS: dict[str, Schema] = {
    "GammarayResult": _object(_SUMMARY),
    "Usage": _USAGE,
    "Completion": _whole(
        "text_completion", _choice({"text": _STRING}, _COMPLETION_LOGPROBS, _FINISH, "gammaray")
    ),
    "ChatCompletion": _whole(
        "chat.completion", _choice({"message": _MESSAGE}, _CHAT_LOGPROBS, _FINISH, "gammaray")
    ),
    "Model": _MODEL,
    "ModelList": _object({"object": {"const": "list"}, "data": _array(_ref("Model"))}),
    "Health": _object({"status": {"const": "ok"}}),
    "Root": _object({"name": {"const": "gammaray"}, "model": _STRING, "endpoints": _array(_STRING)}),
    "MetricsTargets": _TARGETS,
    "Error": _object({"error": _ERROR}),
}
"""Schemas of responses by name."""

STREAM_SCHEMAS: dict[str, Schema] = {
    "CompletionPiece": _piece(
        "text_completion", _choice({"text": _STRING}, _COMPLETION_LOGPROBS, _or_null(_FINISH))
    ),
    "ChatCompletionPiece": _piece(
        "chat.completion.chunk", _choice({"delta": _DELTA}, _CHAT_LOGPROBS, _or_null(_FINISH))
    ),
}
"""Schemas of a stream's event data by name; an event may also be an `Error`, and the last one is `[DONE]`."""


PATH = "/openapi.json"

_ERRORS = {
    400: "An invalid field (named by `param`), malformed JSON, or invalid UTF-8.",
    401: "No valid API key.",
    403: "Without API keys: a request for another host, or from a page of another site.",
    404: "Unknown model or session.",
    405: "Method not allowed for this path.",
    408: "The body took too long to arrive.",
    409: "The session is in another state, or its target model is no longer served.",
    413: "The body is too large.",
    415: "The body's content type is not application/json.",
    429: "A limit is exceeded.",
    500: "An internal error.",
    503: "No target worker or Redis is available; retry.",
    504: "The deadline is exceeded.",
}
_LOOKING_UP = (400, 401, 403, 405, 500, 503, 504)
_GENERATING = tuple(_ERRORS)


def add_document(app: FastAPI) -> None:
    """Add GET /openapi.json."""

    @app.get(PATH)
    async def openapi() -> JSONResponse:
        return JSONResponse(document())


@cache
def document() -> dict[str, Any]:
    """Return the document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gammaray",
            "version": __version__,
            "description": "Lossless speculative decoding, over OpenAI's API.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/completions": _generation("CompletionRequest", "Completion"),
            "/v1/chat/completions": _generation("ChatRequest", "ChatCompletion"),
            **_information(),
        },
        "components": {
            "schemas": {**REQUEST_SCHEMAS, **RESPONSE_SCHEMAS, **STREAM_SCHEMAS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _generation(request: str, response: str) -> Schema:
    """Return the path item of a kind of completions."""
    body = {"required": True, "content": {"application/json": {"schema": _ref(request)}}}
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_ref(f"{response}Piece"), _ref("Error")]},
    }
    event = {  # one object per event, as tools expect for this media type
        "type": "object",
        "properties": {"id": {"type": "string"}, "data": {"anyOf": [{"const": "[DONE]"}, data]}},
        "required": ["data"],
    }
    answer = {
        "description": "The completion; with `stream` its pieces, as server-sent events.",
        "content": {"application/json": {"schema": _ref(response)}, "text/event-stream": {"schema": event}},
    }
    return {
        "post": {
            "operationId": f"create{response}",
            "parameters": _headers(),
            "requestBody": body,
            "responses": {"200": answer, **_errors(_GENERATING)},
        }
    }


def _headers() -> list[Schema]:
    def header(name: str, schema: Schema, meaning: str) -> Schema:
        return {"name": name, "in": "header", "description": meaning, "schema": schema}

    return [
        header(
            TIMEOUT_HEADER,
            {"type": "integer", "minimum": 1, "maximum": MAX_TIMEOUT_MS},
            "Timeout of the request in milliseconds; at that time the work is cancelled.",
        ),
        header(
            PRIORITY_HEADER,
            {"type": "integer", "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
            "Priority among the tenant's waiting requests; higher runs first.",
        ),
        header(
            "Last-Event-ID",
            {"type": "string", "pattern": r"^[A-Za-z0-9_.-]{1,128}:[0-9]{1,12}:[0-9]{1,12}(:end)?$"},
            "Id of the last event that the client received, to resume a stream of one choice.",
        ),
        header("traceparent", {"type": "string"}, "W3C trace context; invalid values are ignored."),
    ]


def _information() -> dict[str, Schema]:
    def get(operation: str, response: str, *errors: int, **more: Any) -> Schema:
        answer = {"description": response, "content": {"application/json": {"schema": _ref(response)}}}
        responses = {"200": answer, **_errors(errors)}
        return {"get": {"operationId": operation, **more, "responses": responses}}

    name: Schema = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    everybody: Schema = {"security": [{}]}
    root = get("root", "Root", 403, 405, **everybody)
    root["get"]["responses"]["200"]["content"]["text/html"] = {"schema": {"type": "string"}}
    scraped: Schema = {
        "operationId": "scrapeMetrics",
        "responses": {
            "200": {
                "description": "vLLM's metrics about requests and speculation, in Prometheus's text format.",
                "content": {"text/plain": {"schema": {"type": "string"}}},
            },
            **_errors(_LOOKING_UP),
        },
    }
    itself = {
        "description": "This document.",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
    return {
        "/v1/models": get("listModels", "ModelList", *_LOOKING_UP),
        "/v1/models/{name}": get("getModel", "Model", *_LOOKING_UP, 404, parameters=[name]),
        "/metrics": {"get": scraped},
        "/metrics/targets": get("listMetricsTargets", "MetricsTargets", *_LOOKING_UP),
        "/health": get("health", "Health", 403, 405, 503, **everybody),
        "/": root,
        PATH: {
            "get": {
                "operationId": "describe",
                **everybody,
                "responses": {"200": itself, **_errors((403, 405))},
            }
        },
    }


def _errors(statuses: tuple[int, ...]) -> dict[str, Schema]:
    found = {}
    for status in sorted(statuses):
        answer: Schema = {"description": _ERRORS[status]}
        answer["content"] = {"application/json": {"schema": _ref("Error")}}
        if status in (429, 503):
            seconds = {"type": "integer", "minimum": 1}
            answer["headers"] = {"Retry-After": {"required": True, "schema": seconds}}
        found[str(status)] = answer
    return found


if __name__ == "__main__":
    print(json.dumps(document(), indent=1))
