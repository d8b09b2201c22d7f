"""How the draft chooses a token: it aims at the target's choice, and keeps to the law it ships.

Each method needs its own way of drawing:

* coupled: the race that the target will run, argmax(log q + gumbel), with the same noise.
* rejection: the draft's distribution is truncated to its most likely tokens and quantised to integer
  weights with a power of two as their sum; the token is drawn from exactly that law, in integers, and the
  law is shipped.
* naive: a plain draw with noise the target does not use.
* greedy (no noise, temperature 0): the argmax.

Confidence and early stopping. With coupled, naive and greedy verification the target draws its token
without looking at the draft's, so every stopping rule is lossless: a token may be dropped after it was
drawn. With rejection, whether a token is part of the proposal must be decided before it is drawn; hence the
confidence given for rejection is a function of q alone, never of the token. A scheduler may therefore use
the confidence of every method in the same way: end the chain before or after the token once the product of
confidences, this one's included, is below a threshold.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate

import torch
from torch import Tensor

from gammaray.types import SparseDistribution, VerificationMethod
from services.engine.noise import Noise

__all__ = ["propose_token", "quantise", "sample_sparse"]

RACE_TEMPERATURE = 0.7
"""Turns the lead of a race's winner into the probability that the target's race has the same winner.

Maximum likelihood on the demo pair at temperature 1: confidences near .41, .60, .81 and .97 matched .48, .59,
.74 and .95 of the time. Closer pairs want less (simulated: .3 at a total variation of .1)."""

ENTROPY_FACTOR = 0.05
"""Factor of the entropy in AdaEDL's estimate 1 - sqrt(factor * H) of acceptance (arXiv 2410.18351).

The paper's .2 bounds acceptance from below; .05 meets its mean on the demo pair (.64 told, .69 true)."""

_NAIVE_BITS = 32


def propose_token(
    method: VerificationMethod,
    log_probs_row: Tensor,
    noise: Noise | None,
    base: int,
    position: int,
    top_k: int,
    bits: int,
    *,
    want_confidence: bool = True,
) -> tuple[int, SparseDistribution | None, float]:
    """Choose the token of one position.

    Args:
        method: Verification method of the session.
        log_probs_row: [vocab_size] processed log-probabilities of the draft. Without noise raw logits do as
            well, when no mask, bias or penalty is switched on.
        noise: The session's noise; None at temperature 0.
        base: Number of committed tokens at the start of the cycle.
        position: Absolute position of the token.
        top_k: Rejection: largest support of the shipped law.
        bits: Rejection: the weights' sum is 2^bits.
        want_confidence: False saves the work, and 1.0 is returned.

    Returns:
        The token, the law it was drawn from (rejection above temperature 0 only), and the confidence that
        it will be accepted, in [0, 1].
    """
    if noise is None:
        return _propose_greedy(log_probs_row, want_confidence)
    if method is VerificationMethod.REJECTION:
        distribution = quantise(log_probs_row.double().exp(), top_k, bits)
        token_id = sample_sparse(distribution, noise.draft_bits(base, position, bits))
        return token_id, distribution, _entropy_estimate(distribution) if want_confidence else 1.0
    if method is VerificationMethod.NAIVE:
        token_id = _sample_dense(log_probs_row, noise.draft_bits(base, position, _NAIVE_BITS))
        return token_id, None, math.exp(float(log_probs_row[token_id])) if want_confidence else 1.0
    return _propose_coupled(log_probs_row, noise, position, want_confidence)


def quantise(probs: Tensor, top_k: int, bits: int) -> SparseDistribution:
    """Return the `top_k` most likely tokens with integer weights by largest remainder, ties to the lower id.

    Args:
        probs: [vocab_size], need not be normalised; at least one positive.
        top_k: Largest support, at least 1.
        bits: The weights' sum is 2^bits, in [1, 24].
    """
    token_ids, probs_kept = _most_likely(probs, min(top_k, probs.shape[-1]))
    scale = (1 << bits) / math.fsum(probs_kept)
    shares = [prob * scale for prob in probs_kept]
    weights = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: weights[i] - shares[i])
    for index in by_remainder[: (1 << bits) - sum(weights)]:
        weights[index] += 1
    kept = [index for index, weight in enumerate(weights) if weight > 0]
    return SparseDistribution(
        tuple(token_ids[index] for index in kept), tuple(weights[index] for index in kept), bits
    )


def sample_sparse(distribution: SparseDistribution, draft_bits: int) -> int:
    """Return the first token whose cumulative weight exceeds `draft_bits`, which is below 2^weight_bits."""
    return distribution.token_ids[bisect_right(list(accumulate(distribution.weights)), draft_bits)]


def _most_likely(probs: Tensor, size: int) -> tuple[list[int], list[float]]:
    """Return the ids, ascending, and probabilities of the `size` most likely tokens, ties to the lower id."""
    last = probs.topk(size).values[-1]
    token_ids = (probs >= last).nonzero().flatten()
    if len(token_ids) > size:
        tied = (probs[token_ids] == last).nonzero().flatten()
        dropped = tied[size - len(token_ids) :]
        token_ids = token_ids[~torch.isin(torch.arange(len(token_ids), device=probs.device), dropped)]
    return token_ids.tolist(), probs[token_ids].tolist()


def _propose_greedy(scores: Tensor, want_confidence: bool) -> tuple[int, None, float]:
    token_id = int(scores.argmax())
    confidence = math.exp(float(scores[token_id] - scores.logsumexp(dim=-1))) if want_confidence else 1.0
    return token_id, None, min(1.0, confidence)


def _propose_coupled(
    log_probs_row: Tensor, noise: Noise, position: int, want_confidence: bool
) -> tuple[int, None, float]:
    scores = log_probs_row + noise.gumbel(position, 1)[0]
    best, token_id = scores.max(dim=-1)
    if not want_confidence:
        return int(token_id), None, 1.0
    return int(token_id), None, 1.0 / float(((scores - best) / RACE_TEMPERATURE).exp().sum())


def _sample_dense(log_probs_row: Tensor, draft_bits: int) -> int:
    cumulative = log_probs_row.double().exp().cumsum(dim=-1)
    threshold = (draft_bits + 0.5) * 2.0**-_NAIVE_BITS * cumulative[-1]
    return int((cumulative <= threshold).sum())


def _entropy_estimate(distribution: SparseDistribution) -> float:
    """Return AdaEDL's estimate of acceptance, a function of the law alone."""
    total = 1 << distribution.weight_bits
    entropy = math.log(total) - sum(w * math.log(w) for w in distribution.weights) / total
    return max(0.0, 1.0 - math.sqrt(ENTROPY_FACTOR * max(0.0, entropy)))
