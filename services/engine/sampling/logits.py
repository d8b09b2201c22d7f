"""The processed distribution, from which the target samples and which speculation must not change.

Draft and target, plain and speculative decoding all use `processed_log_probs`. The order is fixed, since
changing it changes the distribution: masks, bias and penalties (`services.engine.sampling.edits`),
temperature, min-p, top-k, top-p, softmax. Tokens on a node's own path count as output, so that row r is
correct for exactly the continuations for which it is used.

Each row is a function of its own logits and path only: no reduction crosses rows, and the order in which a
row is summed does not depend on the number of rows. Hence the tokens do not depend on gamma.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gammaray.types import SamplingParams
from services.engine.sampling.edits import LogitEdits

# Lower bound: at this temperature the best token already has all probability; smaller ones would give 0 / 0.
_MIN_TEMPERATURE = 1e-30
# Probabilities are summed as integers, which is exact and therefore independent of the order of summation.
_MASS_UNIT = 2.0**40
_USUAL_NUCLEUS = 256
_FEW_LOGITS = 2**14
"""Up to here, to sort all of them takes less time than to choose some."""
_USUAL_DEPTH = 6.0
"""Nats below the best token, less the logarithm of the mass outside, down to which most nuclei reach."""


def processed_log_probs(
    logits: Tensor,
    params: SamplingParams,
    edits: LogitEdits | None = None,
    paths: Sequence[Sequence[int]] = (),
    *,
    is_normalised: bool = True,
) -> Tensor:
    """Return the log-probabilities that tokens are drawn from.

    Args:
        logits: [rows, vocab_size]. Not changed.
        edits: Masks, bias and penalties, updated to the committed tokens; None if `params` has none.
        paths: For each row, the tokens between the committed ones and the row, as of `row_paths`.
        is_normalised: Whether to subtract the logarithm of their sum, which a Gumbel-max draw does not need.

    Returns:
        [rows, vocab_size] float32, -inf for tokens that cannot be drawn. At temperature 0: 0 at the argmax
        (lowest id on ties), -inf elsewhere.
    """
    logits = edited_logits(logits, edits, paths)
    if params.temperature == 0:
        return _point_mass(logits)
    if params.temperature != 1:
        logits = logits / max(params.temperature, _MIN_TEMPERATURE)
    if params.min_p > 0:
        logits = _keep_min_p(logits, params.min_p)
    if 0 < params.top_k < logits.shape[-1]:
        logits = _keep_top_k(logits, params.top_k)
    if params.top_p < 1:
        logits = _keep_top_p(logits, params.top_p)
    return logits.log_softmax(dim=-1) if is_normalised else logits


def filter_key(params: SamplingParams) -> tuple[float, ...]:
    """Return what a processed distribution depends on except logits and edits; equal ones share a call."""
    return params.temperature, params.top_k, params.top_p, params.min_p


def edited_logits(logits: Tensor, edits: LogitEdits | None, paths: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits after masks, bias and penalties, the first half of `processed_log_probs`.

    At temperature 0 only their best token counts, the lowest id on ties.
    """
    return logits.float() if edits is None else edits.apply(logits, paths)


def _point_mass(logits: Tensor) -> Tensor:
    best, token_ids = logits.max(dim=-1, keepdim=True)
    # 0, or NaN if the best logit is not finite, so that a broken model is detected.
    return torch.full_like(logits, -torch.inf).scatter_(-1, token_ids, best - best)


def _keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    return logits.masked_fill(weights < min_p, -torch.inf)


def _keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    last = logits.topk(top_k, dim=-1).values[:, -1:]
    return _keep_down_to(logits, last, torch.full_like(last, top_k, dtype=torch.int64))


def _keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keep the most likely tokens, up to and including the one at which their mass reaches `top_p`."""
    most = logits.amax(dim=-1, keepdim=True)
    needed = _mass(logits, most).sum(dim=-1, keepdim=True).double() * top_p
    ordered = _likeliest(logits, most, top_p)
    num_kept = _num_within(ordered, most, needed)
    last = ordered.gather(-1, num_kept - 1)
    if (wide := (num_kept[:, 0] == ordered.shape[-1]).nonzero()[:, 0]).numel():
        ordered = _descending(logits[wide])
        num_kept[wide] = _num_within(ordered, most[wide], needed[wide])
        last[wide] = ordered.gather(-1, num_kept[wide] - 1)
    return _keep_down_to(logits, last, num_kept)


def _likeliest(logits: Tensor, most: Tensor, top_p: float) -> Tensor:
    """Return the largest logits of each row, `most` first, then -inf; usually they contain the nucleus."""
    if logits.device.type != "cpu":
        return logits.topk(min(_USUAL_NUCLEUS, logits.shape[-1]), dim=-1).values
    if logits.numel() <= _FEW_LOGITS:
        return _descending(logits)
    # NOTE: a comparison and a sort of what passes take a tenth of the time of `topk`.
    rows = logits.numpy()
    is_likely = rows > (most - _USUAL_DEPTH + math.log1p(-top_p)).numpy()
    counts = np.count_nonzero(is_likely, axis=-1, keepdims=True)
    ordered = np.full((len(rows), max(1, counts.max(initial=0))), -np.inf, np.float32)
    ordered[np.arange(ordered.shape[1]) < counts] = rows[is_likely]
    ordered.sort(axis=-1)
    ordered[:, -1:] = most.numpy()  # also where it is not finite
    return torch.from_numpy(ordered).flip(-1)


def _descending(logits: Tensor) -> Tensor:
    if logits.device.type != "cpu":
        return logits.sort(dim=-1, descending=True).values
    # NOTE: numpy's vectorised sort takes a sixth of the time of torch's, which also sorts the ids.
    return torch.from_numpy(np.sort(logits.numpy(), axis=-1)).flip(-1)


def _num_within(ordered: Tensor, most: Tensor, needed: Tensor) -> Tensor:
    """Return [rows, 1]: of tokens in descending order, how many have less than `needed` before them."""
    mass = _mass(ordered, most).cumsum(dim=-1).double()
    return (mass < needed).sum(dim=-1, keepdim=True).add_(1).clamp_(max=ordered.shape[-1])


def _mass(logits: Tensor, most: Tensor) -> Tensor:
    """Return int64 weights proportional to probabilities; `most` is the largest logit of each row."""
    return (logits - most).exp_().double().mul_(_MASS_UNIT).round_().long()


def _keep_down_to(logits: Tensor, last: Tensor, num_kept: Tensor) -> Tensor:
    """Keep the `num_kept` largest logits, down to `last`, both [rows, 1]; of equal ones the lowest ids."""
    # NaN is below nothing, so that it stays and is detected.
    is_dropped = logits < last
    if not is_dropped.is_cpu or is_dropped.count_nonzero() < (logits.shape[-1] - num_kept).sum():
        num_ties = num_kept - (logits > last).sum(dim=-1, keepdim=True)
        ties = logits == last
        is_dropped |= ties & (ties.cumsum(dim=-1) > num_ties)
    return logits.masked_fill(is_dropped, -torch.inf)
