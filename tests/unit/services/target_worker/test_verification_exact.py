"""Losslessness by enumeration: cycles of the real draft and verify code, then plain decoding, give the
target's distribution.

Every total variation below is exact up to floating point; nothing is sampled.
"""

import itertools

import pytest
import torch

from gammaray.types import Proposal, VerificationMethod
from services.engine.sampling.noise import Noise
from services.speculation.predictions import ENTROPY_FACTOR, quantise
from tests.support.drafting_helpers import propose_token
from tests.support.maths_helpers import (
    Blend,
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

COUPLED, REJECTION, NAIVE, BLOCK = VerificationMethod
START = (0,)
EXACT = 1e-12
BY_DISTRIBUTION = pytest.mark.parametrize(
    "distribution_of", [rejection_distribution, block_distribution], ids=["rejection", "block"]
)


def assert_lossless(distribution, target, length):
    whole = completed(distribution, target, START, length)
    assert distance(whole, plain_distribution(target, START, length)) < EXACT


def cycle_of(target, proposals, distribution_of):
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


@BY_DISTRIBUTION
@pytest.mark.parametrize("gamma", range(1, 5))
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


def test_rejection_acceptance_and_corrections_are_golden():
    """p = (.5, .2, .1, .2), q = (.4, .3, .2, .1): alpha .8 and corrections (.5, 0, 0, .5)."""

    class Fixed(TinyModel):
        def distribution(self, context):
            return [0.5, 0.2, 0.1, 0.2]

    shipped = quantise(torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64), 4, 24)
    alpha, corrections = 0.0, [0.0] * 4
    for token_id, weight in zip(shipped.token_ids, shipped.weights, strict=True):
        emitted = rejection_distribution(Fixed(4, 0), START, Proposal((token_id,), None, (shipped,)))
        for tokens, prob in emitted.items():
            if len(tokens) == 2:
                alpha += weight / 2**24 * prob
            else:
                corrections[tokens[0]] += weight / 2**24 * prob
    assert alpha == pytest.approx(0.8, abs=1e-6)
    assert [prob / 0.2 for prob in corrections] == pytest.approx([0.5, 0, 0, 0.5], abs=1e-5)


@pytest.mark.parametrize("method", [COUPLED, NAIVE])
@pytest.mark.parametrize("gamma", range(5))
def test_matching_cycle_is_lossless_for_every_chain(method, gamma):
    target = TinyModel(3, 11, zeros=0.2)
    for tokens in itertools.product(range(3), repeat=gamma):
        assert_lossless(matched_distribution(method, target, START, Proposal(tokens)), target, gamma + 1)


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
    drawn = [propose_token(REJECTION, row, noise, base, 200, 16, 12) for base in range(100)]
    assert len({token_id for token_id, _, _ in drawn}) > 5
    assert len({confidence for _, _, confidence in drawn}) == 1
    distribution = drawn[0][1]
    probs = torch.tensor(distribution.weights).double() / 4096
    entropy = float(-(probs * probs.log()).sum())
    assert drawn[0][2] == pytest.approx(max(0.0, 1 - (ENTROPY_FACTOR * entropy) ** 0.5))


def test_rejection_emits_more_with_a_better_draft():
    target = TinyModel(3, 1)
    accepted = []
    for share in (0.0, 0.3, 1.0):
        shipped = quantised_drafter(Blend(target, 9, share), 3, 10)
        distribution = cycle_of(target, chain_proposals(shipped, START, 1), rejection_distribution)
        accepted.append(sum(prob for tokens, prob in distribution.items() if len(tokens) == 2))
    assert accepted[0] > 0.999
    assert accepted == sorted(accepted, reverse=True)
