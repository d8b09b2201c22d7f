"""How often a proposal is there before it is asked for."""

from __future__ import annotations

import math

__all__ = ["HitRates"]

MEMORY = 128.0
"""Lookups that count."""

PRIOR_SLOPE, PRIOR_STRENGTH = -0.4, 4.0
"""Share of the mean rate by which the rate grows with the logarithm of the depth, and the spread of depths
that this is worth. The demo pair's rates were 0.78 at 2, 0.69 at 3, 0.55 at 4, 0.47 at 6, 0.44 at 8
(greedily, fixed gammas, by `gammaray trace --json`, two AMD EPYC cores, 2026-11-21): a start, which each
replica corrects."""


class HitRates:
    """Hit rates of draft-ahead by depth: deeper proposals are ready in time less often.

    A wait for a proposal is close to nothing on a hit, and a round trip and several forwards on a miss. Their
    mean moves with every change of luck; rate and waits apart are each learned quickly. The rate is a line
    over the logarithm of the depth, so that playing one depth tells what another would bring.
    """

    def __init__(self) -> None:
        self._num = self._hits = 0.0
        self._x = self._xx = self._xh = 0.0

    def observe(self, depth: int, share: float, *, is_hit: bool) -> None:
        """Note a lookup.

        Args:
            depth: Of the proposal before, which is what the next one is prepared to be; at least 1.
            share: Its weight, less than 1 when several sessions report at once.
            is_hit: Whether the proposal was there.
        """
        x, fading = math.log(depth), 1.0 - share / MEMORY
        self._num = self._num * fading + share
        self._hits = self._hits * fading + share * is_hit
        self._x = self._x * fading + share * x
        self._xx = self._xx * fading + share * x * x
        self._xh = self._xh * fading + share * x * is_hit

    def rate(self, depth: int) -> float:
        """Return the expected rate at a depth; 0 before the first hit."""
        if not self._hits or depth < 1:
            return 0.0
        mean, mean_x = self._hits / self._num, self._x / self._num
        spread = max(0.0, self._xx - self._num * mean_x * mean_x)
        common = self._xh - self._num * mean_x * mean
        slope = (common + PRIOR_STRENGTH * PRIOR_SLOPE * mean) / (spread + PRIOR_STRENGTH)
        return min(1.0, max(0.0, mean + min(0.0, slope) * (math.log(depth) - mean_x)))
