"""Attention of the lean path: rotation, writing to the cache and mixing, in shapes that depend on positions.

Rows whose positions share a block of 64 go together and see the slots up to the block's end, so the shape
of a row's products depends on its position alone. Fewer than four stacked rows would take another kernel
of the matrix library, so they are filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from services.engine.batch import Segment, allowed_slots
from services.engine.kv_cache import BLOCK, SessionCache
from services.engine.lean_weights import LeanShape

__all__ = ["LeanAttention", "SegmentWork"]

_MIN_STACKED_ROWS = 4
_MAX_KEPT_VIEWS = 512


@dataclass(slots=True)
class _RowViews:
    """Buffers of one call: G heads of a group times n rows, stacked."""

    query_source: Tensor  # complex [num_kv_heads, G, n, head_dim / 2], in qkv
    query_target: Tensor  # complex, same shape, in queries
    queries: Tensor  # [num_kv_heads, stacked, head_dim]
    outputs: Tensor  # [num_kv_heads, stacked, head_dim]
    output_source: Tensor  # [n, num_kv_heads, G, head_dim], in outputs
    output_target: Tensor  # same shape, in mixed


@dataclass(slots=True)
class _Call:
    """One attention call per layer.

    Attributes:
        views: Its buffers.
        factors: Rotation of the queries, scaled: complex [n, head_dim / 2].
        keys: Per layer [num_kv_heads, head_dim, end].
        values: Per layer [num_kv_heads, end, head_dim].
        masks: By window: [1, stacked or 1, end], 0 or -inf; None where all is seen.
        path: Slots in the order of their positions when they are not 0, 1, ...; None else.
    """

    views: _RowViews
    factors: Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    masks: dict[int | None, Tensor | None]
    path: Tensor | None = None


@dataclass(slots=True)
class SegmentWork:
    """What a step does with one segment in every layer."""

    source: Tensor  # keys and values: complex [2, num_kv_heads, count, head_dim / 2], in qkv
    factors: Tensor  # complex [2, 1, count, head_dim / 2]
    slots: Sequence[Tensor]  # per layer, the shape of `source`, in the cache
    calls: list[_Call]


class LeanAttention:
    """Attention over rows of `qkv` into rows of `mixed`."""

    def __init__(self, shape: LeanShape, qkv: Tensor, mixed: Tensor) -> None:
        rows, dim, kv_heads = qkv.shape[0], shape.head_dim, shape.num_kv_heads
        self._kv_heads, self._dim = kv_heads, dim
        self._group = shape.num_heads // kv_heads
        heads = torch.view_as_complex(qkv.view(rows, -1, dim // 2, 2))
        self._queries = heads[:, : shape.num_heads].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        self._new = heads[:, shape.num_heads :].unflatten(1, (2, kv_heads)).permute(1, 2, 0, 3)
        self._mixed = mixed.view(rows, kv_heads, -1, dim)
        self._causal = torch.empty(0, 0)
        self._views: dict[tuple[int, int], _RowViews] = {}

    def run(self, work: list[SegmentWork], layer: int, window: int | None) -> None:
        """Write one layer's keys and values to the cache and the attention's output to `mixed`."""
        mul, baddbmm, bmm, softmax = torch.mul, torch.baddbmm, torch.bmm, torch.softmax
        for part in work:
            mul(part.source, part.factors, out=part.slots[layer])
            for call in part.calls:
                views, keys, values = call.views, call.keys[layer], call.values[layer]
                if call.path is not None:
                    keys = keys.transpose(1, 2).index_select(1, call.path).transpose(1, 2)
                    values = values.index_select(1, call.path)
                mul(views.query_source, call.factors, out=views.query_target)
                mask = call.masks[window]
                if mask is None:
                    scores = bmm(views.queries, keys)
                else:
                    scores = baddbmm(mask, views.queries, keys)
                bmm(softmax(scores, -1), values, out=views.outputs)
                views.output_target.copy_(views.output_source)

    def plan(
        self, segment: Segment, rotation: Tensor, windows: Iterable[int | None], exact_trees: bool
    ) -> SegmentWork:
        """Lay out a segment's calls.

        Args:
            segment: The feed's share of the rows.
            rotation: By position, complex [3, positions, head_dim / 2]: for queries (scaled), keys, values.
            windows: The windows of the layers.
            exact_trees: Gather each node's path, so that it sees what a chain would.
        """
        row, start, count = segment.row, segment.start, segment.count
        end = start + count
        if segment.parents is None:
            rotation = rotation[:, start:end]
        else:
            rotation = rotation[:, torch.tensor(segment.positions)]
        factors = rotation[0]
        slots = segment.cache.data[:, :, start:end]
        work = SegmentWork(
            source=self._new[:, :, row : row + count],
            factors=rotation[1:].unsqueeze(1),
            slots=torch.view_as_complex(slots.view(-1, 2, self._kv_heads, count, self._dim // 2, 2)).unbind(
                0
            ),
            calls=[],
        )
        chain_end = end if segment.parents is None else end - len(segment.parents)
        if segment.parents is not None and not exact_trees:
            work.calls.append(self._masked_call(segment, factors, windows))
            return work
        for first in _block_starts(start, chain_end):
            last = min(chain_end, first // BLOCK * BLOCK + BLOCK)
            work.calls.append(self._chain_call(segment, first, last, factors, windows))
        for slot in range(chain_end, end):
            work.calls.append(self._path_call(segment, slot, factors, windows))
        return work

    def _chain_call(
        self, segment: Segment, first: int, last: int, factors: Tensor, windows: Iterable[int | None]
    ) -> _Call:
        """Positions [first, last) of a chain, all in one block."""
        row, count = segment.row + first - segment.start, last - first
        end = first // BLOCK * BLOCK + BLOCK
        masks = {window: self._stacked(self._chain_mask(first, last, window), count) for window in windows}
        keys, values = self._layer_views(segment.cache, end)
        here = factors[first - segment.start : last - segment.start]
        return _Call(self._row_views(row, count), here, keys, values, masks)

    def _masked_call(self, segment: Segment, factors: Tensor, windows: Iterable[int | None]) -> _Call:
        """All rows of a tree at once, each behind its own mask."""
        used = segment.start + segment.count
        end = -(-used // BLOCK) * BLOCK
        masks: dict[int | None, Tensor | None] = {}
        for window in windows:
            allowed = allowed_slots(segment, window)
            if allowed is None:
                allowed = torch.ones(segment.count, used, dtype=torch.bool)
            masks[window] = self._stacked(_bias(F.pad(allowed, (0, end - used))), segment.count)
        keys, values = self._layer_views(segment.cache, end)
        return _Call(self._row_views(segment.row, segment.count), factors, keys, values, masks)

    def _path_call(
        self, segment: Segment, slot: int, factors: Tensor, windows: Iterable[int | None]
    ) -> _Call:
        """One node of a tree, in the shape that it would have as the end of a chain."""
        offset = slot - segment.start
        position = segment.positions[offset]
        end = position // BLOCK * BLOCK + BLOCK
        path = _path_slots(segment, slot)
        # What lies behind the node is masked; any slot will do there.
        path += [0] * (end - len(path))
        masks = {w: self._stacked(self._chain_mask(position, position + 1, w), 1) for w in windows}
        used = -(-(slot + 1) // BLOCK) * BLOCK
        keys, values = self._layer_views(segment.cache, used)
        views = self._row_views(segment.row + offset, 1)
        return _Call(views, factors[offset : offset + 1], keys, values, masks, torch.tensor(path))

    def _chain_mask(self, first: int, last: int, window: int | None) -> Tensor | None:
        """0 or -inf [last - first, end of the block]; None when all is seen."""
        end = first // BLOCK * BLOCK + BLOCK
        if window is None or window >= last:
            if last - first == 1 and last == end:
                return None
            if self._causal.shape[1] < end:
                self._causal = F.pad(_bias(torch.ones(BLOCK, BLOCK, dtype=torch.bool).tril()), (2 * end, 0))
            # Every block's mask is the triangle with zeros before it.
            return self._causal[first % BLOCK : first % BLOCK + last - first, -end:]
        positions, slots = torch.arange(first, last)[:, None], torch.arange(end)
        return _bias((slots <= positions) & (slots > positions - window))

    def _stacked(self, mask: Tensor | None, count: int) -> Tensor | None:
        """A mask [count, end] for the stacked rows of a group."""
        if mask is None or count == 1:
            return None if mask is None else mask[None]
        mask = mask.repeat(self._group, 1)
        missing = _MIN_STACKED_ROWS - mask.shape[0]
        return (mask if missing <= 0 else F.pad(mask, (0, 0, 0, missing)))[None]

    def _row_views(self, row: int, count: int) -> _RowViews:
        views = self._views.get((row, count))
        if views is None:
            if len(self._views) >= _MAX_KEPT_VIEWS:
                self._views.clear()
            views = self._views[row, count] = self._make_row_views(row, count)
        return views

    def _make_row_views(self, row: int, count: int) -> _RowViews:
        used = self._group * count
        stacked = max(_MIN_STACKED_ROWS, used)
        queries = torch.zeros(self._kv_heads, stacked, self._dim)
        outputs = torch.empty_like(queries)
        target = queries[:, :used].view(self._kv_heads, self._group, count, -1, 2)
        source = outputs[:, :used].view(self._kv_heads, self._group, count, self._dim)
        return _RowViews(
            query_source=self._queries[:, :, row : row + count],
            query_target=torch.view_as_complex(target),
            queries=queries,
            outputs=outputs,
            output_source=source.permute(2, 0, 1, 3),
            output_target=self._mixed[row : row + count],
        )

    def _layer_views(self, cache: SessionCache, end: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Per layer keys [num_kv_heads, head_dim, end] and values [num_kv_heads, end, head_dim]."""
        kept = cache.views.get(end)
        if kept is None:
            keys = cache.data[:, : self._kv_heads, :end].transpose(2, 3).unbind(0)
            kept = cache.views[end] = keys, cache.data[:, self._kv_heads :, :end].unbind(0)
        return kept


def _block_starts(start: int, end: int) -> list[int]:
    """First position in [start, end) of each block that it touches."""
    if start >= end:
        return []
    return [start, *range(start // BLOCK * BLOCK + BLOCK, end, BLOCK)]


def _path_slots(segment: Segment, slot: int) -> list[int]:
    """Slots of the committed tokens and of a node's ancestors, in the order of their positions."""
    assert segment.parents is not None
    base = segment.start + segment.count - len(segment.parents)
    path, node = [], slot - base
    while node >= 0:
        path.append(base + node)
        node = segment.parents[node]
    return [*range(base), *reversed(path)]


def _bias(allowed: Tensor) -> Tensor:
    return torch.zeros(allowed.shape).masked_fill_(~allowed, float("-inf"))
