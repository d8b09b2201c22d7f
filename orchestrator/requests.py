"""From a request to a session: everything that is checked against the served model."""

from __future__ import annotations

import secrets
import uuid
from dataclasses import replace

from gammaray.checks import check_token_ids
from gammaray.errors import InvalidArgumentError, NotFoundError
from gammaray.types import GenerationRequest, check_prompt_logprobs
from orchestrator.access.caller import ANONYMOUS, Caller
from orchestrator.cycle.session import Session
from orchestrator.text.cpu_threads import in_thread
from orchestrator.text.detokenizer import Detokenizer
from orchestrator.text.tokenizer import Tokenizer

__all__ = ["check_prompt_length", "check_request", "make_session", "open_session"]

LONG_PROMPT = 8192
"""Characters or token ids from which on they are handled in a thread, so that other sessions go on."""


def check_prompt_length(num_tokens: int, max_context: int) -> None:
    """Check that a prompt leaves room for a token in the model's context.

    Raises:
        InvalidArgumentError: It does not.
    """
    if num_tokens >= max_context:
        raise InvalidArgumentError(
            "prompt",
            f"{num_tokens} tokens",
            f"at most {max_context - 1} tokens, one less than the model's context of {max_context}",
        )


async def check_request(
    request: GenerationRequest, *, model_name: str, vocab_size: int, max_prompt_bytes: int, max_context: int
) -> None:
    """Check a request against the served model, as far as this goes without tokenising.

    A request of many token ids is checked in a thread.

    Raises:
        NotFoundError: Another model is asked for.
        InvalidArgumentError: Names the first wrong field.
    """
    if request.model not in ("", model_name):
        raise NotFoundError(f"no model {request.model!r}; served: {model_name!r}", "model")
    if isinstance(request.prompt, str):
        size = len(request.prompt.encode(errors="surrogatepass"))
        if size > max_prompt_bytes:
            raise InvalidArgumentError("prompt", f"{size} bytes", f"at most {max_prompt_bytes} bytes")
    else:
        check_prompt_length(len(request.prompt), max_context)
    if _num_ids(request) < LONG_PROMPT:
        _check_fields(request, vocab_size)
    else:
        await in_thread(_check_fields, request, vocab_size)


def _num_ids(request: GenerationRequest) -> int:
    masks = len(request.sampling.allowed_token_ids) + len(request.sampling.banned_token_ids)
    return masks + (0 if isinstance(request.prompt, str) else len(request.prompt))


def _check_fields(request: GenerationRequest, vocab_size: int) -> None:
    if not isinstance(request.prompt, str):
        check_token_ids("prompt", request.prompt, vocab_size)
    request.validate()
    request.sampling.validate(vocab_size)
    check_token_ids("stop_token_ids", request.stop_token_ids, vocab_size)


async def open_session(
    request: GenerationRequest,
    tokenizer: Tokenizer,
    max_context: int,
    caller: Caller = ANONYMOUS,
    before: tuple[int, ...] = (),
    seed: int | None = None,
) -> Session:
    """Return the session of a checked request: prompt tokenised, seed drawn, length clipped to the context.

    Its name is the caller's qualified one. The prompt follows the tokens of `before`, the session's turns so
    far, whose seed goes on where the request names none.

    Raises:
        InvalidArgumentError: The prompt has no token, leaves no room in the context, or is too long for the
            log-probabilities that are asked for.
    """
    own = await _prompt_ids(request.prompt, tokenizer, is_start=not before)
    if not own:
        raise InvalidArgumentError("prompt", "a text without tokens", "at least one token")
    prompt = before + own
    check_prompt_length(len(prompt), max_context)
    if request.num_prompt_logprobs is not None:
        check_prompt_logprobs(request.num_prompt_logprobs, len(prompt))
    if request.sampling.seed is None:
        seed = secrets.randbits(64) if seed is None else seed
        request = replace(request, sampling=replace(request.sampling, seed=seed))
    name = caller.qualify(request.session_id or uuid.uuid4().hex)
    return make_session(name, request, prompt, min(request.max_tokens, max_context - len(prompt)), tokenizer)


def make_session(
    name: str, request: GenerationRequest, prompt: tuple[int, ...], max_tokens: int, tokenizer: Tokenizer
) -> Session:
    """Return the session of a request whose seed is set, for a prompt of at least one token."""
    return Session(
        session_id=name,
        prompt=prompt,
        params=request.sampling,
        method=request.verification,
        max_tokens=max_tokens,
        text=Detokenizer(tokenizer, prompt, request.stop),
        eos_token_ids=frozenset() if request.ignore_eos else tokenizer.eos_token_ids,
        stop_token_ids=frozenset(request.stop_token_ids),
        num_top_logprobs=request.num_top_logprobs,
        turn=request.turn,
        cache_salt=request.cache_salt,
        num_prompt_logprobs=request.num_prompt_logprobs,
    )


async def _prompt_ids(
    prompt: str | tuple[int, ...], tokenizer: Tokenizer, *, is_start: bool
) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return prompt
    if len(prompt) < LONG_PROMPT:
        return tuple(tokenizer.encode(prompt, is_start=is_start))
    return await tokenizer.encode_long(prompt, is_start=is_start)
