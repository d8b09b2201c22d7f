"""Detects growth of a figure over a run: compares the medians of its last and its second third."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Z = 3.0
"""Growth orders the two thirds: nearly all later values are above nearly all earlier ones. Noise leaves half
of the pairs either way, give or take the deviation of the rank-sum test. A run judges some seventy figures,
so each may raise a false alarm in one of several hundred runs at most: three deviations."""

NUM_QUARTERS = 4

MIN_COUNT = 6
"""Below that, thirds hold one value and say nothing."""


@dataclass(frozen=True)
class Bound:
    """How much a figure may grow from the middle of the second third of a run to the middle of the last."""

    slack: float  # allowed growth regardless of the duration
    per_hour: float = 0.0  # additional allowed growth per hour between them
    # Whether it is a pool that may grow to its peak demand and stay there. Then a step of any height is no
    # leak, but growth until the end is.
    is_pool: bool = False


BOUNDS = {
    # Resident memory moves by whole arenas and heap trims of the allocator, a few MiB at a time, hence the
    # slack: an arena touched once, late in the run, must not pass for a leak. 48 MiB an hour is 1 GiB a day;
    # with the slack, half an hour sees leaks from some 84 MiB an hour on, and two hours from 57 on.
    "rss_mb": Bound(slack=6.0, per_hour=48.0),
    # Redis says what it has allocated, without arenas, but what it holds is the traffic of the last TTL.
    "memory_mb": Bound(slack=2.0, per_hour=12.0),
    # Counts are taken at rest. Pools of Python grow up to their size with the worst moment so far; idle
    # connections between processes, one descriptor at each end, come and go with Ray's own calls.
    "threads": Bound(slack=3.0),
    # gRPC's own pool has no size. In the run of 2026-11-21, two processes of Ray that do nothing for requests
    # got five and seven more threads within some minutes of a starved machine, and none after that.
    "pool_threads": Bound(slack=3.0, is_pool=True),
    "files": Bound(slack=6.0),
    # asyncio tasks at rest: the process's own and one or two per stream between processes.
    "tasks": Bound(slack=3.0),
    "clients": Bound(slack=3.0),
    # Lines of /metrics: a label that has a value for the first time adds a histogram of some fifteen lines.
    "series": Bound(slack=40.0),
    # What belongs to requests is nothing at rest, and so may not grow at all.
    **dict.fromkeys(("sessions", "queued", "kv_mb", "running"), Bound(slack=0.0)),
    # Keys without an expiry: the set of orchestrators, and the set of running sessions while there are any.
    "lasting_keys": Bound(slack=1.0),
}
"""By measure. One that is not here is not judged: `keys` follows the traffic of the last TTL, and what counts
is that none is left when that has passed."""


@dataclass(frozen=True)
class Trend:
    before: float
    after: float
    allowed: float
    share: float  # of rising pairs of a value of the second third and one of the last; ties count half
    min_share: float
    goes_on: bool  # whether each quarter of the two thirds is above the previous one
    is_pool: bool

    @property
    def grows(self) -> bool:
        rose = self.after - self.before > self.allowed and self.share >= self.min_share
        return rose and (self.goes_on or not self.is_pool)


def trend(at_s: Sequence[float], values: Sequence[float], bound: Bound) -> Trend:
    """Return the trend of values over time; the first third is the warm-up and is ignored."""
    if len(values) < MIN_COUNT:
        raise ValueError(f"got {len(values)} values, allowed: at least {MIN_COUNT}")
    third = len(values) // 3
    early, late = values[-2 * third : -third], values[-third:]
    hours = (statistics.median(at_s[-third:]) - statistics.median(at_s[-2 * third : -third])) / 3600
    ends = [2 * third * number // NUM_QUARTERS for number in range(NUM_QUARTERS + 1)]
    medians = [statistics.median(values[-2 * third :][begin:end]) for begin, end in pairwise(ends)]
    rises = [(new > old) + 0.5 * (new == old) for new in late for old in early]
    return Trend(
        statistics.median(early),
        statistics.median(late),
        bound.slack + bound.per_hour * hours,
        statistics.fmean(rises),
        min(1.0, 0.5 + Z * math.sqrt((2 * third + 1) / (12 * third**2))),
        all(new > old for old, new in pairwise(medians)),
        bound.is_pool,
    )
