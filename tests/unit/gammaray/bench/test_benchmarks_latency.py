"""Gaps between tokens, and percentiles."""

import random

import pytest

from gammaray.bench.rows import gap_figures, gaps
from gammaray.bench.systems import Arrival
from tests.support.theory import expected_tokens


def cycles(num_cycles: int, alpha: float, gamma: int, seconds: float = 0.02, seed: int = 7) -> list[Arrival]:
    """Chunks of cycles of equal length whose draft tokens pass independently with probability alpha."""
    rng = random.Random(seed)
    made = []
    for i in range(num_cycles):
        accepted = 0
        while accepted < gamma and rng.random() < alpha:
            accepted += 1
        made.append(((i + 1) * seconds, accepted + 1))
    return made


def test_gaps_within_a_chunk_are_zero_and_the_first_chunk_counts_as_first_token():
    assert gaps([(0.5, 3), (0.75, 1), (1.0, 3)]) == pytest.approx([0.25, 0.25, 0.0, 0.0])
    assert gaps([(0.5, 3)]) == []
    assert gaps([]) == []


def test_gap_figures_of_cycles_have_the_mean_of_their_tokens():
    figures = gap_figures([cycles(20_000, alpha=0.8, gamma=5)])
    assert figures is not None
    assert figures["mean_ms"] == pytest.approx(20.0 / expected_tokens(0.8, 5), rel=0.02)
    assert figures["p50_ms"] == 0.0
    assert figures["p99_ms"] == pytest.approx(20.0)
