"""Losslessness by enumeration: cycles of the real draft and verify code, then plain decoding, give the
target's distribution. Planted faults are found.

Every total variation below is exact up to floating point; nothing is sampled, unless marked as statistical.
"""

import itertools
import math
from functools import partial

import pytest
import torch

from gammaray.types import Proposal, SamplingParams, VerificationMethod
from services.engine.sampling.noise import Noise
from services.speculation.predictions import ENTROPY_FACTOR
from services.verification import rules as verification
from tests.support.maths_helpers import (
    TinyModel,
    block_distribution,
    chain_proposals,
    completed,
    distance,
    matched_distribution,
    mixed,
    plain_distribution,
    quantised_drafter,
    rejection_distribution,
)
from tests.support.maths_loop_helpers import Speculator, chain_of, g_test, propose_token

COUPLED, REJECTION, NAIVE, BLOCK = VerificationMethod
MATCHED = [partial(matched_distribution, method) for method in (COUPLED, NAIVE)]

START = (0,)

EXACT = 1e-12

BY_DISTRIBUTION = pytest.mark.parametrize(
    "distribution_of", [rejection_distribution, block_distribution], ids=["rejection", "block"]
)


def assert_lossless(distribution, target, length):
    whole = completed(distribution, target, START, length)
    assert distance(whole, plain_distribution(target, START, length)) < EXACT


def cycle_of(target, proposals, distribution_of=block_distribution):
    return mixed((prob, distribution_of(target, START, proposal)) for prob, proposal in proposals)


@BY_DISTRIBUTION
@pytest.mark.parametrize("gamma", range(5))
@pytest.mark.parametrize(("top_k", "bits"), [(3, 8), (2, 4), (1, 3)], ids=["dense", "sparse", "single"])
@pytest.mark.parametrize("zeros", [0.0, 0.4], ids=["full", "zeros"])
def test_cycle_is_lossless(gamma, top_k, bits, zeros, distribution_of):
    for seed in range(2 if gamma == 4 else 4):
        target, draft = TinyModel(3, seed, zeros), TinyModel(3, seed + 100, zeros)
        proposals = chain_proposals(quantised_drafter(draft, top_k, bits), START, gamma)
        assert_lossless(cycle_of(target, proposals, distribution_of), target, gamma + 1)


@pytest.mark.parametrize("distribution_of", [rejection_distribution, block_distribution, *MATCHED])
@pytest.mark.parametrize("gamma", range(5))
def test_cycle_without_distributions_is_lossless_for_any_token(gamma, distribution_of):
    target = TinyModel(3, 7, zeros=0.2)
    for tokens in itertools.product(range(3), repeat=gamma):
        assert_lossless(distribution_of(target, START, Proposal(tokens)), target, gamma + 1)


@BY_DISTRIBUTION
@pytest.mark.parametrize("ends_after", [None, 2])
def test_chain_that_ends_before_a_draw_is_lossless(ends_after, distribution_of):
    """It may end for any reason that does not depend on the next token, such as an end of sequence."""

    def proposals(context, gamma):
        distribution = shipped(context)
        is_unsure = max(distribution.weights) < 0.55 * (1 << distribution.weight_bits)
        if gamma == 0 or is_unsure or context[-1] == ends_after:
            yield 1.0, Proposal()
            return
        for weight, token_id in zip(distribution.weights, distribution.token_ids, strict=True):
            for prob, rest in proposals((*context, token_id), gamma - 1):
                sent = (distribution, *(rest.draft_distributions or ()))
                yield (
                    prob * weight / (1 << distribution.weight_bits),
                    Proposal((token_id, *rest.token_ids), None, sent),
                )

    lengths = set()
    for seed in range(6):
        target, draft = TinyModel(3, seed), TinyModel(3, seed + 100)
        shipped = quantised_drafter(draft, 3, 6)
        cycle = list(proposals(START, 4))
        lengths |= {len(proposal) for _, proposal in cycle}
        assert_lossless(cycle_of(target, cycle, distribution_of), target, 5)
    assert len(lengths) > 2


TREES = [
    ((0, 1, 2), (-1, -1, -1)),
    ((0, 1, 0, 1, 2), (-1, -1, 0, 0, 1)),
    ((2, 2, 0, 1, 1), (-1, -1, 0, 1, 2)),
    ((1, 0, 2, 0, 2, 1, 0, 2), (-1, 0, 0, 1, 1, 2, 3, -1)),
]


@pytest.mark.parametrize(("tokens", "parents"), TREES)
@pytest.mark.parametrize("seed", range(3))
def test_coupled_tree_is_lossless(tokens, parents, seed):
    target, proposal = TinyModel(3, seed), Proposal(tokens, parents)
    assert_lossless(matched_distribution(COUPLED, target, START, proposal), target, proposal.depth + 1)


def test_rejection_confidence_depends_on_the_distribution_only():
    noise, row = Noise(3, 0, 64), torch.randn(64, generator=torch.manual_seed(0)).log_softmax(-1)
    drawn = [propose_token(REJECTION, row, noise, base, 200) for base in range(100)]
    assert len({token_id for token_id, _, _ in drawn}) > 5
    assert len({confidence for _, _, confidence in drawn}) == 1
    distribution = drawn[0][1]
    probs = torch.tensor(distribution.weights).double() / 4096
    entropy = float(-(probs * probs.log()).sum())
    assert drawn[0][2] == pytest.approx(max(0.0, 1 - (ENTROPY_FACTOR * entropy) ** 0.5))


PLANTED = {
    "accept_always": ("is_accepted", lambda *_: True),
    "correction_of_p": ("residual_distribution", lambda row, draft, scale=1.0: row.double().exp()),
    "carried_of_one_token": ("carry", lambda c, p, w, bits: min(1.0, p * 2**bits / w)),
    "threshold_is_what_is_carried": ("block_threshold", lambda c, excess: c),
    "noise_of_one_position": ("row_depths", lambda proposal: [0] * (len(proposal) + 1)),
}


@pytest.mark.parametrize(("name", "fault"), PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_found(monkeypatch, name, fault):
    target, shipped = TinyModel(4, 0), quantised_drafter(TinyModel(4, 50), 3, 4)
    proposals, tree = list(chain_proposals(shipped, START, 3)), Proposal(*TREES[1])

    def check():
        for distribution_of in (rejection_distribution, block_distribution):
            assert_lossless(cycle_of(target, proposals, distribution_of), target, 4)
        assert_lossless(matched_distribution(COUPLED, target, START, tree), target, tree.depth + 1)

    check()
    monkeypatch.setattr(verification, name, fault)
    # KeyError: a token is tested that no noise was written down for, as the one before it must be rejected.
    with pytest.raises((AssertionError, KeyError)):
        check()


class FixedLogits:
    def __init__(self, *probs):
        self.vocab_size, self._logits = len(probs), torch.tensor(probs).log()

    def logits(self, context):
        return self._logits


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize(("p", "q"), [(1 / 3, 2 / 3), (1 / 2, 0.9)])
def test_draws_and_tests_of_a_block_serve_no_second_time(p, q):
    """What is accepted depends on all of them; a position is drafted and tested again after a rejection."""
    noise = Noise(13, 0, 2)
    made = Speculator(BLOCK, FixedLogits(p, 1 - p), FixedLogits(q, 1 - q), SamplingParams(), noise)
    counts = dict.fromkeys(itertools.product(range(2), repeat=3), 0)
    for sample in range(3000):
        made.offset = sample * 8
        counts[made.generate(3, chain_of(3))] += 1
    expected = [math.prod((p, 1 - p)[token] for token in tokens) for tokens in counts]
    assert g_test(list(counts.values()), expected) > 1e-3
