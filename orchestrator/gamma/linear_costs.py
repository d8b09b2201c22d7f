"""The cost of a cycle as a linear function of what it does, estimated by a Kalman filter.

    seconds = fixed + drafted + forwards * per forward + rows * per row + company * per session
              + others' rows * per other row

A coefficient that a session cannot tell apart from another one does no harm: what decides is the sum that
belongs to a shape, and that sum is known as soon as shapes like it were played.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Sequence

from gammaray.maths.acceptance import AcceptanceEstimator
from orchestrator.cycle.types import Cycle, Shape
from orchestrator.gamma.fixed import first_children, stopped_early
from orchestrator.gamma.linear_trees import TreeModel

__all__ = ["LinearCosts", "is_tree"]

PRIOR = (1.0, 0.1, 0.1, 0.03, 0.02, 0.02)
PRIOR_SD = (0.5, 0.3, 0.3, 0.05, 0.05, 0.02)
"""Coefficients before anything was measured, in plain cycles, and their standard deviations. Their scale is
that of the first measured cycle. What a proposal costs is assumed to grow with its forwards rather than to be
fixed: the other assumption keeps short chains from being tried, and a short chain refutes this one."""

DRIFT = 0.02
"""Relative standard deviation of what changes in one cycle: of all costs together (a busy machine), and of
each coefficient by itself, in units of `PRIOR_SD`. Where waits vary by 0.2, the last cycle has a weight of
0.02 / 0.2 = 0.1 in the level of all costs."""

FIRST_NOISE = 0.3
"""Relative standard deviation of a cycle's seconds before it is measured, and that of the fixed costs up to
which the seconds of a plain cycle count as known."""

SURPRISE = 3.0
"""A cycle's deviation counts as at most so many standard deviations: a hiccup is no trend. A mean of the last
deviations that is so many standard deviations of such a mean is a change: all is uncertain again."""

RATE = 1.0 / 32.0
"""Weight of the last cycle in the means of noise, company and speed, and in a session's acceptance."""

HOLD = 8
"""Cycles for which one sample from the posterior decides: the first one after plain cycles makes the drafter
catch up, and one cycle says little of acceptance. As many of a fresh replica are left out of the costs."""

SCALE = 0.5
"""Share of a standard deviation by which samples spread. Costs drift, so that the posterior never becomes
narrow, and sampling all of it would never end exploring: with 1.0 the mean share of the oracle's speed in
simulation is 0.955 instead of 0.961 (36 worlds, another version of this model, 2026-11-22)."""

FORGETTING = 0.001
"""Share of the way back to what was assumed at first that acceptance and the costs of drafting go in each
plain cycle. In simulation a useless draft then costs 0.3 to 0.9 % and one that becomes good is found within
200 to 830 cycles; with 0.0025 it costs 0.8 to 1.8 % and 60 to 190 cycles."""

FIRST_FORGETTING = 0.5
"""The same times the cycles of a replica so far, while that is more: what fresh workers took lasts less long.
With half of it, a replica whose workers were slow for its first 100 cycles decodes plainly for 100 to 400
cycles more, instead of 0 to 180 (`test_gamma.py`, eight seeds, 2026-11-22)."""

FLEET_DECAY = 0.995
"""What is known of all sessions' acceptance fades by this with each cycle: a memory of 200."""

SURE = 0.999
"""Probability that a chain goes on, before any ended early."""

LEAST_FIXED = 0.01
"""Share of a cycle that its fixed costs are at least: a sample may not be 0."""

_SIZE = len(PRIOR)
_VARIANCE = tuple(deviation**2 for deviation in PRIOR_SD)


class LinearCosts:
    """Seconds of a cycle, and what else the sessions of a replica share.

    The first cycle of a session is left out, as it contains the prefill; so are cycles whose drafter failed.
    The first one with a proposal after plain ones tells what catching up takes, and of the rest only that it
    is far slower than expected.

    Args:
        rng: Where samples come from.

    Attributes:
        acceptance: Acceptance over all sessions.
        reach: How far chains get before the draft ends them, over all sessions.
        trees: What trees gain, over all sessions.
        luck: Standard normal numbers by which costs (all but the last) and acceptance (the last) are sampled.
            All sessions share them: so they try what is unknown together, and see what it does to all.
        crowd: Mean number of other sessions that wait for the same worker.
        others_rows: Mean number of rows that these propose.
        mean: The coefficients, as they are believed.
        num_renewed: How often `luck` was drawn.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self.acceptance = AcceptanceEstimator(FLEET_DECAY)
        self.reach = AcceptanceEstimator(FLEET_DECAY, prior_alpha=SURE)
        self.trees = TreeModel(FLEET_DECAY)
        self.crowd = self.others_rows = self._catch_up = 0.0
        self.num_renewed = 0
        self._rng = rng or random.Random()
        self._clock = self._renewed_at = 0.0
        self._renew()
        self.mean, self._covariance = [0.0] * _SIZE, [[0.0] * _SIZE for _ in range(_SIZE)]
        self._unit, self._noise = 0.0, FIRST_NOISE**2
        self._num_cycles, self._has_plain = 0, False
        self._tokens = self._seconds = 0.0
        self._bias = 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._unit > 0

    @property
    def tokens_per_s(self) -> float:
        """Mean speed of a session; 0 while unknown."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    @property
    def plain_cycle_s(self) -> float | None:
        """Seconds of a cycle at gamma 0 at this moment; None while the fixed costs are not known.

        They are when plain cycles were measured, or others that differ enough.
        """
        if not self.is_known:
            return None
        fixed = self.mean[0]
        is_certain = math.sqrt(self._covariance[0][0]) <= FIRST_NOISE * fixed
        return self.plain_s(self.mean) if self._has_plain or is_certain else None

    @property
    def catch_up_s(self) -> float:
        """Seconds that the first proposal after plain cycles takes beyond the usual."""
        return self._catch_up * self.mean[0]

    def plain_s(self, costs: Sequence[float]) -> float:
        """Return the seconds of a plain cycle in the present company, by these coefficients."""
        return costs[0] + costs[4] * self.crowd + costs[5] * self.others_rows

    def learn(self, cycle: Cycle, *, was_plain: bool) -> None:
        """Learn from a cycle of any session.

        Args:
            cycle: The cycle.
            was_plain: Whether the session's cycle before had no proposal.
        """
        tested, accepted = first_children(cycle)
        share = _share(cycle)
        if tested:
            self.acceptance.observe(tested, accepted)
        elif cycle.gamma == 0:
            self._forget(share)
        if cycle.num_drafted > 0 and not is_tree(cycle.shape):
            self.reach.observe(cycle.num_drafted + stopped_early(cycle), cycle.num_drafted)
        self._clock += share
        if self._clock >= self._renewed_at + HOLD:
            self._renew()
        if cycle.is_first or cycle.draft_failed or cycle.total_s <= 0:
            return
        self._num_cycles += 1
        crowd, others_rows = _company(cycle)
        self.crowd += RATE * (crowd - self.crowd)
        self.others_rows += RATE * (others_rows - self.others_rows)
        if self._num_cycles > HOLD:
            forwards = cycle.shape.depth if is_tree(cycle.shape) else cycle.num_drafted + stopped_early(cycle)
            own = (1.0, float(cycle.num_drafted > 0), float(forwards if cycle.num_drafted else 0))
            self._observe(cycle, (*own, float(cycle.num_drafted), crowd, others_rows), share, was_plain)

    def _forget(self, share: float) -> None:
        """Let what only drafting tells go back to what was assumed at first, so that it is tried again."""
        rate = share * max(FORGETTING, FIRST_FORGETTING / max(self._clock, HOLD))
        self.acceptance.fade(1.0 - rate)
        for i in (1, 2, 3):
            self.mean[i] += rate * (PRIOR[i] * self.mean[0] - self.mean[i])

    def _observe(self, cycle: Cycle, x: tuple[float, ...], share: float, was_plain: bool) -> None:
        seconds = cycle.total_s
        self._tokens += RATE * (cycle.num_accepted + 1 - self._tokens)
        self._seconds += RATE * (seconds - self._seconds)
        if not self.is_known:
            self._unit = seconds / _dot(x, PRIOR)
            self.mean = [value * self._unit for value in PRIOR]
            for i, variance in enumerate(_VARIANCE):
                self._covariance[i][i] = variance * self._unit**2
        expected = _dot(x, self.mean)
        if cycle.num_drafted > 0 and was_plain and seconds < SURPRISE * expected:
            extra = max(0.0, seconds - expected) / self.mean[0]
            self._catch_up += HOLD * RATE * (extra - self._catch_up)
            return
        self._has_plain |= cycle.num_drafted == 0
        self._update(x, seconds, expected, share)

    def _update(self, x: tuple[float, ...], seconds: float, expected: float, share: float) -> None:
        """One step of the filter; sessions that report the same step share its weight."""
        mean, rows = self.mean, self._covariance
        common = share * DRIFT**2 * _dot(mean, x)
        own = share * (DRIFT * mean[0]) ** 2
        weighted = [
            _dot(row, x) + common * m + own * variance * xi
            for row, m, variance, xi in zip(rows, mean, _VARIANCE, x, strict=True)
        ]
        known = _dot(weighted, x)
        noise = self._noise * expected * expected
        bound = SURPRISE * math.sqrt(known + noise)
        residual = min(max(seconds - expected, -bound), bound)
        total = known + noise / share
        common = share * DRIFT**2
        for i, row in enumerate(rows):
            grown, shrunk = common * mean[i], weighted[i] / total
            rows[i] = [
                value + grown * m - shrunk * w for value, m, w in zip(row, mean, weighted, strict=True)
            ]
            rows[i][i] += own * _VARIANCE[i]
        gain = residual / total
        self.mean = [m + w * gain for m, w in zip(mean, weighted, strict=True)]
        self._keep_positive(self.mean)
        self.mean[0] = max(self.mean[0], LEAST_FIXED * expected)
        self._bias += share / HOLD * (residual / expected - self._bias)
        # The variance of a mean with weights that fall by 1 - 1 / HOLD.
        if self._bias**2 > SURPRISE**2 * self._noise / (2 * HOLD - 1):
            for i, (a, variance) in enumerate(zip(self.mean, _VARIANCE, strict=True)):
                self._covariance[i][i] += variance * self.mean[0] ** 2
                for j, b in enumerate(self.mean):
                    self._covariance[i][j] += self._bias**2 * a * b
            self._bias = 0.0
        self._noise += RATE * share * ((residual / expected) ** 2 - self._noise)
        self._noise = max(self._noise, DRIFT**2)

    def _renew(self) -> None:
        self.luck = [SCALE * self._rng.gauss(0.0, 1.0) for _ in range(_SIZE + 1)]
        self._renewed_at = self._clock
        self.num_renewed += 1

    def sample(self) -> list[float]:
        """Return coefficients from the posterior: the same luck, the knowledge of this moment."""
        factor: list[list[float]] = []
        sampled = []
        for i, row in enumerate(self._covariance):
            found: list[float] = []
            for other, value in zip(factor, row, strict=False):
                pivot = other[-1]
                found.append((value - _dot(found, other)) / pivot if pivot > 0 else 0.0)
            found.append(math.sqrt(max(0.0, row[i] - _dot(found, found))))
            factor.append(found)
            sampled.append(self.mean[i] + _dot(found, self.luck))
        self._keep_positive(sampled)
        sampled[0] = max(sampled[0], LEAST_FIXED * self.mean[0])
        return sampled

    def _keep_positive(self, costs: list[float]) -> None:
        """Move coefficients below 0 to it, and the others as follows from that: sums that are known stay."""
        for i in range(1, _SIZE):
            if costs[i] < 0.0:
                row = self._covariance[i]
                excess = costs[i] / row[i]
                for j in range(_SIZE):
                    costs[j] -= row[j] * excess
        for i in range(1, _SIZE):
            costs[i] = max(0.0, costs[i])


def _share(cycle: Cycle) -> float:
    """Return what a cycle counts for: sessions whose steps are shared all report the same step."""
    return 1.0 / max(1, cycle.timing.batch_size) if cycle.timing is not None else 1.0


def _company(cycle: Cycle) -> tuple[float, float]:
    """Return how many other sessions wait for the worker, and the rows that those in the batch propose."""
    timing = cycle.timing
    if timing is None:
        return 0.0, 0.0
    busy = min(1.0, 2.0 * timing.queue_s / timing.compute_s) if timing.compute_s > 0 else 0.0
    rows = timing.batch_tokens - cycle.num_drafted - timing.batch_size
    return timing.batch_size * (1.0 + busy) - 1.0, float(max(0, rows))


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the scalar product, up to the end of the shorter one."""
    total: float = sum(map(operator.mul, one, other))
    return total


def is_tree(shape: Shape) -> bool:
    """Whether a proposal of this shape may be a tree."""
    return shape.max_nodes > shape.depth
