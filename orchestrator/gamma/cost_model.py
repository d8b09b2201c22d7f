"""What cycles cost, as the orchestrator measures it, and how often proposals were drafted ahead."""

from __future__ import annotations

import math

from gammaray.maths.acceptance import AcceptanceEstimator
from orchestrator.cycle.types import Cycle, Shape
from orchestrator.gamma.latency_table import Mean, WaitTable
from orchestrator.gamma.load_switch import Contest
from orchestrator.gamma.shapes import ProbeSchedule
from orchestrator.gamma.tree_model import TreeModel

__all__ = ["CostModel", "HitRates", "share_of"]

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


STEP_RATE, DRAFT_RATE = 0.1, 0.05
"""Share of a deviation that goes to the level: some ten steps and twenty proposals, whose waits vary more."""

STEP_STRENGTHS = (60.0, 4.0)
"""What it is worth to assume that tokens cost next to nothing, and that drafting slows no step: eight
observations of two lengths that are four tokens apart, and eight of plain steps and eight of others."""

WARM_UP = 8
"""Steps, and proposals, of a replica that are left out: fresh workers are slow."""

SURE = 0.999
"""Probability that a chain goes on, before any ended early."""

LEAST_KNOWN = 3.0
"""Fresh observations from which on the cost of a chain's length is known."""

LEAST_CROWD = 0.2
"""Sessions that wait for the same worker on average, below which there is nobody else."""

LEAST_DRAFTED = 0.1
"""Nodes that the others propose on average from which on somebody drafts."""

EXACT_TOKENS, TOKEN_RATIO = 32, 1.08
"""Steps of more tokens than the first share a mean with those that have up to 8 % more."""


class CostModel:
    """Seconds by shape, and what else the sessions of a replica share.

    The first cycle of a session is left out of the waits: it contains the prefill. So is the wait for a
    drafter that has to catch up.

    Attributes:
        acceptance: Acceptance over all sessions.
        reach: How far chains get before the draft ends them, over all sessions.
        trees: What trees gain, over all sessions.
        probes: When what was tried.
        contest: Drafting against plain decoding under load.
        hits: Rate at which proposals are prepared before they are asked for.
        clock: Cycles so far, those of sessions whose steps are shared counted once.
    """

    def __init__(self) -> None:
        self.acceptance = AcceptanceEstimator(decay=0.995)
        self.reach = AcceptanceEstimator(decay=0.995, prior_alpha=SURE, prior_strength=8.0)
        self.trees = TreeModel()
        self.probes = ProbeSchedule()
        self.contest = Contest()
        self.clock = 0.0
        self._draft = WaitTable(is_proportional=True, strengths=(2.0, 50.0), rate=DRAFT_RATE)
        self._step = WaitTable(is_proportional=False, strengths=STEP_STRENGTHS, rate=STEP_RATE)
        self.hits = HitRates()
        self._prepared = Mean()
        self._overhead, self._rest = Mean(), Mean()
        self._others, self._crowd = Mean(), Mean()
        self._emitted = self._seconds = 0.0
        self._actual = self._predicted = 0.0
        self._num_steps = self._num_drafts = 0

    def observe(self, cycle: Cycle, *, depth_before: int) -> None:
        """Learn the costs of a finished cycle.

        Args:
            cycle: The cycle.
            depth_before: Gamma of the session's cycle before; 0 when that had no proposal.
        """
        share = share_of(cycle)
        self.clock += share
        if cycle.is_first:
            return
        self._num_steps += 1
        self._num_drafts += cycle.num_drafted > 0
        if self._num_steps <= WARM_UP:
            return
        self._observe_step(cycle, share)
        self._rest.observe(max(0.0, cycle.total_s - cycle.draft_s - cycle.verify_s))
        drafted = _drafted(cycle)
        if cycle.num_drafted > 0 and self._num_drafts > WARM_UP:
            self._observe_draft(cycle, drafted, share, depth_before)
        if depth_before or cycle.num_drafted == 0:
            played = drafted if cycle.num_drafted > 0 else Shape(0)
            predicted = self.cycle_s(played, cycle.num_drafted)
            if predicted is not None and not cycle.draft_failed:
                self._actual = 0.99 * self._actual + cycle.total_s
                self._predicted = 0.99 * self._predicted + predicted
        self._emitted = 0.99 * self._emitted + cycle.num_accepted + 1
        self._seconds = 0.99 * self._seconds + cycle.total_s

    def _observe_draft(self, cycle: Cycle, drafted: Shape, share: float, depth_before: int) -> None:
        if depth_before:  # else there was nothing to draft ahead from
            self.hits.observe(depth_before, share, is_hit=cycle.is_prepared)
        if cycle.is_prepared:
            self._prepared.observe(cycle.draft_s)
        # A drafter that has to catch up takes longer than usual; that it was fast all the same counts.
        elif depth_before or cycle.draft_s < (self._asked_s(drafted) or 0.0):
            relative = cycle.draft_s / self._step.level if self._step.level > 0 else cycle.draft_s
            self._draft.observe(_draft_key(drafted), relative, self.clock, share)

    def _observe_step(self, cycle: Cycle, share: float) -> None:
        own, timing = cycle.num_drafted + 1, cycle.timing
        if timing is None:
            step_s, tokens = cycle.verify_s, own
        else:
            step_s, tokens = timing.compute_s, max(timing.batch_tokens, own)
            busy = min(1.0, 2.0 * timing.queue_s / step_s) if step_s > 0 else 0.0
            self._crowd.observe(timing.batch_size * (1.0 + busy) - 1.0)
        self._others.observe(tokens - own)
        self._overhead.observe(max(0.0, cycle.verify_s - step_s))
        is_drafted = tokens > (own if timing is None else timing.batch_size)
        self._step.observe(_step_key(tokens, is_drafted), step_s, self.clock, share)

    def draft_s(self, shape: Shape) -> float | None:
        """Return the expected wait for a proposal; None before one was asked for."""
        asked = self._asked_s(shape)
        return None if asked is None else self._mixed(asked, shape.depth)

    def _asked_s(self, shape: Shape) -> float | None:
        """Return the expected wait for a proposal that was not prepared; None before there was one."""
        if shape.depth == 0:
            return 0.0
        relative = self._draft.estimate(_draft_key(shape), self.clock)
        return None if relative is None else relative * self._step.level

    def _chain_s(self, forwards: float) -> float:
        """Return the same for chains that take so many forwards on average."""
        fewer = max(1, math.floor(forwards))
        first, second = self._asked_s(Shape(fewer)) or 0.0, self._asked_s(Shape(fewer + 1)) or 0.0
        return first + max(0.0, forwards - fewer) * (second - first)

    def _mixed(self, asked_s: float, depth: int) -> float:
        """Return the expected wait for a proposal that may have been prepared."""
        rate = self.hits.rate(depth)
        return rate * self._prepared.value + (1.0 - rate) * asked_s

    def knowledge(self, shape: Shape) -> float:
        """Return how many fresh observations the wait for such a proposal rests on."""
        return self._draft.weight(_draft_key(shape), self.clock)

    def step_s(self, nodes: float) -> float | None:
        """Return the expected seconds of a step with `nodes` proposed tokens in the company of the moment."""
        tokens = self._others.value + 1.0 + nodes
        if self._others.value < 1.0:
            return self._step.estimate(_step_key(tokens, nodes > 0), self.clock)
        # The batch varies more than the proposal.
        return self._step.trend(tokens, nodes > 0 or self.mean_nodes >= LEAST_DRAFTED)

    def cycle_s(self, shape: Shape, nodes: float, forwards: float | None = None) -> float | None:
        """Return the expected seconds of a cycle; None while unknown.

        Args:
            shape: What is asked for.
            nodes: Nodes of its proposal, on average.
            forwards: Of chains that the draft may end early: forwards that they take it, on average.
        """
        asked, step = self._asked_s(shape), self.step_s(nodes)
        if asked is None or step is None:
            return None
        if forwards is not None:
            asked = self._chain_s(forwards)
        draft = self._mixed(asked, shape.depth)
        return draft + step + self._overhead.value + self._rest.value

    def token_s(self, longest: int) -> float | None:
        """Return the seconds that each further token of a chain takes its cycle; None while unknown.

        On average from the shortest to the longest chain of late: between lengths that are close together
        the estimates' errors would be most of the difference, and what is long ago may no longer hold.

        Args:
            longest: Of the chains that are asked for, at least 2.
        """
        known = [n for n in range(1, longest + 1) if self._chain_weight(n) >= LEAST_KNOWN]
        first, last = (known[0], known[-1]) if known and known[-1] - known[0] >= 2 else (1, longest)
        shorter, longer = (self.cycle_s(Shape(n), n) for n in (first, last))
        return None if shorter is None or longer is None else (longer - shorter) / (last - first)

    def _chain_weight(self, length: int) -> float:
        """Return how many fresh observations there are of a chain's draft or step, the rarer of both."""
        drafts = self._draft.weight(_draft_key(Shape(length)), self.clock)
        return min(drafts, self._step.weight(_step_key(length + 1, True), self.clock))

    def burden_s(self, nodes: float) -> float:
        """Return the seconds that `nodes` proposed tokens cost all other sessions at the target together.

        Those in the same batch wait for the longer step, and so do those that come while it runs: as many as
        find the worker busy, by what it reports of queueing.
        """
        if self._crowd.value < LEAST_CROWD:
            return 0.0
        step, plain = self.step_s(nodes), self.step_s(0)
        if step is None or plain is None:
            return 0.0
        return self._crowd.value * max(0.0, step - plain)

    @property
    def mean_nodes(self) -> float:
        """Nodes that the other sessions in a batch propose on average."""
        return max(0.0, self._others.value / self._crowd.value - 1.0) if self._crowd.value > 0.5 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Mean speed of the sessions while they decode; 0 while unknown."""
        return self._emitted / self._seconds if self._seconds > 0 else 0.0

    @property
    def plain_cycle_s(self) -> float | None:
        """Seconds of a cycle at gamma 0 at this moment, hiccups included.

        Measured where there was one, else extrapolated from steps with different numbers of tokens; None
        while there are none.
        """
        is_known = self._step.is_measured(_step_key(1, False)) or self._step.num_shapes >= 2
        plain = self.cycle_s(Shape(0), 0) if is_known else None
        if plain is None or self._predicted <= 0:
            return plain
        return plain * self._actual / self._predicted


def share_of(cycle: Cycle) -> float:
    """Return what a cycle counts for: sessions whose steps are shared all report the same step."""
    return 1.0 / max(1, cycle.timing.batch_size) if cycle.timing is not None else 1.0


def _drafted(cycle: Cycle) -> Shape:
    """Return the shape that was drafted: what was asked for, or of a chain that ended early its forwards.

    The forward over the last token of such a chain told that none should follow. A draft that takes forwards
    in twos may have done one more.
    """
    shape = cycle.shape
    is_chain, is_short = shape.max_nodes <= shape.depth, 0 < cycle.num_drafted < shape.depth
    return Shape(cycle.num_drafted + 1) if is_chain and is_short and shape.stop_threshold > 0 else shape


def _draft_key(shape: Shape) -> tuple[int, int]:
    return shape.depth, max(0, shape.max_nodes - shape.depth)


def _step_key(tokens: float, is_drafted: bool) -> tuple[int, int]:
    """Tokens, and whether some are proposed: on shared cores, steps are slower while somebody drafts."""
    if tokens <= EXACT_TOKENS:
        return max(1, round(tokens)), is_drafted
    bucket = round(math.log(tokens / EXACT_TOKENS, TOKEN_RATIO))
    return round(EXACT_TOKENS * TOKEN_RATIO**bucket), is_drafted
