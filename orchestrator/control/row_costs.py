"""What the rows of a proposal add to a target's forward, as the worker timed it when it loaded its model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate, pairwise

from gammaray.types import MAX_NODES

ASSUMED = 0.03
"""Seconds that a row adds, over those of a forward over one token, where nothing was timed."""

LEAST_RISE = 0.1
"""Least rise of the timed forwards, over the first one, that says how it is spread over the rows."""


class RowCosts:
    """Seconds of further rows, in units of their mean.

    Rows cost next to nothing while the forward waits for its weights, and then as much as their arithmetic.
    A worker's load changes both, but hardly where the one ends and the other begins.

    Args:
        forward_s: Seconds of forwards over 1, 2, 4, 8, ... tokens. Without two of them, or if they hardly
            differ, all rows cost the same.

    Attributes:
        mean: Of a row, over the seconds of a forward over one token.
    """

    def __init__(self, forward_s: Sequence[float] = ()) -> None:
        times = list(accumulate(forward_s, max))  # a shorter time of more tokens is noise
        self.mean, self._slopes = ASSUMED, [1.0]
        if len(times) > 1 and times[0] > 0:
            unit = (times[-1] - times[0]) / (2 ** (len(times) - 1) - 1)
            self.mean = unit / times[0]
            if times[-1] - times[0] >= LEAST_RISE * times[0]:
                self._slopes = [
                    (later - earlier) / 2**index / unit
                    for index, (earlier, later) in enumerate(pairwise(times))
                    for _ in range(2**index)
                ]
        self._from = functools.cache(self._added)

    def added(self, others: float) -> Sequence[float]:
        """Return what 0, 1, 2, ... rows add to a forward that has one row and those of `others`."""
        return self._from(min(int(others), len(self._slopes)))

    def _added(self, others: int) -> Sequence[float]:
        last = self._slopes[-1:]
        return tuple(accumulate((self._slopes[others:] + last * MAX_NODES)[:MAX_NODES], initial=0.0))
