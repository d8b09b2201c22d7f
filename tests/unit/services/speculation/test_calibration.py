"""Calibration of the draft's confidence, learned from verification."""

import random
from collections.abc import Callable

import pytest
from test_draft_tree import EOS, Fixed

from gammaray.blocks import Shape
from gammaray.types import SamplingParams, VerificationMethod
from services.speculation.calibration import Calibration
from services.speculation.proposals import ProposalBuilder
from services.speculation.tree import Node
from tests.support.draft_helpers import VOCAB, Drafter, TableEngine

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
