"""The draft's choice after one node, for tests of the maths."""

from torch import Tensor

from gammaray.types import SparseDistribution, VerificationMethod
from services.engine.sampling.noise import Noise
from services.speculation.predictions import predictions


def propose_token(
    method: VerificationMethod,
    log_probs_row: Tensor,
    noise: Noise | None,
    base: int,
    position: int,
    top_k: int,
    bits: int,
) -> tuple[int, SparseDistribution | None, float]:
    """Return the draft's token after one node, the distribution it was sampled from, and its confidence."""
    (prediction,) = predictions(
        method, log_probs_row[None], noise, [position], temperature=1.0, top_k=top_k, bits=bits
    )
    return prediction.choose(base), prediction.distribution, prediction.confidence(base)
