"""How many workers a pool should have: pure functions from load to a number, called about ten times a second.

Signals, each worker's own (`services.scheduling.load`), as means over the last reports:

* *in flight*: blocks waiting or worked on. `load` of them per worker are wanted: more stretch each other's
  cycles, fewer leave the device idle.
* *cache use*: sessions that do not fit are evicted and read again, so a target pool grows before that.
* *hit rate*: proposals that draft-ahead had ready live off the drafters' idle time, and that is gone when
  fewer drafters do the work. So a draft pool shrinks only if it carries the load with nothing ready.
* *gain*: tokens per second that drafting adds to what the targets had emitted alone. A drafter whose share is
  below `min_gain` does not pay, and goes, one at a time, down to the pool's minimum.

What keeps it from swinging: growing needs a load above `load` per worker, shrinking one that fits into 70 %
of `load` with one worker less (so the new state is far from growing again); workers go one at a time; while
some start or stop nothing grows; Serve asks for the same wish over `scale_up_delay_s` or `scale_down_delay_s`
before it acts; and a drafter that did not pay is not tried again before a pause that doubles each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gammaray.config import ScalingSettings
from services.scheduling.load import LoadReport

__all__ = ["DraftMemory", "Pool", "wanted_drafters", "wanted_targets"]

SHRINK_MARGIN = 0.7
"""Share of the wanted load that the rest must be able to carry for a worker to go."""

MIN_BUSY = 0.3
"""Workers that are less busy than this do not wait for arithmetic: more of them would not help."""

CACHE_FULL = 0.85
"""Share of the KV cache budget from which on another target worker is wanted."""

MAX_HIT_RATE = 0.9
"""Hit rates count up to here: beyond, what the load were without hits is guesswork."""

MAX_DOUBLINGS = 4
"""Of the pause after drafters that did not pay."""


@dataclass(frozen=True)
class Pool:
    """A pool as its workers report it.

    Args:
        wanted: Workers that were decided on last.
        reports: Of the workers that run, those that reported.
        minimum: Lower bound of workers.
        maximum: Upper bound of workers.
    """

    wanted: int
    reports: Sequence[LoadReport]
    minimum: int
    maximum: int

    @property
    def in_flight(self) -> float:
        """Blocks in flight over all workers."""
        return sum(report.in_flight for report in self.reports)

    @property
    def is_settled(self) -> bool:
        """Whether all workers run that were decided on, and report."""
        return len(self.reports) == self.wanted

    def mean(self, name: str) -> float:
        """Return the mean of a field of the reports; 0 without reports."""
        values = [getattr(report, name) for report in self.reports]
        return sum(values) / len(values) if values else 0.0

    def clip(self, number: int) -> int:
        """Return the number of workers within the bounds, and not more than now while some start or stop."""
        highest = self.maximum if self.is_settled else min(self.maximum, self.wanted)
        return max(self.minimum, min(highest, number))


@dataclass(frozen=True)
class DraftMemory:
    """What is remembered of drafters that did not pay.

    Args:
        refused: As many drafters did not pay; 0 when nothing is remembered.
        paused_until: No drafter is added before then, in the caller's seconds.
        failures: Pauses in a row.
    """

    refused: int = 0
    paused_until: float = 0.0
    failures: int = 0


def wanted_targets(pool: Pool, settings: ScalingSettings) -> int:
    """Return how many target workers there should be.

    Args:
        pool: The target workers.
        settings: Thresholds.
    """
    number = _by_load(pool, settings.target_load, pool.in_flight)
    cached = sum(report.cache_use for report in pool.reports)  # in budgets of one worker
    if cached > CACHE_FULL * pool.wanted:
        number = max(number, pool.wanted + 1)
    elif number < pool.wanted and cached > SHRINK_MARGIN * CACHE_FULL * number:
        number = pool.wanted
    return pool.clip(number)


def wanted_drafters(
    pool: Pool, demand: float, memory: DraftMemory, settings: ScalingSettings, now: float
) -> tuple[int, DraftMemory]:
    """Return how many draft workers there should be, and what to remember.

    Args:
        pool: The draft workers.
        demand: Blocks in flight at the target workers: whether there is anybody to draft for.
        memory: What the last call returned.
        settings: Thresholds.
        now: Time of any clock, in seconds.
    """
    if pool.wanted == 0:
        begins = demand > 0 and now >= memory.paused_until
        return pool.clip(int(begins)), memory
    if not pool.reports:
        return pool.clip(pool.wanted), memory  # they load their model: nobody has worked yet, so nobody idles
    # A drafter that nobody asks while targets work is one that does not pay: controllers have left it.
    if max(pool.in_flight, demand) > 0 and pool.is_settled:
        if sum(report.gained for report in pool.reports) < settings.min_gain * pool.wanted:
            return pool.clip(pool.wanted - 1), _pause(memory, pool.wanted, settings, now)
        if pool.wanted >= memory.refused:
            memory = DraftMemory()  # as many pay after all: it was a passing weakness, or another load
    ready = min(pool.mean("hit_rate"), MAX_HIT_RATE)
    number = _by_load(pool, settings.draft_load, pool.in_flight / (1 - ready))
    if now < memory.paused_until:
        number = min(number, pool.wanted)
    return pool.clip(number), memory


def _by_load(pool: Pool, load: float, load_without_hits: float) -> int:
    """Return the number of workers for `load` blocks in flight each, shrinking by one at most."""
    needed = math.ceil(pool.in_flight / load)
    if needed > pool.wanted:
        return needed if pool.mean("busy") >= MIN_BUSY else pool.wanted
    if load_without_hits <= SHRINK_MARGIN * load * (pool.wanted - 1):
        return pool.wanted - 1
    return pool.wanted


def _pause(memory: DraftMemory, refused: int, settings: ScalingSettings, now: float) -> DraftMemory:
    """Push the end of the pause ahead; a pause that was over before counts as another failure."""
    failures = memory.failures + (now >= memory.paused_until)
    pause_s = settings.retry_s * 2.0 ** min(failures - 1, MAX_DOUBLINGS)
    return DraftMemory(refused, now + pause_s, failures)
