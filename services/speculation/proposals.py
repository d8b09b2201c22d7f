"""Reads proposals off the speculation tree.

A proposal is the chain of the draft's own choices, or for wide shapes the nodes that the target most likely
reaches. Open nodes on the way are returned to the caller, which must feed them first.

A parallel draft model (PARD, arXiv 2504.18583) predicts all tokens of a proposal in one forward, from mask
tokens after the root: the tokens at one depth have the same prediction, whatever precedes them. Then only the
root can be open, and its `block` has the predictions of the depths after the first.

A chain with shipped distributions (rejection, block verification above temperature 0) takes the same number
of forwards wherever it ends. If it were answered sooner once an end of sequence is drawn, proposals with one
would meet a deadline more often than others. Since late proposals are not tested, the tested tokens would no
longer follow the distribution shipped with them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from gammaray.blocks import Shape
from gammaray.types import Proposal
from services.speculation.calibration import scales
from services.speculation.predictions import NOTHING, Guess, Prediction
from services.speculation.tree import Node

RUN = 4
"""Upper bound of single-row forwards in one call; called one by one, Python takes a third of their time."""

MIN_PROPOSED, MIN_GROWN = 0.02, 0.05
"""Tree nodes with a lower probability of being reached are not proposed, or get no children: a node costs the
target some hundredths of a forward and saves at most its probability of being reached."""


class ProposalBuilder:
    """Reads a proposal below a node, which is taken as the last committed token.

    Args:
        eos_token_ids: Tokens after which a proposal ends.
        power: Exponent of confidences; see `services.speculation.calibration`. 1 where the choice is a draw.
        is_parallel: Whether the draft is a parallel one.

    Attributes:
        nodes: The nodes so far, each after its parent.
        weights: Of a tree, the probability that the target reaches each node.
        parents: Index of each node's parent in `nodes`, -1 for children of the root; None for a chain.
    """

    def __init__(
        self,
        root: Node,
        shape: Shape,
        eos_token_ids: Sequence[int],
        power: float = 1.0,
        *,
        is_parallel: bool = False,
    ) -> None:
        self.root, self.shape, self._is_parallel = root, shape, is_parallel
        self._eos = eos_token_ids
        self.nodes: list[Node] = []
        self.weights: list[float] = []
        self.parents: list[int] | None = [] if shape.is_tree else None
        # With a power above 1 runners-up could outweigh the first choice, although they are offered after it.
        self._power = power if self.parents is None else min(power, 1.0)
        self._is_ended = self._is_read = False
        self._beyond: list[Node] = []  # drafted after the end of sequence, to keep the duration constant

    def advance(self) -> list[Node]:
        """Read as far as the tree has predictions; return the open nodes reached, none when complete."""
        if self._is_parallel and not self.has_block:
            return [self.root]
        return self._read_chain() if self.parents is None else self._read_tree()

    @property
    def has_block(self) -> bool:
        """Whether a parallel draft model has predicted all tokens of the proposal."""
        return self.root.prediction is not None and len(self.root.block) >= self.shape.depth - 1

    def prediction_after(self, node: Node) -> Prediction | None:
        """Return the prediction of the proposal's token after a node; None where it is not known."""
        depth = node.position - self.root.position
        if not self._is_parallel or depth == 0:
            return node.prediction
        return self.root.block[depth - 1] if depth <= len(self.root.block) else None

    @property
    def depth(self) -> int:
        """Length of the longest path, in tokens."""
        return max((node.position for node in self.nodes), default=self.root.position) - self.root.position

    @property
    def longest_run(self) -> int:
        """Upper bound of single-row forwards in one call; 1 for a tree and for a parallel draft."""
        return RUN if self.parents is None and not self._is_parallel else 1

    @property
    def run_length(self) -> int:
        """Number of single-row forwards to run now: at most what the proposal may still need."""
        depth = min(self.shape.drafted_depth or self.shape.depth, self.shape.depth)
        return min(self.longest_run, max(1, depth - len(self.nodes) - len(self._beyond)))

    def proposal(self) -> Proposal:
        """Return the proposal read so far."""
        token_ids = tuple(node.token_id for node in self.nodes)
        if self.parents is not None:
            return Proposal(token_ids, tuple(self.parents))
        distributions = []
        for node in (self.root, *self.nodes[:-1]):
            prediction = self.prediction_after(node)
            if prediction is None or prediction.distribution is None:
                return Proposal(token_ids)
            distributions.append(prediction.distribution)
        return Proposal(token_ids, None, tuple(distributions))

    def outcomes(self) -> tuple[list[tuple[float, Node, int]], list[tuple[float, Node]]]:
        """Return the likely outcomes of verifying this proposal.

        Returns:
            The likely (probability, last accepted node, next token), and the (probability, node) of open
            nodes after which verification may also end.
        """
        proposed: list[set[int]] = [set() for _ in range(len(self.nodes) + 1)]
        for index, node in enumerate(self.nodes):
            parent = index - 1 if self.parents is None else self.parents[index]
            proposed[parent + 1].add(node.token_id)
        reached = self._reached()
        ends, still_open = [], []
        for node, weight, tested in zip((self.root, *self.nodes), reached, proposed, strict=True):
            if node.token_id in self._eos and node is not self.root:
                continue
            prediction = self.prediction_after(node)
            if prediction is None:
                if not self._is_parallel:
                    still_open.append((weight, node))
                continue
            for token_id, probability in self.guesses(prediction, is_tested=bool(tested)):
                if token_id not in tested:
                    ends.append((weight * probability, node, token_id))
        return ends, still_open

    def tested(self, token_ids: Sequence[int]) -> tuple[list[tuple[Prediction, int]], bool]:
        """Return the predictions that the session's tokens tested, with the base; whether the last failed."""
        node, base = self.root, self.root.position + 1
        tested: list[tuple[Prediction, int]] = []
        for token_id in token_ids[base : base + self.depth]:
            prediction = self.prediction_after(node)
            if prediction is None:
                break
            tested.append((prediction, base))
            if prediction.choose(base) != token_id:
                return tested, True
            node = node.child(token_id)
        return tested, False

    def guesses(self, prediction: Prediction, *, is_tested: bool) -> list[Guess]:
        """Return the target's likely tokens, calibrated; `is_tested`: the proposal has the draft's choice."""
        base = self.root.position + 1
        guesses = prediction.guesses(base if is_tested else None)
        if self._power == 1.0:
            return list(guesses)
        choice, (sure, unsure) = prediction.choose(base), scales(prediction.confidence(base), self._power)
        return [(token_id, share * (sure if token_id == choice else unsure)) for token_id, share in guesses]

    @property
    def reach(self) -> float:
        """The probability that the target reaches the end of a chain; of a tree 1."""
        return self._reached()[-1] if self.parents is None else 1.0

    def _reached(self) -> list[float]:
        """The probability that the target reaches the root and each node."""
        if self.parents is not None:
            return [1.0, *self.weights]
        base, reached, node = self.root.position + 1, [1.0], self.root
        for following in self.nodes:
            prediction = self.prediction_after(node)
            assert prediction is not None
            reached.append(reached[-1] * prediction.confidence(base) ** self._power)
            node = following
        return reached

    def _read_chain(self) -> list[Node]:
        base = self.root.position + 1
        while len(self.nodes) + len(self._beyond) < self.shape.depth and not self._is_read:
            tip = (self._beyond or self.nodes or [self.root])[-1]
            prediction = self.prediction_after(tip)
            if prediction is None:
                return [] if 0 < self.shape.drafted_depth <= len(self.nodes) else [tip]
            if prediction is NOTHING:
                break
            following = tip.child(prediction.choose(base))
            if self._is_ended:
                self._beyond.append(following)
            else:
                self.nodes.append(following)
                self._is_ended = following.token_id in self._eos
            self._is_read = self._is_ended and prediction.distribution is None
        return []

    def _read_tree(self) -> list[Node]:
        """Read the most likely nodes, best first; a child is never likelier than its parent."""
        self.nodes, self.weights, self.parents = [], [], []
        nodes, weights, parents = self.nodes, self.weights, self.parents
        max_position = self.root.position + self.shape.depth
        still_open: list[Node] = []
        # Entries: minus the weight, insertion order to break ties, parent, the parent's index, rank.
        heap: list[tuple[float, int, Node, int, int]] = []
        age = itertools.count()

        def guesses_after(node: Node) -> Sequence[Guess]:
            prediction = self.prediction_after(node)
            assert prediction is not None  # `grow` offers only nodes that have one
            return prediction.guesses(None)

        def offer(parent: Node, index: int, weight: float, rank: int) -> None:
            guesses = guesses_after(parent)
            if rank < len(guesses):
                weight *= guesses[rank][1] * scales(guesses[0][1], self._power)[rank > 0]
                if weight >= MIN_PROPOSED or not nodes:
                    heapq.heappush(heap, (-weight, next(age), parent, index, rank))

        def grow(node: Node, index: int, weight: float) -> None:
            is_last = node.position >= max_position or (index >= 0 and node.token_id in self._eos)
            if is_last or weight < MIN_GROWN:
                return
            if self.prediction_after(node) is None:
                still_open.append(node)
            else:
                offer(node, index, weight, 0)

        grow(self.root, -1, 1.0)
        while heap and len(nodes) < self.shape.max_nodes:
            negative, _, parent, index, rank = heapq.heappop(heap)
            node = parent.child(guesses_after(parent)[rank][0])
            nodes.append(node)
            weights.append(-negative)
            parents.append(index)
            grow(node, len(nodes) - 1, -negative)
            offer(parent, index, weights[index] if index >= 0 else 1.0, rank + 1)
        return still_open
