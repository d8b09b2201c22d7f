"""Types of the fields of request bodies, with checks that are bounded in time whatever a body contains.

A body of too many values is read in part. Errors that hold whatever follows are `errors.lasting`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    GetCoreSchemaHandler,
    WrapValidator,
    field_validator,
)
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

from gammaray.checks import MAX_TOKEN_IDS, Integer, TokenBiases, TokenIds
from gammaray.sampling import SAMPLING_RULES, SAMPLING_TYPES
from gammaray.types import MAX_PREDICTION, MAX_STOP
from orchestrator.api.http.errors import lasting, too_many

MAX_CHOICES = 128

_TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]
_StopText = Annotated[str, Field(min_length=1, max_length=256)]
Stop = _StopText | Annotated[list[_StopText], Field(max_length=MAX_STOP)]
_Prompt = (
    Annotated[str, Field(min_length=1, max_length=2**20)]
    | Annotated[list[_TokenId], Field(min_length=1, max_length=MAX_TOKEN_IDS)]
)
Prompts = _Prompt | Annotated[list[_Prompt], Field(min_length=1, max_length=MAX_CHOICES)]


class StrictModel(BaseModel):
    """An object of a body; it has no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class TextPart(BaseModel):
    """A part of a text; further fields are ignored."""

    type: Literal["text"]
    text: str


class RefusalPart(BaseModel):
    """A part of a message in which the assistant refuses; further fields are ignored."""

    type: Literal["refusal"]
    refusal: str


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


def with_one_unknown(model: type[BaseModel], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's known fields and the first unknown one, as pydantic reports an error for each."""
    names = {field.alias or name for name, field in model.model_fields.items()}
    known = {name: value for name, value in fields.items() if name in names}
    unknown = next((name for name in fields if name not in names), None)
    return known if unknown is None else {**known, unknown: fields[unknown]}


def present(model: type[BaseModel], value: Any) -> Any:
    """Return the fields of an object that are not null, see `with_one_unknown`; any other value as it is."""
    if not isinstance(value, dict):
        return value
    return with_one_unknown(model, {name: field for name, field in value.items() if field is not None})


class JsonSchemaFormat(StrictModel):
    """OpenAI's `json_schema` of a response format."""

    model_config = ConfigDict(json_schema_extra=null_is_absent)

    name: str = Field(description="Ignored.", pattern="^[A-Za-z0-9_-]{1,64}$")
    description: str = Field("", description="Ignored.")
    json_schema: Any = Field(
        alias="schema", description="The JSON schema.", json_schema_extra={"type": ["object", "boolean"]}
    )
    strict: bool = Field(False, description="Ignored: the completion matches the schema in any case.")


def _describe_format(schema: dict[str, Any]) -> None:
    null_is_absent(schema)
    schema["if"] = {"properties": {"type": {"const": "json_schema"}}}
    schema["then"] = {"required": ["json_schema"], "properties": {"json_schema": {"type": "object"}}}
    schema["else"] = {"properties": {"json_schema": {"type": "null"}}}


class ResponseFormat(StrictModel):
    """OpenAI's `response_format`."""

    model_config = ConfigDict(json_schema_extra=_describe_format)

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="Any text, any JSON object, or JSON that matches `json_schema`."
    )
    json_schema: JsonSchemaFormat | None = Field(None, description="Only with type json_schema.")

    @field_validator("json_schema", mode="before")
    @classmethod
    def _without_null(cls, value: Any) -> Any:
        return present(JsonSchemaFormat, value)


def _describe_outputs(schema: dict[str, Any]) -> None:
    kinds = [name for name in schema["properties"] if name != "disable_any_whitespace"]
    null_is_absent(schema)
    schema["oneOf"] = [
        {
            "required": [name],
            "properties": {name: {"const": True} if name == "json_object" else {"not": {"type": "null"}}},
        }
        for name in kinds
    ]


class StructuredOutputs(StrictModel):
    """vLLM's `structured_outputs`: exactly one of the fields, besides `disable_any_whitespace`."""

    model_config = ConfigDict(json_schema_extra=_describe_outputs)

    json_schema: Any = Field(
        None,
        alias="json",
        description="JSON schema, or its text.",
        json_schema_extra={"type": ["object", "boolean", "string"]},
    )
    regex: str = Field("", description="Regular expression of the whole completion.")
    choice: Annotated[list[str], FailFast()] = Field(default=[], description="The possible completions.")
    grammar: str = Field(
        "", description="Grammar in the Lark syntax of llguidance, or GBNF, whose first rule is `root`."
    )
    json_object: bool = Field(False, description="Any JSON object.")
    disable_any_whitespace: bool = Field(
        False, description="Ignored: JSON has the whitespace of Python's `json.dumps` in any case."
    )


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


def answer_part(part: Any) -> Any:
    """Return a part of the assistant's message as a text part, if it is a refusal."""
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal"
    return {"type": "text", "text": part.get("refusal")} if is_refusal else part


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
