"""Types of the fields of request bodies. Checks stop at the first wrong item of a list."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError, model_validator
from pydantic_core import from_json

from gammaray.checks import MAX_TOKEN_IDS, TokenBiases, TokenIds
from gammaray.errors import InvalidArgumentError
from gammaray.sampling import SAMPLING_RULES, SAMPLING_TYPES
from gammaray.types import MAX_PREDICTION, MAX_STOP
from orchestrator.api.http.tools.calls import ChoiceMode, Tool, ToolChoice

MAX_CHOICES = 128

MAX_TOOLS = 128
"""Upper bound of tools in a request, the same as OpenAI's, and of calls in a message."""

MAX_SCHEMA_CHARS = 2**17
"""Upper bound of the characters of all tools' schemas."""

MAX_ARGUMENT_CHARS = 2**20
"""Upper bound of the characters of the arguments of all calls in the messages: no prompt is longer."""

_MAX_DEPTH = 64
_ENCODER = json.JSONEncoder()
_NAME = r"^[A-Za-z0-9_.\-]{1,64}$"

_TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]
_StopText = Annotated[str, Field(min_length=1, max_length=256)]
Stop = _StopText | Annotated[list[_StopText], Field(max_length=MAX_STOP)]
_Prompt = (
    Annotated[str, Field(min_length=1, max_length=2**20)]
    | Annotated[list[_TokenId], Field(min_length=1, max_length=MAX_TOKEN_IDS)]
)
Prompts = _Prompt | Annotated[list[_Prompt], Field(min_length=1, max_length=MAX_CHOICES)]


def null_is_absent(schema: dict[str, Any]) -> None:
    """Add null to the values of a schema's optional fields: a model drops such fields."""
    for name, field in schema["properties"].items():
        if name not in schema.get("required", ()):
            outer = {key: field.pop(key) for key in ("default", "description") if key in field}
            if outer.get("default") in ("", []) or isinstance(outer.get("default"), dict):
                outer["default"] = None
            schema["properties"][name] = {"anyOf": [*field.pop("anyOf", [field]), {"type": "null"}], **outer}


def with_one_unknown(model: type[BaseModel], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's known fields and the first unknown one, as pydantic reports an error for each."""
    names = {field.alias or name for name, field in model.model_fields.items()}
    known = {name: value for name, value in fields.items() if name in names}
    unknown = next((name for name in fields if name not in names), None)
    return known if unknown is None else {**known, unknown: fields[unknown]}


class StrictModel(BaseModel):
    """An object of a body; it has no unknown fields, and null means that a field is absent."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        json_schema_extra=null_is_absent,
    )

    @model_validator(mode="before")
    @classmethod
    def _prepared(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = {name: field for name, field in value.items() if field is not None}
        return given if cls.model_config["extra"] == "ignore" else with_one_unknown(cls, given)


class OpenModel(StrictModel):
    """The same with further fields, which are ignored."""

    model_config = ConfigDict(extra="ignore")


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


class JsonSchemaFormat(StrictModel):
    """OpenAI's `json_schema` of a response format."""

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


def _describe_outputs(schema: dict[str, Any]) -> None:
    kinds = list(schema["properties"])
    null_is_absent(schema)
    schema["oneOf"] = [
        {
            "required": [name],
            "properties": {name: {"const": True} if name == "json_object" else {"not": {"type": "null"}}},
        }
        for name in kinds
    ]


class StructuredOutputs(StrictModel):
    """vLLM's `structured_outputs`: exactly one of the fields."""

    model_config = ConfigDict(json_schema_extra=_describe_outputs)

    json_schema: Any = Field(
        None,
        alias="json",
        description="JSON schema, or its text.",
        json_schema_extra={"type": ["object", "boolean", "string"]},
    )
    regex: str = Field("", description="Regular expression of the whole completion.")
    choice: Annotated[list[str], FailFast()] = Field(default=[], description="The possible completions.")
    grammar: str = Field("", description="Grammar in the Lark syntax of llguidance.")
    json_object: bool = Field(False, description="Any JSON object.")


def _by_token_id(limit: int, value: Any) -> dict[int, Any]:
    """Return an object with token ids as keys, which JSON has as strings."""
    if not isinstance(value, dict) or len(value) > limit:
        raise ValueError(f"an object of token id to bias, with at most {limit} entries")
    if not all(key.isascii() and key.isdigit() and len(key) <= 10 for key in value):
        raise ValueError("an object whose keys are token ids")
    return {int(key): bias for key, bias in value.items()}


def sampling_type(name: str) -> Any:
    """Return the type of a sampling parameter in JSON; `SamplingParams.validate` checks its range."""
    rule = SAMPLING_RULES[name]
    if isinstance(rule, TokenIds):  # an empty list would allow no token, so that it is no way to allow all
        some = Field(min_length=1, max_length=rule.max_ids, json_schema_extra={"minItems": 1})
        return Annotated[list[int], FailFast(), some, rule]
    if isinstance(rule, TokenBiases):
        by_token_id = partial(_by_token_id, rule.max_entries)
        return Annotated[dict[int, float], BeforeValidator(by_token_id), rule]
    return SAMPLING_TYPES[name]


def joined(content: Any, kinds: tuple[str, ...] = ("text",)) -> str:
    """Return the text of a string or of a list of text parts, whose types are `kinds`."""
    parts = [{"type": kinds[0], "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(_is_text_part(part, kinds) for part in parts):
        raise ValueError("a string or a list of text parts (no other kind is supported)")
    return "".join(part["text"] for part in parts)


def answer_part(part: Any) -> Any:
    """Return a part of the assistant's message as a text part, if it is a refusal."""
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal"
    return {"type": "text", "text": part.get("refusal")} if is_refusal else part


def _is_text_part(part: Any, kinds: tuple[str, ...]) -> bool:
    return isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get("text"), str)


def is_token_ids(value: Any) -> bool:
    """Return whether a value is a list of integers, which may not be longer than a prompt."""
    if not isinstance(value, list) or set(map(type, value)) != {int}:
        return False
    if len(value) > MAX_TOKEN_IDS:
        raise ValueError(f"at most {MAX_TOKEN_IDS} token ids")
    return True


class FunctionDefinition(StrictModel):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=_NAME)] = Field(description="Name of the function.")
    description: str = Field("", description="What it does, for the model.")
    parameters: dict[str, Any] | None = Field(
        None, description="JSON schema of its arguments, an object; without it there are none."
    )
    strict: bool | None = Field(
        None, description="Ignored: forced calls match the schema in any case, others are the model's own."
    )


class FunctionKind(StrictModel):
    """The kind of a tool."""

    type: Literal["function"] = Field(description="Hosted tools are not supported.")


class FunctionTool(FunctionKind):
    """OpenAI's tool; functions are supported."""

    function: FunctionDefinition


class ToolInput(FunctionDefinition, FunctionKind):
    """A function that the model may call, in the Responses API."""


class ChosenName(StrictModel):
    """The name of a function."""

    name: str


class NamedTool(StrictModel):
    """The tool that the model must call."""

    form: ClassVar[str] = '{"type": "function", "function": {"name": name}}'

    type: Literal["function"]
    function: ChosenName

    @property
    def called(self) -> str:
        return self.function.name


class ChosenTool(ChosenName):
    """The tool that the model must call, in the Responses API."""

    form: ClassVar[str] = '{"type": "function", "name": name}'

    type: Literal["function"]

    @property
    def called(self) -> str:
        return self.name


class CalledFunction(OpenModel):
    """A function and the text of its arguments; further fields are ignored."""

    name: str
    arguments: str = Field(description="JSON of an object; any other text reaches the model as it is.")


class MessageCall(OpenModel):
    """A call in a message of the assistant; further fields are ignored."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


def parse_choice(value: Any, named: type[NamedTool] | type[ChosenTool] = NamedTool) -> ToolChoice:
    """Return the choice that a `tool_choice` stands for; `named` is the model of one tool."""
    for mode in get_args(ChoiceMode):
        if value == mode:
            return ToolChoice(mode)
    try:
        return ToolChoice("required", named.model_validate(value).called)
    except ValidationError:
        raise ValueError(f'"none", "auto", "required" or {named.form}') from None


def checked_tools(
    definitions: Sequence[BaseModel], choice: ToolChoice | None, field: str = "tools.{}"
) -> list[Tool]:
    """Return the functions that a body defines; `field` names the field of a definition by its index.

    InvalidArgumentError if a name occurs twice, a tool is required without tools, the chosen one is unknown,
    or their schemas are too long or nested too deeply.
    """
    tools = [
        Tool(own.name, own.description, own.parameters, f"{field.format(index)}.parameters")
        for index, own in enumerate(definitions)
        if isinstance(own, FunctionDefinition)
    ]
    names = [tool.name for tool in tools]
    for index, (name, tool) in enumerate(zip(names, tools, strict=True)):
        if name in names[:index]:
            place = tool.field.removesuffix(".parameters")
            raise InvalidArgumentError(f"{place}.name", name, "a name that no other tool has")
    if choice is not None and choice.mode == "required" and not tools:
        raise InvalidArgumentError("tool_choice", choice.name or choice.mode, "none or auto, without tools")
    if choice is not None and choice.name and choice.name not in names:
        allowed = f"the name of a tool ({', '.join(names[:8])}{', ...' if len(names) > 8 else ''})"
        raise InvalidArgumentError("tool_choice", f"the function {choice.name}", allowed)
    check_schemas(tools)
    return tools


def check_schemas(tools: Sequence[Tool]) -> None:
    """Refuse tools whose schemas are too long or nested too deeply."""
    num_chars = 0
    for tool in tools:
        if is_deeper(tool.parameters or {}, _MAX_DEPTH):
            allowed = f"at most {_MAX_DEPTH} levels"
            raise InvalidArgumentError(tool.field, "a schema that is nested too deeply", allowed)
        for piece in _ENCODER.iterencode(dict(tool.parameters or {})):
            num_chars += len(piece)
            if num_chars > MAX_SCHEMA_CHARS:
                got = f"more than {MAX_SCHEMA_CHARS} characters of schemas so far"
                raise InvalidArgumentError(tool.field, got, f"at most {MAX_SCHEMA_CHARS} in all tools")


def parse_arguments(functions: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Replace the arguments of called functions, which are texts, by objects, as chat templates take them.

    Arguments that are no JSON object, such as those of a call that was cut, stay texts. Each function comes
    with the name of the field of its arguments, for the error if all of them are too long together.
    """
    num_chars = 0
    for field, function in functions:
        num_chars += len(function["arguments"])
        if num_chars > MAX_ARGUMENT_CHARS:
            got = f"more than {MAX_ARGUMENT_CHARS} characters of arguments so far"
            raise InvalidArgumentError(field, got, f"at most {MAX_ARGUMENT_CHARS} in all calls")
        function["arguments"] = _parsed(function["arguments"])


def _parsed(arguments: str) -> dict[str, Any] | str:
    if not arguments.strip():
        return {}
    try:
        value = from_json(arguments)  # without lone surrogates, which no prompt can have
    except ValueError:
        return arguments
    return value if isinstance(value, dict) and not is_deeper(value, _MAX_DEPTH) else arguments


def is_deeper(value: Any, depth: int) -> bool:
    """Return whether lists and objects are nested deeper than that in a list or an object."""
    entries = value.values() if isinstance(value, dict) else value
    nested = (entry for entry in entries if isinstance(entry, (dict, list)))
    return depth < 0 or any(is_deeper(entry, depth - 1) for entry in nested)
