"""The adaptive gamma controller: expected tokens from acceptance by depth, seconds from a linear cost model.

Each choice is the best shape under one sample from the posterior of both, held for some cycles. Shapes whose
speed is uncertain are thus tried as often as they may turn out to be the best (Thompson sampling). The choice
depends on past cycles only, which keeps every verification method lossless.
"""

from __future__ import annotations

import functools
import math

from gammaray.blocks import Shape
from gammaray.maths.acceptance import AcceptanceEstimator
from gammaray.types import DrafterKind
from orchestrator.cycle.types import Cycle
from orchestrator.gamma import cost_model
from orchestrator.gamma.cost_model import HOLD, RATE, CostModel, first_children
from orchestrator.gamma.fixed import Reason

__all__ = ["AdaptiveGamma"]

FIRST_GAMMA = 4
"""Gamma of the first cycles, while no costs are known: about the best fixed gamma of the simulated worlds (3
for chains, 4 with trees and under load; docs/lab.md)."""

STRENGTH = 8.0
"""Weight of the replica's acceptance in a session's own, in tested tokens: half of it after about three
cycles."""

REFRESH = 4
"""Cycles for which one evaluation of all shapes serves: it takes as long as learning from two cycles."""

TREE_DEPTHS, TREE_NODES = (1, 2, 3, 4, 6, 8), (2, 4, 8, 16, 32)
"""Trees that are considered, within the request's bounds. The best of them and of all chains has 0.998 of the
oracle's speed in simulation, mean of 108 worlds, and 0.984 in the worst; chains alone 0.906 and 0.564."""


class AdaptiveGamma:
    """Chooses the shape, gamma 0 included, with the most expected tokens per second; a GammaController.

    The rows of a proposal take time from the other sessions of the target worker. The tokens that these lose
    in that time are subtracted, so that the tokens per second of all sessions together are maximised.

    After plain cycles a proposal has at most 2 rows, and then at most twice as many as the largest
    one since. A trial of a draft that is still useless thus costs little.

    Args:
        max_gamma: Upper bound of the depth.
        costs: Shared by the sessions of this replica.
        max_nodes: Upper bound of the nodes; up to 1 for chains only.
        drafter: Kind of the drafter, a draft model or a head.

    Attributes:
        drafter: As given.
        acceptance: Acceptance of this session, shrunk towards that of the replica.
        speed: Expected tokens per second of the last shape, under the sample that chose it; 0 while unknown.
    """

    def __init__(
        self,
        max_gamma: int,
        costs: CostModel,
        max_nodes: int = 0,
        *,
        drafter: DrafterKind = DrafterKind.MODEL,
    ) -> None:
        self.drafter = drafter
        self._max_gamma, self._costs = max_gamma, costs
        self.acceptance = AcceptanceEstimator(1.0 - RATE, prior_strength=STRENGTH, fleet=costs.acceptance)
        self._was_plain, self._num_drafting, self._largest = True, 0, math.inf
        self._has_proposed = False
        self._num_cycles, self.speed = 0, 0.0
        self._shape: Shape | None = None
        self._renewed, self._expected = 0, 0.0
        self._chains = [_shape(depth, 0, drafter) for depth in range(max_gamma + 1)]
        sizes = {
            depth: [_shape(depth, nodes, drafter) for nodes in TREE_NODES if depth < nodes <= max_nodes]
            for depth in TREE_DEPTHS
            if depth <= max_gamma
        }
        self._tree_shapes = {depth: shapes for depth, shapes in sizes.items() if shapes}
        self._trees: list[tuple[Shape, float]] = []

    def next_shape(self) -> Shape:
        """Return the shape of the next cycle's proposal, with the reason."""
        if self._max_gamma == 0:
            return Shape(0, reason=Reason.OFF.value, drafter=self.drafter)
        if not self._costs.is_known:
            depth = min(FIRST_GAMMA, self._max_gamma)
            return Shape(depth, reason=Reason.FIRST.value, drafter=self.drafter)
        has_begun = 0 < self._num_drafting < REFRESH  # a trial that fails ends at once
        is_renewed = self._renewed != self._costs.num_renewed
        if self._num_cycles % REFRESH == 0 or is_renewed or has_begun or self._shape is None:
            by_depth = self._sample_acceptance()
            if is_renewed:
                self._renewed, self._trees = self._costs.num_renewed, self._evaluate_trees(by_depth)
            self._shape = self._best(by_depth)
        return self._shape

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle."""
        self._num_cycles += 1
        tested, accepted = first_children(cycle)
        if tested:
            self.acceptance.observe(tested, accepted)
        elif cycle.gamma == 0:
            self.acceptance.fade(1.0 - cost_model.FORGETTING)
        if cycle.num_drafted > 0 and cycle.shape.is_tree and cycle.shape == self._shape:
            self._costs.trees.observe(cycle.levels, self._expected)
        is_entry = cycle.num_drafted > 0 and not self._has_proposed
        self._costs.observe(cycle, was_plain=self._was_plain, is_entry=is_entry)
        self._has_proposed |= is_entry
        self._was_plain = cycle.num_drafted == 0
        self._num_drafting = 0 if self._was_plain else self._num_drafting + 1
        self._largest = 1.0 if cycle.gamma == 0 else max(self._largest, float(cycle.num_drafted))

    def skip(self) -> None:
        """Note a cycle with another drafter, after which the draft model has to catch up."""
        self._num_cycles += 1
        self._was_plain, self._num_drafting = True, 0

    def _best(self, by_depth: list[float]) -> Shape:
        """Return the best shape under the current posterior sample."""
        costs = self._costs
        sampled = costs.sample()
        drafted_s, forward_s, other_row_s = sampled[1], sampled[2], sampled[5]
        plain_s = costs.plain_s(sampled)
        drafted_s += plain_s + (costs.catch_up_s / HOLD if self._was_plain else 0.0)
        # Tokens that the other sessions would get in the time that a row takes from them.
        price = costs.num_waiting * costs.tokens_per_s * other_row_s
        bias, most_rows = costs.trees.bias, 2.0 * self._largest
        best, highest, self._expected = self._chains[0], 1.0 / plain_s, 0.0
        tokens = reached = 1.0
        for depth, probability in enumerate(by_depth, 1):
            reached *= probability
            tokens += reached
            seconds = drafted_s + forward_s * depth + costs.rows_s(sampled, depth)
            speed = (tokens - price * depth) / seconds
            if speed > highest and depth <= most_rows:
                best, highest = self._chains[depth], speed
        for shape, expected in self._trees:
            rows = shape.max_nodes
            seconds = drafted_s + forward_s * shape.depth + costs.rows_s(sampled, rows)
            speed = (expected * bias - price * rows) / seconds
            if speed > highest and rows <= most_rows:
                best, highest, self._expected = shape, speed, expected
        self.speed = highest
        return best

    def _sample_acceptance(self) -> list[float]:
        """Return a posterior sample of the probability of acceptance by depth."""
        strength = STRENGTH + self.acceptance.num_tested
        draw = self._costs.draws[-1] / math.sqrt(strength)
        return [
            min(1.0, max(0.0, p + draw * math.sqrt(p * (1.0 - p))))
            for p in self.acceptance.by_depth(self._max_gamma)
        ]

    def _evaluate_trees(self, by_depth: list[float]) -> list[tuple[Shape, float]]:
        """Return the trees that are considered, with the tokens that the model expects."""
        trees = []
        for depth, shapes in self._tree_shapes.items():
            tokens = self._costs.trees.expected_tokens(by_depth[:depth], shapes[-1].max_nodes)
            found = len(tokens)  # fewer than requested if the tree is complete
            trees += [(shape, tokens[shape.max_nodes - 1]) for shape in shapes if shape.max_nodes <= found]
        return trees


@functools.cache
def _shape(depth: int, max_nodes: int, drafter: DrafterKind) -> Shape:
    return Shape(depth, max_nodes, reason=Reason.BEST.value, drafter=drafter)
