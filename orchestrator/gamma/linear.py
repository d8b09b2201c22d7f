"""Adaptive gamma from two estimates: tokens from acceptance by depth, seconds from a linear cost model.

What is not well known is tried by itself: each choice is the best one by a sample from what is believed, held
for some cycles. So there are no probes, no hysteresis and no second opinion.
"""

from __future__ import annotations

import math

from gammaray.maths.acceptance import AcceptanceEstimator
from orchestrator.cycle.types import Cycle, Shape
from orchestrator.gamma.fixed import Reason, first_children, stopped_early
from orchestrator.gamma.linear_costs import FORGETTING, HOLD, RATE, LinearCosts, is_tree

__all__ = ["LinearGamma"]

FIRST_GAMMA = 4
"""Where to start when nothing is known of the costs."""

STRENGTH = 8.0
"""Tested tokens that the fleet's acceptance is worth beside a session's own: half of the weight after three
cycles."""

REFRESH = 4
"""Cycles that one evaluation serves: it takes as long as learning from two cycles."""

TREE_DEPTHS, TREE_NODES = (1, 2, 3, 4, 6, 8), (4, 8, 12, 16, 24, 32)
"""Trees that are considered, within the request's bounds."""

_Arm = tuple[Shape, float, float, float]
"""Shape, expected tokens, forwards of the draft, rows."""


class LinearGamma:
    """The shape, gamma 0 included, that promises most tokens per second; implements GammaController.

    What a proposal's rows take from the other sessions of the target is set against its tokens, so that all
    sessions together get most.

    Args:
        max_gamma: Upper bound of the depth.
        costs: Shared by the sessions of this replica.
        max_nodes: Upper bound of the nodes; up to 1 for chains only.
        ends_early: Whether the drafter ends chains where it is told to by `Shape.stop_threshold`.

    Attributes:
        acceptance: This session's, shrunk towards the fleet's.
    """

    def __init__(
        self, max_gamma: int, costs: LinearCosts, max_nodes: int = 0, *, ends_early: bool = True
    ) -> None:
        self._max_gamma, self._max_nodes, self._ends_early = max_gamma, max_nodes, ends_early
        self._costs = costs
        self.acceptance = AcceptanceEstimator(1.0 - RATE, prior_strength=STRENGTH, fleet=costs.acceptance)
        self._reach = AcceptanceEstimator(1.0 - RATE, prior_strength=STRENGTH, fleet=costs.reach)
        self._was_plain, self._num_drafting = True, 0
        self._num_cycles = 0
        self._shape: Shape | None = None
        self._renewed = 0
        self._promised: dict[Shape, float] = {}
        self._trees: list[_Arm] = []

    def next_shape(self) -> Shape:
        """Return the shape of the next cycle's proposal, with the reason."""
        if self._max_gamma == 0:
            return Shape(0, 0, Reason.OFF.value)
        if not self._costs.is_known:
            return Shape(min(FIRST_GAMMA, self._max_gamma), 0, Reason.FIRST.value)
        has_begun = 0 < self._num_drafting < REFRESH  # a trial that fails ends at once
        is_renewed = self._renewed != self._costs.num_renewed
        if self._num_cycles % REFRESH == 0 or is_renewed or has_begun or self._shape is None:
            by_depth = self._by_depth()
            if is_renewed:
                self._renewed, self._trees = self._costs.num_renewed, self._look_at_trees(by_depth)
            self._shape = self._best(by_depth)
        return self._shape

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle."""
        self._num_cycles += 1
        tested, accepted = first_children(cycle)
        if tested:
            self.acceptance.observe(tested, accepted)
        elif cycle.gamma == 0:
            self.acceptance.fade(1.0 - FORGETTING)
        if cycle.num_drafted > 0 and is_tree(cycle.shape):
            promised = self._promised.get(cycle.shape)
            if promised is not None:
                self._costs.trees.observe(cycle.levels, promised)
        elif cycle.num_drafted > 0:
            self._reach.observe(cycle.num_drafted + stopped_early(cycle), cycle.num_drafted)
        self._costs.learn(cycle, was_plain=self._was_plain)
        self._was_plain = cycle.num_drafted == 0
        self._num_drafting = 0 if self._was_plain else self._num_drafting + 1

    def _best(self, by_depth: list[float]) -> Shape:
        costs = self._costs
        sampled = costs.sample()
        _, drafted_s, forward_s, row_s, _, other_row_s = sampled
        plain_s = costs.plain_s(sampled)
        drafted_s += plain_s + (costs.catch_up_s / HOLD if self._was_plain else 0.0)
        # A row takes this much time from the others, during which each would get tokens.
        price = costs.crowd * costs.tokens_per_s * other_row_s
        best, highest = Shape(0), 1.0 / plain_s
        for arm in (*self._chains(by_depth), *self._trees):
            shape, tokens, forwards, rows = arm
            seconds = drafted_s + forward_s * forwards + row_s * rows
            speed = (tokens - price * rows) / seconds
            if speed > highest:
                best, highest = shape, speed
        stop = 0.0
        if best.depth > 1 and not is_tree(best) and self._ends_early:
            # A token more is worth its probability, and costs so many tokens elsewhere.
            stop = min(1.0, (forward_s + row_s) * highest + price)
        return Shape(best.depth, best.max_nodes, Reason.BEST.value, stop_threshold=stop)

    def _by_depth(self) -> list[float]:
        """Return a sample of the probability of acceptance by depth."""
        strength = STRENGTH + sum(self.acceptance.counts[1])
        luck = self._costs.luck[-1] / math.sqrt(strength)
        return [
            min(1.0, max(0.0, p + luck * math.sqrt(p * (1.0 - p))))
            for p in self.acceptance.by_depth(self._max_gamma)
        ]

    def _chains(self, by_depth: list[float]) -> list[_Arm]:
        """Return chains; one that may end early takes a forward over its last token, to see that it ends."""
        arms, tokens, reached, rows = [], 1.0, 1.0, 0.0
        lengths = self._reach.survival(self._max_gamma)
        for depth, (probability, length) in enumerate(zip(by_depth, lengths, strict=True), 1):
            reached *= probability
            tokens += reached
            forwards = 1.0 + rows
            rows += length
            arms.append((Shape(depth), tokens, forwards, rows))
        return arms

    def _look_at_trees(self, by_depth: list[float]) -> list[_Arm]:
        """Return trees, and take note of what the model promises of them; takes 35 us."""
        if self._max_nodes < TREE_NODES[0]:
            return []
        arms, trees = [], self._costs.trees
        self._promised = {}
        for depth in (d for d in TREE_DEPTHS if d <= self._max_gamma):
            tokens = trees.model(by_depth[:depth], self._max_nodes)
            for nodes in (n for n in TREE_NODES if depth < n <= len(tokens)):
                shape, expected = Shape(depth, nodes), tokens[nodes - 1]
                self._promised[shape] = expected
                arms.append((shape, expected * trees.bias, float(depth), float(nodes)))
        return arms
