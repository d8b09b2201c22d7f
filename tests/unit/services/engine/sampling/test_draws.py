"""The kernel draws the token that float64 noise gives, also between scores that float32 cannot tell apart."""

import math

import pytest
import torch

from services.engine.native.library import Kernel, open_kernel, usable_variants
from services.engine.sampling import noise as noises
from services.engine.sampling.draws import best_tokens
from services.engine.sampling.noise import Noise

POSITIONS = [2**31 - 1, 2**31 + 5, 2**31 + 5, 2**31]
VARIANTS = [None, *usable_variants()]


@pytest.fixture(params=VARIANTS)
def kernel(request, monkeypatch):
    kernel = open_kernel(request.param) if request.param else Kernel(None)
    monkeypatch.setattr(noises, "load_kernel", lambda: kernel)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("size", [1, 3, 15, 256, 259, 2048, 50_257])
def test_draw_is_the_argmax_of_float64_scores(size):
    generator = torch.Generator().manual_seed(size)
    for seed in (0, 5, 2**64 - 1):
        noise = Noise(seed, seed % 3, size)
        logits = torch.randn(len(POSITIONS), size, generator=generator) * 4 - 100 * (seed % 2)
        logits[:, : size // 2 : 2] = -math.inf
        expected = logits + torch.stack([noise.gumbel(position, 1)[0] for position in POSITIONS])
        tokens, scores = noise.draw(logits, POSITIONS)
        assert tokens == best_tokens(expected)
        assert torch.allclose(scores.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("kernel")
def test_draw_tells_scores_apart_that_are_equal_in_float32():
    noise = Noise(3, 0, 2048)
    gumbel = noise.gumbel(9, 1)[0]
    for token in range(0, 2000, 20):
        others = torch.arange(token + 1, token + 20)
        logits = torch.full((1, 2048), -50.0)
        logits[0, token] = 20.0
        logits[0, others] = (20.0 + gumbel[token] - gumbel[others]).float()
        scores = logits[0].double() + gumbel
        assert float(scores[token] - scores[others].amin()) < 1e-5
        assert noise.draw(logits, [9])[0] == [int(scores.argmax())]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("at", [0, 2, 2046, 2049])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_draw_from_broken_logits_is_none(at, value):
    logits = torch.zeros(3, 2050)
    logits[1, at] = value
    logits[2] = -math.inf
    first, *others = Noise(1, 0, 2050).draw(logits, [4, 5, 6])[0]
    assert first is not None
    assert others == [None, None]


def test_draw_from_float64_and_from_strided_logits():
    noise, logits = Noise(1, 0, 50), torch.randn(2, 50, dtype=torch.float64)
    expected = noise.draw(logits.float(), [4, 5])[0]
    assert noise.draw(logits, [4, 5])[0] == noise.draw(logits.float().T.contiguous().T, [4, 5])[0] == expected
