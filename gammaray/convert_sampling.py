"""Sampling parameters between wire messages and types."""

from __future__ import annotations

from gammaray.sampling import SamplingParams
from gammaray.v1 import types_pb2 as pb

__all__ = ["sampling_from_proto", "sampling_to_proto"]


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
    """Return the sampling parameters of a wire message; absent fields take their defaults."""
    return SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids),
        banned_token_ids=tuple(message.banned_token_ids),
        min_tokens=message.min_tokens,
        seed=message.seed if message.HasField("seed") else None,
        sample_index=message.sample_index,
    )
