"""Losslessness by enumeration: cycles of the real draft and verify code, then plain decoding, give the
target's distribution. Block verification is never worse than rejection, and planted bugs of it are caught.

Every total variation below is exact up to floating point; nothing is sampled, unless marked as statistical.
"""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from gammaray.types import Proposal, SamplingParams, SparseDistribution, VerificationMethod
from services.engine.sampling.noise import Noise
from services.speculation.predictions import ENTROPY_FACTOR, quantise
from services.verification import rules as verification
from tests.support.drafting_helpers import propose_token
from tests.support.maths_helpers import (
    GREEDY,
    Blend,
    Fixed,
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
from tests.support.maths_loop_helpers import Speculator, chain_of, g_test

COUPLED, REJECTION, NAIVE, BLOCK = VerificationMethod

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


def mean_length(distribution):
    return math.fsum(prob * len(tokens) for tokens, prob in distribution.items())


@pytest.mark.parametrize("gamma", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_never_fewer_tokens_than_rejection(gamma):
    gains = []
    for seed in range(12):
        target = TinyModel(3, seed, zeros=0.2)
        shipped = quantised_drafter(Blend(target, seed + 100, 0.2 + 0.06 * seed), 3, 8)
        proposals = list(chain_proposals(shipped, START, gamma))
        block = mean_length(cycle_of(target, proposals))
        gains.append(block - mean_length(cycle_of(target, proposals, rejection_distribution)))
    assert min(gains) > -EXACT
    if gamma == 1:
        assert max(gains) < EXACT
    else:
        assert max(gains) > 0.01


GOLDEN = {1: Fraction(2, 3), 2: Fraction(11, 9), 3: Fraction(5, 3), 4: Fraction(166, 81)}

GOLDEN_REJECTION = {1: Fraction(2, 3), 2: Fraction(10, 9), 3: Fraction(38, 27), 4: Fraction(130, 81)}

UNEVEN, UNEVEN_DRAFT = Fixed(1 / 3, 2 / 3), Fixed(2 / 3, 1 / 3)


@pytest.mark.parametrize("gamma", GOLDEN)
def test_accepted_tokens_are_golden(gamma):
    """The article's example: p = (1/3, 2/3), q = (2/3, 1/3) in every context."""
    proposals = list(chain_proposals(quantised_drafter(UNEVEN_DRAFT, 2, 12), START, gamma))
    accepted = mean_length(cycle_of(UNEVEN, proposals)) - 1
    assert accepted == pytest.approx(float(GOLDEN[gamma]), abs=2e-3)
    by_token = mean_length(cycle_of(UNEVEN, proposals, rejection_distribution)) - 1
    assert by_token == pytest.approx(float(GOLDEN_REJECTION[gamma]), abs=2e-3)


def test_a_certain_draft_gains_nothing():
    """Tokens that were looked up have all mass on themselves: block and rejection accept alike."""
    for seed in range(5):
        target = TinyModel(3, seed)
        for tokens in itertools.product(range(3), repeat=3):
            block = mean_length(block_distribution(target, START, Proposal(tokens)))
            rejection = mean_length(rejection_distribution(target, START, Proposal(tokens)))
            assert block == pytest.approx(rejection, abs=EXACT)


def test_temperature_0_gains_nothing():
    target = TinyModel(3, 1)
    for tokens in itertools.product(range(3), repeat=3):
        rows = target.log_probs([tokens[:end] for end in range(4)])
        verdicts = {
            verification.verify(method, rows, Proposal(tokens), GREEDY, None, 1)
            for method in VerificationMethod
        }
        assert len(verdicts) == 1


def test_expected_accepted_tokens_are_the_sum_of_carried_probabilities():
    target, gamma = TinyModel(3, 5), 3
    proposals = list(chain_proposals(quantised_drafter(TinyModel(3, 105), 3, 6), START, gamma))
    carried = 0.0
    for prob, proposal in proposals:
        kept = 1.0
        for node, draft in enumerate(proposal.draft_distributions):
            token_id = proposal.token_ids[node]
            weight = draft.weights[draft.token_ids.index(token_id)]
            p = target.distribution(START + proposal.token_ids[:node])[token_id]
            kept = verification.carry(kept, p, weight, draft.weight_bits)
            carried += prob * kept
    assert mean_length(cycle_of(target, proposals)) - 1 == pytest.approx(carried, abs=EXACT)


def check_block():
    for seed, zeros in itertools.product(range(4), (0.0, 0.5)):
        target, draft = TinyModel(4, seed, zeros), TinyModel(4, seed + 50)
        proposals = list(chain_proposals(quantised_drafter(draft, 3, 4), START, 3))
        assert_lossless(cycle_of(target, proposals), target, 4)


def stop_at_the_first_failure(uniforms, thresholds):
    passed = [u < h for u, h in zip(uniforms, thresholds, strict=True)]
    return passed.index(False) if False in passed else len(passed)


def pass_at_equality(uniforms, thresholds):
    passed = [node for node, (u, h) in enumerate(zip(uniforms, thresholds, strict=True), 1) if u <= h]
    return passed[-1] if passed else 0


def support_of(weights, draft):
    kept = torch.zeros_like(weights)
    kept[list(draft.token_ids)] = weights[list(draft.token_ids)]
    return kept


REAL_RESIDUAL, REAL_EXCESS = verification.residual_distribution, verification.excess_distribution

BLOCK_MUTANTS = {
    "stop_at_the_first_failure": ("last_passed", stop_at_the_first_failure),
    "pass_at_equality": ("last_passed", pass_at_equality),
    "residual_without_the_carried_probability": (
        "residual_distribution",
        lambda row, draft, scale=1.0: REAL_RESIDUAL(row, draft),
    ),
    "residual_of_p": ("residual_distribution", lambda row, draft, scale=1.0: row.double().exp()),
    "excess_of_the_support_only": (
        "excess_distribution",
        lambda row, draft, scale=1.0: support_of(REAL_EXCESS(row, draft, scale), draft),
    ),
    "excess_without_the_draft": (
        "excess_distribution",
        lambda row, draft, scale=1.0: scale * row.double().exp(),
    ),
    "excess_without_the_carried_probability": (
        "excess_distribution",
        lambda row, draft, scale=1.0: REAL_EXCESS(row, draft),
    ),
    "carried_above_1": ("carry", lambda c, p, w, bits: c * p * 2**bits / w),
    "carried_of_this_token_only": ("carry", lambda c, p, w, bits: min(1.0, p * 2**bits / w)),
    "carried_tested_as_it_is": ("block_threshold", lambda c, excess: c),
    "test_of_single_tokens": ("block_threshold", lambda c, excess: excess / (excess + 1)),
}


def test_check_of_block_passes_on_the_real_code():
    check_block()


@pytest.mark.parametrize(("name", "mutant"), BLOCK_MUTANTS.values(), ids=BLOCK_MUTANTS)
def test_mutant_of_block_is_caught(monkeypatch, name, mutant):
    monkeypatch.setattr(verification, name, mutant)
    with pytest.raises(AssertionError):
        check_block()


def test_mutant_dropping_a_sampled_token_of_low_confidence_is_caught():
    """The last token is dropped if q gives it less than .5: its value decides."""
    target, draft = TinyModel(3, 2), TinyModel(3, 102)
    shipped = quantised_drafter(draft, 3, 6)

    def dropped(proposal):
        last = proposal.draft_distributions[-1]
        if verification.weight_of(last, proposal.token_ids[-1]) >= 32:
            return proposal
        return Proposal(proposal.token_ids[:-1], None, proposal.draft_distributions[:-1] or None)

    proposals = list(chain_proposals(shipped, START, 2))
    assert_lossless(cycle_of(target, proposals), target, 3)
    with pytest.raises(AssertionError):
        assert_lossless(cycle_of(target, [(p, dropped(one)) for p, one in proposals]), target, 3)


@pytest.mark.parametrize("change", [1, -1])
def test_mutant_weight_off_by_one_is_caught(change):
    target, shipped = TinyModel(3, 2), quantised_drafter(TinyModel(3, 102), 3, 4)

    def altered(draft):
        first, second, *rest = draft.weights
        return SparseDistribution(draft.token_ids, (first + change, second - change, *rest), 4)

    proposals = list(chain_proposals(shipped, START, 2))
    assert_lossless(cycle_of(target, proposals), target, 3)
    lies = [
        (prob, Proposal(one.token_ids, None, tuple(map(altered, one.draft_distributions))))
        for prob, one in proposals
    ]
    with pytest.raises(AssertionError):
        assert_lossless(cycle_of(target, lies), target, 3)


class FixedLogits:
    """The logits of one distribution in every context."""

    def __init__(self, *probs):
        self.vocab_size, self._logits = len(probs), torch.tensor(probs).log()

    def logits(self, context):
        return self._logits


class DrawsByPosition(Noise):
    """A position that is drafted again is drawn as it was before."""

    def draft_bits(self, base, position, bits):
        return super().draft_bits(0, position, bits)


class TestsByPosition(Noise):
    """A position that is tested again is tested as it was before."""

    __test__ = False

    def accept_uniform(self, position, base=0):
        return super().accept_uniform(position)


def triples_of(noise, p, q, samples=3000):
    made = Speculator(BLOCK, FixedLogits(p, 1 - p), FixedLogits(q, 1 - q), SamplingParams(), noise)
    counts = dict.fromkeys(itertools.product(range(2), repeat=3), 0)
    for sample in range(samples):
        made.offset = sample * 8
        counts[made.generate(3, chain_of(3))] += 1
    expected = [math.prod((p, 1 - p)[token] for token in tokens) for tokens in counts]
    return g_test(list(counts.values()), expected)


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize(
    ("mutant", "p", "q"), [(DrawsByPosition, 1 / 3, 2 / 3), (TestsByPosition, 1 / 2, 0.9)]
)
def test_noise_of_a_position_that_is_used_again_is_caught(mutant, p, q):
    """What is accepted depends on all draws and tests of the block: none of them may serve a second time."""
    assert triples_of(Noise(13, 0, 2), p, q) > 1e-3
    assert triples_of(mutant(13, 0, 2), p, q) < 1e-6
