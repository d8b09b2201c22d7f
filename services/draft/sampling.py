"""Draws from the draft's distributions, and the law that rejection verification is told."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate

import torch
from torch import Tensor

from gammaray.types import SparseDistribution

__all__ = ["ENTROPY_FACTOR", "entropy_estimate", "quantise", "sample_dense", "sample_sparse"]

ENTROPY_FACTOR = 0.05
"""Factor of the entropy in AdaEDL's estimate 1 - sqrt(factor * H) of acceptance (arXiv 2410.18351).

The paper's .2 bounds acceptance from below; .05 meets its mean on the demo pair (.64 told, .69 true)."""


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


def sample_dense(log_probs_row: Tensor, draft_bits: int, bits: int) -> int:
    """Draw from [vocab_size] log-probabilities with `draft_bits`, a uniform integer below 2^bits."""
    cumulative = log_probs_row.double().exp().cumsum(dim=-1)
    threshold = (draft_bits + 0.5) * 2.0**-bits * cumulative[-1]
    return int((cumulative <= threshold).sum())


def entropy_estimate(distribution: SparseDistribution) -> float:
    """Return AdaEDL's estimate of acceptance, a function of the law alone."""
    total = 1 << distribution.weight_bits
    entropy = math.log(total) - sum(w * math.log(w) for w in distribution.weights) / total
    return max(0.0, 1.0 - math.sqrt(ENTROPY_FACTOR * max(0.0, entropy)))
