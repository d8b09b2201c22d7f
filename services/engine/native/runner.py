"""Runs steps with the kernel: one call, which releases the GIL."""

from __future__ import annotations

from ctypes import addressof, byref, c_int32
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.engine.core.batch import Batch, Runner, node_path
from services.engine.core.errors import EndedEarlyError
from services.engine.native.bindings import BatchArguments, SegmentArguments
from services.engine.native.library import kernel_threads
from services.engine.native.weights import NativeModel


class NativeRunner(Runner):
    """Runs steps on a model of `services.engine.native.weights`; the cache's rows are key and value heads."""

    has_kernel = True

    def __init__(self, model: NativeModel) -> None:
        self.model = model
        self._scratch = torch.empty(0)
        self._cos, self._sin = model.rotation(1)
        self._features: Tensor | None = None  # of a head: those of the next forward

    @property
    def hidden_size(self) -> int:
        size: int = self.model.weights.hidden
        return size

    def tap_obstacle(self) -> str:
        return ""

    def forward(self, batch: Batch) -> Tensor:
        threads = kernel_threads()
        self._make_room(len(batch.token_ids), max(batch.positions), threads)
        logits, _, arguments, _pointed_to = self._laid_out(batch, threads)
        if self.model.kernel.gr_forward(byref(self.model.weights), byref(arguments)):
            raise EndedEarlyError
        return logits

    def chain(
        self, batch: Batch, noise: Tensor | None, scale: float, stop: c_int32, target_ids: Tensor | None
    ) -> tuple[list[int], Tensor]:
        threads = kernel_threads()
        self._make_room(batch.num_first, max(batch.positions), threads)
        noise = None if noise is None else noise.contiguous()  # for some vocabulary sizes the rows are padded
        logits, numbers, arguments, _pointed_to = self._laid_out(batch, threads)
        count = self.model.kernel.gr_chain(
            byref(self.model.weights),
            byref(arguments),
            numbers.ctypes.data,
            None if noise is None else noise.data_ptr(),
            0 if noise is None else noise.shape[1],
            None if target_ids is None else target_ids.data_ptr(),
            scale,
            byref(stop),
        )
        return numbers[: batch.num_first - 1 + count].tolist(), logits[:count]

    def _laid_out(
        self, batch: Batch, threads: int
    ) -> tuple[Tensor, NDArray[np.int32], BatchArguments, object]:
        """Return the logits to be filled, all integers, the arguments, and other memory these point to."""
        rows = len(batch.token_ids)
        wanted = range(rows) if batch.logit_rows is None else batch.logit_rows
        logits = torch.empty(len(wanted), self.model.vocab_size)
        num_chain, offsets, path = _paths(batch)
        segments = (SegmentArguments * len(batch.segments))(
            *(
                SegmentArguments(s.cache.data.data_ptr(), s.cache.capacity, s.slot, s.count, s.cache.first)
                for s in batch.segments
            )
        )
        layers = () if batch.taps is None else batch.taps.layers
        # One array for all integers: few calls, and one owner to keep alive until the kernel returns.
        parts = chain(batch.token_ids, batch.positions, num_chain, offsets, wanted, path, layers)
        numbers = np.fromiter(parts, dtype=np.int32)
        at = numbers.ctypes.data
        arguments = BatchArguments(
            rows,
            len(segments),
            len(wanted),
            addressof(segments),
            at,
            at + 4 * rows,
            at + 8 * rows,
            at + 12 * rows,
            at + 16 * rows + 4 * len(wanted),
            at + 16 * rows,
            self._cos.data_ptr(),
            self._sin.data_ptr(),
            self._scratch.data_ptr(),
            logits.data_ptr(),
            len(layers),
            at + 4 * (len(numbers) - len(layers)),
            None if batch.taps is None else batch.taps.states.data_ptr(),
            None if self._features is None else self._features.data_ptr(),
            threads,
            None if batch.idle_until is None else addressof(batch.idle_until),
            None if batch.until is None else addressof(batch.until),
        )
        return logits, numbers, arguments, segments

    def _make_room(self, rows: int, position: int, threads: int) -> None:
        model = self.model
        if position >= len(self._cos):
            self._cos, self._sin = model.rotation(2 * (position + 1))
        size = model.kernel.gr_scratch_size(byref(model.weights), rows, position, threads)
        if size > len(self._scratch):
            self._scratch = torch.empty(size * 5 // 4)


def _paths(batch: Batch) -> tuple[list[int], list[int], list[int]]:
    # Per row: how many of its positions are in the slots of the same number, and where in `path` its further
    # slots begin.
    num_chain, offsets, path = list[int](), list[int](), list[int]()
    for segment in batch.segments:
        num_nodes = len(segment.parents or ())
        first_node = segment.num_kept - (segment.count - num_nodes)
        for row, position in enumerate(segment.positions):
            offsets.append(len(path))
            if row < segment.count - num_nodes:
                num_chain.append(position + 1)
            else:
                seen, nodes = node_path(segment, first_node + row)
                num_chain.append(seen)
                path += nodes
    return num_chain, offsets, path
