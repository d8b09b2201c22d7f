"""The duration of a cycle as a linear function of its work, estimated by a Kalman filter.

    seconds = fixed + drafted + forwards * per forward
              + rows * per row + rows beyond `KNEE` * further per row
              + waiting sessions * per session + their rows * per row of others
              + rows of their prompts * per row of a prompt

`drafted` applies to every cycle with a proposal, `forwards` are those of an ordinary draft model, one per
depth (a parallel one runs one forward for all depths: `per forward` is then found to be 0), `rows` are the
proposed tokens: the first ones are computed while a forward reads its weights, further ones after that. A
session may be unable to tell two coefficients apart. That does no harm: shapes are compared by sums of
coefficients, and the sum of a shape is known once similar shapes were played.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Sequence

from gammaray.maths.acceptance import AcceptanceEstimator
from gammaray.types import DrafterKind
from orchestrator.cycle.types import Cycle
from orchestrator.gamma.tree_model import TreeModel

__all__ = ["CostModel", "first_children"]

PRIOR = (1.0, 0.1, 0.1, 0.03, 0.02, 0.02, 0.02, 0.0)
PRIOR_SD = (0.5, 0.3, 0.3, 0.05, 0.05, 0.05, 0.05, 0.05)
"""Coefficients before any measurement and their standard deviations, in units of the fixed costs; the first
measured cycle sets the unit. Proposals are assumed to cost by the forward rather than by the proposal: the
opposite assumption prevents short chains from being tried, whereas a short chain refutes this one. Where the
target computes rather than reads weights, a row costs half of a forward: a deviation of 0.02 for the rows of
others takes hundreds of steps to learn that, and 0.1 makes 32 sessions in "shared cores" 2 % slower
(`benchmarks.ablation --sets load`, 2026-11-23)."""

KNEE = 4
"""Rows of a proposal beyond which a row may cost more. On a core of Zen 5 that reads 37 GB/s, the second to
fifth row of a forward cost 0.03 of it each, the sixth to twelfth 0.12 (SmolLM2, `benchmarks.rows`,
2026-11-25)."""

DRIFT = 0.02
"""Relative standard deviation of the change per cycle: of all coefficients together (a busy machine), and of
each one separately in units of `PRIOR_SD`. Where cycles vary by 0.2, the last cycle gets a weight of
0.02 / 0.2 = 0.1 in the level of all costs."""

FIRST_NOISE = 0.3
"""Relative standard deviation of a cycle's seconds before it is measured. A plain cycle's seconds count as
known once those of the fixed costs are below it."""

SURPRISE = 3.0
"""Deviations are clipped to this many standard deviations, so that a hiccup is not taken for a trend. A mean
of recent deviations beyond this many of its standard deviations is a change of all costs, which makes all
coefficients uncertain again."""

RATE = 1.0 / 32.0
"""Weight of the last cycle in the means of noise, load and speed, and in a session's acceptance. With alpha
0.8 and four tested tokens a cycle, a memory of 32 cycles leaves a standard error of 0.035 in alpha."""

HOLD = 8
"""Cycles for which one posterior sample is used: the first proposal after plain cycles makes the drafter
catch up, and one cycle says little about acceptance. As many cycles of a new replica are left out of the
costs."""

SCALE = 0.5
"""Factor on the standard deviations of posterior samples. Because costs drift, the posterior never becomes
narrow, and full samples would never stop exploring: with 1.0 the mean share of the oracle's speed in
simulation is 0.955 instead of 0.961 (36 worlds, an earlier version of this model, 2026-11-22)."""

FORGETTING = 0.002
"""Share of the way back to the prior that acceptance and the costs of drafting go in each plain cycle. In
simulation a useless draft (alpha 0.05 to 0.5) then costs 0.6 to 1.1 %, and one that becomes good is found
within 300 cycles by 17 of 20 replicas; with 0.001 it costs 0.3 to 0.7 % and 10 of 20 find it (2026-11-22)."""

FIRST_FORGETTING = 0.5
"""That share times the age of the replica in cycles, while this is more than `FORGETTING`: measurements on
workers that just started are valid for a shorter time. With half of it, a replica whose workers were slow in
its first 100 cycles decodes plainly for 100 to 400 cycles more, instead of 0 to 180 (`test_gamma.py`, eight
seeds, 2026-11-22)."""

FLEET_DECAY = 0.995
"""Factor per cycle on the acceptance counts of all sessions: a memory of 200 cycles, and a standard error of
0.014 in the same case."""

LEAST_FIXED = 0.01
"""Lower bound of the fixed costs as a share of a cycle, so that no sample is 0."""

_SIZE = len(PRIOR)
_VARIANCE = tuple(deviation**2 for deviation in PRIOR_SD)


class CostModel:
    """Seconds of a cycle, and the other statistics that the sessions of a replica share.

    The proposal of a text drafter has rows, but no forwards of a draft model.

    Left out are a session's first cycle, as it contains the prefill, its first proposal, for which a head
    reads the prompt, and cycles whose drafter failed. A later first proposal after plain cycles measures the
    catch-up of the drafter; unless it took far longer than expected, the coefficients do not learn from it.

    Args:
        rng: Source of the posterior samples.

    Attributes:
        acceptance: Acceptance of the draft model's proposals over all sessions.
        text_acceptance: Acceptance of text drafters' proposals over all sessions, by kind, match
            length and temperature, in classes (`orchestrator.drafting.text_gamma`).
        trees: Expected tokens of trees, over all sessions.
        draws: Standard normal draws, times `SCALE`, by which costs (all but the last one) and acceptance (the
            last one) are sampled. All sessions share them, so that they explore together and measure the
            effect on the whole replica.
        num_renewed: How often `draws` were drawn.
        num_waiting: Mean number of other sessions that wait for the same target worker.
        others_rows: Mean number of rows that those sessions propose.
        mean: Posterior mean of the coefficients.
        covariance: Posterior covariance of the coefficients.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self.acceptance = AcceptanceEstimator(FLEET_DECAY)
        self.text_acceptance: dict[tuple[DrafterKind, int, int], AcceptanceEstimator] = {}
        self.trees = TreeModel(FLEET_DECAY)
        self.num_waiting = self.others_rows = self._catch_up = 0.0
        self.num_renewed = 0
        self._rng = rng or random.Random()
        self._clock = self._renewed_at = 0.0
        self.renew()
        self.mean, self.covariance = [0.0] * _SIZE, [[0.0] * _SIZE for _ in range(_SIZE)]
        self._noise, self._bias = FIRST_NOISE**2, 0.0
        self._num_cycles, self._has_plain = 0, False
        self._tokens = self._seconds = 0.0

    @property
    def is_known(self) -> bool:
        """Whether any cycle was measured."""
        return self.mean[0] > 0

    @property
    def tokens_per_s(self) -> float:
        """Mean speed of a session; 0 while unknown."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    @property
    def plain_cycle_s(self) -> float | None:
        """Current seconds of a cycle at gamma 0; None while the fixed costs are not known.

        They are known once a plain cycle was measured, or cycles with sufficiently different proposals.
        """
        if not self.is_known:
            return None
        is_certain = math.sqrt(self.covariance[0][0]) <= FIRST_NOISE * self.mean[0]
        return self.plain_s(self.mean) if self._has_plain or is_certain else None

    @property
    def catch_up_s(self) -> float:
        """Additional seconds of the first proposal after plain cycles."""
        return self._catch_up * self.mean[0]

    def plain_s(self, costs: Sequence[float]) -> float:
        """Return the seconds of a plain cycle under the current load, by these coefficients."""
        return costs[0] + costs[4] * self.num_waiting + costs[5] * self.others_rows

    @staticmethod
    def rows_s(costs: Sequence[float], rows: int) -> float:
        """Return the seconds that a proposal's rows add to the target's forward, by these coefficients."""
        return costs[3] * rows + costs[7] * max(0, rows - KNEE)

    def observe(self, cycle: Cycle, *, was_plain: bool, is_entry: bool = False) -> None:
        """Learn from a cycle of any session.

        Args:
            cycle: The cycle.
            was_plain: Whether the session's previous cycle had no proposal of the draft model.
            is_entry: Whether it has the session's first proposal of the draft model.
        """
        tested, accepted = first_children(cycle)
        share = _share(cycle)
        is_model = cycle.shape.drafter.is_model
        if cycle.gamma == 0 or not is_model:
            self._forget(share)
        elif tested:
            self.acceptance.observe(tested, accepted)
        self._clock += share
        if self._clock >= self._renewed_at + HOLD:
            self.renew()
        if cycle.is_first or is_entry or cycle.draft_failed or cycle.total_s <= 0:
            return
        self._num_cycles += 1
        num_waiting, others_rows, others_prompts = _load(cycle)
        self.num_waiting += RATE * (num_waiting - self.num_waiting)
        self.others_rows += RATE * (others_rows - self.others_rows)
        if self._num_cycles <= HOLD:
            return
        forwards = 0
        if cycle.num_drafted > 0 and is_model:
            forwards = cycle.shape.depth if cycle.shape.is_tree else cycle.num_drafted
        own = (1.0, float(forwards > 0), float(forwards), float(cycle.num_drafted))
        further = float(max(0, cycle.num_drafted - KNEE))
        self._measure_speed(cycle, others_prompts, share)
        self._fit(cycle, (*own, num_waiting, others_rows, others_prompts, further), share, was_plain)

    def _forget(self, share: float) -> None:
        """Move acceptance and costs of drafting towards the prior, so that drafting is tried again."""
        rate = share * max(FORGETTING, FIRST_FORGETTING / max(self._clock, HOLD))
        self.acceptance.fade(1.0 - rate)
        for i in (1, 2, 3):
            self.mean[i] += rate * (PRIOR[i] * self.mean[0] - self.mean[i])

    def _measure_speed(self, cycle: Cycle, others_prompts: float, share: float) -> None:
        # The prompts of others delay all shapes alike: their time would make that of a row look cheap.
        seconds = max(cycle.total_s - others_prompts * self.mean[6], self.mean[0])
        self._tokens += share / HOLD * (cycle.num_accepted + 1 - self._tokens)
        self._seconds += share / HOLD * (seconds - self._seconds)

    def _fit(self, cycle: Cycle, x: tuple[float, ...], share: float, was_plain: bool) -> None:
        seconds = cycle.total_s
        if not self.is_known:
            unit = seconds / _dot(x, PRIOR)
            self.mean = [value * unit for value in PRIOR]
            for i, variance in enumerate(_VARIANCE):
                self.covariance[i][i] = variance * unit**2
        expected = _dot(x, self.mean)
        if x[1] > 0 and was_plain and seconds < SURPRISE * expected:
            extra = max(0.0, seconds - expected) / self.mean[0]
            self._catch_up += HOLD * RATE * (extra - self._catch_up)
            return
        self._has_plain |= cycle.num_drafted == 0
        self._update(x, seconds, expected, share)

    def _update(self, x: tuple[float, ...], seconds: float, expected: float, share: float) -> None:
        """Do one step of the filter; the sessions of a batch report the same step and share its weight."""
        mean, rows = self.mean, self.covariance
        common = share * DRIFT**2 * expected
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
        self._project(self.mean)
        self.mean[0] = max(self.mean[0], LEAST_FIXED * expected)
        self._detect_change(residual / expected, share)
        self._noise += RATE * share * ((residual / expected) ** 2 - self._noise)
        self._noise = max(self._noise, DRIFT**2)

    def _detect_change(self, deviation: float, share: float) -> None:
        """Widen the covariance where the mean of recent relative deviations cannot be noise."""
        self._bias += share / HOLD * (deviation - self._bias)
        # The variance of a mean with weights that fall by 1 - 1 / HOLD.
        if self._bias**2 > SURPRISE**2 * self._noise / (2 * HOLD - 1):
            for i, (a, variance) in enumerate(zip(self.mean, _VARIANCE, strict=True)):
                self.covariance[i][i] += variance * self.mean[0] ** 2
                for j, b in enumerate(self.mean):
                    self.covariance[i][j] += self._bias**2 * a * b
            self._bias = 0.0

    def renew(self) -> None:
        """Draw new `draws`."""
        self.draws = [SCALE * self._rng.gauss(0.0, 1.0) for _ in range(_SIZE + 1)]
        self._renewed_at = self._clock
        self.num_renewed += 1

    def sample(self) -> list[float]:
        """Return a posterior sample of the coefficients, from the current posterior and `draws`."""
        factor: list[list[float]] = []  # Cholesky
        sampled = []
        for i, row in enumerate(self.covariance):
            found: list[float] = []
            for other, value in zip(factor, row, strict=False):
                pivot = other[-1]
                found.append((value - _dot(found, other)) / pivot if pivot > 0 else 0.0)
            found.append(math.sqrt(max(0.0, row[i] - _dot(found, found))))
            factor.append(found)
            sampled.append(self.mean[i] + _dot(found, self.draws))
        self._project(sampled)
        sampled[0] = max(sampled[0], LEAST_FIXED * self.mean[0])
        return sampled

    def _project(self, costs: list[float]) -> None:
        """Raise negative coefficients to 0 and condition the others on that, so that known sums stay."""
        for i in range(1, _SIZE):
            if costs[i] < 0.0:
                row = self.covariance[i]
                excess = costs[i] / row[i]
                for j in range(_SIZE):
                    costs[j] -= row[j] * excess
        for i in range(1, _SIZE):
            costs[i] = max(0.0, costs[i])


def first_children(cycle: Cycle) -> tuple[int, int]:
    """Return how many first children were tested and how many of them were accepted, up to the first failure.

    The first children of a tree form the chain that it contains; of a chain they are all tokens.
    """
    accepted = 0
    for _, rank in cycle.levels:
        if rank != 0:
            return accepted + 1, accepted
        accepted += 1
    return accepted, accepted


def _share(cycle: Cycle) -> float:
    """Return the weight of a cycle: the sessions of a batch all report the same step."""
    return 1.0 / max(1, cycle.timing.batch_size) if cycle.timing is not None else 1.0


def _load(cycle: Cycle) -> tuple[float, float, float]:
    """Return how many other sessions wait for the worker, the rows they propose, and those of prompts."""
    timing = cycle.timing
    if timing is None:
        return 0.0, 0.0, 0.0
    busy = min(1.0, 2.0 * timing.queue_s / timing.compute_s) if timing.compute_s > 0 else 0.0
    rows = max(0, timing.batch_rows - cycle.num_drafted - timing.batch_size)
    prompts = timing.batch_tokens - timing.batch_rows
    return timing.batch_size * (1.0 + busy) - 1.0, rows * (1.0 + busy), prompts * (1.0 + busy)


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the scalar product, up to the end of the shorter one."""
    total: float = sum(map(operator.mul, one, other))
    return total
