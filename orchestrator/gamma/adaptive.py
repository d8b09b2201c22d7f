"""Controllers of gamma: fixed, and adaptive to measured acceptance and costs.

Choosing the shape of a proposal from past cycles alone keeps every verification method lossless.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from gammaray.maths.acceptance import AcceptanceEstimator
from orchestrator.cycle.types import Cycle, Shape
from orchestrator.gamma.cost_model import CostModel, share_of
from orchestrator.gamma.exploration import FIRST_GAMMA, Bursts, Prospects
from orchestrator.gamma.fixed import (
    FixedGamma,
    Learner,
    Reason,
    first_children,
    stopped_early,
)
from orchestrator.gamma.shapes import Family, all_shapes, family

__all__ = ["AdaptiveGamma", "FixedGamma", "Reason"]

HYSTERESIS = 1.03
"""Another shape must promise this much more speed before it replaces the current one: the estimates move by
about that from cycle to cycle, and a switch costs what was drafted ahead."""

LEAST_GAIN = 1.05
"""Drafting must promise this much more than plain decoding: its cycles have more messages, any of which may
be late, and means that leave hiccups out make them too short."""

LEAVE_PLAIN = 1.1
"""As much before plain decoding is left: a drafter that was not asked for long has to catch up first."""

REFRESH, REFRESH_PLAIN = 16, 32
"""Cycles that one evaluation of all shapes serves. It takes up to a tenth of a plain cycle of a small model,
and plain cycles tell nothing of acceptance."""

TREE_PERIOD = 4
"""Evaluations of chains to one of trees, which are many, while no tree is played: in between, trees are as
fast beside chains as they were."""

FADE = 0.99
"""What a session knows of its own acceptance fades by this with each plain cycle."""

EXPLORE_PERIOD, EXPLORE_SHARE = 24, 0.95
"""Every so many cycles the nearly best shape that was tried longest ago is played: what costs are estimated
from would else be one shape only. It costs at most 5 % of one cycle in 24."""

LONGER_SHARE = 0.97
"""The longest chain that promises this share of the best one is played where the draft ends chains early: it
knows of the text to come, and what is known of past text comes some cycles late."""

EXPLORE_STOP = 0.5
"""Share of the usual threshold at which the chains of such a cycle end, and those of deeper probes: some
tokens later, which tells what those cost."""

MAX_RATE_RATIO = 3.0
"""How many times as valuable another session's time may count as this one's, and the reverse."""

LEAST_EFFECTIVE = 0.5
"""Relief for the others makes a cycle appear at most this much shorter."""

LEAST_STOP, MOST_STOP = 0.02, 0.8
"""Bounds of the probability below which chains usually end."""

_PLAIN = Shape(0)
_PLAIN_UNDER_LOAD = Shape(0, 0, Reason.LOAD.value)


class AdaptiveGamma:
    """The shape, gamma 0 included, that promises most tokens per second; implements GammaController.

    Expected tokens come from this session's acceptance by depth, shrunk towards the fleet's, and for trees
    from the fleet's acceptance by rank. Seconds come from the shared cost model: those of this session's
    cycle, and those that its proposal takes from the other sessions of the target worker, weighted by how
    fast these are. So under load each further token is proposed where it is most likely accepted, and the
    last session stops proposing when no token is worth what it costs everybody. What this model does not
    see is left to the contest of drafting with plain decoding.

    Args:
        max_gamma: Upper bound of the depth.
        costs: Shared by the sessions of this replica.
        max_nodes: Upper bound of the nodes; up to 1 for chains only.
        ends_early: Whether the drafter ends chains where it is told to by `Shape.stop_threshold`.

    Attributes:
        acceptance: This session's, shrunk towards the fleet's.
        num_cycles: Cycles observed so far.
    """

    def __init__(
        self, max_gamma: int, costs: CostModel, max_nodes: int = 0, *, ends_early: bool = True
    ) -> None:
        self._costs, self._learner = costs, Learner(costs)
        self.acceptance = AcceptanceEstimator(0.975, prior_strength=8.0, fleet=costs.acceptance)
        self._reach = AcceptanceEstimator(0.975, prior_strength=8.0, fleet=costs.reach)
        self._shapes = all_shapes(max_gamma, max_nodes)
        self._ends_early = ends_early
        self._max_gamma, self._max_nodes = max_gamma, max_nodes
        self._bursts = Bursts(costs)
        self._speeds: Mapping[Shape, float] = {}
        self._promises: dict[Shape, tuple[float, int]] = {}
        self._shape: Shape | None = None
        self._prospects: Prospects | None = None
        self._usual = Shape(0)
        self.num_cycles = self._num_evaluated = 0
        self._tree_shares: dict[Shape, float] = {}
        self._played_at: dict[Shape, int] = {}
        self._rate = 0.0

    def next_shape(self) -> Shape:
        """Return the shape of the next cycle's proposal, with the reason."""
        if self._max_gamma == 0:
            return Shape(0, 0, Reason.OFF.value)
        if self._costs.contest.is_plain:
            return _PLAIN_UNDER_LOAD
        if self._bursts.shape is not None:
            return self._bursts.shape
        if self._prospects is None or self.num_cycles % self._refresh == 0:
            self._speeds = self.evaluate()
            self._decide()
        if self._prospects is None:
            return Shape(min(FIRST_GAMMA, self._max_gamma), 0, Reason.FIRST.value)
        probe = self._bursts.due(self._prospects)
        if probe is not None:
            is_deeper = probe.reason == Reason.PROBE_DEEPER.value
            return self._bursts.stopping_at((EXPLORE_STOP if is_deeper else 1.0) * self._stop(probe))
        if self.num_cycles % EXPLORE_PERIOD == EXPLORE_PERIOD - 1:
            return self._least_tried()
        return self._usual

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle."""
        self.num_cycles += 1
        kind = family(cycle.shape)
        self._observe_tokens(cycle, kind)
        self._costs.contest.observe(cycle)
        self._costs.probes.clock += share_of(cycle)
        self._learner.learn(cycle, kind)
        if kind is Family.PLAIN or cycle.num_drafted > 0:
            self._played_at[cycle.shape] = self.num_cycles
        if not cycle.is_first and cycle.total_s > 0:
            rate = (cycle.num_accepted + 1) / cycle.total_s
            self._rate += (rate - self._rate) * (0.05 if self._rate else 1.0)
        # A probe that a plain round cuts off goes on behind it.
        if cycle.shape.reason != _PLAIN_UNDER_LOAD.reason and self._bursts.observe(cycle):
            if kind is Family.TREE:
                self._tree_shares = {}  # what was believed of them is outdated
            self._speeds = self.evaluate()
            self._bursts.conclude(self._expectations())
            self._decide()

    def _observe_tokens(self, cycle: Cycle, kind: Family) -> None:
        tested, accepted = first_children(cycle)
        if kind is Family.TREE and cycle.num_drafted > 0 and cycle.shape in self._promises:
            expected, _ = self._promises[cycle.shape]
            self._costs.trees.observe(cycle.shape, cycle.levels, cycle.num_drafted, expected)
        if tested:
            self.acceptance.observe(tested, accepted)
        elif kind is Family.PLAIN:
            self.acceptance.fade(FADE)
        if kind is Family.CHAIN and cycle.num_drafted > 0:
            self._reach.observe(cycle.num_drafted + stopped_early(cycle), cycle.num_drafted)

    def evaluate(self) -> dict[Shape, float]:
        """Return the expected tokens per second of each shape; nothing while costs are unknown.

        The others' loss enters as seconds of this session's cycle, against what it costs them now: then a
        shape is faster than the present one just when all sessions together get more tokens per second.
        """
        by_depth = self.acceptance.by_depth(self._max_gamma)
        survival = self.acceptance.survival(self._max_gamma)
        costs, speeds = self._costs, dict[Shape, float]()
        weight, usual = self._weight(), costs.burden_s(self._usual_nodes())
        lengths = [0.0, *itertools.accumulate(self._reach.survival(self._max_gamma))]
        sizes: dict[int, list[float]] = {}
        self._num_evaluated += 1
        is_in_use = self._shape is not None and family(self._shape) is Family.TREE
        has_trees = is_in_use or not self._tree_shares or self._num_evaluated % TREE_PERIOD == 0
        for shape in self._shapes:
            nodes, forwards = lengths[shape.depth], None
            if family(shape) is Family.TREE:
                if not has_trees:
                    continue
                if shape.depth not in sizes:
                    sizes[shape.depth] = costs.trees.model(by_depth[: shape.depth], self._max_nodes)
                tokens_by_size = sizes[shape.depth]
                size = min(shape.max_nodes, len(tokens_by_size))
                if size <= shape.depth:
                    continue
                self._promises[shape] = (tokens_by_size[size - 1], size)
                tokens = tokens_by_size[size - 1] * costs.trees.bias(shape)
                nodes = costs.trees.nodes(shape, size)
            else:
                tokens = 1.0 + sum(survival[: shape.depth])
                if shape.depth > 0:  # over the last committed token, and each that another may follow
                    forwards = 1.0 + lengths[shape.depth - 1]
            seconds = costs.cycle_s(shape, nodes, forwards)
            if not seconds:
                return {}
            burden = weight * (costs.burden_s(nodes) - usual)
            speeds[shape] = tokens / max(seconds + burden, LEAST_EFFECTIVE * seconds)
        best = max(speed for shape, speed in speeds.items() if family(shape) is not Family.TREE)
        if has_trees:
            self._tree_shares = {s: v / best for s, v in speeds.items() if family(s) is Family.TREE}
        return speeds | {shape: share * best for shape, share in self._tree_shares.items()}

    def _weight(self) -> float:
        """Return how many times as valuable the other sessions' time is as this one's: by their speeds."""
        weight = self._costs.tokens_per_s / self._rate if self._rate > 0 else 1.0
        return min(max(weight, 1.0 / MAX_RATE_RATIO), MAX_RATE_RATIO)

    def _usual_nodes(self) -> float:
        """Return the nodes that this session proposes at present, at first those of the others."""
        if self._shape is None:
            return self._costs.mean_nodes
        if family(self._shape) is Family.TREE and self._shape in self._promises:
            return self._costs.trees.nodes(self._shape, self._promises[self._shape][1])
        return sum(self._reach.survival(self._shape.depth))

    def _stop(self, shape: Shape) -> float:
        """Return the probability of acceptance below which a chain's next token costs more than it brings.

        Speed is tokens over seconds, so a token pays just when its probability exceeds the seconds that it
        takes, others' included, times the speed.
        """
        if family(shape) is not Family.CHAIN or shape.depth == 1 or not self._ends_early:
            return 0.0
        costs, longest = self._costs, shape.depth
        own_s = costs.token_s(longest)
        if own_s is None:
            return 0.0
        others_s = (costs.burden_s(longest) - costs.burden_s(1)) / (longest - 1)
        price = (own_s + self._weight() * others_s) * max(self._speeds.values())
        return min(max(price, LEAST_STOP), MOST_STOP)

    def _expectations(self) -> Prospects | None:
        if not self._speeds or self._shape is None:
            return None
        return Prospects(self._speeds, self._shape, self._max_gamma, self._costs)

    @property
    def _refresh(self) -> int:
        return REFRESH_PLAIN if self._shape is not None and self._shape.depth == 0 else REFRESH

    def _decide(self) -> None:
        """Choose what is played until the next evaluation."""
        reason = self._choose() if self._speeds else None
        self._prospects = self._expectations()
        if reason is not None and self._shape is not None:
            threshold = self._stop(self._shape)
            self._usual = replace(self._shape, reason=reason.value, stop_threshold=threshold)

    def _choose(self) -> Reason:
        best, before = max(self._speeds, key=self._speeds.__getitem__), self._shape
        if self._speeds[best] < LEAST_GAIN * self._speeds[_PLAIN]:
            best = _PLAIN
        current = self._speeds.get(before, 0.0) if before is not None else 0.0
        is_plain = before is not None and before.depth == 0
        needed = (LEAVE_PLAIN if is_plain else HYSTERESIS) * current
        is_held = best.depth > 0 and self._speeds[best] <= needed and best != before
        if not is_held:
            self._shape = best
        if self._shape is not None:
            self._shape = self._lengthened(self._shape)
        return Reason.HELD if is_held and self._shape == before else Reason.BEST

    def _lengthened(self, shape: Shape) -> Shape:
        """Return the longest chain that promises nearly as much as the best one, for a chain."""
        if family(shape) is not Family.CHAIN or not self._ends_early:
            return shape
        chains = {s: speed for s, speed in self._speeds.items() if family(s) is Family.CHAIN}
        enough = LONGER_SHARE * max(chains.values())
        return max((s for s, speed in chains.items() if speed >= enough), key=lambda s: s.depth)

    def _least_tried(self) -> Shape:
        assert self._shape is not None
        enough = EXPLORE_SHARE * self._speeds[self._shape]
        near = [
            s for s, speed in self._speeds.items() if speed >= enough and family(s) is family(self._shape)
        ]
        shape = min(near, key=lambda s: self._played_at.get(s, 0))
        return replace(shape, reason=Reason.EXPLORE.value, stop_threshold=EXPLORE_STOP * self._stop(shape))
