"""The speculation tree and its proposals, against brute force over all paths."""

import itertools
import random
from collections.abc import Sequence

import pytest

from gammaray.blocks import Shape
from gammaray.types import Proposal, SparseDistribution
from services.speculation.predictions import Guess
from services.speculation.proposals import MIN_GROWN, MIN_PROPOSED, ProposalBuilder
from services.speculation.tree import IN_CHAIN, Node, SpeculationTree

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


@pytest.mark.parametrize("seed", range(6))
def test_tree_takes_one_forward_per_level_and_ends_at_the_same_nodes(seed):
    rng, root, whole = random.Random(seed), Node(9, 5, None), Node(9, 5, None)
    opened(whole, 4, rng)
    reading, wanted = ProposalBuilder(root, Shape(4, 12), EOS), ProposalBuilder(whole, Shape(4, 12), EOS)
    wanted.advance()
    twins, levels = {root: whole}, 0
    while level := reading.advance():
        levels += 1
        for node in level:
            if node is not root:
                twins[node] = twins[node.parent].child(node.token_id)
            node.prediction = twins[node].prediction
    assert levels <= 4
    assert reading.proposal() == wanted.proposal()


class Cache:
    """Slots of the engine: a chain of nodes and other nodes."""

    def __init__(self, tree: SpeculationTree) -> None:
        self.chain: list[object] = [None] * tree.root.position + [tree.root]
        self.off_chain: list[Node] = []

    def feed(self, tree: SpeculationTree, nodes: list[Node]) -> None:
        if tree.feeds_chain(nodes):
            self.chain.append(nodes[0])
        else:
            for node, parent in zip(nodes, tree.parents_of(nodes), strict=True):
                held = self.off_chain[parent] if parent >= 0 else self.chain[parent]
                assert held is node.parent
                self.off_chain.append(node)
        tree.fed(nodes)

    def move(self, base: int, path: list[int], keep: list[int]) -> None:
        self.chain[base:] = [self.off_chain[place] for place in path]
        self.off_chain = [self.off_chain[place] for place in keep]

    def check(self, tree: SpeculationTree) -> None:
        """Every fed node below the root is where the tree says, and every slot that counts is known."""
        assert len(self.chain) == tree.chain_length
        assert self.off_chain == tree.off_chain
        for node in (tree.root, *tree.root.below()):
            if node.place == IN_CHAIN:
                assert self.chain[node.position] is node
            elif node.place is not None:
                assert self.off_chain[node.place] is node


def test_tree_tracks_slots_when_its_root_moves(subtests):
    for seed in range(30):
        with subtests.test(seed=seed):
            rng = random.Random(seed)
            tree = SpeculationTree(Node(9, 5, None))
            tree.root_fed()
            tree.root.prediction = random_prediction(rng)
            cache = Cache(tree)
            for _ in range(25):
                for _ in range(rng.randrange(6)):
                    fed = [n for n in (tree.root, *tree.root.below()) if n.prediction is not None]
                    parents = rng.sample(fed, k=min(len(fed), rng.choice((1, 1, 1, 3))))
                    nodes = [p.child(rng.choice(p.prediction.guesses(None))[0]) for p in parents]
                    nodes = [node for node in dict.fromkeys(nodes) if node.place is None]
                    if nodes:
                        cache.feed(tree, nodes)
                        for node in nodes:
                            node.prediction = random_prediction(rng)
                        cache.check(tree)
                fed = [node for node in tree.root.below() if node.place is not None]
                if fed and rng.random() < 0.5:
                    root = rng.choice(fed)
                    survivors = [node for node in root.below() if node.place is not None]
                    path = [node.token_id for node in root.path()]
                    assert tree.find(path) is root
                    assert tree.find([*path, -1]) is root
                    moved = tree.move_root(root)
                    if moved is not None:
                        cache.move(*moved)
                    assert tree.root is root
                    assert root.parent is None
                    assert all(node.place is not None for node in survivors)
                    cache.check(tree)
