"""The duration of a cycle as a linear function of its work, estimated by a Kalman filter.

A session may be unable to tell two coefficients apart. That does no harm: shapes are compared by sums of
coefficients, and the sum of a shape is known once similar shapes were played.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Sequence
from typing import NamedTuple

from gammaray.maths.acceptance import AcceptanceEstimator
from gammaray.types import DrafterKind
from orchestrator.control.row_costs import ASSUMED, RowCosts
from orchestrator.control.tree_model import TreeModel
from orchestrator.cycle.types import Cycle

DRIFT = 0.02
"""Relative standard deviation of the change per cycle: of all coefficients together (a busy machine), and of
each one separately in units of `PRIOR_SD`."""

FIRST_NOISE = 0.3
"""Relative standard deviation of a cycle's seconds before it is measured. A plain cycle's seconds count as
known once those of the fixed costs are below it."""

SURPRISE = 3.0
"""Deviations are clipped to this many standard deviations: a hiccup is no trend. A mean of recent deviations
beyond this many of its standard deviations is a change, which makes all coefficients uncertain again."""

RATE = 1.0 / 32.0
"""Weight of the last cycle in the means of noise, load and speed, and in a session's acceptance, whose alpha
then has a standard error of 0.035 (alpha 0.8, four tested tokens a cycle)."""

HOLD = 8
"""Cycles for which one posterior sample is used, as one cycle says little about acceptance. As many cycles of
a new replica are left out of the costs."""

SCALE = 0.35
"""Factor on the standard deviations of posterior samples. As costs drift, the posterior never narrows, and
full samples explore for ever. With 0.5, 0.989 of the oracle's speed instead of 0.990 (mean of 12 worlds);
with 0.25 a draft that becomes good is found by 16 of 20 replicas instead of 19 (simulation, 2026-11-30)."""

FORGETTING = 0.002
"""Share of the way back to the prior that acceptance and the costs of drafting go in each plain cycle. A
useless draft then costs 0.6 to 1.1 %, and one that becomes good is found within 300 cycles by 17 of 20
replicas; with 0.001 it costs 0.3 to 0.7 % and 10 of 20 find it (simulation, 2026-11-22)."""

FIRST_FORGETTING = 0.5
"""That share times the age of the replica in cycles, while this is more than `FORGETTING`: what workers took
that just started is valid for a shorter time. With half of it, a replica that was slow in its first 100
cycles decodes plainly for 100 to 400 cycles more, instead of 0 to 180 (simulation, 2026-11-22)."""

FLEET_DECAY = 0.995
"""Factor per cycle on the acceptance counts of all sessions: a memory of 200 cycles."""

LEAST_FIXED = 0.01
"""Lower bound of the fixed costs as a share of a cycle, so that no sample is 0."""

STRENGTH = 16.0
"""Weight of the replica's acceptance in a session's own, in tested tokens: about the variance of a token's
acceptance over that between texts. With 8, 0.973 of the oracle's speed instead of 0.975 for sessions of six
acceptances in turn (simulation, 2026-11-30)."""

LEAST_WEIGHT = 1.0 / 8.0
"""Least weight of a measured cycle, in steps of the target. Of a step with more than 8 sessions about 8 are
measured, at random: a measurement takes 42 microseconds (AMD EPYC, by hand, 2026-11-29)."""

MatchClass = tuple[DrafterKind, int, int]
"""Kind of a match, and the classes of its length and of the request's temperature."""


class Costs(NamedTuple):
    """Seconds by kind of work, or how much of each a cycle has."""

    fixed: float  # of every cycle
    draft: float  # of a proposal of a draft model, whatever its size
    forward: float  # of a draft's forward that the cycle waits for, one per depth; 0 for a parallel draft
    row: float  # of a proposed token that the target verifies, the mean one of `RowCosts`
    session: float  # of another session that waits for the same target worker
    others_row: float  # of a proposed token of those sessions
    others_prompt: float  # of a token of their prompts


PRIOR = Costs(1.0, 0.1, 0.1, ASSUMED, 0.02, 0.02, 0.02)
PRIOR_SD = Costs(0.5, 0.3, 0.3, 0.05, 0.05, 0.05, 0.05)
"""Coefficients before any measurement and their standard deviations, in units of the fixed costs; the first
measured cycle sets the unit. Proposals are assumed to cost by the forward rather than by the proposal: the
opposite prevents short chains from being tried, whereas a short chain refutes this. A deviation of 0.02 for
the rows of others takes hundreds of steps to learn that rows are dear, 0.1 makes 32 sessions on shared cores
2 % slower (simulation, 2026-11-23)."""


_SIZE = len(PRIOR)
_VARIANCE = tuple(deviation**2 for deviation in PRIOR_SD)


class CostModel:
    """Seconds of a cycle, and the other statistics that the sessions of a replica share.

    Left out are a session's first cycle, as it contains the prefill, its first proposal, for which a head
    reads the prompt, and cycles whose drafter failed. A later first proposal after plain cycles measures the
    catch-up of the drafter; unless it took far longer than expected, the coefficients do not learn from it.

    Attributes:
        rows: Of the target workers; set when these are known.
        has_drafted: Whether a proposal of the model was measured.
        prepared: Recent share of the model's proposals that were prepared before they were requested.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self.rows = RowCosts()
        self.acceptance = AcceptanceEstimator(FLEET_DECAY)  # of the draft model's proposals
        self.of_matches: dict[MatchClass, AcceptanceEstimator] = {}  # see `match_acceptance`
        self.trees = TreeModel(FLEET_DECAY)
        # Means of the other sessions that wait for the same target worker, and of the rows that they propose.
        self.num_waiting = self.others_rows = self._catch_up = 0.0
        self.num_renewed = 0  # how often `draws` were drawn
        self._rng = rng or random.Random()
        self._clock = self._renewed_at = 0.0
        self.renew()
        # Of the posterior of the coefficients.
        self.mean, self.covariance = Costs(*[0.0] * _SIZE), [[0.0] * _SIZE for _ in range(_SIZE)]
        self._noise, self._bias = FIRST_NOISE**2, 0.0
        self._num_cycles, self._has_plain, self.has_drafted = 0, False, False
        self.prepared, self._drafted = 0.0, 1.0
        self._tokens = self._seconds = 0.0

    @property
    def is_known(self) -> bool:
        """Whether any cycle was measured."""
        return self.mean.fixed > 0

    @property
    def tokens_per_s(self) -> float:
        """Mean speed of a session; 0 while unknown."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    @property
    def plain_cycle_s(self) -> float | None:
        """Seconds of a cycle at gamma 0; None until one, or proposals different enough, were measured."""
        if not self.is_known:
            return None
        is_certain = math.sqrt(self.covariance[0][0]) <= FIRST_NOISE * self.mean.fixed
        return self.plain_s(self.mean) if self._has_plain or is_certain else None

    @property
    def catch_up_s(self) -> float:
        """Additional seconds of the first proposal after plain cycles."""
        return self._catch_up * self.mean.fixed

    def plain_s(self, costs: Costs) -> float:
        """Return the seconds of a plain cycle under the current load, by these coefficients."""
        return costs.fixed + costs.session * self.num_waiting + costs.others_row * self.others_rows

    @property
    def added_rows(self) -> Sequence[float]:
        """What 0, 1, 2, ... proposed tokens add under the current load, in units of `Costs.row`."""
        return self.rows.added(self.num_waiting + self.others_rows)

    def price(self, costs: Costs) -> float:
        """Return the tokens that the other sessions lose by a row of this one's."""
        return self.num_waiting * self.tokens_per_s * costs.others_row

    def prepared_after(self, depth: int) -> float:
        """Return the probability that the proposal after one of this depth is prepared.

        Its verification can end at `depth` + 1 places, and about the same number of outcomes is prepared.
        """
        odds = self.prepared * self._drafted
        return odds / (odds + (1.0 - self.prepared) * depth) if odds > 0 else 0.0

    def observe(
        self, cycle: Cycle, *, was_plain: bool, is_entry: bool = False, by_other: bool = False
    ) -> None:
        """Learn from a cycle of any session.

        It `was_plain` if the session's previous cycle had no proposal of the model; `is_entry` if this one
        has the session's first such proposal. If another model proposed, `by_other`, nothing is learnt, and
        what is known of this one fades as in a plain cycle.
        """
        tested, accepted = cycle.first_children
        is_drafted = cycle.gamma > 0 and cycle.shape.drafter.is_model and not by_other
        if is_drafted and tested:
            self.acceptance.observe(tested, accepted)
        if is_drafted and cycle.num_drafted > 0:
            self.prepared += RATE * (cycle.is_prepared - self.prepared)
            self._drafted += RATE * (cycle.num_drafted - self._drafted)
        share = max(LEAST_WEIGHT, _share(cycle))
        if share == LEAST_WEIGHT and self._rng.random() * LEAST_WEIGHT >= _share(cycle):
            return
        if not is_drafted:
            self._forget(share)
        self._clock += share
        if self._clock >= self._renewed_at + HOLD:
            self.renew()
        if by_other or cycle.is_first or is_entry or cycle.draft_failed or cycle.cost_s <= 0:
            return
        self._num_cycles += 1
        work = _work_of(cycle, self.rows)
        self.num_waiting += RATE * (work.session - self.num_waiting)
        self.others_rows += RATE * (work.others_row - self.others_rows)
        if self._num_cycles <= HOLD:
            return
        self._measure_speed(cycle, work, share)
        self._fit(cycle, work, share, was_plain)

    def _forget(self, share: float) -> None:
        """Move acceptance and costs of drafting towards the prior, so that drafting is tried again."""
        rate = share * max(FORGETTING, FIRST_FORGETTING / max(self._clock, HOLD))
        self.acceptance.fade(1.0 - rate)
        mean = self.mean
        self.mean = mean._replace(
            draft=mean.draft + rate * (PRIOR.draft * mean.fixed - mean.draft),
            forward=mean.forward + rate * (PRIOR.forward * mean.fixed - mean.forward),
            row=mean.row + rate * (self.rows.mean * mean.fixed - mean.row),
        )

    def _measure_speed(self, cycle: Cycle, work: Costs, share: float) -> None:
        # The prompts of others delay all shapes alike: their time would make that of a row look cheap.
        seconds = max(cycle.cost_s - work.others_prompt * self.mean.others_prompt, self.mean.fixed)
        self._tokens += share / HOLD * (cycle.num_accepted + 1 - self._tokens)
        self._seconds += share / HOLD * (seconds - self._seconds)

    def _fit(self, cycle: Cycle, work: Costs, share: float, was_plain: bool) -> None:
        seconds = cycle.cost_s
        if not self.is_known:
            prior = PRIOR._replace(row=self.rows.mean)
            unit = seconds / _dot(work, prior)
            self.mean = Costs(*[value * unit for value in prior])
            for i, variance in enumerate(_VARIANCE):
                self.covariance[i][i] = variance * unit**2
        expected = _dot(work, self.mean)
        if work.draft > 0 and was_plain and seconds < SURPRISE * expected:
            extra = max(0.0, seconds - expected) / self.mean.fixed
            self._catch_up += HOLD * RATE * (extra - self._catch_up)
            return
        self._has_plain |= cycle.num_drafted == 0
        self.has_drafted |= work.draft > 0
        self._update(work, seconds, expected, share)

    def _update(self, work: Costs, seconds: float, expected: float, share: float) -> None:
        """Do one step of the filter; the sessions of a batch report the same step and share its weight."""
        mean, rows = self.mean, self.covariance
        common = share * DRIFT**2 * expected
        own = share * (DRIFT * mean.fixed) ** 2
        weighted = [
            _dot(row, work) + common * m + own * variance * amount
            for row, m, variance, amount in zip(rows, mean, _VARIANCE, work, strict=True)
        ]
        known = _dot(weighted, work)
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
        moved = self._possible([m + w * gain for m, w in zip(mean, weighted, strict=True)])
        self.mean = moved._replace(fixed=max(moved.fixed, LEAST_FIXED * expected))
        self._detect_change(residual / expected, share)
        self._noise += RATE * share * ((residual / expected) ** 2 - self._noise)
        self._noise = max(self._noise, DRIFT**2)

    def _detect_change(self, deviation: float, share: float) -> None:
        """Widen the covariance where the mean of recent relative deviations cannot be noise."""
        self._bias += share / HOLD * (deviation - self._bias)
        # The variance of a mean with weights that fall by 1 - 1 / HOLD.
        if self._bias**2 > SURPRISE**2 * self._noise / (2 * HOLD - 1):
            for i, (a, variance) in enumerate(zip(self.mean, _VARIANCE, strict=True)):
                self.covariance[i][i] += variance * self.mean.fixed**2
                for j, b in enumerate(self.mean):
                    self.covariance[i][j] += self._bias**2 * a * b
            self._bias = 0.0

    def renew(self) -> None:
        # The last one samples acceptance, the others costs. Sessions share them: they explore together and
        # measure the joint effect.
        self.draws = [SCALE * self._rng.gauss(0.0, 1.0) for _ in range(_SIZE + 1)]
        self._renewed_at = self._clock
        self.num_renewed += 1

    def sample(self) -> Costs:
        """Return a posterior sample of the coefficients, from the current posterior and `draws`."""
        factor: list[list[float]] = []  # Cholesky
        values = []
        for i, row in enumerate(self.covariance):
            found: list[float] = []
            for other, value in zip(factor, row, strict=False):
                pivot = other[-1]
                found.append((value - _dot(found, other)) / pivot if pivot > 0 else 0.0)
            found.append(math.sqrt(max(0.0, row[i] - _dot(found, found))))
            factor.append(found)
            values.append(self.mean[i] + _dot(found, self.draws))
        costs = self._possible(values)
        return costs._replace(fixed=max(costs.fixed, LEAST_FIXED * self.mean.fixed))

    def _possible(self, values: list[float]) -> Costs:
        """Raise negative coefficients to 0 and condition the others on that, so that known sums stay."""
        for i in range(1, _SIZE):
            if values[i] < 0.0:
                row = self.covariance[i]
                excess = values[i] / row[i]
                for j in range(_SIZE):
                    values[j] -= row[j] * excess
        return Costs(values[0], *[max(0.0, value) for value in values[1:]])


def _share(cycle: Cycle) -> float:
    """Return the weight of a cycle: the sessions of a batch all report the same step."""
    return 1.0 / max(1, cycle.timing.batch_size) if cycle.timing is not None else 1.0


def _work_of(cycle: Cycle, row_costs: RowCosts) -> Costs:
    """Return how much of each kind of work a cycle had, that of the sessions that it waited for included."""
    forwards = 0
    if cycle.num_drafted > 0 and cycle.shape.drafter.is_model:
        forwards = cycle.shape.depth if cycle.shape.is_tree else cycle.num_drafted
    sessions = rows = prompts = 0.0
    timing = cycle.timing
    if timing is not None:
        busy = min(1.0, 2.0 * timing.queue_s / timing.compute_s) if timing.compute_s > 0 else 0.0
        sessions = timing.batch_size * (1.0 + busy) - 1.0
        steps = 1 if cycle.ahead_s is None else len(cycle.token_ids)
        rows = max(0.0, timing.batch_rows / steps - cycle.num_drafted - timing.batch_size) * (1.0 + busy)
        prompts = (timing.batch_tokens - timing.batch_rows) / steps * (1.0 + busy)
    return Costs(
        fixed=1.0,
        draft=float(forwards > 0),
        forward=0.0 if cycle.is_prepared else float(forwards),
        row=row_costs.added(sessions + rows)[cycle.num_drafted],
        session=sessions,
        others_row=rows,
        others_prompt=prompts,
    )


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the scalar product, up to the end of the shorter one."""
    total: float = sum(map(operator.mul, one, other))
    return total
