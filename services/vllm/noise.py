"""The noise of all sessions of a step, computed where their logits are.

On a GPU nothing is cached: torch compiles one kernel that computes all rows of a step (docs/lab.md: 320 rows
of 128,256 ids take 0.7 ms on an H200). On a CPU each recent session keeps its `Noise`, whose blocks the
compiled kernel fills.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gammaray.types import SamplingParams
from services.engine.sampling.noise import INDEPENDENT, SHARED, Noise, philox4x32
from services.scheduling.sessions import MIN_WITH_NOISE, NOISE_BYTES, NOISE_BYTES_PER_ID
from services.scheduling.tasks import SessionSpec

_WORD = 0xFFFFFFFF
_Compute = Callable[[Sequence[tuple[int, int, int]], int], Tensor]


class NoiseRows(NamedTuple):
    """Consecutive positions, at least one, of a session, from the absolute position `start` on."""

    session_id: str
    spec: SessionSpec
    start: int
    num_rows: int


class NoiseSource:
    """Gives the noise of sessions; `is_computed`: without a cache, None: on GPUs, where that is cheaper."""

    def __init__(self, vocab_size: int, device: torch.device, is_computed: bool | None = None) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._noises: OrderedDict[str, Noise] = OrderedDict()
        self._most = max(MIN_WITH_NOISE, NOISE_BYTES // (NOISE_BYTES_PER_ID * vocab_size))
        # An argument of the compiled function: inductor would count in 32 bits.
        self._groups = torch.arange(-(-vocab_size // 4), device=device)
        self._compute: Callable[..., Tensor] | None = None
        if device.type == "cuda" if is_computed is None else is_computed:
            compute = partial(_gumbel, vocab_size=vocab_size)
            self._compute = torch.compile(compute, dynamic=True) if device.type == "cuda" else compute

    @property
    def num_sessions(self) -> int:
        return len(self._noises)

    def forget(self, session_id: str) -> None:
        self._noises.pop(session_id, None)

    def of(self, session_id: str, spec: SessionSpec) -> Noise:
        params, noise = spec.params, self._noises.pop(session_id, None)
        if noise is None or (noise.seed, noise.sample_index) != (params.seed, params.sample_index):
            assert params.seed is not None
            if self._compute is None:
                noise = Noise(params.seed, params.sample_index, self._vocab_size, device=self._device)
            else:
                noise = _ComputedNoise(params, self._vocab_size, self._compute_rows)
        self._noises[session_id] = noise
        if len(self._noises) > self._most:
            self._noises.popitem(last=False)
        return noise

    def gumbel(self, wanted: Sequence[NoiseRows]) -> Tensor:
        """Return the rows that draft and target share, [rows of all sessions, vocab_size] float64."""
        if self._compute is None:
            rows = [self.of(each.session_id, each.spec).gumbel(each.start, each.num_rows) for each in wanted]
            return rows[0] if len(rows) == 1 else torch.cat(rows)
        counters = [
            (each.spec.params.seed or 0, position, each.spec.params.sample_index)
            for each in wanted
            for position in range(each.start, each.start + each.num_rows)
        ]
        return self._compute_rows(counters, SHARED)

    def _compute_rows(self, counters: Sequence[tuple[int, int, int]], stream: int) -> Tensor:
        """Return the rows of (seed, position, sample index)."""
        assert self._compute is not None
        words = [(seed & _WORD, seed >> 32, at & _WORD, index, stream) for seed, at, index in counters]
        return self._compute(torch.tensor(words, dtype=torch.int64).to(self._device), self._groups)


class _ComputedNoise(Noise):
    """A session's noise whose rows are computed whenever they are asked for."""

    def __init__(self, params: SamplingParams, vocab_size: int, compute: _Compute) -> None:
        assert params.seed is not None
        super().__init__(params.seed, params.sample_index, vocab_size)
        self._compute = compute

    def gumbel(self, start: int, count: int) -> Tensor:
        return self._rows(start, count, SHARED)

    def independent_gumbel(self, start: int, count: int) -> Tensor:
        return self._rows(start, count, INDEPENDENT)

    def residual_gumbel(self, position: int) -> Tensor:
        return self._rows(position, 1, INDEPENDENT)[0]

    def _rows(self, start: int, count: int, stream: int) -> Tensor:
        positions = range(start, start + count)
        return self._compute([(self.seed, position, self.sample_index) for position in positions], stream)


def _gumbel(words: Tensor, groups: Tensor, *, vocab_size: int) -> Tensor:
    """Return -log E, [rows, vocab_size] float64, as `Noise.gumbel`.

    Args:
        words: [rows, 5] int64: low and high word of the seed, position, sample index, stream.
        groups: 0, 1, ... for each four token ids.
    """
    low, high, position, index, stream = (words[:, at, None] for at in range(5))
    drawn = torch.stack(philox4x32((groups[None], position, index, stream), (low, high)), dim=-1)
    exponential = -torch.log1p((drawn.double() + 0.5) * -(2.0**-32))
    return -torch.log(exponential.flatten(1)[:, :vocab_size])
