"""JSON schemas of the request bodies, made of the models that parse them.

A field's name, default and whether it must be there come from its model; the table here adds the range, which
the models leave to `GenerationRequest.validate`. A field without an entry is an error when this is imported.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from gammaray.checks import MAX_TOKEN_IDS
from gammaray.types import (
    MAX_CACHE_SALT,
    MAX_GAMMA,
    MAX_KEEP_CACHE_S,
    MAX_LOGIT_BIAS,
    MAX_NODES,
    MAX_STOP,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
)
from orchestrator.http_models import (
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

__all__ = ["REQUEST_SCHEMAS", "Schema"]

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
    "model": {"type": "string", "description": "The model served, by its name or empty."},
    "n": _integer(1, MAX_CHOICES, "Samples per prompt; each is a session of its own."),
    "stream": _boolean("Whether to answer by server-sent events."),
    "stream_options": {"$ref": "#/components/schemas/StreamOptions"},
    "max_tokens": _integer(1, _MAX_COUNT),
    "max_completion_tokens": _integer(1, _MAX_COUNT, "The same as max_tokens; where both are, they agree."),
    "stop": {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP}]},
    "seed": _integer(0, 2**64 - 1, "The same request with it gives the same tokens."),
    "temperature": _number(0, 100, "Divides the logits; 0 is greedy."),
    "top_p": _number(0, 1, "Keep the smallest set of likely tokens with this mass.", open_low=True),
    "top_k": _integer(-1, _MAX_COUNT, "Keep this many likely tokens; 0 and -1 are off."),
    "min_p": _number(0, 1, "Drop tokens less likely than this share of the likeliest."),
    "repetition_penalty": _number(0, 100, "Over prompt and output.", open_low=True),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "logit_bias": {
        "type": "object",
        "patternProperties": {"^[0-9]{1,9}$": {"type": "number", "minimum": -100, "maximum": 100}},
        "additionalProperties": False,
        "maxProperties": MAX_LOGIT_BIAS,
    },
    "min_tokens": _integer(0, _MAX_COUNT, "No end of sequence before this many."),
    "ignore_eos": _boolean("Go on past the end of sequence."),
    "stop_token_ids": {
        **_TOKEN_IDS,
        "maxItems": MAX_STOP_TOKEN_IDS,
        "description": "End after one of them.",
    },
    "allowed_token_ids": {**_TOKEN_IDS, "description": "Nothing else is produced, unless it is empty."},
    "prompt_logprobs": _integer(0, MAX_TOP_LOGPROBS, "Tell how likely the prompt's tokens are."),
    "gammaray": {"$ref": "#/components/schemas/GammarayOptions"},
}
_FIELDS: dict[type[BaseModel], dict[str, Schema]] = {
    StreamOptions: {
        "include_usage": _boolean("Whether a last event carries the usage."),
        "continuous_usage_stats": _boolean("With include_usage: each event has its choice's usage so far."),
        "include_obfuscation": _boolean("Whether events are padded to sizes that do not show their text's."),
    },
    GammarayOptions: {
        "verification": {"enum": ["coupled", "rejection", "naive"]},
        "gamma": {"anyOf": [_integer(0, MAX_GAMMA), {"const": "adaptive"}]},
        "max_gamma": _integer(0, MAX_GAMMA, "Upper bound of an adaptive gamma; 0 is the server's."),
        "max_nodes": _integer(0, MAX_NODES, "Upper bound of a proposal's nodes; 0 is the server's choice."),
        "drafter": {"enum": ["model", "ngram", "none"]},
        "session_id": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{0,128}$"},
        "turn": _integer(0, 2**31 - 1, "Above 0 the session's finished turn before is continued."),
        "keep_cache_s": _number(0, MAX_KEEP_CACHE_S, "How long workers keep caches for the next turn."),
        "cache_salt": {
            "type": "string",
            "maxLength": MAX_CACHE_SALT,
            "description": "Caches are shared only with requests of the same salt.",
        },
        "stream_tokens": _boolean("Whether each streamed piece tells its tokens."),
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
        "top_logprobs": _integer(0, MAX_TOP_LOGPROBS, "Only beside logprobs."),
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
    """Return the fields of OpenAI's that change nothing, and those that may only ask for nothing."""
    ignored: dict[str, Schema] = {name: {"description": "Ignored."} for name in sorted(IGNORED)}
    return ignored | {name: {"enum": [*values, None]} for name, values in NEUTRAL.items()}


REQUEST_SCHEMAS: dict[str, Schema] = {model.__name__: _schema(model) for model in _FIELDS}
"""By the name of the model."""
