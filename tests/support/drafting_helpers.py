"""The draft's choice behind one node, as the tests of the maths want it."""

from __future__ import annotations

from torch import Tensor

from gammaray.types import SparseDistribution, VerificationMethod
from services.draft.predictions import predictions
from services.engine.sampling.noise import Noise


def propose_token(
    method: VerificationMethod,
    log_probs_row: Tensor,
    noise: Noise | None,
    base: int,
    position: int,
    top_k: int,
    bits: int,
) -> tuple[int, SparseDistribution | None, float]:
    """Return what the draft chooses behind one node, the law it drew from, and its confidence."""
    (prediction,) = predictions(
        method, log_probs_row[None], noise, [position], temperature=1.0, top_k=top_k, bits=bits
    )
    return prediction.choose(base), prediction.law, prediction.confidence(base)
