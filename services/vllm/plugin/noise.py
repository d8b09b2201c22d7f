"""Noise that is a pure function of a request's seed, a position in its text, and a token id.

The token at a position is the argmax of log-probabilities plus Gumbel noise, which is a draw from them. It
depends neither on the proposal nor on the other requests of the batch.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

MAX_CELLS = 1 << 22
"""Most scores whose noise is computed at once, which takes about 100 MB."""

_STEP = -7046029254386353131  # the golden ratio in 64 bits, as a signed number
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685
_DRAWN_BITS = 52  # halves of these steps are doubles below 1


def signed_seed(seed: int | None, name: str) -> int:
    """Return a seed's low 64 bits as a signed number; without a seed, one of the request's name.

    So all ranks of a tensor-parallel group have the same. vLLM's names end with random characters.
    """
    if seed is None:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return one int64 per pair of a seed and a position, of which `gumbel` makes a row of noise."""
    return _mixed(_mixed(seeds) + (positions + 1) * _STEP)


def gumbel(keys: Tensor, vocab_size: int) -> Tensor:
    """Return the noise [len(keys), vocab_size] float64 of rows."""
    tokens = torch.arange(1, vocab_size + 1, device=keys.device) * _STEP
    drawn = _shifted(_mixed(keys[:, None] + tokens), 64 - _DRAWN_BITS)
    uniform = (drawn.double() + 0.5) * 2.0**-_DRAWN_BITS
    return uniform.log_().neg_().log_().neg_()


def noisy_argmax(scores: Tensor, keys: Tensor) -> Tensor:
    """Return the argmax [rows] int64 of `scores` [rows, vocab_size], in the log domain, plus noise."""
    vocab_size = scores.shape[1]
    size = max(1, MAX_CELLS // vocab_size)
    parts = [
        (scores[at : at + size] + gumbel(keys[at : at + size], vocab_size)).argmax(dim=-1)
        for at in range(0, max(1, len(scores)), size)
    ]
    return torch.cat(parts)


def _mixed(words: Tensor) -> Tensor:
    """Return SplitMix64's output function of int64 words, which wrap around."""
    words = (words ^ _shifted(words, 30)) * _FIRST
    words = (words ^ _shifted(words, 27)) * _SECOND
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Return words shifted right as unsigned numbers."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
