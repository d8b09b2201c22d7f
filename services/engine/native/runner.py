"""Steps through the kernel: one call, during which Python's lock is free."""

from __future__ import annotations

from ctypes import addressof, byref
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from services.engine.batch import Batch, node_path
from services.engine.native.bindings import BatchArguments, SegmentArguments
from services.engine.native.weights import NativeModel

__all__ = ["NativeRunner"]


class NativeRunner:
    """Runs steps on a model of `services.engine.native.weights`; the cache's rows are key and value heads."""

    def __init__(self, model: NativeModel) -> None:
        self._model = model
        self._scratch = torch.empty(0)
        self._cos, self._sin = model.rotation(1)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits [wanted rows, vocab_size] in float32; writes the new keys and values."""
        model, rows = self._model, len(batch.token_ids)
        wanted = range(rows) if batch.logit_rows is None else batch.logit_rows
        self._make_room(rows, max(batch.positions))
        logits = torch.empty(len(wanted), model.vocab_size)
        num_chain, offsets, path = _paths(batch)
        segments = (SegmentArguments * len(batch.segments))(
            *((s.cache.data.data_ptr(), s.cache.capacity, s.slot, s.count) for s in batch.segments)
        )
        # One array for all integers: few calls, and one owner to keep until the kernel is done.
        numbers = np.fromiter(
            chain(batch.token_ids, batch.positions, num_chain, offsets, wanted, path), dtype=np.int32
        )
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
        )
        model.kernel.gr_forward(byref(model.weights), byref(arguments))
        return logits

    def _make_room(self, rows: int, position: int) -> None:
        model = self._model
        if position >= len(self._cos):
            self._cos, self._sin = model.rotation(2 * (position + 1))
        size = model.kernel.gr_scratch_size(byref(model.weights), rows, position)
        if size > len(self._scratch):
            self._scratch = torch.empty(size * 5 // 4)


def _paths(batch: Batch) -> tuple[list[int], list[int], list[int]]:
    """Where each row's path lies.

    Returns:
        By row, how many of its positions lie in the slots of the same number; by row, where in the third list
        its further slots begin; those slots.
    """
    num_chain, offsets, path = [], [], []
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
