"""Closed forms against published and recomputed values, brute force, and each other."""

import itertools
import math

import pytest

from gammaray.maths import theory

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


def test_optimal_gamma_and_speedup_are_golden(subtests):
    for alpha, cost, latency, gamma, gain in OPTIMA:
        with subtests.test(str((alpha, cost, latency, gamma, gain))[:80]):
            assert theory.optimal_gamma(alpha, cost, latency) == gamma
            assert theory.speedup(alpha, gamma, cost, latency) == pytest.approx(gain, abs=5e-4)


def test_optimal_gamma_is_zero_where_speculation_cannot_pay():
    assert theory.optimal_gamma(0.3, 0.5) == 0
    assert theory.optimal_gamma(0.8, 0.05, latency=3.0) == 0
    assert theory.speedup(0.9, 0, 0.3, latency=5.0) == 1.0
