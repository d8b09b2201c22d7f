"""Conversion between wire messages and the types of `gammaray.types`, in both directions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from gammaray import types as t
from gammaray.checks import MAX_TOKEN_IDS
from gammaray.errors import InternalError, InvalidArgumentError
from gammaray.types import MAX_LOGIT_BIAS, ProcessStatus, SamplingParams, SpeculationTotals, WorkerTotals
from gammaray.v1 import generation_service_pb2 as gen
from gammaray.v1 import types_pb2 as pb
from gammaray.wire.enums import (
    DRAFTERS,
    DRAFTERS_BACK,
    FINISH_REASONS,
    FINISH_REASONS_BACK,
    METHODS,
    METHODS_BACK,
    ORIGINS,
    ORIGINS_BACK,
)

__all__ = [
    "process_from_proto",
    "process_to_proto",
    "sampling_from_proto",
    "sampling_to_proto",
    "token_ids_from_proto",
    "worker_totals_from_proto",
]


def process_to_proto(process: ProcessStatus) -> gen.ProcessStatus:
    """Return the wire form of a process's status."""
    worker, speculation = process.worker_totals, process.speculation_totals
    return gen.ProcessStatus(
        **{
            **vars(process),
            "worker_totals": None if worker is None else pb.WorkerTotals(**vars(worker)),
            "speculation_totals": None if speculation is None else pb.SpeculationTotals(**vars(speculation)),
        }
    )


def process_from_proto(message: gen.ProcessStatus) -> ProcessStatus:
    """Return the process status of a wire message."""
    values = {field.name: getattr(message, field.name) for field in fields(ProcessStatus)}
    values["accepted_per_position"] = tuple(message.accepted_per_position)
    values["worker_totals"] = (
        worker_totals_from_proto(message.worker_totals) if message.HasField("worker_totals") else None
    )
    values["speculation_totals"] = (
        SpeculationTotals(**_numbers(message.speculation_totals, SpeculationTotals))
        if message.HasField("speculation_totals")
        else None
    )
    return ProcessStatus(**values)


def worker_totals_from_proto(message: pb.WorkerTotals) -> WorkerTotals:
    """Return the totals of a wire message."""
    return WorkerTotals(**_numbers(message, WorkerTotals))


def _numbers(message: Any, kind: type[WorkerTotals] | type[SpeculationTotals]) -> dict[str, int]:
    return {field.name: getattr(message, field.name) for field in fields(kind)}


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    """Return the wire form of sampling parameters."""
    message = pb.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        allowed_token_ids=params.allowed_token_ids,
        banned_token_ids=params.banned_token_ids,
        min_tokens=params.min_tokens,
        sample_index=params.sample_index,
    )
    if params.seed is not None:
        message.seed = params.seed
    return message


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Return the sampling parameters of a wire message; missing fields take their defaults.

    Raises:
        InvalidArgumentError: A list has too many entries.
    """
    if len(message.logit_bias) > MAX_LOGIT_BIAS:
        got = f"{len(message.logit_bias)} entries"
        raise InvalidArgumentError("logit_bias", got, f"at most {MAX_LOGIT_BIAS}")
    return SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=token_ids_from_proto("allowed_token_ids", message.allowed_token_ids),
        banned_token_ids=token_ids_from_proto("banned_token_ids", message.banned_token_ids),
        min_tokens=message.min_tokens,
        seed=message.seed if message.HasField("seed") else None,
        sample_index=message.sample_index,
    )


def token_ids_from_proto(name: str, ids: Sequence[int]) -> tuple[int, ...]:
    """Return the token ids of a repeated field.

    Raises:
        InvalidArgumentError: There are more than a request may have; checked before any is copied.
    """
    if len(ids) > MAX_TOKEN_IDS:
        raise InvalidArgumentError(name, f"{len(ids)} token ids", f"at most {MAX_TOKEN_IDS}")
    return tuple(ids)


MAX_SUPPORT = 4096
"""Upper bound of tokens in a draft distribution, the same as of the drafter's setting: 64 distributions stay
below a target worker's maximum frame size, so that no drafter can break the stream of all sessions."""

_SLICE = 4096
"""Numbers of a column converted per call, which holds the GIL."""


def method_to_proto(method: t.VerificationMethod) -> pb.VerificationMethod.ValueType:
    """Return the wire value of a verification method."""
    return METHODS[method]


def method_from_proto(value: int) -> t.VerificationMethod:
    """Return the verification method of a wire value; UNSPECIFIED is the default.

    Raises:
        InvalidArgumentError: The value is unknown to this version.
    """
    if value == pb.VERIFICATION_METHOD_UNSPECIFIED:
        return t.VerificationMethod.COUPLED
    if value not in METHODS_BACK:
        raise InvalidArgumentError("verification", value, f"one of {sorted(METHODS_BACK)}")
    return METHODS_BACK[pb.VerificationMethod.ValueType(value)]


def origin_to_proto(origin: t.TokenOrigin) -> pb.TokenOrigin.ValueType:
    """Return the wire value of a token origin."""
    return ORIGINS[origin]


def origin_from_proto(value: pb.TokenOrigin.ValueType) -> t.TokenOrigin:
    """Return the token origin of a wire value.

    Raises:
        InternalError: The origin is missing, or unknown to this version.
    """
    if value not in ORIGINS_BACK:
        raise InternalError(f"the peer sent token origin {value}, allowed: {sorted(ORIGINS_BACK)}")
    return ORIGINS_BACK[value]


def proposal_to_proto(proposal: t.Proposal) -> pb.Proposal:
    """Return the wire form of a proposal."""
    return pb.Proposal(
        token_ids=proposal.token_ids,
        parents=proposal.parents or (),
        draft_distributions=[
            pb.SparseDistribution(token_ids=d.token_ids, weights=d.weights, weight_bits=d.weight_bits)
            for d in proposal.draft_distributions or ()
        ],
    )


def proposal_from_proto(message: pb.Proposal, vocab_size: int) -> t.Proposal:
    """Return the proposal of a wire message, which is validated as untrusted data.

    Raises:
        InvalidArgumentError: Token ids outside the vocabulary, parents that do not precede their node, or
            distributions that do not match their tokens.
    """
    token_ids = tuple(message.token_ids)
    if any(token_id >= vocab_size for token_id in token_ids):
        raise InvalidArgumentError("proposal.token_ids", max(token_ids), f"below {vocab_size}")
    parents = tuple(message.parents) or None
    if parents is not None:
        if len(parents) != len(token_ids):
            raise InvalidArgumentError("proposal.parents", f"{len(parents)} entries", f"{len(token_ids)}")
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise InvalidArgumentError(f"proposal.parents[{node}]", parent, f"-1 to {node - 1}")
    distributions = tuple(_distribution(d, vocab_size) for d in message.draft_distributions) or None
    if distributions is not None and len(distributions) != len(token_ids):
        raise InvalidArgumentError("proposal.draft_distributions", len(distributions), f"{len(token_ids)}")
    return t.Proposal(token_ids, parents, distributions)


def _distribution(message: pb.SparseDistribution, vocab_size: int) -> t.SparseDistribution:
    name = "proposal.draft_distributions"
    ids, weights, bits = tuple(message.token_ids), tuple(message.weights), message.weight_bits
    if not 1 <= bits <= 24:
        raise InvalidArgumentError(f"{name}.weight_bits", bits, "1 to 24")
    if len(ids) > MAX_SUPPORT:
        raise InvalidArgumentError(f"{name}.token_ids", f"{len(ids)} ids", f"at most {MAX_SUPPORT}")
    if len(ids) != len(weights) or len(set(ids)) != len(ids) or any(i >= vocab_size for i in ids):
        raise InvalidArgumentError(
            f"{name}.token_ids", f"{len(ids)} ids", f"distinct ids below {vocab_size}, one per weight"
        )
    if min(weights, default=0) < 1 or sum(weights) != 1 << bits:
        raise InvalidArgumentError(
            f"{name}.weights", f"a sum of {sum(weights)}", f"positive weights with sum {1 << bits}"
        )
    return t.SparseDistribution(ids, weights, bits)


def request_to_proto(request: t.GenerationRequest) -> gen.GenerateRequest:
    """Return the wire form of a generation request."""
    message = gen.GenerateRequest(
        model=request.model,
        sampling=sampling_to_proto(request.sampling),
        max_tokens=request.max_tokens,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        num_top_logprobs=request.num_top_logprobs,
        verification=METHODS[request.verification],
        gamma=gen.GammaPolicy(max_gamma=request.gamma.max_gamma, max_nodes=request.gamma.max_nodes),
        drafter=DRAFTERS[request.drafter],
        session_id=request.session_id,
        turn=request.turn,
        resume_from=request.resume_from,
        keep_cache_s=request.keep_cache_s,
        cache_salt=request.cache_salt,
        num_prompt_logprobs=request.num_prompt_logprobs,
    )
    if request.gamma.fixed is None:
        message.gamma.adaptive = True
    else:
        message.gamma.fixed = request.gamma.fixed
    if isinstance(request.prompt, str):
        message.text = request.prompt
    elif request.prompt:
        message.token_ids.ids.extend(request.prompt)
    if isinstance(request.prediction, str) and request.prediction:
        message.prediction.text = request.prediction
    elif request.prediction:
        message.prediction.token_ids.ids.extend(request.prediction)
    return message


def request_from_proto(message: gen.GenerateRequest) -> t.GenerationRequest:
    """Return the generation request of a wire message, validated as far as possible without the model.

    Raises:
        InvalidArgumentError: Names the first invalid field.
    """
    prompt: str | tuple[int, ...]
    prompt = message.text
    if message.WhichOneof("prompt") == "token_ids":
        prompt = token_ids_from_proto("prompt", message.token_ids.ids)
    prediction: str | tuple[int, ...] = message.prediction.text
    if message.prediction.WhichOneof("content") == "token_ids":
        prediction = token_ids_from_proto("prediction", message.prediction.token_ids.ids)
    if message.drafter not in (pb.DRAFTER_KIND_UNSPECIFIED, *DRAFTERS_BACK):
        raise InvalidArgumentError("drafter", message.drafter, f"one of {sorted(DRAFTERS_BACK)}")
    fixed = message.gamma.fixed if message.gamma.WhichOneof("policy") == "fixed" else None
    request = t.GenerationRequest(
        prompt=prompt,
        model=message.model,
        sampling=sampling_from_proto(message.sampling),
        max_tokens=message.max_tokens if message.HasField("max_tokens") else 128,
        stop=tuple(message.stop),
        stop_token_ids=token_ids_from_proto("stop_token_ids", message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        num_top_logprobs=message.num_top_logprobs if message.HasField("num_top_logprobs") else None,
        verification=method_from_proto(message.verification),
        gamma=t.GammaPolicy(fixed, message.gamma.max_gamma, message.gamma.max_nodes),
        drafter=DRAFTERS_BACK.get(message.drafter, t.DrafterKind.MODEL),
        session_id=message.session_id,
        turn=message.turn,
        resume_from=message.resume_from if message.HasField("resume_from") else None,
        keep_cache_s=message.keep_cache_s,
        cache_salt=message.cache_salt,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        prediction=prediction,
    )
    request.validate()
    return request


def chunk_to_proto(chunk: t.Chunk) -> gen.GenerateResponse:
    """Return the wire form of a chunk."""
    message = gen.GenerateResponse(
        session_id=chunk.session_id,
        text=chunk.text,
        seed=chunk.seed,
        tokens=[token_to_proto(token) for token in chunk.tokens],
        offset=chunk.offset,
        turn=chunk.turn,
        prompt_tokens=chunk.prompt_tokens,
    )
    if chunk.finish_reason is not None:
        message.finish_reason = FINISH_REASONS[chunk.finish_reason]
    if chunk.usage is not None:
        message.usage.CopyFrom(gen.Usage(**vars(chunk.usage)))
    if chunk.summary is not None:
        message.summary.CopyFrom(gen.SpeculationSummary(**vars(chunk.summary)))
    if chunk.prompt_logprobs is not None:
        _fill_prompt_logprobs(message.prompt_logprobs, chunk.prompt_logprobs)
    return message


def _fill_prompt_logprobs(message: pb.PromptLogprobs, prompt: t.PromptLogprobs) -> None:
    message.SetInParent()
    message.num_top = prompt.num_top
    for name in ("token_ids", "logprobs", "ranks", "top_token_ids", "top_logprobs"):
        column, values = getattr(message, name), getattr(prompt, name)
        for start in range(0, len(values), _SLICE):  # in slices, as each call holds the GIL
            column.extend(values[start : start + _SLICE])


def chunk_from_proto(message: gen.GenerateResponse) -> t.Chunk:
    """Return the chunk of a wire message."""
    return t.Chunk(
        session_id=message.session_id,
        text=message.text,
        tokens=tuple(token_from_proto(token) for token in message.tokens),
        seed=message.seed,
        finish_reason=FINISH_REASONS_BACK.get(message.finish_reason),
        usage=_usage_from_proto(message.usage) if message.HasField("usage") else None,
        summary=_summary_from_proto(message.summary) if message.HasField("summary") else None,
        offset=message.offset,
        turn=message.turn,
        prompt_tokens=message.prompt_tokens,
        prompt_logprobs=(
            prompt_logprobs_from_proto(message.prompt_logprobs, tuple(message.prompt_logprobs.token_ids))
            if message.HasField("prompt_logprobs")
            else None
        ),
    )


def prompt_logprobs_from_proto(message: pb.PromptLogprobs, token_ids: tuple[int, ...]) -> t.PromptLogprobs:
    """Return the log-probabilities of the prompt `token_ids`.

    Raises:
        InternalError: The columns do not match the tokens, or contain invalid numbers.
    """
    found = t.PromptLogprobs(
        token_ids,
        tuple(message.logprobs),
        tuple(message.ranks),
        message.num_top,
        tuple(message.top_token_ids),
        tuple(message.top_logprobs),
    )
    entries = max(0, len(token_ids) - 1)
    sizes = [len(found.logprobs), len(found.ranks), len(found.top_token_ids), len(found.top_logprobs)]
    if sizes != [entries, entries, entries * found.num_top, entries * found.num_top]:
        raise InternalError(f"the peer sent {sizes} log-probabilities of a prompt of {len(token_ids)} tokens")
    if any(map(math.isnan, found.logprobs)) or any(map(math.isnan, found.top_logprobs)):
        raise InternalError("the peer sent log-probabilities of a prompt that are not numbers")
    return found


def token_to_proto(token: t.EmittedToken) -> gen.EmittedToken:
    """Return the wire form of an emitted token."""
    return gen.EmittedToken(
        token_id=token.token_id,
        origin=ORIGINS[token.origin],
        logprob=token.logprob,
        top_logprobs=[gen.TopLogprob(**vars(top)) for top in token.top_logprobs],
        token_bytes=token.token_bytes,
        drafter=pb.DRAFTER_KIND_UNSPECIFIED if token.drafter is None else DRAFTERS[token.drafter],
    )


def token_from_proto(message: gen.EmittedToken) -> t.EmittedToken:
    """Return the emitted token of a wire message."""
    return t.EmittedToken(
        token_id=message.token_id,
        origin=origin_from_proto(message.origin),
        token_bytes=message.token_bytes,
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple(t.TopLogprob(p.token_id, p.logprob, p.token_bytes) for p in message.top_logprobs),
        drafter=DRAFTERS_BACK.get(message.drafter),  # None also for a kind that a later version added
    )


def _usage_from_proto(message: gen.Usage) -> t.Usage:
    return t.Usage(
        message.prompt_tokens,
        message.completion_tokens,
        message.accepted_prediction_tokens,
        message.rejected_prediction_tokens,
        message.cached_tokens,
    )


def _summary_from_proto(message: gen.SpeculationSummary) -> t.SpeculationSummary:
    return t.SpeculationSummary(
        cycles=message.cycles,
        tokens_per_cycle=message.tokens_per_cycle,
        alpha=message.alpha if message.HasField("alpha") else None,
        acceptance_rate=message.acceptance_rate if message.HasField("acceptance_rate") else None,
        accepted_lengths=tuple(message.accepted_lengths),
        gamma_mean=message.gamma_mean,
        draft_ms=message.draft_ms,
        verify_ms=message.verify_ms,
        other_ms=message.other_ms,
        total_ms=message.total_ms,
        speedup_estimate=message.speedup_estimate if message.HasField("speedup_estimate") else None,
        model_cycles=message.model_cycles,
        ngram_cycles=message.ngram_cycles,
        plain_cycles=message.plain_cycles,
        fallback_cycles=message.fallback_cycles,
        draft_workers=message.draft_workers,
        suffix_cycles=message.suffix_cycles,
        prediction_cycles=message.prediction_cycles,
        drafted_tokens=message.drafted_tokens,
        accepted_tokens=message.accepted_tokens,
    )
