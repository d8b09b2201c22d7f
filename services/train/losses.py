"""What a drafter is trained for and measured by: its agreement with the target at temperature 1.

Both distributions are known at the target's most likely ids only, so agreement is a lower bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

_KL_SHARE = 0.1
"""Of the loss `coupled`: the divergence has a gradient also where the drafter is far from the target."""

_LEAST = 1e-30
"""Denominators below this are of tokens that neither draws."""


def overlap(wanted: Tensor, drafted: Tensor) -> Tensor:
    """Return 1 - TV, [predictions], from the target's probabilities and the drafter's log-probabilities.

    Both are [predictions, top_k], for the same ids. Where the drafter has no row `wanted` is 0, and `drafted`
    of any value.
    """
    return torch.minimum(wanted, drafted.exp()).sum(-1)


def coupled(wanted: Tensor, drafted: Tensor) -> Tensor:
    """Return the probability [predictions] that target and drafter draw one token with the same Gumbel noise.

    That is sum_j 1 / sum_i max(p_i / p_j, q_i / q_j). Tokens that are not among `wanted` are taken to belong
    to one of the two only.
    """
    drafted = drafted.exp() * (wanted > 0)
    p_rest, q_rest = (1 - part.sum(-1, keepdim=True) for part in (wanted, drafted))
    larger = torch.maximum(wanted[:, None] * drafted[..., None], drafted[:, None] * wanted[..., None]).sum(-1)
    larger = larger + p_rest.clamp_min(0) * drafted + q_rest.clamp_min(0) * wanted
    return (wanted * drafted / larger.clamp_min(_LEAST)).sum(-1)


def loss_of(kind: str, wanted: Tensor, drafted: Tensor) -> Tensor:
    """Return the loss of each prediction, [predictions].

    `kind` is "kl" (up to the target's entropy), or "coupled", the probability that coupled verification
    rejects and a tenth of "kl".
    """
    divergence = -(wanted * drafted).sum(-1)
    return divergence if kind == "kl" else 1 - coupled(wanted, drafted) + _KL_SHARE * divergence
