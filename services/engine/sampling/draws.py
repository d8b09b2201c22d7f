"""Gumbel-max draws: the token whose logit plus noise is the largest."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.engine.native.library import load_kernel
from services.engine.sampling.noise import SHARED, Noise


def draw(logits: Tensor, noise: Noise, positions: Sequence[int]) -> tuple[list[int | None], Tensor]:
    """Draw the token at each position with the noise that draft and target share.

    Args:
        logits: [positions, vocab_size] float32, -inf for tokens that cannot be drawn; need not be normalised.
        noise: That of all tokens.
        positions: Absolute positions of the tokens.

    Returns:
        The tokens, see `best_tokens`, and the scores [positions, vocab_size], in float32 to 1e-4 where the
        compiled kernel draws; it compares the best ones in float64.
    """
    library = load_kernel().library if logits.is_cpu and logits.is_contiguous() else None
    if library is None:
        scores = logits + noise.at(positions)
        return best_tokens(scores), scores
    rows, size = logits.shape
    scores = torch.empty_like(logits)
    places, tokens = (ctypes.c_int64 * rows)(*positions), (ctypes.c_int64 * rows)()
    sources = places, logits.data_ptr(), rows, size
    library.gr_draw(noise.seed, noise.sample_index, SHARED, *sources, scores.data_ptr(), tokens)
    return [token if token >= 0 else None for token in tokens], scores


def best_tokens(scores: Tensor) -> list[int | None]:
    """Return the argmax of each row, lowest id on ties, and None for rows that hold no finite number."""
    if scores.device.type == "cpu":
        # NOTE: numpy's argmax takes a sixth of torch's time; it returns the first maximum, or the first NaN.
        rows = scores.numpy()
        winners = rows.argmax(axis=-1)
        pairs = zip(rows[np.arange(len(rows)), winners].tolist(), winners.tolist(), strict=True)
    else:
        best, token_ids = scores.max(dim=-1)
        pairs = zip(best.tolist(), token_ids.tolist(), strict=True)
    return [token_id if math.isfinite(score) else None for score, token_id in pairs]
