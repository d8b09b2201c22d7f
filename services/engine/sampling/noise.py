"""Counter-based noise: every random number of a session is a pure function of seed and counter.

The generator is Philox4x32-10 (Salmon et al., SC 2011). With key = the 64-bit seed and counter = [index,
position, c2, c3], the four output words serve indexes 4 * index ... 4 * index + 3; a word w becomes the
uniform u = (w + 0.5) / 2^32, which is never 0 nor 1. Position is absolute: 0 is the first prompt token.

Streams, disjoint because the low byte of c3 differs:

| stream | c2 | c3 | used for |
|---|---|---|---|
| 0 | sample index | 0 | the Gumbel-max draw that draft and target share (coupled verification) |
| 1 | base position of the cycle | sample index * 256 + 1 | the draft's own draws (rejection, block, naive) |
| 2 | 0; block: base position | sample index * 256 + 2 | acceptance tests (rejection, block) |
| 3 | sample index | 3 | corrections and bonus tokens (rejection, block), the target's own draws (naive) |

The draft's draws depend on the base position because the same position is drafted again after a rejection,
and must then be drawn independently. Block verification looks at the whole chain before it decides where to
stop, so the draws and the tests of a position that is drafted again must be independent of the earlier ones.

Cost: one row takes about 5 ns per token id of the vocabulary on one CPU core with the compiled kernel (250 us
for 49,152 ids), 15 ns without it; a draw by the kernel, which keeps no rows, 2 ns. Rows are computed ahead in
blocks of positions and cached, so that a cycle computes only the positions by which it advances; the cache is
bounded in bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from services.engine.native.library import load_kernel
from services.engine.sampling.draws import best_tokens

W = TypeVar("W", int, Tensor)

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

SHARED, _DRAFT, _ACCEPT, INDEPENDENT = range(4)

_MAX_BLOCK_ROWS = 16
_CACHE_BYTES = 12 << 20


def philox4x32(counter: tuple[W, W, W, W], seed: int | tuple[W, W]) -> tuple[W, W, W, W]:
    """Return the four output words of Philox4x32-10, int64 with values in [0, 2^32) as those of the counter.

    The counter's shapes broadcast: small tensors for constant words make the first rounds nearly free. The
    key `seed` is in [0, 2^64); or its low and high word, tensors that broadcast with the counter.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = (seed & _MASK, seed >> 32) if isinstance(seed, int) else seed
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2^64; masking after the shift drops the sign extension.
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((high >> 32) & _MASK) ^ (c1 ^ k0),
            high & _MASK,
            ((low >> 32) & _MASK) ^ (c3 ^ k1),
            low & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def philox_word(counter: tuple[int, int, int, int], seed: int) -> int:
    """Return the first output word of Philox4x32-10 for one counter."""
    return philox4x32(counter, seed)[0]


def exponential(
    seed: int,
    start: int,
    count: int,
    vocab_size: int,
    *,
    sample_index: int = 0,
    stream: int = SHARED,
    device: torch.device | str = "cpu",
    token_ids: Tensor | None = None,
) -> Tensor:
    """Return standard exponential noise E(t, v) = -log1p(-u), precise for small values, which decide draws.

    Args:
        start: First absolute position.
        stream: 0 or 3, see the table above.
        device: Where to compute. Devices may differ in the last bit of the logarithm.
        token_ids: Compute only the noise of these `vocab_size` ids, on `device`; None for all ids in order.

    Returns:
        [count, vocab_size] float64.
    """
    if token_ids is None:
        groups = torch.arange(-(-vocab_size // 4), device=device)
    else:
        groups, places = torch.unique(token_ids // 4, return_inverse=True)
    noise = torch.empty(count, len(groups), 4, dtype=torch.float64, device=device)
    library = load_kernel().library if noise.is_cpu else None
    if library is not None:
        counters = (groups.data_ptr(), len(groups), start, count, sample_index, stream)
        library.gr_philox(seed, *counters, noise.data_ptr())
    else:
        scalar = torch.tensor([[sample_index], [stream]], dtype=torch.int64, device=device)
        words = philox4x32(
            (
                groups[None, :],
                # A block may begin before position 0; those rows are never used.
                torch.arange(start, start + count, device=device)[:, None] & _MASK,
                scalar[:1],
                scalar[1:],
            ),
            seed,
        )
        for lane, word in enumerate(words):
            noise[:, :, lane] = word
        noise.add_(0.5).mul_(-(2.0**-32))
    noise = noise.view(count, len(groups) * 4)
    noise = noise[:, :vocab_size] if token_ids is None else noise[:, places * 4 + token_ids % 4]
    return noise.log1p_().neg_()


class Noise:
    """The noise of one session: of a seed in [0, 2^64) and an index among several samples in [0, 2^24).

    With `token_ids`, rows have only the noise of these `vocab_size` ids, on `device`.
    """

    def __init__(
        self,
        seed: int,
        sample_index: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        token_ids: Tensor | None = None,
    ) -> None:
        self.seed, self.sample_index, self._has_all = seed, sample_index, token_ids is None
        sizes: dict[str, Any] = {"vocab_size": vocab_size, "device": device, "token_ids": token_ids}
        compute = partial(exponential, seed, sample_index=sample_index, **sizes)
        self._shared = _GumbelRows(partial(compute, stream=SHARED), vocab_size)
        self._residual = _GumbelRows(partial(compute, stream=INDEPENDENT), vocab_size)

    def gumbel(self, start: int, count: int) -> Tensor:
        """Return -log E(t, v) of the stream that draft and target share; callers must not write to it.

        It is [count, vocab_size] float64, for `count` positions, at least 1, from `start` on.
        """
        return self._shared.rows(start, count)

    def draw(self, logits: Tensor, positions: Sequence[int]) -> tuple[list[int | None], Tensor]:
        """Draw the token at each position, whose logit plus noise is the largest; draft and target share it.

        Args:
            logits: [positions, vocab_size], -inf for tokens that cannot be drawn; need not be normalised.
            positions: Absolute positions of the tokens.

        Returns:
            The tokens, see `best_tokens`, and the scores [positions, vocab_size]: where the compiled kernel
            draws in float32, to 1e-4; it compares the best ones in float64.
        """
        is_plain = logits.is_cpu and logits.is_contiguous() and logits.dtype is torch.float32
        library = load_kernel().library if is_plain and self._has_all else None
        if library is None:
            scores = logits + self.at(positions)
            return best_tokens(scores), scores
        rows, size = logits.shape
        scores = torch.empty_like(logits)
        places, tokens = (ctypes.c_int64 * rows)(*positions), (ctypes.c_int64 * rows)()
        sources = places, logits.data_ptr(), rows, size
        library.gr_draw(self.seed, self.sample_index, SHARED, *sources, scores.data_ptr(), tokens)
        return [token if token >= 0 else None for token in tokens], scores

    def at(self, positions: Sequence[int]) -> Tensor:
        """Return `gumbel` of some positions, [positions, vocab_size]; read only."""
        first, last = min(positions), max(positions)
        rows = self.gumbel(first, last - first + 1)
        if list(positions) == list(range(first, last + 1)):
            return rows
        return rows[[position - first for position in positions]]

    def independent_gumbel(self, start: int, count: int) -> Tensor:
        """Return [count, vocab_size] float64 noise that the draft does not use (stream 3); read only."""
        return self._residual.rows(start, count)

    def residual_gumbel(self, position: int) -> Tensor:
        """Return the noise of the correction or bonus at a position (stream 3); [vocab_size], read only."""
        return self._residual.rows(position, 1)[0]

    def accept_uniform(self, position: int, base: int = 0) -> float:
        """Return the uniform of the acceptance test at a position: a multiple of 2^-33 in (0, 1), exact.

        `base` is that of the cycle where later cycles may test the position again; else 0.
        """
        word = philox_word((0, position, base, self.sample_index << 8 | _ACCEPT), self.seed)
        return (word + 0.5) * 2.0**-32

    def draft_bits(self, base: int, position: int, bits: int) -> int:
        """Return a uniform integer in [0, 2^bits): the draft's draw at `position`, in the cycle at `base`."""
        word = philox_word((0, position, base, self.sample_index << 8 | _DRAFT), self.seed)
        return word >> (32 - bits)


class _GumbelRows:
    """Rows of one stream, from `compute(start, count)` in blocks of positions, which are cached."""

    def __init__(self, compute: Callable[[int, int], Tensor], vocab_size: int) -> None:
        self._compute = compute
        kept_rows = max(1, _CACHE_BYTES // (8 * vocab_size))
        self._block_rows = min(_MAX_BLOCK_ROWS, max(1, kept_rows // 4))
        self._max_blocks = min(4, max(1, kept_rows // self._block_rows))
        self._origin: int | None = None
        self._blocks: dict[int, Tensor] = {}

    def rows(self, start: int, count: int) -> Tensor:
        if self._origin is None:
            self._origin = start
        size, begin = self._block_rows, start - self._origin
        parts = []
        for index in range(begin // size, (begin + count - 1) // size + 1):
            first = index * size
            parts.append(self._block(index)[max(begin - first, 0) : begin + count - first])
        while len(self._blocks) > self._max_blocks:
            del self._blocks[next(iter(self._blocks))]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _block(self, index: int) -> Tensor:
        # Reinsert the block, so that the dictionary stays in order of last use.
        block = self._blocks.pop(index, None)
        if block is None:
            assert self._origin is not None
            block = self._compute(self._origin + index * self._block_rows, self._block_rows)
            block.log_().neg_()
        self._blocks[index] = block
        return block
