"""The probes of one session: a few cycles in a row of what does not seem to pay, and what came of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from orchestrator.cycle.types import Cycle, Shape
from orchestrator.gamma.cost_model import CostModel
from orchestrator.gamma.fixed import Reason
from orchestrator.gamma.shapes import Family, family

__all__ = ["FIRST_GAMMA", "Bursts", "Prospects"]

FIRST_GAMMA = 4
"""Where to start when nothing is known of the costs."""

BURSTS = {Family.PLAIN: 1, Family.CHAIN: 3, Family.TREE: 3, Family.DEEPER: 2}
"""Cycles of a probe. The drafter catches up in the first one after plain cycles, whose wait says nothing."""

NEAR = 0.7
"""Little known shapes of a family are probed when they reach this share of its best speed."""

MAX_BURST = 16
"""Cycles after which a probe ends in any case; a drafter may have a long prompt to read."""

OVERDUE = 256
"""Cycles after which a single cheap cycle is tried whatever it is expected to cost."""

_Plan = tuple[Shape, int, float]
"""Shape, cycles, and how long the kind must not have been played before."""

_REASONS = {
    Family.PLAIN: Reason.PROBE_PLAIN,
    Family.CHAIN: Reason.PROBE_CHAIN,
    Family.TREE: Reason.PROBE_TREE,
    Family.DEEPER: Reason.PROBE_DEEPER,
}


@dataclass(frozen=True)
class Prospects:
    """What a controller expects of all shapes at the moment.

    Args:
        speeds: Tokens per second by shape.
        current: The shape in use, one of them.
        max_gamma: Upper bound of the depth.
        costs: Seconds by shape.
    """

    speeds: Mapping[Shape, float]
    current: Shape
    max_gamma: int
    costs: CostModel = field(repr=False)

    def share(self, kind: Family) -> float:
        """Return the best speed of a kind over that of all."""
        return max((self.speeds[shape] for shape in self.of(kind)), default=0.0) / max(self.speeds.values())

    def of(self, kind: Family) -> Iterator[Shape]:
        """Yield the shapes that a probe of this kind may have."""
        return (shape for shape in self.speeds if self._is_of(shape, kind))

    def _is_of(self, shape: Shape, kind: Family) -> bool:
        if kind is not Family.DEEPER:
            return family(shape) is kind
        current = self.current
        if current.depth == 0 or family(shape) is not family(current):
            return False
        return shape.depth >= min(2 * current.depth, self.max_gamma) and shape.depth > current.depth

    def loss(self, shape: Shape) -> float:
        """Return what a cycle of this shape is expected to cost, in cycles of the current one."""
        share = max(0.0, 1.0 - self.speeds[shape] / self.speeds[self.current])
        mine, its = (self.costs.cycle_s(s, max(s.depth, s.max_nodes)) for s in (self.current, shape))
        return (its / mine if mine and its else 1.0) * share

    @cached_property
    def hopeless(self) -> Family | None:
        """The slower one of chains and trees while plain decoding is best: one probe tells on both."""
        if self.current.depth > 0:
            return None
        return min((Family.CHAIN, Family.TREE), key=self.share)


class Bursts:
    """When this session probes what, and the probe under way.

    Args:
        costs: Shared by the sessions of a replica, with the schedule of their probes.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._kind, self._shape = Family.PLAIN, Shape(0)
        self._left = self._num_cycles = 0
        self._believed = self._rate = 0.0
        self._seconds = self._tokens = 0.0
        self._waited = dict.fromkeys(Family, 0)
        self._looked_at: Prospects | None = None
        self._plans: dict[Family, list[_Plan]] = {}

    @property
    def shape(self) -> Shape | None:
        """What the probe under way asks for; None while there is none."""
        return self._shape if self._left > 0 else None

    def due(self, prospects: Prospects) -> Shape | None:
        """Return the shape to probe now, if any, and start its burst."""
        for kind in Family:
            if kind is family(prospects.current):
                continue
            waited = self._costs.probes.waited(kind, self._waited[kind])
            if waited is None or kind is prospects.hopeless:
                continue
            for shape, length, needed in self._plans_for(prospects, kind):
                if waited >= needed:
                    return self._start(prospects, kind, shape, length)
        return None

    def _plans_for(self, prospects: Prospects, kind: Family) -> list[_Plan]:
        """Return the probes of a kind, best first; worked out once for the same prospects."""
        if prospects is not self._looked_at:
            self._looked_at = prospects
            self._plans.clear()
        if kind not in self._plans:
            self._plans[kind] = self._plan(prospects, kind)
        return self._plans[kind]

    def _plan(self, prospects: Prospects, kind: Family) -> list[_Plan]:
        shape, length, probes = self._promising(prospects, kind), BURSTS[kind], self._costs.probes
        if shape is None:
            return []
        # A single cheap cycle tells whether the belief is outdated, too.
        cheap = min(prospects.of(kind), key=prospects.loss)
        return [
            (shape, length, probes.needed_wait(kind, length, prospects.loss(shape))),
            (cheap, 1, min(probes.needed_wait(kind, 1, prospects.loss(cheap)), OVERDUE)),
        ]

    def _start(self, prospects: Prospects, kind: Family, shape: Shape, length: int) -> Shape:
        self._kind, self._shape = kind, replace(shape, reason=_REASONS[kind].value)
        self._left, self._num_cycles = length, 0
        self._believed = prospects.share(kind)
        self._rate = prospects.speeds[prospects.current]
        self._seconds = self._tokens = 0.0
        return self._shape

    def stopping_at(self, threshold: float) -> Shape:
        """Have the burst's chains end below a probability, and return its shape."""
        self._shape = replace(self._shape, stop_threshold=threshold)
        return self._shape

    def observe(self, cycle: Cycle) -> bool:
        """Count a finished cycle; return whether it ended a probe."""
        kind = family(cycle.shape)
        for other in Family:
            self._waited[other] += 1
        if kind is Family.PLAIN or cycle.num_drafted > 0:
            self._waited[kind] = 0
        if self._left == 0:
            return False
        self._num_cycles += 1
        self._seconds += cycle.total_s
        self._tokens += cycle.num_accepted + 1
        self._left -= self._shape.depth == 0 or cycle.num_drafted > 0
        if self._num_cycles >= MAX_BURST or cycle.draft_failed:
            self._left = 0
        return self._left == 0

    def conclude(self, prospects: Prospects | None) -> None:
        """Look at what the probe that has just ended changed and cost; None: nothing is known any more."""
        self._waited[self._kind] = 0
        if prospects is None:
            return
        lost = (self._rate * self._seconds - self._tokens) / max(1, self._num_cycles)
        self._costs.probes.played(self._kind)
        self._costs.probes.probed(self._kind, prospects.share(self._kind), self._believed, lost)

    def _promising(self, prospects: Prospects, kind: Family) -> Shape | None:
        """Return the most promising shape of a kind; of families in turn a deeper, a little known one."""
        shapes = list(prospects.of(kind))
        if not shapes:
            return None
        speed = prospects.speeds.__getitem__
        best = max(shapes, key=speed)
        turn = 0 if kind is Family.DEEPER else self._costs.probes.num_confirmed(kind) % 3
        if turn == 1:
            enough = min(max(2 * best.depth, FIRST_GAMMA), max(shape.depth for shape in shapes))
            return max((shape for shape in shapes if shape.depth >= enough), key=speed)
        if turn == 2:
            near = [shape for shape in shapes if speed(shape) >= NEAR * speed(best)]
            return min(near, key=self._costs.knowledge)
        return best
