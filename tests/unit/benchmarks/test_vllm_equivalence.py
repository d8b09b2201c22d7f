"""Ties at temperature 1: the two largest noised logits, not further apart than the arithmetic's noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.equivalence import Asks, Made
from benchmarks.pair_loop import Ask, Pair
from benchmarks.vllm_equivalence import Comparisons, NoisedGaps
from services.engine.loader import load_engine
from services.scheduling.planning import Limits
from services.target_worker.scheduler import TargetScheduler
from tests.support.engine_helpers import random_tokens, tiny_model

PROMPT = tuple(random_tokens(12, 0))
SEED = 0
"""Of the first prompt."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("noised"), gain=0.7)


def compared(directory: Path, noise: float, ours: int, theirs: int) -> dict[str, Any]:
    """Compare two completions that differ in the first token."""
    asks = Asks((PROMPT,), 2, True, 1)
    comparisons = Comparisons(str(directory), asks, asks, [], noise, 0.0)
    comparisons.add_sampled("a = b", [Made((ours, 1))], [Made((theirs, 1))])
    return comparisons.counts[0]


def test_largest_noised_logit_is_the_token_that_the_engine_draws(directory: Path) -> None:
    pair = Pair(TargetScheduler(load_engine(str(directory)), Limits(1024, 256)), None)
    drawn = list(pair.complete(Ask(PROMPT, 6, 1.0, 5, ()), 0).token_ids)
    gaps = NoisedGaps(str(directory))
    assert [gaps.first_two([*PROMPT, *drawn[:at]], 5)[0] for at in range(6)] == drawn


@pytest.mark.parametrize("is_swapped", [False, True])
def test_the_two_largest_are_a_tie_within_the_noise(directory: Path, is_swapped: bool) -> None:
    first, second, gap = NoisedGaps(str(directory)).first_two(PROMPT, SEED)
    pair = (first, second) if is_swapped else (second, first)
    tied = compared(directory, gap, *pair)
    assert (tied["equal"], len(tied["tied"]), tied["different"]) == (0, 1, [])
    assert tied["tied"][0]["gap"] == gap
    different = compared(directory, gap / 2, *pair)
    assert (different["tied"], different["different"][0]["gap"]) == ([], gap)


def test_another_token_is_no_tie(directory: Path) -> None:
    first, second, gap = NoisedGaps(str(directory)).first_two(PROMPT, SEED)
    other = next(token for token in range(97) if token not in (first, second))
    assert compared(directory, 2 * gap, other, first)["tied"] == []
    assert compared(directory, 2 * gap, first, other)["tied"] == []
