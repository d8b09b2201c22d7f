"""JSON schemas of what the HTTP API answers; each object is closed, so that tests see a field too many."""

from __future__ import annotations

from orchestrator.openapi_requests import Schema

__all__ = ["RESPONSE_SCHEMAS", "STREAM_SCHEMAS"]

_STRING: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_AMOUNT: Schema = {"type": "number", "minimum": 0}
_SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
_BYTES: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}}
_ORIGIN: Schema = {"enum": ["accepted", "correction", "bonus"]}
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
    "origins": _array(_ORIGIN),
    "token_ids": _array(_COUNT),
    "time_ms": _object(dict.fromkeys(("draft", "verify", "other", "total"), _AMOUNT)),
    "speedup_estimate": _or_null(_AMOUNT),
    "cycles_by_drafter": _object(dict.fromkeys(("model", "ngram", "none"), _COUNT)),
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
_PIECE_TOKEN = _object({"id": _COUNT, "origin": _ORIGIN, "bytes": _BYTES})
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
    """Return the schema of an event; `gammaray` may tell tokens, the summary, both or be absent."""
    piece = _whole(kind, choice)
    told = _object({**_SUMMARY, "tokens": _array(_PIECE_TOKEN)}, optional=(*_SUMMARY, "tokens"))
    usage = {"anyOf": [_ref("Usage"), _TOKEN_COUNTS]}
    piece["properties"] |= {"gammaray": told, "usage": usage, "obfuscation": _STRING}
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
        "param": {"type": ["string", "null"], "description": "The wrong field."},
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
"""By name."""

STREAM_SCHEMAS: dict[str, Schema] = {
    "CompletionPiece": _piece(
        "text_completion", _choice({"text": _STRING}, _COMPLETION_LOGPROBS, _or_null(_FINISH))
    ),
    "ChatCompletionPiece": _piece(
        "chat.completion.chunk", _choice({"delta": _DELTA}, _CHAT_LOGPROBS, _or_null(_FINISH))
    ),
}
"""Of the data of a stream's events, by name; an event may be an `Error` too, and the last one is `[DONE]`."""
