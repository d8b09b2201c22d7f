"""How tokens arrive: time to the first, gaps between the others, and how bursty they are.

A cycle's tokens come in one chunk, so that most gaps are 0 and the others as long as a cycle. With k tokens
per cycle and cycles of equal length the share of zero gaps is 1 - 1/k, and the squared coefficient of
variation of the gaps (variance / mean squared) is k - 1; cycles of varying length add to it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from gammaray.bench.systems import Arrival

__all__ = ["burst_cv2", "burst_zero_share", "gap_figures", "gaps", "paced_gaps", "percentile"]

_PACE_WEIGHT = 0.2
"""Weight of the newest cycle in the pace that `paced_gaps` follows."""


def gaps(arrivals: Sequence[Arrival]) -> list[float]:
    """Return the seconds between tokens of one completion.

    The first chunk is left out, but for being where the second one's wait starts: the wait for it is the
    time to the first token.
    """
    found: list[float] = []
    for (before, _), (at, num_tokens) in pairwise(arrivals):
        found += [at - before, *[0.0] * (num_tokens - 1)]
    return found


def paced_gaps(arrivals: Sequence[Arrival]) -> list[float]:
    """Return the seconds between tokens when they are handed on at the pace of the cycles so far.

    What a user interface can do against bursts, knowing the past only: a token is shown one pace after the
    one before it, or on arrival if that is later. The pace is a decayed mean of time over tokens.
    """
    shown: list[float] = []
    time_s = tokens = 0.0
    for (before, _), (at, num_tokens) in pairwise(arrivals):
        weight = _PACE_WEIGHT if tokens else 1.0
        time_s += weight * (at - before - time_s)
        tokens += weight * (num_tokens - tokens)
        for _ in range(num_tokens):
            shown.append(max(at, shown[-1] + time_s / tokens) if shown else at)
    return [later - earlier for earlier, later in pairwise(shown)]


def burst_zero_share(tokens_per_cycle: float) -> float:
    """Return the share of zero gaps that `tokens_per_cycle` implies, 1 - 1/k."""
    return 1.0 - 1.0 / tokens_per_cycle


def burst_cv2(tokens_per_cycle: float) -> float:
    """Return the squared coefficient of variation of the gaps between cycles of equal length, k - 1."""
    return tokens_per_cycle - 1.0


def gap_figures(completions: Iterable[Sequence[Arrival]]) -> dict[str, Any] | None:
    """Return what the gaps of several completions say together, in milliseconds; None when there are none.

    `expected` holds the closed forms at `tokens_per_cycle`, which here leaves first chunks out.
    """
    found, paced, num_chunks = [], [], 0
    for arrivals in completions:
        found += gaps(arrivals)
        paced += paced_gaps(arrivals)
        num_chunks += max(0, len(arrivals) - 1)
    if not found:
        return None
    mean = statistics.fmean(found)
    tokens_per_cycle = len(found) / num_chunks
    return {
        "mean_ms": mean * 1e3,
        **{f"p{q}_ms": percentile(found, q) * 1e3 for q in (50, 95, 99)},
        "cv2": statistics.pvariance(found, mean) / mean**2 if mean > 0 else 0.0,
        "zero_share": 1.0 - num_chunks / len(found),
        "tokens_per_cycle": tokens_per_cycle,
        "expected": {"cv2": burst_cv2(tokens_per_cycle), "zero_share": burst_zero_share(tokens_per_cycle)},
        "paced": {f"p{q}_ms": percentile(paced, q) * 1e3 for q in (50, 99)} if paced else None,
    }


def percentile(values: Sequence[float], q: float) -> float:
    """Return the `q`th percentile of at least one value, linear between the two nearest."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100.0
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
