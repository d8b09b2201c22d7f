"""Sampling by the draft: exact quantised distributions, the Gumbel-max draw, calibrated confidences."""

import math
from fractions import Fraction

import pytest
import torch

from gammaray.types import SparseDistribution, VerificationMethod
from services.engine.sampling.noise import Noise
from services.speculation.predictions import draw_temperature, quantise, sample_sparse
from tests.support.maths_helpers import drawn_tokens
from tests.support.maths_loop_helpers import propose_token

COUPLED, REJECTION, NAIVE, BLOCK = VerificationMethod
VOCAB = 50


def row(seed=0, vocab_size=VOCAB):
    return (2 * torch.randn(vocab_size, generator=torch.manual_seed(seed))).log_softmax(-1)


def oracle_quantise(probs, top_k, bits):
    """Largest remainder in exact rational arithmetic."""
    order = sorted(range(len(probs)), key=lambda v: (-probs[v], v))[:top_k]
    total = sum(Fraction(probs[v]) for v in order)
    shares = {v: Fraction(probs[v]) * 2**bits / total for v in sorted(order)}
    weights = {v: math.floor(share) for v, share in shares.items()}
    by_remainder = sorted(shares, key=lambda v: (weights[v] - shares[v], v))
    for v in by_remainder[: 2**bits - sum(weights.values())]:
        weights[v] += 1
    return {v: w for v, w in weights.items() if w > 0}


@pytest.mark.parametrize("bits", [1, 4, 12, 24])
@pytest.mark.parametrize("top_k", [1, 5, 50, 4096])
def test_quantise_equals_rational_oracle(top_k, bits):
    for seed in range(10):
        probs = row(seed).double().exp()
        distribution = quantise(probs, top_k, bits)
        assert dict(zip(distribution.token_ids, distribution.weights, strict=True)) == oracle_quantise(
            probs.tolist(), top_k, bits
        )
        assert sum(distribution.weights) == 1 << bits
        assert distribution.weight_bits == bits


@pytest.mark.parametrize(
    ("probs", "top_k", "bits", "expected"),
    [
        ([0.25, 0.25, 0.25, 0.25], 2, 4, {0: 8, 1: 8}),
        ([0.1, 0.3, 0.3, 0.3], 2, 3, {1: 4, 2: 4}),
        ([1 / 3, 1 / 3, 1 / 3], 3, 4, {0: 6, 1: 5, 2: 5}),
        ([0.0, 0.5, 0.0, 0.5], 4, 2, {1: 2, 3: 2}),
        ([0.0, 0.0, 1.0, 0.0], 3, 24, {2: 1 << 24}),
        ([0.97, 0.01, 0.01, 0.01], 4, 2, {0: 4}),
        ([2.0, 6.0], 2, 4, {0: 4, 1: 12}),
    ],
    ids=["ties", "ties_below_the_top", "remainder_ties", "zeros", "certain", "dropped", "unnormalised"],
)
def test_quantise_edge_cases(probs, top_k, bits, expected):
    distribution = quantise(torch.tensor(probs, dtype=torch.float64), top_k, bits)
    assert dict(zip(distribution.token_ids, distribution.weights, strict=True)) == expected


def test_sample_sparse_over_all_integers_gives_the_exact_distribution():
    distribution = SparseDistribution((3, 9, 4), (5, 1, 10), 4)
    assert drawn_tokens(distribution) == {3: 5 / 16, 9: 1 / 16, 4: 10 / 16}
    assert [sample_sparse(distribution, bits) for bits in (0, 4, 5, 6, 15)] == [3, 3, 9, 4, 4]


def test_propose_rejection_samples_from_the_sent_distribution():
    noise, log_probs = Noise(5, 0, 100), row(vocab_size=100)
    for base in range(50):
        token_id, distribution, _ = propose_token(REJECTION, log_probs, noise, base, 80)
        assert distribution == quantise(log_probs.double().exp(), 64, 12)
        assert token_id == sample_sparse(distribution, noise.draft_bits(base, 80, 12))


def test_propose_coupled_is_the_gumbel_max_draw_with_shared_noise():
    noise = Noise(5, 0, VOCAB)
    for position in range(100):
        log_probs = row(position)
        token_id, distribution, confidence = propose_token(COUPLED, log_probs, noise, 0, position)
        scores = log_probs + noise.gumbel(position, 1)[0]
        assert distribution is None
        assert token_id == int(scores.argmax())
        expected = float((scores / draw_temperature(1.0)).softmax(-1)[token_id])
        assert confidence == pytest.approx(expected, rel=1e-3)  # the kernel's scores are exact to 1e-4


def test_propose_naive_samples_the_draft_without_shared_noise():
    noise, log_probs = Noise(5, 0, VOCAB), row()
    drawn = [propose_token(NAIVE, log_probs, noise, base, 7) for base in range(4000)]
    counts = torch.tensor([token_id for token_id, _, _ in drawn]).bincount(minlength=VOCAB)
    expected = 4000 * log_probs.double().exp()
    assert float(((counts - expected) ** 2 / expected).sum()) < 85.4  # 49 degrees of freedom, p = .001
    assert all(
        confidence == pytest.approx(float(log_probs[token_id].exp())) for token_id, _, confidence in drawn
    )


@pytest.mark.parametrize("method", list(VerificationMethod))
def test_propose_greedy_takes_raw_logits(method):
    logits = torch.tensor([0.0, 3.0, 3.0, -1.0])
    token_id, distribution, confidence = propose_token(method, logits, None, 0, 0)
    assert (token_id, distribution) == (1, None)
    assert confidence == pytest.approx(float((logits / draw_temperature(0.0)).softmax(-1)[1]))
