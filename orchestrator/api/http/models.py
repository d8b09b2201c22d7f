"""OpenAI's request bodies, validated as untrusted input.

Field names are OpenAI's, extensions have vLLM's names (`top_k`, `min_p`, `repetition_penalty`, `min_tokens`,
`ignore_eos`, `stop_token_ids`, `allowed_token_ids`, `prompt_logprobs`) and the object `gammaray` controls
speculation. A field whose value could not change the completion (`user`, `store`, ...) is ignored; every
other unknown field is refused, as the completion without it could differ from the requested one. null means
absent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError, field_validator

from gammaray.checks import MAX_TOKEN_IDS
from gammaray.errors import InvalidArgumentError
from gammaray.types import MAX_LOGIT_BIAS, MAX_STOP, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS
from orchestrator.api.http.errors import (
    invalid_argument,
    invalid_beginning,
    lasting,
    too_many,
)
from orchestrator.api.http.json_text import MAX_VALUES, Decoded, decode

__all__ = [
    "IGNORED",
    "MAX_CHOICES",
    "MAX_MESSAGES",
    "NEUTRAL",
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "GammarayOptions",
    "OpenAIRequest",
    "StreamOptions",
    "parse_body",
]

MAX_CHOICES = 128

MAX_MESSAGES = 2**14
"""Messages of one chat: rendering this many takes a tenth of a second."""

_SMALL_BODY_BYTES = 2**16
"""Bodies up to this size hold too few values to take long."""

IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",  # no effect without tools
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
# Unsupported fields, with the values that have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class GammarayOptions(_Strict):
    """The request object `gammaray`.

    Args:
        verification: Verification method.
        gamma: Draft length, 0 to 64, or "adaptive".
        max_gamma: Upper bound of an adaptive gamma; 0 for the server's.
        max_nodes: Upper bound of a proposal's nodes, above gamma for trees; 0 for the server's choice.
        drafter: Which drafter may propose: "model", "server" (the server that drafts, without look-ups),
            "ngram" (prompt lookup), "suffix" (suffix decoding), "prediction" (the request's `prediction`) or
            "none" (gamma 0).
        session_id: Name of the session; if empty, the server generates one. Only with one choice.
        turn: Turn of the session; above 0 it continues the previous, finished turn. Not for chats.
        keep_cache_s: Seconds that the workers retain their caches for the next turn.
        cache_salt: The workers' caches are shared only with requests of the same salt.
        stream_tokens: Whether each streamed piece includes its tokens, with their origins, under `gammaray`.
    """

    verification: Literal["coupled", "rejection", "naive"] = "coupled"
    gamma: int | Literal["adaptive"] = "adaptive"
    max_gamma: int = 0
    max_nodes: int = 0
    drafter: Literal["model", "server", "ngram", "suffix", "prediction", "none"] = "model"
    session_id: str = ""
    turn: int = 0
    keep_cache_s: float = 0.0
    cache_salt: str = ""
    stream_tokens: bool = False

    @field_validator("gamma", mode="plain")
    @classmethod
    def _check_gamma(cls, value: Any) -> Any:
        if value == "adaptive" or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise ValueError('an integer in [0, 64] or "adaptive"')


class StreamOptions(_Strict):
    """OpenAI's `stream_options`, with vLLM's `continuous_usage_stats`.

    Args:
        include_usage: Send the usage of the whole response in one more event before `[DONE]`.
        continuous_usage_stats: With `include_usage`, each event also has the usage of its choice so far.
        include_obfuscation: Pad each event to a multiple of `stream.EVENT_BYTES`, so that event sizes do not
            reveal the length of the text. The default is false, unlike OpenAI's, which is true.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class OpenAIRequest(_Strict):
    """Fields common to completions and chat completions; see `SamplingParams` for the ranges."""

    default_max_tokens: ClassVar[int | None] = None

    model: str = ""
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[int], FailFast()] = []
    allowed_token_ids: Annotated[list[int], FailFast()] = []
    prompt_logprobs: int | None = None
    prediction: str = ""
    gammaray: GammarayOptions = GammarayOptions()

    @field_validator("n", mode="after")
    @classmethod
    def _check_n(cls, value: int) -> int:
        if not 1 <= value <= MAX_CHOICES:
            raise ValueError(f"an integer in [1, {MAX_CHOICES}]")
        return value

    @field_validator("stop", mode="plain")
    @classmethod
    def _check_stop(cls, value: Any) -> tuple[str, ...]:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(_is_text(text) for text in texts[: MAX_STOP + 1]):
            raise ValueError("a string or a list of strings")
        if len(texts) > MAX_STOP:
            raise too_many(f"{len(texts)} strings", MAX_STOP)
        return tuple(texts)

    @field_validator("logit_bias", mode="wrap")
    @classmethod
    def _check_logit_bias(cls, value: Any, validate: Callable[[Any], dict[int, float]]) -> dict[int, float]:
        if not isinstance(value, dict):
            raise ValueError("an object of token id to bias")
        first = dict(islice(value.items(), MAX_LOGIT_BIAS + 1))
        if not all(key.isascii() and key.isdigit() and len(key) <= 10 for key in first):
            raise ValueError("an object whose keys are token ids")
        checked = validate({int(key): bias for key, bias in first.items()})
        if len(value) > MAX_LOGIT_BIAS:
            raise too_many(f"{len(value)} entries", MAX_LOGIT_BIAS)
        return checked

    @field_validator("stop_token_ids", mode="wrap")
    @classmethod
    def _check_stop_token_ids(cls, value: Any, validate: Callable[[Any], list[int]]) -> list[int]:
        return _bounded(value, validate, MAX_STOP_TOKEN_IDS, "token ids")

    @field_validator("allowed_token_ids", mode="wrap")
    @classmethod
    def _check_allowed_token_ids(cls, value: Any, validate: Callable[[Any], list[int]]) -> list[int]:
        return _bounded(value, validate, MAX_TOKEN_IDS, "token ids")

    @field_validator("prompt_logprobs", mode="after")
    @classmethod
    def _check_prompt_logprobs(cls, value: int | None) -> int | None:
        if value is not None and not 0 <= value <= MAX_TOP_LOGPROBS:
            raise ValueError(f"an integer in [0, {MAX_TOP_LOGPROBS}]")
        return value

    @field_validator("prediction", mode="plain")
    @classmethod
    def _check_prediction(cls, value: Any) -> str:
        if not isinstance(value, dict):
            raise ValueError('an object with type "content" and content')
        if value.get("type", "content") != "content":
            raise lasting('an object of type "content"')
        if unknown := value.keys() - {"type", "content"}:
            raise lasting(f"an object with type and content alone, without {min(unknown)}")
        if not {"type", "content"} <= value.keys():
            raise ValueError('an object with type "content" and content')
        return _joined(value["content"])

    @field_validator("top_k", mode="after")
    @classmethod
    def _check_top_k(cls, value: int) -> int:
        return 0 if value == -1 else value  # off, as in vLLM

    @property
    def asked_max_tokens(self) -> int | None:
        """The limit on emitted tokens under either of its names; None for the rest of the context.

        Raises:
            InvalidArgumentError: Both names are given and they differ.
        """
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidArgumentError("max_tokens", f"{old} with max_completion_tokens {new}", "one of them")
        return next((bound for bound in (new, old, self.default_max_tokens) if bound is not None), None)


class CompletionRequest(OpenAIRequest):
    """Body of POST /v1/completions."""

    default_max_tokens: ClassVar[int | None] = 16  # OpenAI's

    prompt: tuple[str | tuple[int, ...], ...]
    logprobs: int | None = None
    echo: bool = False

    @field_validator("logprobs", mode="after")
    @classmethod
    def _check_logprobs(cls, value: int | None) -> int | None:
        if value is not None and not 0 <= value <= MAX_TOP_LOGPROBS:
            raise ValueError(f"an integer in [0, {MAX_TOP_LOGPROBS}]")
        return value

    @field_validator("prompt", mode="plain")
    @classmethod
    def _check_prompt(cls, value: Any) -> tuple[str | tuple[int, ...], ...]:
        if isinstance(value, str) or _is_token_ids(value):
            value = [value]
        form = f"a string, a list of token ids, or a list of 1 to {MAX_CHOICES} of these"
        if not isinstance(value, list) or not value:
            raise ValueError(form)
        if len(value) > MAX_CHOICES:
            raise lasting(form)
        if not all(_is_text(prompt) or _is_token_ids(prompt) for prompt in value):
            raise ValueError("strings (without lone surrogates) or lists of token ids, none empty")
        return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in value)


class ChatMessage(BaseModel):
    """One message of a chat; further fields (`name`, ...) are ignored and not passed to the model."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: str

    @field_validator("content", mode="plain")
    @classmethod
    def _join_parts(cls, value: Any) -> str:
        return _joined(value)


class ChatRequest(OpenAIRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FailFast()]
    logprobs: bool = False
    top_logprobs: int | None = None

    @field_validator("messages", mode="wrap")
    @classmethod
    def _check_messages(cls, value: Any, validate: Callable[[Any], list[ChatMessage]]) -> list[ChatMessage]:
        messages = _bounded(value, validate, MAX_MESSAGES, "messages")
        if not messages:
            raise ValueError("at least one message")
        return messages


_Item = TypeVar("_Item")
_Request = TypeVar("_Request", bound=OpenAIRequest)


def parse_body(model: type[_Request], body: bytes) -> _Request:
    """Return the request in a body.

    Time and memory are bounded whatever the body contains. A body of more than `_SMALL_BODY_BYTES` may still
    take a few tenths of a second: call this in a thread.

    Raises:
        InvalidArgumentError: A field is invalid; the error names the first one, or `body` if it is not a JSON
            object in UTF-8.
    """
    decoded = _decoded(body)
    payload = decoded.value
    if not isinstance(payload, dict):
        raise InvalidArgumentError("body", f"a JSON {type(payload).__name__}", "a JSON object")
    fields = {name: value for name, value in payload.items() if value is not None and name not in IGNORED}
    for name, neutral in NEUTRAL.items():
        if name in fields and not _is_any_of(fields.pop(name), neutral):
            raise InvalidArgumentError(name, payload[name], "no value; this server does not support it")
    if isinstance(nested := fields.get("gammaray"), dict):
        present = {name: value for name, value in nested.items() if value is not None}
        fields["gammaray"] = _with_one_unknown(GammarayOptions, present)
    if isinstance(nested := fields.get("stream_options"), dict):
        fields["stream_options"] = _with_one_unknown(StreamOptions, nested)
    try:
        request = model.model_validate(_with_one_unknown(model, fields))
    except ValidationError as error:
        if decoded.open_path is None:
            raise invalid_argument(error) from None
        if (found := invalid_beginning(error, decoded.open_path)) is not None:
            raise found from None
    if decoded.open_path is not None:
        allowed = f"at most {MAX_VALUES}, integers in lists not counted"
        raise InvalidArgumentError("body", f"more than {MAX_VALUES} JSON values", allowed)
    return request


def _decoded(body: bytes) -> Decoded:
    try:
        text = body.decode("utf-8")
        return Decoded(json.loads(text)) if len(body) <= _SMALL_BODY_BYTES else decode(text)
    except UnicodeDecodeError as error:
        raise InvalidArgumentError("body", f"invalid UTF-8 at byte {error.start}", "JSON in UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError("body", f"malformed JSON ({error})", "a JSON object") from None


def _with_one_unknown(model: type[BaseModel], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's known fields and the first unknown one, as pydantic reports an error for each."""
    known = {name: value for name, value in fields.items() if name in model.model_fields}
    unknown = next((name for name in fields if name not in known), None)
    return known if unknown is None else {**known, unknown: fields[unknown]}


def _bounded(value: Any, validate: Callable[[Any], list[_Item]], limit: int, noun: str) -> list[_Item]:
    """Return the validated items of a list of at most `limit` items; later items are not checked."""
    items = validate(value[: limit + 1] if isinstance(value, list) else value)
    if len(items) > limit:
        raise too_many(f"{len(value)} {noun}", limit)
    return items


def _is_any_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Return whether a JSON value is one of them; unlike in Python, true does not equal 1."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed)


def _is_text(value: Any) -> bool:
    """Return whether a value is a string without lone surrogates."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _joined(content: Any) -> str:
    """Return the text of a string or of a list of text parts.

    Raises:
        ValueError: It is neither.
        PydanticCustomError: The same, whatever follows in the list.
    """
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    allowed = "a string or a list of text parts (no other kind is supported)"
    if not isinstance(parts, list):
        raise ValueError(allowed)
    if not all(map(_is_text_part, parts[:-1])):
        raise lasting(allowed)
    if not all(map(_is_text_part, parts[-1:])):
        raise ValueError(allowed)
    return "".join(part["text"] for part in parts)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and _is_text(part.get("text"))


def _is_token_ids(value: Any) -> bool:
    """Return whether a value is a list of integers.

    Raises:
        PydanticCustomError: It has more of them than a prompt may have.
    """
    if not isinstance(value, list) or set(map(type, value[: MAX_TOKEN_IDS + 1])) != {int}:
        return False
    if len(value) > MAX_TOKEN_IDS:
        raise too_many(f"{len(value)} token ids", MAX_TOKEN_IDS)
    return True
