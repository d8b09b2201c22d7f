"""Types of the fields of request bodies, with checks that are bounded in time whatever a body contains.

A body of too many values is read in part. Errors that hold whatever follows are `errors.lasting`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, GetCoreSchemaHandler, WrapValidator
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

from gammaray.checks import MAX_TOKEN_IDS, Integer, TokenBiases, TokenIds
from gammaray.sampling import SAMPLING_RULES, SAMPLING_TYPES
from gammaray.types import MAX_PREDICTION, MAX_STOP
from orchestrator.api.http.errors import lasting, too_many

__all__ = [
    "MAX_CHOICES",
    "CheckedInteger",
    "Prediction",
    "Prompts",
    "Stop",
    "TextPart",
    "at_most",
    "is_text",
    "is_token_ids",
    "joined",
    "null_is_absent",
    "sampling_type",
]

MAX_CHOICES = 128

_TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]
_StopText = Annotated[str, Field(min_length=1, max_length=256)]
Stop = _StopText | Annotated[list[_StopText], Field(max_length=MAX_STOP)]
_Prompt = (
    Annotated[str, Field(min_length=1, max_length=2**20)]
    | Annotated[list[_TokenId], Field(min_length=1, max_length=MAX_TOKEN_IDS)]
)
Prompts = _Prompt | Annotated[list[_Prompt], Field(min_length=1, max_length=MAX_CHOICES)]


class TextPart(BaseModel):
    """A part of a text; further fields are ignored."""

    type: Literal["text"]
    text: str


class Prediction(BaseModel):
    """OpenAI's predicted output: text that the completion is expected to resemble. It affects speed only."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["content"]
    content: Annotated[str, Field(max_length=MAX_PREDICTION)] | list[TextPart]


@dataclass(frozen=True)
class CheckedInteger(Integer):
    """An integer that is checked here, since later checks know it by another name or not at all."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: int | None) -> int | None:
        if value is not None and not self.low <= value <= self.high:
            raise ValueError(f"an integer in [{self.low}, {self.high}]")
        return value


def null_is_absent(schema: dict[str, Any]) -> None:
    """Add null to the values of a schema's optional fields: `parse_body` drops such fields."""
    for name, field in schema["properties"].items():
        if name not in schema.get("required", ()):
            outer = {key: field.pop(key) for key in ("default", "description") if key in field}
            schema["properties"][name] = {"anyOf": [*field.pop("anyOf", [field]), {"type": "null"}], **outer}


def at_most(limit: int, noun: str) -> WrapValidator:
    """Return the validator of a list of at most `limit` items; later items are not checked."""

    def bounded(value: Any, validate: Callable[[Any], list[Any]]) -> list[Any]:
        items = validate(value[: limit + 1] if isinstance(value, list) else value)
        if len(items) > limit:
            raise too_many(f"{len(value)} {noun}", limit)
        return items

    return WrapValidator(bounded)


def _biases(limit: int) -> WrapValidator:
    """Return the validator of an object with token ids as keys, which JSON has as strings."""

    def bounded(value: Any, validate: Callable[[Any], dict[int, float]]) -> dict[int, float]:
        if not isinstance(value, dict):
            raise ValueError("an object of token id to bias")
        first = dict(islice(value.items(), limit + 1))
        if not all(key.isascii() and key.isdigit() and len(key) <= 10 for key in first):
            raise ValueError("an object whose keys are token ids")
        checked = validate({int(key): bias for key, bias in first.items()})
        if len(value) > limit:
            raise too_many(f"{len(value)} entries", limit)
        return checked

    return WrapValidator(bounded)


def sampling_type(name: str) -> Any:
    """Return the type of a sampling parameter in JSON; `SamplingParams.validate` checks its range."""
    rule = SAMPLING_RULES[name]
    if isinstance(rule, TokenIds):
        return Annotated[list[int], FailFast(), at_most(rule.max_ids, "token ids"), rule]
    if isinstance(rule, TokenBiases):
        return Annotated[dict[int, float], _biases(rule.max_entries), rule]
    return SAMPLING_TYPES[name]


def is_text(value: Any) -> bool:
    """Return whether a value is a string without lone surrogates."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def joined(content: Any, kinds: tuple[str, ...] = ("text",)) -> str:
    """Return the text of a string or of a list of text parts.

    Args:
        content: The value.
        kinds: Types of parts that are text.

    Raises:
        ValueError: It is neither.
        PydanticCustomError: The same, whatever follows in the list.
    """
    parts = [{"type": kinds[0], "text": content}] if isinstance(content, str) else content
    allowed = "a string or a list of text parts (no other kind is supported)"
    if not isinstance(parts, list):
        raise ValueError(allowed)
    if not all(_is_text_part(part, kinds) for part in parts[:-1]):
        raise lasting(allowed)
    if not all(_is_text_part(part, kinds) for part in parts[-1:]):
        raise ValueError(allowed)
    return "".join(part["text"] for part in parts)


def _is_text_part(part: Any, kinds: tuple[str, ...]) -> bool:
    return isinstance(part, dict) and part.get("type") in kinds and is_text(part.get("text"))


def is_token_ids(value: Any) -> bool:
    """Return whether a value is a list of integers.

    Raises:
        PydanticCustomError: It has more of them than a prompt may have.
    """
    if not isinstance(value, list) or set(map(type, value[: MAX_TOKEN_IDS + 1])) != {int}:
        return False
    if len(value) > MAX_TOKEN_IDS:
        raise too_many(f"{len(value)} token ids", MAX_TOKEN_IDS)
    return True
