"""Conversion of OpenAI's request bodies to generation requests, one per choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from gammaray.errors import InvalidArgumentError, renaming
from gammaray.types import (
    MAX_PROMPT_LOGPROBS,
    DrafterKind,
    GammaPolicy,
    GenerationRequest,
    SamplingParams,
    VerificationMethod,
)
from orchestrator.api.http.fields import MAX_CHOICES
from orchestrator.api.http.models import (
    HTTP_SAMPLING,
    ChatRequest,
    CompletionRequest,
    OpenAIRequest,
    RequestBody,
)
from orchestrator.api.http.structured import grammar_of
from orchestrator.api.http.tools.calls import CallPlan
from orchestrator.sessions.lifecycle import check_prompt_length
from orchestrator.text.controls import ChatPrompt
from orchestrator.text.cpu_threads import INLINE_BYTES
from orchestrator.text.tokenizer import Tokenizer

MAX_RESPONSE_BYTES = 2**28
"""Upper bound of what is kept of one response until it is sent: text, token ids and log-probabilities."""

TOKEN_BYTES = 64
"""Bytes of a response that are reckoned per token: its text, its id and its origin."""

LOGPROB_BYTES = 96
"""Bytes of a response that are reckoned per log-probability: a token's own, and each alternative."""


@dataclass(frozen=True)
class ChoicePlan:
    index: int  # position among the choices of the response
    prompt_index: int
    request: GenerationRequest
    echo: str = ""  # text to put before the completion
    stream_tokens: bool = False  # whether each streamed piece includes its tokens
    echo_logprobs: int | None = None  # alternatives per echoed prompt token in `logprobs`; None: no prompt
    prompt_logprobs: int | None = None  # alternatives in the choice's `prompt_logprobs`; None omits the field
    is_prompt_only: bool = False  # whether to omit the completion; at least one token is always generated
    prompt_text: str = ""  # the rendered prompt of a chat
    calls: CallPlan | None = None  # the tool calls that the completion may have; None if it has none
    grammar_field: str = ""  # the field that asked for a grammar; empty if none did

    def num_logprobs(self, num_tokens: int) -> int:
        """Return how many log-probabilities of a prompt of `num_tokens` the choice returns."""
        num_top = _larger(self.echo_logprobs, self.prompt_logprobs)
        return 0 if num_top is None else num_tokens * (num_top + 1)


def is_quick(body: bytes, tokenizer: Tokenizer) -> bool:
    """Return whether a body is planned in milliseconds: it is small, and `with_ids` encodes nothing."""
    return len(body) <= INLINE_BYTES and not tokenizer.chat_format.controls.may_be_in(body)


def expected_bytes(request: GenerationRequest, max_context: int) -> int:
    """Return the bytes that are reckoned for the longest completion of a request."""
    num_logprobs = 0 if request.num_top_logprobs is None else 1 + request.num_top_logprobs
    return min(request.max_tokens, max_context) * (TOKEN_BYTES + num_logprobs * LOGPROB_BYTES)


@contextmanager
def naming_grammar(plan: ChoicePlan) -> Iterator[None]:
    """Let errors about the grammar of a choice name the field that asked for it, or a tool's schema."""
    try:
        yield
    except InvalidArgumentError as error:
        if error.field != "grammar" or not plan.grammar_field:
            raise
        placed = plan.calls and plan.calls.place_of(error, plan.request.sampling.grammar)
        raise placed or error.renamed(plan.grammar_field) from error


def check_size(request: GenerationRequest, count: int, num_bytes: int) -> None:
    """Refuse a response, kept until its end, that is too large; the error names the fields that decide."""
    if num_bytes > MAX_RESPONSE_BYTES:
        top = request.num_top_logprobs
        each = "" if top is None else f" x {top + 1} log-probabilities"
        raise InvalidArgumentError(
            "max_tokens",
            f"{count} choices x {request.max_tokens} tokens{each}: {num_bytes} bytes",
            f"at most {MAX_RESPONSE_BYTES} bytes, {TOKEN_BYTES} a token and {LOGPROB_BYTES} a "
            "log-probability; ask for less of n, max_tokens or logprobs, or stream the response",
        )


def _check_whole(body: OpenAIRequest, plans: Sequence[ChoicePlan], max_context: int) -> None:
    if not body.stream:
        num_bytes = sum(expected_bytes(plan.request, max_context) for plan in plans)
        check_size(plans[0].request, len(plans), num_bytes)


def completion_choices(
    body: CompletionRequest, max_context: int, decode: Callable[[Sequence[int]], str]
) -> list[ChoicePlan]:
    """Return the choices of a completions request: `n` samples for each prompt.

    Only the first sample of a prompt scores the prompt. A whole response repeats the log-probabilities in the
    prompt's other choices; a stream sends them once.
    """
    is_prompt_only = body.echo and body.asked_max_tokens == 0
    echo_logprobs = body.logprobs if body.echo else None
    num_choices = body.n * len(body.prompt)
    if num_choices > MAX_CHOICES:
        raise InvalidArgumentError("n", f"{body.n} for {len(body.prompt)} prompts", f"{MAX_CHOICES} in all")
    plans: list[ChoicePlan] = []
    num_logprobs = 0
    grammar, field = grammar_of(body)
    for prompt_index, prompt in enumerate(body.prompt):
        requests = _requests(
            *(body, prompt, num_choices, body.logprobs, max_context),
            grammar=grammar,
            grammar_field=field,
            max_tokens=1 if is_prompt_only else body.asked_max_tokens,
            num_prompt_logprobs=_larger(echo_logprobs, body.prompt_logprobs),
        )
        if body.echo and not isinstance(prompt, str):
            check_prompt_length(len(prompt), max_context)
        echo = "" if not body.echo else prompt if isinstance(prompt, str) else decode(prompt)
        for sample_index, request in enumerate(requests):
            tells_prompt = sample_index == 0 or not body.stream
            plan = ChoicePlan(
                index=len(plans),
                prompt_index=prompt_index,
                request=request,
                echo=echo,
                stream_tokens=body.gammaray.stream_tokens,
                echo_logprobs=echo_logprobs if tells_prompt else None,
                prompt_logprobs=body.prompt_logprobs if tells_prompt else None,
                is_prompt_only=is_prompt_only,
                grammar_field=field,
            )
            if not isinstance(prompt, str):
                num_logprobs += plan.num_logprobs(len(prompt))
                check_num_logprobs(plan, num_logprobs)
            plans.append(plan)
    _check_whole(body, plans, max_context)
    return plans


def check_num_logprobs(plan: ChoicePlan, num_logprobs: int) -> None:
    """Refuse too many prompt log-probabilities in a response; the error names the field that asks for it."""
    if num_logprobs > MAX_PROMPT_LOGPROBS:
        raise InvalidArgumentError(
            "echo" if plan.prompt_logprobs is None else "prompt_logprobs",
            f"{num_logprobs} or more log-probabilities of prompts in one response",
            f"(alternatives + 1) x prompt tokens, summed over the choices, up to {MAX_PROMPT_LOGPROBS}",
        )


def with_ids(
    requests: Sequence[GenerationRequest], prompt: ChatPrompt, tokenizer: Tokenizer, max_context: int
) -> list[GenerationRequest]:
    """Return requests for a chat's prompt; of a marked one, whose text is ambiguous, with its token ids."""
    if not prompt.mark:
        return list(requests)
    check_prompt_length(tokenizer.min_tokens(prompt.text), max_context, is_least=True)
    token_ids = tokenizer.encode_marked(prompt)
    return [replace(request, prompt=token_ids) for request in requests]


def chat_choices(
    body: ChatRequest,
    prompt: ChatPrompt,
    tokenizer: Tokenizer,
    max_context: int,
    calls: CallPlan | None = None,
) -> list[ChoicePlan]:
    """Return the choices of a chat request: `n` samples for its rendered messages and tools."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidArgumentError("top_logprobs", f"{body.top_logprobs} without logprobs", "logprobs true")
    if body.gammaray.turn:
        raise InvalidArgumentError("turn", body.gammaray.turn, "0: a chat request has the whole conversation")
    num_top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    grammar, field = _grammar(body, prompt.text, calls)
    requests = _requests(
        *(body, prompt.text, body.n, num_top_logprobs, max_context),
        grammar=grammar,
        grammar_field=field,
        max_tokens=body.asked_max_tokens,
        num_prompt_logprobs=body.prompt_logprobs,
    )
    plans = [
        ChoicePlan(
            index,
            0,
            request,
            stream_tokens=body.gammaray.stream_tokens,
            prompt_logprobs=request.num_prompt_logprobs,
            prompt_text=prompt.text,
            calls=calls,
            grammar_field=field,
        )
        for index, request in enumerate(with_ids(requests, prompt, tokenizer, max_context))
    ]
    _check_whole(body, plans, max_context)
    return plans


def _larger(one: int | None, other: int | None) -> int | None:
    return max((number for number in (one, other) if number is not None), default=None)


def _requests(
    body: OpenAIRequest,
    prompt: str | tuple[int, ...],
    num_choices: int,
    num_top_logprobs: int | None,
    max_context: int,
    *,
    grammar: str,
    grammar_field: str,
    max_tokens: int | None,
    num_prompt_logprobs: int | None,
) -> list[GenerationRequest]:
    if body.gammaray.session_id and num_choices > 1:
        raise InvalidArgumentError("session_id", f"one name for {num_choices} choices", "a single choice")
    if any(token_id < 0 for token_id in body.stop_token_ids):
        raise InvalidArgumentError("stop_token_ids", min(body.stop_token_ids), "token ids")
    common, stop_token_ids = common_request(body, prompt, grammar), tuple(body.stop_token_ids)
    requests = [
        replace(
            common,
            sampling=replace(common.sampling, sample_index=sample_index),
            max_tokens=max_context if max_tokens is None else max_tokens,
            stop=body.stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=body.ignore_eos,
            num_top_logprobs=num_top_logprobs,
            # The samples share the prompt, so only one session scores it.
            num_prompt_logprobs=num_prompt_logprobs if sample_index == 0 else None,
            prediction=body.prediction,
            store=body.store,
        )
        for sample_index in range(body.n)
    ]
    bound = "max_completion_tokens" if body.max_tokens is None is not body.max_completion_tokens else ""
    with renaming(grammar=grammar_field, max_tokens=bound):
        requests[0].validate()
    return requests


def common_request(body: RequestBody, prompt: str | tuple[int, ...], grammar: str) -> GenerationRequest:
    """Return a request for a prompt with what all bodies have: sampling and the options of speculation."""
    options, sampling = body.gammaray, {name: getattr(body, name) for name in HTTP_SAMPLING}
    given = {name: value for name, value in sampling.items() if value is not None}
    return GenerationRequest(
        prompt=prompt,
        model=body.model,
        sampling=SamplingParams.of({**given, "grammar": grammar}),
        verification=VerificationMethod(options.verification),
        gamma=GammaPolicy(
            None if options.gamma == "adaptive" else options.gamma, options.max_gamma, options.max_nodes
        ),
        drafter=DrafterKind(options.drafter),
        session_id=options.session_id,
        turn=options.turn,
        cache_salt=options.cache_salt,
        receipt=options.receipt,
    )


def _grammar(body: ChatRequest, prompt: str, calls: CallPlan | None) -> tuple[str, str]:
    """Return the grammar of the completions of a chat, and the field that asks for it."""
    if calls is None:
        return grammar_of(body)
    if body.structured_outputs is not None:
        allowed = "no value with tools, or tool_choice none; response_format goes with tools"
        raise InvalidArgumentError("structured_outputs", "a value with tools", allowed)
    answer, field = grammar_of(body)
    grammar = calls.grammar(prompt, answer.removeprefix("start: "))
    return grammar, "tools" if calls.is_forced else field
