"""The speculation tree and its proposals against brute force; confidences learned from verification."""

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from gammaray.blocks import Shape
from gammaray.types import Proposal, SamplingParams, SparseDistribution, VerificationMethod
from services.speculation.calibration import Calibration
from services.speculation.predictions import Guess
from services.speculation.proposals import MIN_GROWN, MIN_PROPOSED, ProposalBuilder
from services.speculation.tree import Node
from tests.support.draft_helpers import VOCAB, Drafter, TableEngine

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


def opened(root: Node, levels: int, rng: random.Random) -> None:
    """Open everything down to some depth, as a function of the path alone."""
    nodes = [root]
    for _ in range(levels):
        for node in nodes:
            weights = sorted((rng.random() ** 3 for _ in range(5)), reverse=True)
            node.prediction = Fixed(*((rng.randrange(1, 10**6), weight / sum(weights)) for weight in weights))
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


PROMPT = [1, 2, 3, 4]


def taught(calibration: Calibration, power: float, num_proposals: int, seed: int = 1) -> None:
    """Observe proposals of four tokens, accepted with the probability of their confidence to this power."""
    rng = random.Random(seed)
    for _ in range(num_proposals):
        tested, is_rejected = [], False
        while len(tested) < 4 and not is_rejected:
            tested.append(rng.uniform(0.3, 1.0))
            is_rejected = rng.random() >= tested[-1] ** power
        calibration.observe(tested, is_rejected=is_rejected)


@pytest.mark.parametrize("power", [0.4, 1.0, 1.6])
def test_learned_power_calibrates_confidences(power):
    # Some 512 proposals count, of two to three tested tokens with an information of about a quarter each:
    # three standard deviations of the logarithm are 3 / sqrt(300) = 0.17.
    calibration = Calibration()
    taught(calibration, power, 3000)
    assert calibration.power == pytest.approx(power, rel=0.17)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_chain_is_reached_with_the_calibrated_confidence(power):
    root = Node(9, 5, None)
    node = root
    for token_id in range(1, 5):
        node.prediction = Fixed((token_id, 0.5))
        node = node.child(token_id)
    reading = ProposalBuilder(root, Shape(4), EOS, power)
    assert reading.advance() == []
    assert reading.outcomes()[1] == [(pytest.approx(0.5 ** (4 * power)), node)]


def compared(
    follow: Callable[[list[int], tuple[int, ...]], list[int]],
    method: VerificationMethod = VerificationMethod.COUPLED,
) -> float:
    """Return how likely a session takes its chains to be accepted whole, over what new sessions do."""
    drafter, tokens = Drafter(TableEngine()), list(PROMPT)
    fields = {"params": SamplingParams(seed=5), "method": method}
    ours = theirs = 0.0
    for cycle in range(30):
        chain = drafter.ask(tokens, 4, **fields).outcome.token_ids
        if cycle >= 10:
            fresh = Drafter(TableEngine())
            fresh.ask(tokens, 4, **fields)
            ours += accepted_whole(drafter)
            theirs += accepted_whole(fresh)
        tokens = follow(tokens, chain)
    return ours / theirs


def accepted_whole(drafter: Drafter) -> float:
    """Return the draft's estimate of the probability that its last chain is accepted whole."""
    sent = drafter.scheduler.speculations["s"].sent
    assert sent is not None
    ((weight, _),) = sent.outcomes()[1]
    return weight


def test_session_gets_more_confident_by_accepted_tokens_and_less_by_rejected_ones():
    assert compared(lambda tokens, chain: [*tokens, *chain, (chain[-1] + 1) % VOCAB]) > 1.2
    assert compared(lambda tokens, chain: [*tokens, (chain[0] + 1) % VOCAB]) < 0.8


@pytest.mark.parametrize(
    "method", [VerificationMethod.REJECTION, VerificationMethod.NAIVE, VerificationMethod.BLOCK]
)
def test_sampled_draft_tokens_do_not_change_the_calibration(method):
    assert compared(lambda tokens, chain: [*tokens, *chain, (chain[-1] + 1) % VOCAB], method) == 1.0
