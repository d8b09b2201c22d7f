"""Attention of the lean path: rotation, writing to the cache and mixing, in the shapes of `blocks`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from services.engine.batch import Segment, allowed_slots
from services.engine.blocks import (
    MIN_STACKED_ROWS,
    Part,
    bias_of,
    chain_mask,
    segment_parts,
    stack_mask,
)
from services.engine.kv_cache import BLOCK, SessionCache
from services.engine.lean_weights import LeanShape

__all__ = ["LeanAttention", "SegmentWork"]

_MAX_KEPT_VIEWS = 32


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
        row, slot, count = segment.row, segment.slot, segment.count
        end = slot + count
        if segment.parents is None:
            rotation = rotation[:, slot:end]
        else:
            rotation = rotation[:, torch.tensor(segment.positions)]
        factors = rotation[0]
        slots = segment.cache.data[:, :, slot:end]
        work = SegmentWork(
            source=self._new[:, :, row : row + count],
            factors=rotation[1:].unsqueeze(1),
            slots=torch.view_as_complex(slots.view(-1, 2, self._kv_heads, count, self._dim // 2, 2)).unbind(
                0
            ),
            calls=[],
        )
        if segment.parents is not None and not exact_trees:
            work.calls.append(self._masked_call(segment, factors, windows))
        else:
            work.calls += [self._call(segment, part, factors, windows) for part in segment_parts(segment)]
        return work

    def _call(self, segment: Segment, part: Part, factors: Tensor, windows: Iterable[int | None]) -> _Call:
        """One part of a segment, in a shape that its positions fix."""
        views = self._row_views(segment.row + part.first, part.last - part.first)
        masks = {window: stack_mask(self._mask(part, window), self._group) for window in windows}
        seen = part.end
        if part.path is not None:
            seen = -(-(segment.slot + part.last) // BLOCK) * BLOCK
        keys, values = self._layer_views(segment.cache, seen)
        return _Call(views, factors[part.first : part.last], keys, values, masks, part.path)

    def _masked_call(self, segment: Segment, factors: Tensor, windows: Iterable[int | None]) -> _Call:
        """All rows of a tree at once, each behind its own mask."""
        end = -(-(segment.slot + segment.count) // BLOCK) * BLOCK
        masks: dict[int | None, Tensor | None] = {}
        for window in windows:
            allowed = allowed_slots(segment, window, end)
            assert allowed is not None
            masks[window] = stack_mask(bias_of(allowed), self._group)
        keys, values = self._layer_views(segment.cache, end)
        return _Call(self._row_views(segment.row, segment.count), factors, keys, values, masks)

    def _mask(self, part: Part, window: int | None) -> Tensor | None:
        """`chain_mask`, from a table where it can: every block's mask is the triangle with zeros before."""
        if window is not None and window < part.end:
            return chain_mask(part, window)
        count = part.last - part.first
        if count == 1 and part.position + 1 == part.end:
            return None
        if self._causal.shape[1] < part.end:
            triangle = bias_of(torch.ones(BLOCK, BLOCK, dtype=torch.bool).tril())
            self._causal = F.pad(triangle, (2 * part.end, 0))
        first = part.position % BLOCK
        return self._causal[first : first + count, -part.end :]

    def _row_views(self, row: int, count: int) -> _RowViews:
        views = self._views.get((row, count))
        if views is None:
            if len(self._views) >= _MAX_KEPT_VIEWS:
                self._views.clear()
            views = self._views[row, count] = self._make_row_views(row, count)
        return views

    def _make_row_views(self, row: int, count: int) -> _RowViews:
        used = self._group * count
        stacked = max(MIN_STACKED_ROWS, used)
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
