"""Sequential test of the mean of bounded values, valid whenever it is stopped.

The test bets against a hypothesis on the mean: while the hypothesis holds, the capital is a nonnegative
supermartingale, so by Ville's inequality it ever exceeds 1 / error with at most that probability. The bets
are those of aGRAPA (arXiv 2010.09686) with its truncation 3/4.

The values may depend on each other: the hypothesis is that each one's mean, given those before it, is at
least (or at most) the bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_TRUNCATION = 0.75


def evidence(values: Sequence[float], bound: float, low: float, high: float) -> tuple[float, float]:
    """Return the logarithm of the largest capital of two bets: that the mean is below and above the bound.

    Where the first is at least log(1 / error), "the mean is at least `bound`" is rejected with at most that
    error; the second likewise rejects "at most `bound`".

    Args:
        values: Observations in their order, in [low, high].
        bound: Mean that is tested. Outside [low, high] one of the results is infinite without observations.
        low: Lower bound of the values.
        high: Their upper bound, above `low`.
    """
    mean = (bound - low) / (high - low)
    if not 0.0 < mean < 1.0:
        return (math.inf, 0.0) if mean >= 1.0 else (0.0, math.inf)
    total, squares = 0.5, 0.25
    below = above = largest_below = largest_above = 0.0
    for count, value in enumerate(values, start=1):
        scaled = (value - low) / (high - low)
        edge = total / count - mean
        bet = edge / (squares / count + edge * edge)
        above += math.log1p(min(max(0.0, bet), _TRUNCATION / mean) * (scaled - mean))
        below += math.log1p(max(min(0.0, bet), -_TRUNCATION / (1.0 - mean)) * (scaled - mean))
        largest_below, largest_above = max(largest_below, below), max(largest_above, above)
        total += scaled
        squares += (scaled - total / (count + 1)) ** 2
    return largest_below, largest_above
