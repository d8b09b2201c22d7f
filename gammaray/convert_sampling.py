"""Sampling parameters between wire messages and types."""

from __future__ import annotations

from collections.abc import Sequence

from gammaray.checks import MAX_TOKEN_IDS
from gammaray.errors import InvalidArgumentError
from gammaray.types import MAX_LOGIT_BIAS, SamplingParams
from gammaray.v1 import types_pb2 as pb

__all__ = ["sampling_from_proto", "sampling_to_proto", "token_ids_from_proto"]


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
    """Return the sampling parameters of a wire message; absent fields take their defaults.

    Raises:
        InvalidArgumentError: A list has more entries than it may have.
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
        InvalidArgumentError: There are more than a request may have; none is copied then.
    """
    if len(ids) > MAX_TOKEN_IDS:
        raise InvalidArgumentError(name, f"{len(ids)} token ids", f"at most {MAX_TOKEN_IDS}")
    return tuple(ids)
