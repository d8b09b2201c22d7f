"""Types of response objects; their schemas in the OpenAPI document are generated from them.

They are TypedDicts: responses are built as plain dicts, which the type checker compares with them; nothing is
validated or converted for each event of a stream. The schemas are closed, so that tests which validate
responses detect undocumented fields.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from gammaray.types import DrafterKind, FinishReason, TokenOrigin

_Count = Annotated[int, Field(ge=0)]
_Amount = Annotated[float, Field(ge=0)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Bytes = list[Annotated[int, Field(ge=0, le=255)]]

ErrorType: TypeAlias = Literal[
    "invalid_request_error", "authentication_error", "rate_limit_error", "server_error"
]


class TimeMs(TypedDict):
    """Milliseconds of a completion."""

    draft: Annotated[_Amount, Field(description="Waited for drafters.")]
    verify: Annotated[_Amount, Field(description="Waited for targets.")]
    other: _Amount
    total: _Amount


class CyclesByDrafter(TypedDict):
    """Number of cycles by drafter."""

    model: _Count
    head: _Count
    suffix: _Count
    prediction: _Count
    grammar: _Count
    none: _Count


class GammarayResult(TypedDict):
    """Speculation in a finished choice."""

    session_id: str
    seed: Annotated[_Count, Field(description="Seed that was used.")]
    cycles: _Count
    tokens_per_cycle: _Amount
    alpha: Annotated[_Share | None, Field(description="Accepted per tested token.")]
    acceptance_rate: Annotated[_Share | None, Field(description="Accepted per drafted token.")]
    accepted_lengths: Annotated[
        list[_Count], Field(description="Entry j: number of cycles in which j tokens were accepted.")
    ]
    gamma_mean: _Amount
    drafted_tokens: _Count
    accepted_tokens: Annotated[_Count, Field(description="Drafted tokens that were accepted and emitted.")]
    origins: Annotated[list[TokenOrigin], Field(description="Origin of each token.")]
    token_ids: list[_Count]
    time_ms: TimeMs
    speedup_estimate: Annotated[
        _Amount | None, Field(description="Decoding speed relative to gamma 0; null while unknown.")
    ]
    cycles_by_drafter: CyclesByDrafter
    fallback_cycles: Annotated[
        _Count, Field(description="Cycles whose allowed drafter was absent, failed or late.")
    ]
    draft_workers: Annotated[_Count, Field(description="Draft workers that proposed.")]
    receipt: NotRequired[
        Annotated[
            str, Field(description="Signed receipt, if requested: a JSON Web Signature in the compact form.")
        ]
    ]


class PieceToken(TypedDict):
    """A token of a streamed piece."""

    id: _Count
    origin: TokenOrigin
    drafter: DrafterKind | None
    bytes: _Bytes


class PieceTokens(TypedDict):
    """Tokens of a streamed piece, if the request has `gammaray.stream_tokens`."""

    tokens: list[PieceToken]


class LastPieceTokens(PieceTokens, GammarayResult):
    """Tokens of a choice's last piece, and the speculation in the choice."""


class SpeculativeDecoding(TypedDict):
    """vLLM's statistics of speculation. A step is a cycle with a proposal."""

    acceptance_histogram: Annotated[
        list[_Count], Field(description="Entry j: number of steps in which j tokens were accepted.")
    ]
    num_spec_steps: _Count
    mean_acceptance_length: Annotated[float, Field(ge=1, description="1 + accepted tokens per step.")]
    draft_acceptance_rate: _Share
    num_accepted_draft_tokens: _Count
    num_draft_tokens: _Count


class Metrics(TypedDict):
    """vLLM's metrics of a response with one choice."""

    speculative_decoding: SpeculativeDecoding


class TokenCounts(TypedDict):
    """Token counts of a choice so far."""

    prompt_tokens: _Count
    completion_tokens: _Count
    total_tokens: _Count


class PromptTokensDetails(TypedDict):
    """Details of the prompt's tokens."""

    cached_tokens: Annotated[_Count, Field(description="Tokens that the target worker had cached.")]


class CompletionTokensDetails(TypedDict):
    """Details of the emitted tokens: proposed tokens of the request's `prediction`."""

    accepted_prediction_tokens: _Count
    rejected_prediction_tokens: _Count


class Usage(TokenCounts):
    """Token counts of a response."""

    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TokenLogprob(TypedDict):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: _Bytes


class ChatTokenLogprob(TokenLogprob):
    """A token with the most likely alternatives."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of chats."""

    content: list[ChatTokenLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    """Log-probabilities of completions, in parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: Annotated[list[_Count], Field(description="Characters before each token.")]


class PromptLogprob(TypedDict):
    """The log-probability of a prompt's token, or of an alternative."""

    logprob: float
    rank: Annotated[int, Field(ge=1, description="1 is the most likely.")]
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
"""vLLM's log-probabilities of a prompt: by token id for each position, null for the first."""


class _Choice(TypedDict):
    index: _Count
    prompt_logprobs: NotRequired[PromptLogprobs]


class _WholeChoice(_Choice):
    gammaray: NotRequired[GammarayResult]


class CompletionChoice(_WholeChoice):
    """A choice of a completion."""

    finish_reason: FinishReason
    text: str
    logprobs: CompletionLogprobs | None


class CalledFunction(TypedDict):
    """A function and its arguments."""

    name: str
    arguments: Annotated[str, Field(description="JSON as the model wrote it.")]


class ToolCall(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    """The message of a chat completion."""

    role: Literal["assistant"]
    content: Annotated[str | None, Field(description="null if there are only calls.")]
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(_WholeChoice):
    """A choice of a chat completion."""

    finish_reason: FinishReason | Literal["tool_calls"]
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class CompletionPieceChoice(_Choice):
    """A streamed piece of a completion's choice."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class ArgumentsPiece(TypedDict):
    """A piece of a call's arguments; the first one has the name as well."""

    name: NotRequired[str]
    arguments: str


class ToolCallPiece(TypedDict):
    """A piece of a call; the first one has its id."""

    index: _Count
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: ArgumentsPiece


class Delta(TypedDict, total=False):
    """A streamed piece of a message."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCallPiece]


class ChatPieceChoice(_Choice):
    """A streamed piece of a chat's choice."""

    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"] | None


class _Body(TypedDict):
    id: str
    created: _Count
    model: str
    metrics: NotRequired[Metrics]
    prompt_logprobs: NotRequired[PromptLogprobs]


class _Whole(_Body):
    usage: Usage
    gammaray: GammarayResult


class _Piece(_Body):
    usage: NotRequired[Usage | TokenCounts | None]
    gammaray: NotRequired[GammarayResult | PieceTokens | LastPieceTokens]
    obfuscation: NotRequired[str]


class Completion(_Whole):
    """A completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatCompletion(_Whole):
    """A chat completion."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionPiece(_Piece):
    """The data of an event of a streamed completion; the last event is `[DONE]`."""

    object: Literal["text_completion"]
    choices: list[CompletionPieceChoice]


class ChatCompletionPiece(_Piece):
    """The data of an event of a streamed chat; the last event is `[DONE]`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatPieceChoice]


class ModelInfo(TypedDict):
    """What gammaray says of the model: whether it has a chat template, and what can draft for it now."""

    chat: bool
    drafters: list[DrafterKind]


class Model(TypedDict):
    """A served model, or a LoRA adapter of it."""

    id: str
    parent: NotRequired[Annotated[str, Field(description="The model that an adapter belongs to.")]]
    object: Literal["model"]
    created: _Count
    owned_by: Literal["gammaray"]
    max_model_len: Annotated[int, Field(ge=1)]
    gammaray: ModelInfo


class ModelList(TypedDict):
    """The served models."""

    object: Literal["list"]
    data: list[Model]


class Health(TypedDict):
    """A target worker is available."""

    status: Literal["ok"]


class Root(TypedDict):
    """The server, for clients other than browsers; its model for those who may ask for it."""

    name: Literal["gammaray"]
    model: NotRequired[str]
    endpoints: list[str]


class ReceiptKeyObject(TypedDict):
    """A public key, as a JSON Web Key."""

    kty: Literal["OKP"]
    crv: Literal["Ed25519"]
    kid: str
    x: Annotated[str, Field(description="The key, 32 bytes in base64url.")]


class ReceiptKeys(TypedDict):
    """Public keys of receipts, former ones first: a JSON Web Key Set."""

    keys: list[ReceiptKeyObject]
    dtypes: NotRequired[
        Annotated[list[str], Field(description="Of the arithmetic of the targets, such as `float32`.")]
    ]


class MetricsTarget(TypedDict):
    """A process that serves metrics, in the form of Prometheus's HTTP service discovery."""

    targets: list[str]
    labels: dict[str, str]


class ErrorObject(TypedDict):
    """OpenAI's error object."""

    message: Annotated[str, Field(description="Names the field, the value and the allowed ones.")]
    type: ErrorType
    param: Annotated[str | None, Field(description="The invalid field.")]
    code: str | None


class Error(TypedDict):
    """A failed request, or a failure after the first event of a stream."""

    error: ErrorObject
