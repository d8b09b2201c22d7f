"""Types of the Responses API's objects; see `orchestrator.api.http.response_types`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from orchestrator.api.http.response_types import ChatTokenLogprob, GammarayResult

_Count = Annotated[int, Field(ge=0)]
ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
Status: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputTextPart(TypedDict):
    """Text of an input message."""

    type: Literal["input_text"]
    text: str


class OutputTextPart(TypedDict):
    """Text that the model wrote."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class MessageItem(TypedDict):
    """A message that the model wrote."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputTextPart]


class InputMessageItem(TypedDict):
    """A message of the input."""

    id: str
    type: Literal["message"]
    role: Literal["user", "system", "developer"]
    status: ItemStatus
    content: list[InputTextPart]


class CallItem(TypedDict):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Annotated[str, Field(description="JSON.")]
    status: ItemStatus


class CallResultItem(TypedDict):
    """The result of a call."""

    id: str
    type: Literal["function_call_output"]
    call_id: str
    output: str
    status: ItemStatus


OutputItem: TypeAlias = MessageItem | CallItem
InputListItem: TypeAlias = InputMessageItem | MessageItem | CallItem | CallResultItem


class ResponseError(TypedDict):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(TypedDict):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(TypedDict):
    """Details of the prompt's tokens."""

    cached_tokens: Annotated[_Count, Field(description="Tokens that the target worker had cached.")]
    cache_write_tokens: Annotated[_Count, Field(description="Always 0.")]


class OutputTokensDetails(TypedDict):
    """Details of the emitted tokens."""

    reasoning_tokens: Annotated[_Count, Field(description="Always 0.")]


class ResponseUsage(TypedDict):
    """Token counts of a response."""

    input_tokens: _Count
    input_tokens_details: InputTokensDetails
    output_tokens: _Count
    output_tokens_details: OutputTokensDetails
    total_tokens: _Count


class ToolObject(TypedDict):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class ToolChoiceFunction(TypedDict):
    """The only tool that the model calls."""

    type: Literal["function"]
    name: str


class TextFormat(TypedDict):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: NotRequired[str]
    description: NotRequired[str | None]
    schema: NotRequired[Any]
    strict: NotRequired[bool | None]


class TextConfig(TypedDict):
    """The form of the text."""

    format: TextFormat
    verbosity: Literal["medium"]


class Reasoning(TypedDict):
    """No reasoning is separated from the text."""

    effort: None
    summary: None


class ResponseObject(TypedDict):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: _Count
    completed_at: _Count | None
    status: Status
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Reasoning
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceFunction
    tools: list[ToolObject]
    top_logprobs: _Count
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    gammaray: NotRequired[GammarayResult]


class _Event(TypedDict):
    sequence_number: _Count
    obfuscation: NotRequired[str]


class StateEvent(_Event):
    """The response as it begins or ends."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class ItemEvent(_Event):
    """An item begins or ends."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: _Count
    item: OutputItem


class _ItemPartEvent(_Event):
    item_id: str
    output_index: _Count


class PartEvent(_ItemPartEvent):
    """A part of a message begins or ends."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: _Count
    part: OutputTextPart


class TextDeltaEvent(_ItemPartEvent):
    """A piece of a message's text."""

    type: Literal["response.output_text.delta"]
    content_index: _Count
    delta: str
    logprobs: list[ChatTokenLogprob]


class TextDoneEvent(_ItemPartEvent):
    """The text of a message is whole."""

    type: Literal["response.output_text.done"]
    content_index: _Count
    text: str
    logprobs: list[ChatTokenLogprob]


class ArgumentsDeltaEvent(_ItemPartEvent):
    """A piece of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(_ItemPartEvent):
    """The arguments of a call are whole."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


Event: TypeAlias = (
    StateEvent
    | ItemEvent
    | PartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
)


class DeletedResponse(TypedDict):
    """A response was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(TypedDict):
    """Items before a response's output."""

    object: Literal["list"]
    data: list[InputListItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
