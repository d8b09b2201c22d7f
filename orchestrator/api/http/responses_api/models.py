"""Body of POST /v1/responses, validated as untrusted input; see `orchestrator.api.http.models`.

An item of the input is a message, a call of a function or its result. Reasoning of earlier responses is
accepted and ignored, as the model does not see it again.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    PlainValidator,
    Tag,
    field_validator,
)

from gammaray.types import MAX_TOP_LOGPROBS
from orchestrator.api.http.fields import (
    MAX_TOOLS,
    ChosenTool,
    OpenModel,
    RefusalPart,
    StrictModel,
    ToolInput,
    answer_part,
    joined,
    null_is_absent,
    parse_choice,
)
from orchestrator.api.http.models import MAX_MESSAGES, ObfuscationOptions, RequestBody
from orchestrator.api.http.tools.calls import ChoiceMode, ToolChoice

LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that asks for log-probabilities."""

Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
MAX_METADATA = 16
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512

_PART_KINDS = ("input_text", "output_text", "text")
_joined = partial(joined, kinds=_PART_KINDS)


class TextInputPart(BaseModel):
    """A part of a text; further fields are ignored."""

    type: Literal["input_text", "output_text", "text"]
    text: str


def _joined_content(value: Any) -> str:
    return _joined([answer_part(part) for part in value] if isinstance(value, list) else value)


MessageText = Annotated[
    str, BeforeValidator(_joined_content, json_schema_input_type=str | list[TextInputPart | RefusalPart])
]
JoinedText = Annotated[str, BeforeValidator(_joined, json_schema_input_type=str | list[TextInputPart])]


class _Item(OpenModel):
    """An item; further fields (`status`, ...) are ignored."""

    id: str | None = None


class MessageInput(_Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: MessageText = Field(description="Text, or parts of text or refusal.")


class CallInput(_Item):
    """A call of a function by the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="JSON of an object.")


class ResultInput(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: JoinedText = Field(description="Text, or text parts.")


class ReasoningInput(_Item):
    """Reasoning of an earlier response; ignored."""

    type: Literal["reasoning"]


def _kind(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    kind = value.get("type") or ("message" if "role" in value else None)
    return kind if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[MessageInput, Tag("message")]
    | Annotated[CallInput, Tag("function_call")]
    | Annotated[ResultInput, Tag("function_call_output")]
    | Annotated[ReasoningInput, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="item_kind",
        custom_error_message="an item of type message, function_call, function_call_output or reasoning",
    ),
]


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _describe_format(schema: dict[str, Any]) -> None:
    null_is_absent(schema)
    schema["if"] = {"properties": {"type": {"const": "json_schema"}}}
    schema["then"] = {"required": ["name", "schema"]}
    schema["else"] = {"properties": {"name": {"type": "null"}, "schema": {"type": "null"}}}


class TextFormatInput(StrictModel):
    """OpenAI's `text.format`."""

    model_config = ConfigDict(json_schema_extra=_describe_format)

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="Any text, any JSON object, or JSON that matches `schema`."
    )
    name: str = Field("", description="Only with type json_schema.", pattern="^[A-Za-z0-9_-]{1,64}$")
    description: str = Field("", description="Ignored.")
    json_schema: Any = Field(
        None,
        alias="schema",
        description="The JSON schema; only with type json_schema.",
        json_schema_extra={"type": ["object", "boolean"]},
    )
    strict: bool | None = Field(None, description="Ignored: the completion matches the schema in any case.")


class TextOptions(StrictModel):
    """OpenAI's `text`."""

    format: TextFormatInput = Field(TextFormatInput(type="text"), description="The form of the text.")
    verbosity: Literal["medium"] = Field("medium", description="Other values are not supported.")


class ReasoningOptions(StrictModel):
    """OpenAI's `reasoning`."""

    effort: Literal["none"] | None = Field(None, description="Other values are not supported.")
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Ignored.")
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Ignored.")


class OtherTool(BaseModel):
    """A tool of another kind; the model is not told of it."""

    type: str = Field(json_schema_extra={"not": {"const": "function"}})


def _tool_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return "other" if isinstance(kind, str) and kind != "function" else "function"


ToolOfAnyKind = Annotated[
    Annotated[ToolInput, Tag("function")] | Annotated[OtherTool, Tag("other")], Discriminator(_tool_kind)
]


class ResponsesRequest(RequestBody):
    """Body of POST /v1/responses."""

    input: Annotated[
        list[InputItem],
        FailFast(),
        Field(max_length=MAX_MESSAGES),
        BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem]),
    ] = Field(default=[], description="A text of the user, or items.")
    instructions: str | None = Field(
        None, description="A message of the system before the input. Later responses do not inherit it."
    )
    previous_response_id: str | None = Field(
        None, description="A stored response, whose input and output come before this input."
    )
    max_output_tokens: int | None = Field(
        None, ge=1, le=2**31, description="Upper bound of emitted tokens; by default the rest of the context."
    )
    text: TextOptions = Field(TextOptions(), description="The form of the text.")
    reasoning: ReasoningOptions = Field(ReasoningOptions(), description="Changes nothing.")
    tools: Annotated[list[ToolOfAnyKind], FailFast()] = Field(
        default=[],
        max_length=MAX_TOOLS,
        description="Functions that the model may call; tools of other kinds are left out.",
    )
    tool_choice: Annotated[
        ToolChoice | None,
        PlainValidator(
            partial(parse_choice, named=ChosenTool), json_schema_input_type=ChoiceMode | ChosenTool
        ),
    ] = Field(None, description="Whether the model calls tools; by default it decides itself.")
    parallel_tool_calls: bool = Field(True, description="Whether the model may make several calls.")
    include: Annotated[list[Includable], FailFast()] = Field(
        default=[], description="Further output: log-probabilities. The other values have no effect."
    )
    top_logprobs: int = Field(
        0, ge=0, le=MAX_TOP_LOGPROBS, description=f"Alternatives per token, with {LOGPROBS} in `include`."
    )
    metadata: dict[str, str] = Field(
        default={},
        description="Returned with the response.",
        json_schema_extra={
            "maxProperties": MAX_METADATA,
            "propertyNames": {"maxLength": MAX_METADATA_KEY},
            "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
        },
    )
    store: bool = Field(
        True, description="Whether the response is stored, for `previous_response_id` and GET."
    )
    stream_options: ObfuscationOptions = Field(ObfuscationOptions(), description="Options of a stream.")

    @field_validator("metadata", mode="plain", json_schema_input_type=dict[str, str])
    @classmethod
    def _check_metadata(cls, value: Any) -> dict[str, str]:
        is_small = isinstance(value, dict) and len(value) <= MAX_METADATA
        if is_small and all(
            isinstance(entry, str) and len(key) <= MAX_METADATA_KEY and len(entry) <= MAX_METADATA_VALUE
            for key, entry in value.items()
        ):
            return dict(value)
        raise ValueError(
            f"at most {MAX_METADATA} texts of {MAX_METADATA_VALUE} characters, by keys of {MAX_METADATA_KEY}"
        )
