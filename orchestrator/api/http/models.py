"""OpenAI's request bodies, validated as untrusted input. Their fields' schemas are in the OpenAPI document.

Field names are OpenAI's, extensions have vLLM's names, and the object `gammaray` controls speculation. The
sampling parameters are those of `gammaray.sampling`. A field whose value could not change the completion
(`user`, `metadata`, ...) is ignored; every other unknown field is refused, as the completion without it could
differ from the requested one. null means absent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from gammaray.checks import Integer, TokenIds
from gammaray.errors import InvalidArgumentError
from gammaray.sampling import SAMPLING_RULES, SamplingParams
from gammaray.types import (
    MAX_CACHE_SALT,
    MAX_GAMMA,
    MAX_NODES,
    MAX_STOP,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
)
from orchestrator.api.http.errors import invalid_argument
from orchestrator.api.http.fields import (
    MAX_CHOICES,
    MAX_TOOLS,
    FunctionTool,
    MessageCall,
    NamedTool,
    Prediction,
    Prompts,
    RefusalPart,
    ResponseFormat,
    Stop,
    StrictModel,
    StructuredOutputs,
    TextPart,
    answer_part,
    is_token_ids,
    joined,
    null_is_absent,
    parse_arguments,
    parse_choice,
    sampling_type,
    with_one_unknown,
)
from orchestrator.api.http.json_text import decode
from orchestrator.api.http.tools.calls import ChoiceMode, ToolChoice

MAX_MESSAGES = 2**14
"""Messages of one chat: rendering this many takes a tenth of a second."""

# Fields whose values cannot change the completion. Bodies may have some of them as fields, here and below.
_IGNORED = frozenset(
    {
        "client_metadata",
        "max_tool_calls",  # of hosted tools
        "metadata",
        "parallel_tool_calls",  # no effect without tools
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    }
)
# Unsupported fields, with the values that have no effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "best_of": (1,),
    "context_management": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning": ({}, {"effort": None}, {"effort": "none"}),
    "reasoning_effort": ("none",),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}

HTTP_SAMPLING = tuple(
    name for name in SAMPLING_RULES if name not in ("banned_token_ids", "sample_index", "grammar")
)
"""Sampling parameters that a body may have; the index of a sample follows from `n`."""

_NULLABLE = ("tool_calls", "tool_call_id")


def _describe_body(schema: dict[str, Any]) -> None:
    null_is_absent(schema)
    others: dict[str, Any] = {name: {"description": "Ignored."} for name in sorted(_IGNORED)}
    others |= {name: {"enum": [*values, None]} for name, values in _NEUTRAL.items()}
    schema["properties"] = {**others, **schema["properties"]}


class GammarayOptions(StrictModel):
    """The request object `gammaray`, which controls speculation."""

    verification: Literal["coupled", "rejection", "naive", "block"] = Field(
        "coupled", description="How proposed tokens are tested."
    )
    gamma: int | Literal["adaptive"] = Field("adaptive", description="Proposed tokens per cycle.")
    max_gamma: Annotated[
        int, Integer(0, MAX_GAMMA, "Upper bound of an adaptive gamma; 0 is the server's bound.")
    ] = 0
    max_nodes: Annotated[
        int, Integer(0, MAX_NODES, "Upper bound of a proposal's nodes; 0 is the server's choice.")
    ] = 0
    drafter: Literal["model", "head", "suffix", "prediction", "grammar", "none"] = Field(
        "model",
        description="What may propose: the draft model or head and all look-ups, the target worker's "
        "head alone, suffix decoding, the request's `prediction`, the tokens that a grammar "
        "forces, or nothing (gamma 0).",
    )
    session_id: str = Field(
        "",
        description="Name of the session; if empty, the server generates one. Only with one choice.",
        json_schema_extra={"pattern": "^[A-Za-z0-9_.-]{0,128}$"},
    )
    turn: Annotated[
        int, Integer(0, 2**31 - 1, "Above 0, continues the session's previous turn. Not for chats.")
    ] = 0
    cache_salt: str = Field(
        "",
        description="Caches are shared only with requests of the same salt.",
        json_schema_extra={"maxLength": MAX_CACHE_SALT},
    )
    stream_tokens: bool = Field(
        False, description="Whether each streamed piece contains its tokens, with their origins."
    )
    receipt: bool = Field(False, description="Whether to return a signed receipt of each choice.")

    @field_validator(
        "gamma",
        mode="plain",
        json_schema_input_type=Annotated[int, Integer(0, MAX_GAMMA)] | Literal["adaptive"],
    )
    @classmethod
    def _check_gamma(cls, value: Any) -> Any:
        if value == "adaptive" or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise ValueError('an integer in [0, 64] or "adaptive"')


class ObfuscationOptions(StrictModel):
    """OpenAI's `stream_options` of a response."""

    include_obfuscation: bool = Field(
        False,
        description="Whether events are padded to multiples of 256 bytes, so that their sizes do not reveal "
        "the length of the text. OpenAI's default is true.",
    )


class StreamOptions(ObfuscationOptions):
    """OpenAI's `stream_options`, with vLLM's `continuous_usage_stats`."""

    include_usage: bool = Field(
        False,
        description="Whether the usage of the whole response is sent in one more event before `[DONE]`.",
    )
    continuous_usage_stats: bool = Field(
        False, description="With include_usage: whether each event contains its choice's usage so far."
    )


if TYPE_CHECKING:
    _SamplingFields = StrictModel
else:
    _SamplingFields = create_model(
        "_SamplingFields",
        __base__=StrictModel,
        **{
            name: (sampling_type(name), None if default == () else default)
            for name in HTTP_SAMPLING
            for default in (getattr(SamplingParams(), name),)
        },
    )


class RequestBody(_SamplingFields):
    """Fields common to all requests for text."""

    model_config = ConfigDict(json_schema_extra=_describe_body)

    model: str = Field("", description="Name of the served model or of one of its LoRA adapters, or empty.")
    stream: bool = Field(False, description="Whether to stream the response as server-sent events.")
    gammaray: GammarayOptions = Field(GammarayOptions(), description="Options of speculation.")

    @model_validator(mode="before")
    @classmethod
    def _prepared(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Drop the fields that are null or have no effect."""
        fields = {}
        for name, field in value.items():
            if name in cls.model_fields or name not in _IGNORED | _NEUTRAL.keys():
                fields[name] = field
            elif name in _NEUTRAL and field is not None and not _is_any_of(field, _NEUTRAL[name]):
                raise InvalidArgumentError(name, field, "no value; this server does not support it")
        return with_one_unknown(cls, {name: field for name, field in fields.items() if field is not None})


class OpenAIRequest(RequestBody):
    """Fields common to completions and chat completions."""

    default_max_tokens: ClassVar[int | None] = None

    n: int = Field(1, ge=1, le=MAX_CHOICES, description="Samples per prompt; each is a separate session.")
    stream_options: StreamOptions = Field(StreamOptions(), description="Options of a streamed response.")
    max_tokens: Annotated[
        int | None,
        Integer(1, 2**31, "Upper bound of emitted tokens; by default 16, for chats the rest of the context."),
    ] = None
    max_completion_tokens: Annotated[
        int | None, Integer(1, 2**31, "Same as max_tokens; if both are given they must be equal.")
    ] = None
    stop: tuple[str, ...] = Field((), description="The completion ends before the first of these texts.")
    top_k: Annotated[
        int,
        AfterValidator(lambda value: 0 if value == -1 else value),  # off, as in vLLM
        Integer(-1, 2**31, "Keep this many most likely tokens; 0 and -1 are off."),
    ] = 0
    ignore_eos: bool = Field(False, description="Continue after end-of-sequence tokens.")
    stop_token_ids: Annotated[
        list[int],
        FailFast(),
        Field(max_length=MAX_STOP_TOKEN_IDS),
        TokenIds("Stop after one of these tokens.", MAX_STOP_TOKEN_IDS),
    ] = Field(default=[])
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Alternatives for each token of the prompt, with log-probabilities.",
    )
    response_format: ResponseFormat | None = Field(None, description="The form of the completion.")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="The form of the completion, in place of `response_format`."
    )
    prediction: str = Field("", description="Text that the completion is expected to resemble.")
    store: bool = Field(
        True,
        description="Whether the session is stored. If false, it cannot be resumed, listed or traced. "
        "OpenAI's default is false.",
    )

    @field_validator("stop", mode="plain", json_schema_input_type=Stop)
    @classmethod
    def _check_stop(cls, value: Any) -> tuple[str, ...]:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or len(texts) > MAX_STOP or not all(isinstance(t, str) for t in texts):
            raise ValueError(f"a string or a list of at most {MAX_STOP} strings")
        return tuple(texts)

    @field_validator("prediction", mode="plain", json_schema_input_type=Prediction)
    @classmethod
    def _check_prediction(cls, value: Any) -> str:
        given = (
            {name for name, entry in value.items() if entry is not None} if isinstance(value, dict) else ()
        )
        if given != {"type", "content"} or value["type"] != "content":
            raise ValueError('an object with type "content" and content alone')
        return joined(value["content"])

    @property
    def asked_max_tokens(self) -> int | None:
        """The limit on emitted tokens under either of its names, which must agree; None without one."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidArgumentError("max_tokens", f"{old} with max_completion_tokens {new}", "one of them")
        return next((bound for bound in (new, old, self.default_max_tokens) if bound is not None), None)


class CompletionRequest(OpenAIRequest):
    """Body of POST /v1/completions."""

    default_max_tokens: ClassVar[int | None] = 16  # OpenAI's

    prompt: tuple[str | tuple[int, ...], ...] = Field(description="Text or token ids, or a list of prompts.")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Alternatives for each token, with log-probabilities; with echo also the prompt's.",
    )
    echo: bool = Field(
        False, description="Whether the text begins with the prompt; max_tokens may then be 0 as well."
    )

    @field_validator("prompt", mode="plain", json_schema_input_type=Prompts)
    @classmethod
    def _check_prompt(cls, value: Any) -> tuple[str | tuple[int, ...], ...]:
        if isinstance(value, str) or is_token_ids(value):
            value = [value]
        is_list = isinstance(value, list) and 1 <= len(value) <= MAX_CHOICES
        if not is_list or not all(isinstance(prompt, str) or is_token_ids(prompt) for prompt in value):
            raise ValueError(f"a string, a list of token ids, or a list of 1 to {MAX_CHOICES} of these")
        return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in value)


def _describe_message(schema: dict[str, Any]) -> None:
    """Let the content of the assistant's messages be null, and be absent."""
    null_is_absent(schema)
    schema["required"].remove("content")
    content = schema["properties"]["content"]
    schema["properties"]["content"] = {"anyOf": [*content.pop("anyOf"), {"type": "null"}], **content}
    schema["if"] = {"properties": {"role": {"const": "assistant"}}, "required": ["role"]}
    schema["else"] = {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}}


class ChatMessage(BaseModel):
    """One message of a chat; further fields are ignored and not passed to the model."""

    model_config = ConfigDict(strict=True, extra="ignore", json_schema_extra=_describe_message)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str, PlainValidator(joined, json_schema_input_type=str | list[TextPart | RefusalPart])
    ] = Field(description="Text, or text parts; of the assistant also its refusal.")
    tool_calls: Annotated[list[MessageCall], FailFast()] = Field(
        default=[], max_length=MAX_TOOLS, description="Calls of the assistant."
    )
    tool_call_id: str = Field("", description="With role tool: the call whose result this is.")

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        is_answer = value.get("role") == "assistant"
        dropped = {name for name in _NULLABLE if value.get(name) is None}
        dropped.update(() if is_answer else ("tool_calls",))
        value = {name: field for name, field in value.items() if name not in dropped}
        if not is_answer:
            return value
        content = value.get("content")
        if content is None:
            content = value.get("refusal") or ""
        elif isinstance(content, list):
            content = [answer_part(part) for part in content]
        return {**value, "content": content}

    def rendered(self) -> dict[str, Any]:
        """Return the message as chat templates take it, with the arguments of its calls as texts."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.role == "tool" and self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message


class ChatRequest(OpenAIRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[
        list[ChatMessage],
        FailFast(),
        Field(min_length=1, max_length=MAX_MESSAGES, description="The conversation."),
    ]
    logprobs: bool = Field(False, description="Return log-probabilities of the tokens.")
    top_logprobs: Annotated[
        int | None, Integer(0, MAX_TOP_LOGPROBS, "Alternatives per token. Requires logprobs.")
    ] = None
    tools: Annotated[list[FunctionTool], FailFast()] = Field(
        default=[], max_length=MAX_TOOLS, description="Functions that the model may call."
    )
    tool_choice: Annotated[
        ToolChoice | None, PlainValidator(parse_choice, json_schema_input_type=ChoiceMode | NamedTool)
    ] = Field(
        None,
        description="Whether the model calls no tool, decides itself (the default), calls at least one, or "
        "calls this one.",
    )
    parallel_tool_calls: bool = Field(True, description="Whether a message may have several calls.")

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates take them."""
        messages = [message.rendered() for message in self.messages]
        parse_arguments(
            (f"messages.{index}.tool_calls.{number}.function.arguments", call["function"])
            for index, message in enumerate(messages)
            for number, call in enumerate(message.get("tool_calls", ()))
        )
        return messages


_Request = TypeVar("_Request", bound=RequestBody)


def parse_body(model: type[_Request], body: bytes) -> _Request:
    """Return the request in a body, in bounded time and memory; errors name the first invalid field.

    A large body may take a few tenths of a second: call this in a thread.
    """
    payload = decode(body)
    if not isinstance(payload, dict):
        raise InvalidArgumentError("body", payload, "a JSON object")
    try:
        return model.model_validate(payload)
    except ValidationError as error:
        raise invalid_argument(error.errors(include_url=False), payload) from None


def _is_any_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Return whether a JSON value is one of them; unlike in Python, true does not equal 1."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed)
