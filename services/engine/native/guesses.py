"""The likeliest tokens by their scores."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from services.engine.native.library import load_kernel

__all__ = ["MAX_GUESSES", "likeliest"]

MAX_GUESSES = 16


def likeliest(scores: Tensor, count: int, temperature: float) -> list[tuple[int, float]]:
    """Return the tokens with the largest scores and their shares of sum exp(score / temperature), best first.

    Args:
        scores: [vocab_size], float32 or float64; -inf where a token cannot be.
        count: How many, at most `MAX_GUESSES` and the size of the vocabulary.
        temperature: Above 0.
    """
    library = load_kernel().library if scores.is_cpu and scores.is_contiguous() else None
    if library is None:
        return _by_torch(scores, min(count, scores.shape[0]), temperature)
    function = library.gr_guesses_float64 if scores.dtype == torch.float64 else library.gr_guesses_float32
    indices, shares = (ctypes.c_int32 * count)(), (ctypes.c_float * count)()
    found = function(scores.data_ptr(), scores.shape[0], count, temperature, indices, shares)
    return list(zip(indices[:found], shares[:found], strict=True))


def _by_torch(scores: Tensor, count: int, temperature: float) -> list[tuple[int, float]]:
    best, token_ids = scores.topk(count)
    total = ((scores - best[0]) / temperature).exp_().sum()
    shares = ((best - best[0]) / temperature).exp_() / total
    return list(zip(token_ids.tolist(), shares.tolist(), strict=True))
