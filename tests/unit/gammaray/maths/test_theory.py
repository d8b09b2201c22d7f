"""Closed forms against published and recomputed values, brute force, and each other."""

import itertools
import math
import random

import pytest

from gammaray.maths import theory

TARGET, DRAFT = (0.5, 0.2, 0.1, 0.2), (0.4, 0.3, 0.2, 0.1)

# tokens per cycle at gamma 4, as recomputed in the literature's own formula
EXPECTED_AT_4 = {0.9: 4.095, 0.8: 3.362, 0.7: 2.773, 0.6: 2.306, 0.5: 1.938, 0.4: 1.650}

# alpha, draft cost, latency, best gamma, speedup
OPTIMA = [
    (0.6, 0.05, 0.0, 4, 1.921),
    (0.6, 0.05, 0.1, 4, 1.647),
    (0.6, 0.2, 0.0, 2, 1.400),
    (0.6, 0.2, 0.1, 2, 1.225),
    (0.8, 0.05, 0.0, 8, 3.092),
    (0.8, 0.05, 0.1, 8, 2.706),
    (0.8, 0.2, 0.0, 4, 1.868),
    (0.8, 0.2, 0.1, 4, 1.681),
    (0.9, 0.05, 0.0, 13, 4.674),
    (0.9, 0.05, 0.1, 14, 4.180),
    (0.9, 0.2, 0.0, 7, 2.373),
    (0.9, 0.2, 0.1, 7, 2.191),
]

# alpha, batch, best gamma, throughput over plain decoding; draft cost .05, saturation at 256 tokens
GOODPUT = [
    (0.8, 1, 8, 3.09),
    (0.8, 32, 7, 3.08),
    (0.8, 64, 3, 2.57),
    (0.8, 128, 1, 1.71),
    (0.8, 256, 0, 1.0),
    (0.6, 32, 4, 1.92),
    (0.6, 256, 0, 1.0),
    (0.9, 1, 13, 4.67),
    (0.9, 64, 3, 2.99),
]


def random_laws(count, size, seed):
    rng = random.Random(seed)
    for _ in range(count):
        laws = []
        for _ in range(2):
            weights = [math.exp(2 * rng.gauss(0, 1)) * (rng.random() > 0.2) + 1e-12 for _ in range(size)]
            laws.append([w / math.fsum(weights) for w in weights])
        yield laws


def test_acceptance_golden_pair():
    assert theory.acceptance_rejection(TARGET, DRAFT) == pytest.approx(0.8, abs=1e-15)
    assert theory.acceptance_naive(TARGET, DRAFT) == pytest.approx(0.30, abs=1e-15)
    assert theory.acceptance_coupled(TARGET, DRAFT) == pytest.approx(0.770906877662812, abs=1e-14)
    assert theory.total_variation(TARGET, DRAFT) == pytest.approx(0.2, abs=1e-15)
    assert theory.residual(TARGET, DRAFT) == pytest.approx([0.5, 0, 0, 0.5])


def test_acceptance_coupled_sorted_form_equals_double_sum():
    for target, draft in random_laws(200, 9, seed=1):
        pairs = list(zip(target, draft, strict=True))
        slow = math.fsum(1 / math.fsum(max(a / p, b / q) for a, b in pairs) for p, q in pairs)
        assert theory.acceptance_coupled(target, draft) == pytest.approx(slow, rel=1e-9)


def test_acceptance_coupled_stays_within_its_bounds():
    for target, draft in random_laws(2000, 6, seed=2):
        low, high = theory.coupled_bounds(theory.acceptance_rejection(target, draft))
        assert low - 1e-9 <= theory.acceptance_coupled(target, draft) <= high + 1e-9


def test_acceptance_of_equal_and_disjoint_laws():
    assert theory.acceptance_coupled(TARGET, TARGET) == pytest.approx(1.0)
    assert theory.acceptance_rejection(TARGET, TARGET) == pytest.approx(1.0)
    assert theory.residual(TARGET, TARGET) == list(TARGET)
    disjoint = ((0.5, 0.5, 0, 0), (0, 0, 0.3, 0.7))
    assert theory.acceptance_coupled(*disjoint) == 0.0
    assert theory.acceptance_rejection(*disjoint) == 0.0
    assert theory.acceptance_coupled((1.0, 0.0), (1.0, 0.0)) == pytest.approx(1.0)


def test_acceptance_coupled_of_a_law_mixed_with_foreign_tokens_is_optimal():
    # q = (1 - e) p + e o with o outside p's support: the coupling loses nothing.
    draft = [0.7 * p for p in TARGET] + [0.1, 0.2]
    assert theory.acceptance_coupled((*TARGET, 0, 0), draft) == pytest.approx(0.7)


def test_laws_of_different_length_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        theory.acceptance_rejection(TARGET, DRAFT[:3])


@pytest.mark.parametrize(("alpha", "tokens"), EXPECTED_AT_4.items())
def test_expected_tokens_gamma_4_is_golden(alpha, tokens):
    assert theory.expected_tokens(alpha, 4) == pytest.approx(tokens, abs=5e-4)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_expected_tokens_equals_enumeration_of_outcomes(alpha, gamma):
    enumerated = 0.0
    for passes in itertools.product((True, False), repeat=gamma):
        accepted = passes.index(False) if False in passes else gamma
        prob = math.prod(alpha if passed else 1 - alpha for passed in passes)
        enumerated += prob * (accepted + 1)
    assert theory.expected_tokens(alpha, gamma) == pytest.approx(enumerated)


@pytest.mark.parametrize(("alpha", "cost", "latency", "gamma", "gain"), OPTIMA)
def test_optimal_gamma_and_speedup_are_golden(alpha, cost, latency, gamma, gain):
    assert theory.optimal_gamma(alpha, cost, latency) == gamma
    assert theory.speedup(alpha, gamma, cost, latency) == pytest.approx(gain, abs=5e-4)


CLOSED_FORM = [(0.8, 0.05, 7.857), (0.8, 0.1, 5.756), (0.9, 0.05, 13.292), (0.6, 0.05, 4.065)]


@pytest.mark.parametrize(("alpha", "cost", "gamma"), CLOSED_FORM)
def test_optimal_gamma_closed_form_is_golden(alpha, cost, gamma):
    assert theory.optimal_gamma_closed_form(alpha, cost) == pytest.approx(gamma, abs=5e-4)


def test_optimal_gamma_closed_form_is_next_to_the_best_integer():
    for alpha, cost, latency in itertools.product((0.3, 0.5, 0.7, 0.9, 0.97), (0.01, 0.05, 0.2), (0, 0.1, 1)):
        best = max(range(1, 400), key=lambda gamma: theory.speedup(alpha, gamma, cost, latency))
        real = theory.optimal_gamma_closed_form(alpha, cost, latency)
        assert abs(real - best) < 1 or (real < 1 and best == 1), (alpha, cost, latency)


def test_optimal_gamma_is_zero_where_speculation_cannot_pay():
    assert theory.optimal_gamma(0.3, 0.5) == 0
    assert theory.optimal_gamma(0.8, 0.05, latency=3.0) == 0
    assert theory.optimal_gamma_closed_form(0.5, 2.0) == 0.0
    assert theory.speedup(0.9, 0, 0.3, latency=5.0) == 1.0


@pytest.mark.parametrize(("alpha", "batch", "gamma", "gain"), GOODPUT)
def test_goodput_optimum_is_golden(alpha, batch, gamma, gain):
    assert theory.optimal_goodput_gamma(alpha, batch, 0.05) == gamma
    assert theory.goodput_speedup(alpha, gamma, batch, 0.05) == pytest.approx(gain, abs=5e-3)


def test_goodput_of_one_sequence_is_the_speedup():
    for gamma in range(1, 9):
        assert theory.goodput_speedup(0.8, gamma, 1, 0.05) == pytest.approx(theory.speedup(0.8, gamma, 0.05))


def test_alpha_standard_error_is_golden():
    assert theory.alpha_standard_error(0.8, 5, 2000) == pytest.approx(0.00488, abs=5e-6)
