"""Controllers of gamma: fixed, and adaptive to measured acceptance and costs.

Choosing the shape of a proposal from past cycles alone keeps every verification method lossless.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from gammaray.metrics import AcceptanceEstimator
from orchestrator.costs import CostModel
from orchestrator.cycle import Cycle, Shape
from orchestrator.fixed_gamma import FixedGamma, Learner, Reason, first_children, stopped_early
from orchestrator.probing import Family, family
from orchestrator.shapes import all_shapes

__all__ = ["AdaptiveGamma", "FixedGamma", "Reason"]

HYSTERESIS = 1.03
"""Another shape must promise this much more speed before it replaces the current one: the estimates move by
about that from cycle to cycle, and a switch costs what was drafted ahead."""

LEAVE_PLAIN = 1.1
"""As much before plain decoding is left: a drafter that was not asked for long has to catch up first."""

FIRST_GAMMA = 4
"""Where to start when nothing is known of the costs."""

REFRESH = 8
"""Cycles that one evaluation of all shapes serves."""

FADE = 0.99
"""What a session knows of its own acceptance fades by this with each plain cycle."""

EXPLORE_PERIOD, EXPLORE_SHARE = 24, 0.95
"""Every so many cycles the nearly best shape that was tried longest ago is played: what costs are estimated
from would else be one shape only. It costs at most 5 % of one cycle in 24."""

BURSTS = {Family.PLAIN: 1, Family.CHAIN: 3, Family.TREE: 3, Family.DEEPER: 2}
"""Cycles of a probe. The drafter catches up in the first one after plain cycles, whose wait says nothing."""

NEAR = 0.7
"""Little known shapes of a family are probed when they reach this share of its best speed."""

MAX_BURST = 16
"""Cycles after which a probe ends in any case; a drafter may have a long prompt to read."""

MAX_RATE_RATIO = 3.0
"""How many times as valuable another session's time may count as this one's, and the reverse."""

LEAST_EFFECTIVE = 0.5
"""Relief for the others makes a cycle appear at most this much shorter."""

LEAST_STOP, MOST_STOP = 0.02, 0.8
"""Bounds of the probability below which chains end."""

_PROBES = {
    Family.PLAIN: Reason.PROBE_PLAIN,
    Family.CHAIN: Reason.PROBE_CHAIN,
    Family.TREE: Reason.PROBE_TREE,
    Family.DEEPER: Reason.PROBE_DEEPER,
}


class AdaptiveGamma:
    """The shape, gamma 0 included, that promises most tokens per second; implements GammaController.

    Expected tokens come from this session's acceptance by depth, shrunk towards the fleet's, and for trees
    from the fleet's acceptance by rank. Seconds come from the shared cost model: those of this session's
    cycle, and those that its proposal takes from the other sessions of the target worker, weighted by how
    fast these are. So under load each further token is proposed where it is most likely accepted, and the
    last session stops proposing when no token is worth what it costs everybody.

    Args:
        max_gamma: Upper bound of the depth.
        costs: Shared by the sessions of this replica.
        max_nodes: Upper bound of the nodes; up to 1 for chains only.

    Attributes:
        acceptance: This session's, shrunk towards the fleet's.
    """

    def __init__(self, max_gamma: int, costs: CostModel, max_nodes: int = 0) -> None:
        self._costs, self._learner = costs, Learner(costs)
        self.acceptance = AcceptanceEstimator(0.975, prior_strength=8.0, fleet=costs.acceptance)
        self._reach = AcceptanceEstimator(0.975, prior_strength=8.0, fleet=costs.reach)
        self._shapes = all_shapes(max_gamma, max_nodes)
        self._max_gamma, self._max_nodes = max_gamma, max_nodes
        self._speeds: Mapping[Shape, float] = {}
        self._promises: dict[Shape, tuple[float, int]] = {}
        self._shape: Shape | None = None
        self._probe: tuple[Family, Shape, int] | None = None
        self._num_cycles = self._probe_cycles = 0
        self._believed = 0.0
        self._played_at: dict[Shape, int] = {}
        self._waited = dict.fromkeys(Family, 0)
        self._rate = 0.0

    def next_shape(self) -> Shape:
        """Return the shape of the next cycle's proposal, with the reason."""
        if self._max_gamma == 0:
            return Shape(0, 0, Reason.OFF.value)
        if self._probe is not None:
            return self._probe[1]
        if self._num_cycles % REFRESH == 0 or not self._speeds:
            self._speeds = self._evaluate()
        if not self._speeds:
            return Shape(min(FIRST_GAMMA, self._max_gamma), 0, Reason.FIRST.value)
        reason = self._choose()
        assert self._shape is not None
        probe = self._due_probe()
        if probe is not None:
            return probe
        if self._num_cycles % EXPLORE_PERIOD == EXPLORE_PERIOD - 1:
            return self._least_tried()
        return replace(self._shape, reason=reason.value, stop_threshold=self._stop(self._shape))

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle."""
        self._num_cycles += 1
        kind = family(cycle.shape)
        self._observe_tokens(cycle, kind)
        self._learner.learn(cycle, kind)
        for other in Family:
            self._waited[other] += 1
        if kind is Family.PLAIN or cycle.num_drafted > 0:
            self._waited[kind] = 0
            self._played_at[cycle.shape] = self._num_cycles
        if not cycle.is_first and cycle.total_s > 0:
            rate = (cycle.num_accepted + 1) / cycle.total_s
            self._rate += (rate - self._rate) * (0.05 if self._rate else 1.0)
        if self._probe is not None:
            self._observe_probe(cycle)

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

    def _observe_probe(self, cycle: Cycle) -> None:
        """Count down the burst; at its end look at what it changed."""
        assert self._probe is not None
        kind, shape, left = self._probe
        self._probe_cycles += 1
        left -= shape.depth == 0 or cycle.num_drafted > 0
        if left > 0 and self._probe_cycles < MAX_BURST and not cycle.draft_failed:
            self._probe = (kind, shape, left)
            return
        self._probe, self._speeds, self._waited[kind] = None, self._evaluate(), 0
        if self._speeds:
            self._costs.probes.played(kind, self._costs.clock)
            self._costs.probes.probed(kind, self._share(kind), self._believed)

    def _is_of(self, shape: Shape, kind: Family) -> bool:
        """Whether a probe of this kind may have this shape."""
        if kind is not Family.DEEPER:
            return family(shape) is kind
        current = self._shape
        if current is None or current.depth == 0 or family(shape) is not family(current):
            return False
        return shape.depth >= min(2 * current.depth, self._max_gamma) and shape.depth > current.depth

    def _evaluate(self) -> dict[Shape, float]:
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
        for shape in self._shapes:
            nodes, forwards = lengths[shape.depth], None
            if family(shape) is Family.TREE:
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
        return speeds

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
        return self._shape.depth

    def _stop(self, shape: Shape) -> float:
        """Return the probability of acceptance below which a chain's next token costs more than it brings.

        Speed is tokens over seconds, so a token pays just when its probability exceeds the seconds that it
        takes, others' included, times the speed.
        """
        if family(shape) is not Family.CHAIN:
            return 0.0
        costs, length = self._costs, max(1, shape.depth // 2)
        shorter, longer = (costs.cycle_s(Shape(n), n) for n in (length, length + 2))
        if shorter is None or longer is None:
            return 0.0
        burden = self._weight() * (costs.burden_s(length + 2) - costs.burden_s(length))
        price = (longer - shorter + burden) / 2 * max(self._speeds.values())
        return min(max(price, LEAST_STOP), MOST_STOP)

    def _choose(self) -> Reason:
        best = max(self._speeds, key=self._speeds.__getitem__)
        current = self._speeds.get(self._shape, 0.0) if self._shape is not None else 0.0
        is_plain = self._shape is not None and self._shape.depth == 0
        needed = (LEAVE_PLAIN if is_plain else HYSTERESIS) * current
        if best.depth > 0 and self._speeds[best] <= needed and best != self._shape:
            return Reason.HELD
        self._shape = best
        return Reason.BEST

    def _due_probe(self) -> Shape | None:
        """Return the shape to probe now, if any, and start its burst."""
        assert self._shape is not None
        for kind in Family:
            if kind is family(self._shape) or kind is self._hopeless():
                continue
            waited = self._costs.probes.waited(kind, self._waited[kind], self._costs.clock)
            shape = self._probe_shape(kind) if waited is not None else None
            if shape is None or waited is None:
                continue
            probes, length = self._costs.probes, BURSTS[kind]
            if not probes.is_affordable(kind, waited, length * self._loss(shape)):
                # A single cheap cycle tells whether the belief is outdated, too.
                shape, length = min((s for s in self._speeds if self._is_of(s, kind)), key=self._loss), 1
                if not (probes.is_affordable(kind, waited, self._loss(shape)) or probes.is_overdue(waited)):
                    continue
            shape = replace(shape, reason=_PROBES[kind].value, stop_threshold=self._stop(shape))
            self._probe, self._probe_cycles = (kind, shape, length), 0
            self._believed = self._share(kind)
            return shape
        return None

    def _share(self, kind: Family) -> float:
        """Return the best speed of a kind over that of all."""
        its = max((s for shape, s in self._speeds.items() if self._is_of(shape, kind)), default=0.0)
        return its / max(self._speeds.values())

    def _hopeless(self) -> Family | None:
        """Return the slower one of chains and trees while plain decoding is best: one probe tells on both."""
        if self._shape is None or self._shape.depth > 0:
            return None
        fastest = dict.fromkeys((Family.CHAIN, Family.TREE), 0.0)
        for shape, speed in self._speeds.items():
            if shape.depth > 0:
                fastest[family(shape)] = max(fastest[family(shape)], speed)
        return min(fastest, key=fastest.__getitem__)

    def _loss(self, shape: Shape) -> float:
        """Return what a cycle of this shape is expected to cost, in cycles of the present one."""
        assert self._shape is not None
        share = max(0.0, 1.0 - self._speeds[shape] / self._speeds[self._shape])
        return self._slowness(shape) * share

    def _probe_shape(self, kind: Family) -> Shape | None:
        """Return the most promising shape of a kind; of families in turn a deeper, a little known one."""
        shapes = [shape for shape in self._speeds if self._is_of(shape, kind)]
        if not shapes:
            return None
        speed = self._speeds.__getitem__
        best = max(shapes, key=speed)
        turn = 0 if kind is Family.DEEPER else self._costs.probes.num_confirmed(kind) % 3
        if turn == 1:
            enough = min(max(2 * best.depth, FIRST_GAMMA), max(shape.depth for shape in shapes))
            return max((shape for shape in shapes if shape.depth >= enough), key=speed)
        if turn == 2:
            near = [shape for shape in shapes if speed(shape) >= NEAR * speed(best)]
            return min(near, key=self._costs.knowledge)
        return best

    def _slowness(self, shape: Shape) -> float:
        """Return the seconds of a cycle of this shape over those of the current one."""
        assert self._shape is not None
        mine, its = (self._costs.cycle_s(s, max(s.depth, s.max_nodes)) for s in (self._shape, shape))
        return its / mine if mine and its else 1.0

    def _least_tried(self) -> Shape:
        assert self._shape is not None
        enough = EXPLORE_SHARE * self._speeds[self._shape]
        near = [
            s for s, speed in self._speeds.items() if speed >= enough and family(s) is family(self._shape)
        ]
        shape = min(near, key=lambda s: self._played_at.get(s, 0))
        return replace(shape, reason=Reason.EXPLORE.value, stop_threshold=self._stop(shape))
