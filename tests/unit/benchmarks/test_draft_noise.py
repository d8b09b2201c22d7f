"""Acceptance by the draft's noise: the closed form agrees with draws."""

import pytest
import torch

from benchmarks.draft_noise import SCALES, accepted

NUM_DRAWS = 20_000
TEMPERATURE = 0.7


@pytest.mark.parametrize("scale", SCALES)
def test_acceptance_is_the_share_of_draws_in_which_target_and_draft_agree(scale):
    generator = torch.Generator().manual_seed(1)
    target = 2 * torch.randn(40, generator=generator)
    draft = target + torch.randn(40, generator=generator)
    gumbel = -torch.empty(NUM_DRAWS, 40).exponential_(generator=generator).log()
    drawn = (target / TEMPERATURE + gumbel).argmax(-1)
    proposed = (draft / TEMPERATURE + scale * gumbel).argmax(-1)
    share = float((drawn == proposed).float().mean())
    assert accepted(target, draft, scale, TEMPERATURE) == pytest.approx(share, abs=0.015)
    assert 0.2 < share < 0.9
