"""What of a session's sampling parameters the draft needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gammaray.types import SamplingParams, VerificationMethod
from services.scheduling.tasks import SessionSpec

__all__ = ["counts_tokens", "draft_params"]


def draft_params(spec: SessionSpec) -> SamplingParams | None:
    """What to process the draft's logits with; None when the plain logits do as well.

    At temperature 0 the argmax is all that counts, and a temperature of 1 with no token dropped keeps it and
    leaves a distribution that the confidence can be read from. Races need no normalised distribution.
    """
    params = spec.params
    if params.temperature == 0:
        params = replace(params, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
    elif spec.method is not VerificationMethod.COUPLED:
        return params
    plain: Any = SamplingParams(seed=params.seed, sample_index=params.sample_index)
    return None if params == plain else params


def counts_tokens(params: SamplingParams) -> bool:
    """Whether the processed distribution depends on the tokens before."""
    return bool(
        params.min_tokens
        or params.repetition_penalty != 1
        or params.frequency_penalty
        or params.presence_penalty
    )
