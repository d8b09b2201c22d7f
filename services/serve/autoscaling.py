"""Number of workers of a pool: pure functions of the load, called about ten times a second.

Signals of each worker (`services.scheduling.load`), as means over the last reports:

* *in flight*: blocks waiting or running. The goal is `load` blocks per worker: more lengthen each other's
  cycles, fewer leave the device idle.
* *cache use*: sessions that do not fit are evicted and prefilled again, so a target pool grows before that.
* *hit rate*: draft-ahead prepares proposals in the drafters' idle time, which shrinks when fewer drafters do
  the work. So a draft pool shrinks only if it can carry the load without hits.

Against oscillation: a pool grows above `load` per worker, and shrinks only if the load fits into 70 % of
`load` with one worker less (so the new state is far from growing again); workers are removed one at a time; a
pool does not grow while workers start or stop; Serve acts only when a decision holds for `SCALE_UP_DELAY_S`
or `SCALE_DOWN_DELAY_S`. The last drafter stays while targets have work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from gammaray.config import ScalingSettings
from gammaray.deploy.serve_config import SHRINK_MARGIN
from services.scheduling.load import LoadReport

MIN_BUSY = 0.3
"""Below this share of busy time workers are not compute-bound, and more of them would not help."""

CACHE_FULL = 0.85
"""Share of the KV cache budget above which a target worker is added."""

MAX_HIT_RATE = 0.9
"""Upper bound of the hit rate: above it, the load without hits cannot be estimated."""


@dataclass(frozen=True)
class Pool:
    """A pool as reported by its running workers; `wanted` is the number decided on last."""

    wanted: int
    reports: Sequence[LoadReport]
    minimum: int
    maximum: int

    @property
    def in_flight(self) -> float:
        """Blocks in flight over all workers."""
        return sum(report.in_flight for report in self.reports)

    def mean(self, name: str) -> float:
        """Return the mean of a field of the reports, of which there is one or more."""
        return fmean(getattr(report, name) for report in self.reports)

    def clip(self, number: int) -> int:
        """Clamp a number of workers to the bounds, and to the current one while workers start or stop."""
        is_settled = len(self.reports) == self.wanted
        highest = self.maximum if is_settled else min(self.maximum, self.wanted)
        return max(self.minimum, min(highest, number))


def wanted_targets(pool: Pool, settings: ScalingSettings) -> int:
    """Return how many target workers there should be."""
    number = _by_load(pool, settings.target_load, pool.in_flight)
    cached = sum(report.cache_use for report in pool.reports)  # in budgets of one worker
    if cached > CACHE_FULL * pool.wanted:
        number = max(number, pool.wanted + 1)
    elif number < pool.wanted and cached > SHRINK_MARGIN * CACHE_FULL * number:
        number = pool.wanted
    return pool.clip(number)


def wanted_drafters(pool: Pool, demand: float, settings: ScalingSettings) -> int:
    """Return how many draft workers there should be.

    The demand, blocks in flight at the target workers, says whether there are sessions to draft for.
    """
    least = int(demand > 0)
    if pool.wanted == 0:
        return pool.clip(least)
    if not pool.reports:
        return pool.clip(pool.wanted)  # the workers still load their models: no load to judge yet
    ready = min(pool.mean("hit_rate"), MAX_HIT_RATE)
    number = _by_load(pool, settings.draft_load, pool.in_flight / (1 - ready))
    return pool.clip(max(least, number))


def _by_load(pool: Pool, load: float, load_without_hits: float) -> int:
    """Return the number of workers for `load` blocks in flight each, shrinking by one at most."""
    needed = math.ceil(pool.in_flight / load)
    if needed > pool.wanted:
        return needed if pool.mean("busy") >= MIN_BUSY else pool.wanted
    if load_without_hits <= SHRINK_MARGIN * load * (pool.wanted - 1):
        return pool.wanted - 1
    return pool.wanted
