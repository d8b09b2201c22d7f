"""The plug-in's noise: draws of a law, equal for equal seeds and positions, unrelated for others."""

import pytest
import torch
from scipy import stats

from services.vllm.plugin.noise import gumbel, noisy_argmax, row_keys, signed_seed

SPLITMIX_OF_ZERO = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
"""The first outputs of SplitMix64 with the seed 0, as its authors publish them."""


def keys(seeds, positions):
    return row_keys(torch.tensor(seeds), torch.tensor(positions))


def test_noise_of_a_row_is_splitmix64_of_its_key():
    drawn = torch.tensor([number >> 12 for number in SPLITMIX_OF_ZERO], dtype=torch.float64)
    expected = -(-((drawn + 0.5) * 2.0**-52).log()).log()
    torch.testing.assert_close(gumbel(torch.tensor([0]), 3)[0], expected, rtol=0, atol=0)


def test_a_row_does_not_depend_on_the_others_or_on_how_many_are_computed_at_once(monkeypatch):
    monkeypatch.setattr("services.vllm.plugin.noise.MAX_CELLS", 2000)
    scores = torch.zeros(5, 999)
    some = keys([3, 9, 3, -1, 1 << 62], [0, 5, 1, 5, 7])
    together = noisy_argmax(scores, some)
    alone = [noisy_argmax(scores[:1], some[at : at + 1]).item() for at in range(5)]
    assert together.tolist() == alone
    assert len(set(alone)) == 5
    assert noisy_argmax(scores[:0], some[:0]).tolist() == []


@pytest.mark.statistical
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_law_and_are_independent(vary):
    law = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.01], dtype=torch.float64)
    count = 20_000
    numbers, same = torch.arange(count), torch.full((count,), 7)
    some = row_keys(numbers, same) if vary == "seed" else row_keys(same, numbers)
    drawn = noisy_argmax(law.log().expand(count, -1), some)
    counts = drawn.bincount(minlength=len(law))
    assert stats.chisquare(counts, law * count).pvalue > 1e-3
    pairs = (drawn[:-1] * len(law) + drawn[1:]).bincount(minlength=len(law) ** 2)
    assert stats.chisquare(pairs, torch.outer(law, law).flatten() * (count - 1)).pvalue > 1e-3


def test_seeds_of_64_bits_and_of_requests_without_one():
    most = (1 << 63) - 1
    wanted = {0: 0, -1: -1, most: most, most + 1: -most - 1, 2 * most + 1: -1}
    assert {seed: signed_seed(seed, "one") for seed in wanted} == wanted
    assert signed_seed(None, "one") == signed_seed(None, "one") != signed_seed(None, "two")
