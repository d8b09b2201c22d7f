"""What trees gain over chains, learned from all sessions of a replica."""

from __future__ import annotations

from collections.abc import Sequence

from gammaray.maths.theory import tree_tokens
from orchestrator.cycle.types import Level, Shape

__all__ = ["TreeModel"]

DECAY = 0.995

FIRST_RESCUE = (0.55, 0.45, 0.4)
"""Probability that the second, third, fourth child is the target's token given that those before are not. In
simulation under shared noise the drafter's next 1, 2, 4 guesses hold it in 66, 85, 96 % of the mismatches."""

RESCUE_STRENGTH = 20.0
"""Tested children that this is worth."""

BIAS_STRENGTH, SHAPE_STRENGTH = 20.0, 10.0
"""Cycles that no bias is worth for trees as a whole, and the bias of trees for one shape."""

LEAST_REACHED = 0.02
"""Nodes that are reached less often are not proposed."""


class TreeModel:
    """Expected tokens of trees: a model from acceptance by depth and rank, corrected by what was measured.

    The model is that of the best tree whose shape is fixed; the drafter's, which knows where it is unsure,
    may be better, and a drafter without trees is worse. So the accepted lengths correct it, for trees as a
    whole and for each shape.
    """

    def __init__(self) -> None:
        self._tested = [RESCUE_STRENGTH] * len(FIRST_RESCUE)
        self._rescued = [RESCUE_STRENGTH * share for share in FIRST_RESCUE]
        self._emitted: dict[Shape, float] = {}
        self._expected: dict[Shape, float] = {}
        self._nodes: dict[Shape, tuple[float, float]] = {}

    def observe(self, shape: Shape, levels: Sequence[Level], num_drafted: int, expected: float) -> None:
        """Learn from a cycle with a tree.

        Args:
            shape: What was asked for.
            levels: What verification met.
            num_drafted: Nodes that came.
            expected: Tokens that the model promised, before correction.
        """
        for num_children, rank in levels:
            last = rank if rank >= 0 else num_children - 1
            for sibling in range(1, min(last, len(FIRST_RESCUE)) + 1):
                self._tested[sibling - 1] = self._tested[sibling - 1] * DECAY + 1.0
                self._rescued[sibling - 1] = self._rescued[sibling - 1] * DECAY + (sibling == rank)
        emitted = 1.0 + sum(rank >= 0 for _, rank in levels)
        for sums, value in ((self._emitted, emitted), (self._expected, expected)):
            for known in sums:
                sums[known] *= DECAY
            sums[shape] = sums.get(shape, 0.0) + value
        total, weight = self._nodes.get(shape, (0.0, 0.0))
        self._nodes[shape] = (total * DECAY + num_drafted, weight * DECAY + 1.0)

    def model(self, by_depth: Sequence[float], max_nodes: int) -> list[float]:
        """Return the expected tokens of trees with 1 ... `max_nodes` nodes or as many as are worth it.

        Args:
            by_depth: Probability that the first child is accepted, at each depth that is allowed.
            max_nodes: Upper bound of nodes.
        """
        rescue = [hit / tested for hit, tested in zip(self._rescued, self._tested, strict=True)]
        return tree_tokens(by_depth, rescue, max_nodes, least=LEAST_REACHED)

    def bias(self, shape: Shape) -> float:
        """Return measured over expected tokens of a shape."""
        emitted, expected = sum(self._emitted.values()), sum(self._expected.values())
        per_cycle = expected / self._num_cycles if self._num_cycles else 1.0
        prior = BIAS_STRENGTH * per_cycle
        overall = (emitted + prior) / (expected + prior)
        own, prior = self._expected.get(shape, 0.0), SHAPE_STRENGTH * per_cycle
        return (self._emitted.get(shape, 0.0) + prior * overall) / (own + prior)

    @property
    def _num_cycles(self) -> float:
        return sum(weight for _, weight in self._nodes.values())

    def nodes(self, shape: Shape, expected: int) -> float:
        """Return the nodes that a proposal of this shape has; the model expects `expected`."""
        total, weight = self._nodes.get(shape, (0.0, 0.0))
        return (total + 4.0 * expected) / (weight + 4.0)
