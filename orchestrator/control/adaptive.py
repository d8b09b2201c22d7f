"""The adaptive gamma controller: expected tokens from acceptance by depth, seconds from a linear cost model.

Each choice is the best under one sample from the posterior of both, held for some cycles. Shapes whose speed
is uncertain are thus tried as often as they may turn out to be the best (Thompson sampling). The choice
depends on committed tokens and past cycles only, which keeps every verification method lossless.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from gammaray.blocks import Shape
from gammaray.maths.acceptance import AcceptanceEstimator
from gammaray.types import DrafterKind
from orchestrator.control import costs as cost_model
from orchestrator.control.costs import HOLD, RATE, STRENGTH, CostModel
from orchestrator.control.fixed import Reason
from orchestrator.control.match_acceptance import MatchAcceptance
from orchestrator.cycle.types import Candidates, Cycle, Match

FIRST_GAMMA = 4
"""Gamma of the first cycles, while no costs are known: about the best fixed one."""

REFRESH = 4
"""Cycles for which one evaluation of all shapes serves: it takes as long as learning from two cycles."""

TREE_DEPTHS, TREE_NODES = (1, 2, 3, 4, 6, 8), (2, 4, 8, 16, 32)
"""Trees that are considered, within the request's bounds. The best of them and of all chains has 0.998 of the
oracle's speed in simulation, mean of 108 worlds; chains alone have 0.906."""

FEW = 3
"""Tokens at most that are drafted of a chain that was not prepared, if not all are."""


class AdaptiveGamma:
    """Chooses the drafter and the shape, gamma 0 included, with the most expected tokens per second.

    Tokens that a grammar forces are proposed alone. Else the draft model and the matches of look-ups compete,
    under the same sample of costs. The rows of a proposal take time from the other sessions of the target
    worker. The tokens that these lose in that time are subtracted, so that the tokens per second of all
    sessions together are maximised.

    After plain cycles a proposal of the model has at most 2 rows, and then at most twice as many as the
    largest one since. A trial of a draft that is still useless thus costs little.

    Args:
        max_gamma: Upper bound of the depth of the model's proposals.
        costs: Shared by the sessions of this replica.
        max_nodes: Upper bound of their nodes; up to 1 for chains only.
        max_match: Upper bound of the tokens of a match that are proposed.
        temperature: Of the request.
        few: Upper bound of the tokens that are drafted of a chain that was not prepared; 0: all are.

    Attributes:
        speed: Tokens per second that are expected of the last shape; 0 while no costs are known.
    """

    def __init__(
        self,
        max_gamma: int,
        costs: CostModel,
        max_nodes: int = 0,
        *,
        max_match: int = 0,
        temperature: float = 0.0,
        few: int = FEW,
    ) -> None:
        self._max_gamma, self._max_match, self._costs, self._few = max_gamma, max_match, costs, few
        self._acceptance = AcceptanceEstimator(1.0 - RATE, prior_strength=STRENGTH, fleet=costs.acceptance)
        self._of_matches = MatchAcceptance(costs.of_matches, temperature)
        self._matches: Sequence[Match] = ()  # of the cycle that runs
        self._was_plain, self._num_drafting, self._largest = True, 0, math.inf
        self._has_proposed, self._num_cycles = False, 0
        self._shape: Shape | None = None
        self._renewed, self._expected, self._speed, self.speed = 0, 0.0, 0.0, 0.0
        sizes = {
            depth: [_shape(depth, nodes) for nodes in TREE_NODES if depth < nodes <= max_nodes]
            for depth in TREE_DEPTHS
            if depth <= max_gamma
        }
        self._tree_shapes = {depth: shapes for depth, shapes in sizes.items() if shapes}
        self._trees: list[tuple[Shape, float]] = []

    def next_shape(self, candidates: Candidates) -> Shape:
        """Return the shape of the next cycle's proposal, which names its drafter, with the reason."""
        self._matches = candidates.matches
        if candidates.num_forced:
            self._matches = ()
            return _shape(candidates.num_forced, 0, DrafterKind.GRAMMAR, Reason.FORCED)
        shape = Shape(0, drafter=DrafterKind.SUFFIX)
        self.speed = 0.0
        if candidates.models:
            shape, self.speed = replace(self._by_model(), drafter=candidates.models[0]), self._speed
        if candidates.matches:
            by_match, speed = self._best_match(candidates.matches, leaves_model=bool(candidates.models))
            if shape.depth == 0 or speed > self.speed:
                shape, self.speed = by_match, speed
        return replace(shape, is_fallback=True) if candidates.is_fallback else shape

    @property
    def is_new(self) -> bool:
        """Whether no proposal of the model was measured."""
        return not self._costs.has_drafted

    def observe(self, cycle: Cycle, *, by_other: bool = False) -> None:
        """Learn from a finished cycle; one whose drafter failed is evidence for none but the matches.

        `by_other`: another model proposed, so the cycle says nothing of this one.
        """
        for match in self._matches:
            self._of_matches.observe(match, cycle.token_ids)
        if cycle.has_fallen_back:
            return
        self._num_cycles += 1
        if cycle.shape.drafter.is_model and not by_other:
            self._observe_model(cycle)
            return
        self._costs.observe(cycle, was_plain=False, by_other=by_other)
        self._was_plain, self._num_drafting = True, 0  # the model has to catch up

    def _observe_model(self, cycle: Cycle) -> None:
        tested, accepted = cycle.first_children
        if tested:
            self._acceptance.observe(tested, accepted)
        elif cycle.gamma == 0:
            self._acceptance.fade(1.0 - cost_model.FORGETTING)
        if cycle.num_drafted > 0 and cycle.shape.is_tree and cycle.shape == self._shape:
            self._costs.trees.observe(cycle.levels, self._expected)
        is_entry = cycle.num_drafted > 0 and not self._has_proposed
        self._costs.observe(cycle, was_plain=self._was_plain, is_entry=is_entry)
        self._has_proposed |= is_entry
        self._was_plain = cycle.num_drafted == 0
        self._num_drafting = 0 if self._was_plain else self._num_drafting + 1
        self._largest = 1.0 if cycle.gamma == 0 else max(self._largest, float(cycle.num_drafted))

    def _by_model(self) -> Shape:
        if self._max_gamma == 0:
            return _shape(0, 0, reason=Reason.OFF)
        if not self._costs.is_known:
            return _shape(min(FIRST_GAMMA, self._max_gamma), 0, reason=Reason.FIRST)
        has_begun = 0 < self._num_drafting < REFRESH  # a trial that fails ends at once
        is_renewed = self._renewed != self._costs.num_renewed
        if self._num_cycles % REFRESH == 0 or is_renewed or has_begun or self._shape is None:
            by_depth = self._sampled(self._acceptance, self._max_gamma)
            if is_renewed:
                self._renewed, self._trees = self._costs.num_renewed, self._evaluate_trees(by_depth)
            self._shape = self._best(by_depth)
        return self._shape

    def _best(self, by_depth: list[float]) -> Shape:
        """Return the best shape of the model under the current posterior sample."""
        model = self._costs
        costs = model.sample()
        plain_s, price, added = model.plain_s(costs), model.price(costs), model.added_rows
        draft_s = costs.draft + (plain_s + (model.catch_up_s / HOLD if self._was_plain else 0.0))
        bias, most_rows = model.trees.bias, 2.0 * self._largest
        best, highest, self._expected = _shape(0, 0), 1.0 / plain_s, 0.0
        chains = [(0.0, 1.0)]  # by depth: tokens, seconds if it is prepared
        tokens = reached = 1.0
        for depth, probability in enumerate(by_depth, 1):
            reached *= probability
            tokens += reached
            if depth <= most_rows:
                chains.append((tokens - price * depth, draft_s + costs.row * added[depth]))
        prepared = [model.prepared_after(depth) for depth in range(len(chains))]
        best, highest = _best_chain(chains, prepared, costs.forward, self._few, highest)
        for shape, expected in self._trees:
            rows = shape.max_nodes
            seconds = draft_s + (1.0 - model.prepared) * costs.forward * shape.depth + costs.row * added[rows]
            speed = (expected * bias - price * rows) / seconds
            if speed > highest and rows <= most_rows:
                best, highest, self._expected = shape, speed, expected
        self._speed = highest
        return best

    def _best_match(self, matches: Sequence[Match], *, leaves_model: bool) -> tuple[Shape, float]:
        """Return the shape of the best match, or of gamma 0, and its expected tokens per second.

        A match takes rows and no forward of a draft model. If it `leaves_model`, the first one also takes the
        time in which the model has to catch up afterwards. While no costs are known, the longest match is
        proposed, and its speed counts as 0.
        """
        model = self._costs
        if not model.is_known:
            longest = max(matches, key=lambda match: match.length)
            depth = min(len(longest.token_ids), self._max_match)
            return _shape(depth, 0, longest.kind, Reason.FIRST), 0.0
        costs = model.sample()
        plain_s, price, added = model.plain_s(costs), model.price(costs), model.added_rows
        best, highest = _shape(0, 0), 1.0 / plain_s
        match_s = plain_s + (model.catch_up_s if leaves_model and not self._was_plain else 0.0)
        for match in matches:
            most = min(len(match.token_ids), self._max_match)
            tokens = reached = 1.0
            for depth, probability in enumerate(self._sampled(self._of_matches.of(match), most), 1):
                reached *= probability
                tokens += reached
                speed = (tokens - price * depth) / (match_s + costs.row * added[depth])
                if speed > highest:
                    best, highest = _shape(depth, 0, match.kind), speed
        return best, highest

    def _sampled(self, acceptance: AcceptanceEstimator, depth: int) -> list[float]:
        """Return a posterior sample of the probability of acceptance, by depth."""
        draw = self._costs.draws[-1] / math.sqrt(STRENGTH + acceptance.num_tested)
        return [min(1.0, max(0.0, p + draw * math.sqrt(p * (1.0 - p)))) for p in acceptance.by_depth(depth)]

    def _evaluate_trees(self, by_depth: list[float]) -> list[tuple[Shape, float]]:
        """Return the trees that are considered, with the tokens that the model expects."""
        trees = []
        for depth, shapes in self._tree_shapes.items():
            tokens = self._costs.trees.expected_tokens(by_depth[:depth], shapes[-1].max_nodes)
            found = len(tokens)  # fewer than requested if the tree is complete
            trees += [(shape, tokens[shape.max_nodes - 1]) for shape in shapes if shape.max_nodes <= found]
        return trees


def _best_chain(
    chains: Sequence[tuple[float, float]],
    prepared: Sequence[float],
    forward_s: float,
    few: int,
    highest: float,
) -> tuple[Shape, float]:
    """Return the chain with most tokens per second, and these; gamma 0 and `highest` if none has more.

    What was prepared is proposed whole. Of another proposal few tokens may be drafted: the session waits
    less, and the next proposal is prepared more often, as a short one has fewer outcomes.

    Args:
        chains: Tokens, and seconds without a wait for the draft, by depth.
        prepared: The share of proposals that are prepared, by the depth of the proposal before.
        forward_s: Wait for each token that is drafted.
        few: Upper bound of these tokens, unless the whole chain is drafted.
    """
    best = _shape(0, 0)
    for depth in range(1, len(chains)):
        for drafted in {*range(1, min(depth, few) + 1), depth}:
            share = prepared[drafted] / (1.0 - prepared[depth] + prepared[drafted])  # in the long run
            (tokens, seconds), (others, others_s) = chains[depth], chains[drafted]
            mean_s = share * seconds + (1.0 - share) * (others_s + forward_s * drafted)
            speed = (share * tokens + (1.0 - share) * others) / mean_s
            if speed > highest:
                best, highest = replace(_shape(depth, 0), drafted_depth=drafted % depth), speed
    return best, highest


@functools.cache
def _shape(
    depth: int, max_nodes: int, drafter: DrafterKind = DrafterKind.MODEL, reason: Reason = Reason.BEST
) -> Shape:
    return Shape(depth, max_nodes, reason=reason.value, drafter=drafter)
