"""The speculation tree and its proposals, against brute force over all paths."""

import itertools
import random
from collections.abc import Sequence

import pytest

from gammaray.blocks import Shape
from gammaray.types import Proposal, SparseDistribution
from services.speculation.predictions import Guess
from services.speculation.proposals import MIN_GROWN, MIN_PROPOSED, ProposalBuilder
from services.speculation.tree import Node

EOS = (0,)
DISTRIBUTION = SparseDistribution((0, 1, 2), (2, 1, 1), 2)


class Fixed:
    """A prediction with given guesses, whose choice for odd bases is the second."""

    distribution: SparseDistribution | None = None

    def __init__(self, *guesses: Guess) -> None:
        self._guesses = guesses

    def choose(self, base: int) -> int:
        return self._guesses[base % 2 and len(self._guesses) > 1][0]

    def confidence(self, base: int) -> float:
        return self._guesses[0][1]

    def guesses(self, base: int | None) -> Sequence[Guess]:
        return self._guesses


def random_prediction(rng: random.Random) -> Fixed:
    weights = sorted((rng.random() ** 3 for _ in range(5)), reverse=True)
    return Fixed(*((rng.randrange(1, 10**6), weight / sum(weights)) for weight in weights))


def opened(root: Node, levels: int, rng: random.Random) -> None:
    """Open everything down to some depth, as a function of the path alone."""
    nodes = [root]
    for _ in range(levels):
        for node in nodes:
            node.prediction = random_prediction(rng)
        nodes = [node.child(token_id) for node in nodes for token_id, _ in node.prediction.guesses(None)]


def test_chain_and_tree_end_with_the_end_of_sequence():
    root = Node(9, 5, None)
    root.prediction = Fixed((0, 0.7), (3, 0.3))
    chain, tree = ProposalBuilder(root, Shape(4), EOS), ProposalBuilder(root, Shape(4, 6), EOS)
    assert chain.advance() == []
    assert chain.proposal().token_ids == (0,)
    assert tree.advance() == [root.child(3)]
    assert tree.proposal() == Proposal((0, 3), (-1, -1))


@pytest.mark.parametrize("chain", list(itertools.product((0, 1, 2), repeat=3)))
def test_duration_of_a_rejection_chain_does_not_depend_on_its_tokens(chain):
    root = Node(9, 5, None)
    reading = ProposalBuilder(root, Shape(3), EOS)
    for num_opened, token_id in enumerate(chain):
        (tip,) = reading.advance()
        assert tip.position == root.position + num_opened
        tip.prediction = Fixed((token_id, 0.9 if token_id == 1 else 0.5))
        tip.prediction.distribution = DISTRIBUTION
    assert reading.advance() == []
    proposal = reading.proposal()
    length = next((index + 1 for index, token_id in enumerate(chain) if token_id in EOS), 3)
    assert proposal.token_ids == chain[:length]
    assert len(proposal.draft_distributions or ()) == length


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("depth", "max_nodes"), [(3, 4), (3, 8), (4, 16), (2, 60)])
def test_tree_contains_the_most_likely_nodes(seed, depth, max_nodes):
    root = Node(9, 5, None)
    opened(root, depth, random.Random(seed))
    reading = ProposalBuilder(root, Shape(depth, max_nodes), EOS)
    assert reading.advance() == []
    assert reading.parents is not None

    everything = []
    for length in range(1, depth + 1):
        for ranks in itertools.product(range(5), repeat=length):
            node, weight, lowest_inner = root, 1.0, 1.0
            for rank in ranks:
                lowest_inner = weight
                token_id, chance = node.prediction.guesses(None)[rank]
                node, weight = node.child(token_id), weight * chance
            if weight >= MIN_PROPOSED and lowest_inner >= MIN_GROWN:
                everything.append((weight, node))
    best = sorted(everything, key=lambda pair: pair[0], reverse=True)[:max_nodes]
    assert reading.weights == pytest.approx([weight for weight, _ in best])
    assert reading.nodes == [node for _, node in best]
    for index, (node, parent) in enumerate(zip(reading.nodes, reading.parents, strict=True)):
        assert parent < index
        assert node.parent is (root if parent < 0 else reading.nodes[parent])
