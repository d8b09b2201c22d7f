"""Attention of all sessions of a step in a few calls per layer, however many sessions there are.

Each session has a buffer of its own for its keys and values, and no kernel of torch reads many buffers: one
call per session and layer would cost more time in launches than a GPU needs for the step. Here `torch.cat`
gathers the keys and values of all sessions, padded to the longest, and one padded call of torch's own
attention follows. The gather reads and writes the keys and values once more; in return the number of calls
does not depend on the number of sessions. `torch.cat` launches one kernel for 64 pieces, of which a session
has up to three: its cached slots, its new ones and the padding.

Sessions whose lengths differ by more than `MAX_LENGTH_RATIO` are padded apart from each other, and a segment
of more than `MAX_PADDED_ROWS` rows, such as a prompt's chunk, attends by itself: over the session's own
buffer, without a copy, by a flash kernel where the layer allows one.

New keys and values of padded sessions are written to their caches once per step, for all layers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from services.engine.core.batch import Batch, Segment, node_path
from services.engine.hf.attention import (
    LayerInput,
    attend_segment,
    bias_of,
    explicit_attention,
    stacked_sinks,
)

MAX_PADDED_ROWS = 64
MAX_LENGTH_RATIO = 4

# Lengths are rounded up to this many slots, since kernels read masks in aligned vectors.
_SLOT_MULTIPLE = 16


class StepAttention:
    """The attention of one step, which ends with `store`.

    Args:
        num_layers: Layers with attention.
        kv_heads: Largest number of key heads of a layer.
        kv_dim: Length of a key and its value together, the maximum over layers.
    """

    def __init__(self, batch: Batch, num_layers: int, kv_heads: int, kv_dim: int) -> None:
        self._batch = batch
        segments = batch.segments
        self._alone = [index for index, s in enumerate(segments) if s.count > MAX_PADDED_ROWS]
        padded = [segment for segment in segments if segment.count <= MAX_PADDED_ROWS]
        sizes = (num_layers, kv_heads, kv_dim)
        self._groups = [_Group(group, *sizes, whole=len(segments)) for group in _by_length(padded)]

    def attend(self, layer: int, inputs: LayerInput) -> Tensor:
        """Return the layer's attention [1, rows, num_heads, value_dim]."""
        num_heads, rows = inputs.query.shape[1], inputs.query.shape[2]
        output = inputs.query.new_empty(rows, num_heads, inputs.value.shape[3])
        for index in self._alone:
            attend_segment(self._batch, index, layer, inputs, output, flash=True)
        for group in self._groups:
            group.attend(layer, inputs, output)
        return output[None]

    def store(self) -> None:
        """Write the new keys and values of all layers to the caches."""
        for group in self._groups:
            group.store()


def _by_length(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Split segments so that within a group no session is MAX_LENGTH_RATIO times as long as another."""
    groups: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda s: s.slot + s.count):
        shortest = groups[-1][0] if groups else segment
        if not groups or segment.slot + segment.count > MAX_LENGTH_RATIO * (shortest.slot + shortest.count):
            groups.append([])
        groups[-1].append(segment)
    return [sorted(group, key=lambda s: s.row) for group in groups]


@dataclass
class _Keys:
    """What the layers with the same window share."""

    cached: list[Sequence[Tensor]]  # by session and layer: slots that a row may see, [rows, slots, dim]
    num_slots: int  # slots of each session after padding
    bias: dict[int, Tensor]  # by heads per key head: 0 or -inf, [1, sessions, group * rows, num_slots]
    mask: Tensor  # [sessions, rows, num_slots], where the bias is 0


class _Group:
    """Sessions that attend in one call; `whole` is the number of all segments of the step."""

    def __init__(
        self, segments: Sequence[Segment], num_layers: int, kv_heads: int, kv_dim: int, *, whole: int
    ) -> None:
        self._segments = segments
        self._num_rows = max(segment.count for segment in segments)
        data = segments[0].cache.data
        size = len(segments) * self._num_rows
        self._new = data.new_empty(num_layers, kv_heads, size, kv_dim)
        self._keys: dict[int | None, _Keys] = {}
        rows = [row for s in segments for row in range(s.row, s.row + s.count)]
        # In the common case of equal counts the step's rows are the padded rows: nothing is moved.
        self._is_whole = len(segments) == whole and len(rows) == size
        if self._is_whole:
            return
        padded = [s.row + min(row, s.count - 1) for s in segments for row in range(self._num_rows)]
        kept = [i * self._num_rows + row for i, s in enumerate(segments) for row in range(s.count)]
        numbers = torch.tensor([*padded, *rows, *kept], device=data.device)
        self._padded, self._rows, self._kept = numbers.split_with_sizes(list(map(len, (padded, rows, kept))))

    def attend(self, layer: int, inputs: LayerInput, output: Tensor) -> None:
        """Attend in one layer and write the rows of these sessions to `output`."""
        num_heads, kv_heads = inputs.query.shape[1], inputs.key.shape[1]
        key_dim, value_dim = inputs.key.shape[3], inputs.value.shape[3]
        sessions, num_rows, group = len(self._segments), self._num_rows, num_heads // kv_heads
        shared = self._shared(inputs.window)
        slots = self._slots(layer, inputs, shared).view(kv_heads, sessions, shared.num_slots, -1)
        keys, values = slots[..., :key_dim], slots[..., key_dim:]
        # Heads of a group share keys and values: they are rows of one head. Key heads come before sessions,
        # so that a product over both is one batch without a copy.
        queries = self._pad(inputs.query[0]).view(kv_heads, group, sessions, num_rows, key_dim)
        queries = queries.transpose(1, 2).reshape(kv_heads, sessions, group * num_rows, key_dim)
        bias = self._bias(shared, group, queries.dtype)
        if inputs.softcap is None and inputs.sinks is None:
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=inputs.scale)
        else:
            sinks = stacked_sinks(inputs, num_rows)
            if sinks is not None:
                sinks = sinks[:, None].expand(-1, sessions, -1, -1)
            mixed = explicit_attention(queries, keys, values, bias, sinks, inputs)
        mixed = mixed.reshape(kv_heads, sessions, group, num_rows, value_dim).permute(1, 3, 0, 2, 4)
        flat = mixed.reshape(sessions * num_rows, num_heads, value_dim)
        if self._is_whole:
            output.copy_(flat)
        else:
            output[self._rows] = flat[self._kept]

    def store(self) -> None:
        num_layers, kv_heads, _, kv_dim = self._new.shape
        for index, segment in enumerate(self._segments):
            new = self._new[:, :, self._new_rows(index)]
            here = slice(segment.slot, segment.slot + segment.count)
            segment.cache.data[:num_layers, :kv_heads, here, :kv_dim] = new

    def _new_rows(self, index: int) -> slice:
        first = index * self._num_rows
        return slice(first, first + self._segments[index].count)

    def _pad(self, packed: Tensor) -> Tensor:
        """Return the rows of [heads, rows of the step, dim] by session, padded with copies of a row."""
        return packed if self._is_whole else packed.index_select(1, self._padded)

    def _slots(self, layer: int, inputs: LayerInput, shared: _Keys) -> Tensor:
        """Keep a layer's new keys and values; return [kv_heads, sessions * slots, key_dim + value_dim]."""
        kv_heads, dim = inputs.key.shape[1], inputs.key.shape[3] + inputs.value.shape[3]
        new = self._new[layer, :kv_heads, :, :dim]
        new.copy_(self._pad(torch.cat((inputs.key[0], inputs.value[0]), -1)))
        nothing = new.new_zeros(1, 1, 1)
        pieces = []
        for index, (segment, layers) in enumerate(zip(self._segments, shared.cached, strict=True)):
            cached = layers[layer][:kv_heads, :, :dim]
            pieces += [cached, new[:, self._new_rows(index)]]
            missing = shared.num_slots - cached.shape[1] - segment.count
            if missing:
                pieces.append(nothing.expand(kv_heads, missing, dim))
        return torch.cat(pieces, 1)

    def _shared(self, window: int | None) -> _Keys:
        if window not in self._keys:
            firsts = [_first_slot(segment, window) for segment in self._segments]
            longest = max(s.slot + s.count - first for s, first in zip(self._segments, firsts, strict=True))
            num_slots = -(-longest // _SLOT_MULTIPLE) * _SLOT_MULTIPLE
            device, num_layers = self._new.device, self._new.shape[0]
            self._keys[window] = _Keys(
                [
                    s.cache.data[:num_layers, :, first : s.slot].unbind(0)
                    for s, first in zip(self._segments, firsts, strict=True)
                ],
                num_slots,
                {},
                padded_mask(self._segments, window, firsts, self._num_rows, num_slots, device),
            )
        return self._keys[window]

    def _bias(self, shared: _Keys, group: int, dtype: torch.dtype) -> Tensor:
        """The mask as a bias for `group` heads stacked as rows; of the queries' type, as kernels want it."""
        if group not in shared.bias:
            sessions, num_rows, num_slots = shared.mask.shape
            bias = bias_of(shared.mask).to(dtype)[:, None].expand(-1, group, -1, -1)
            shared.bias[group] = bias.reshape(1, sessions, group * num_rows, num_slots)
        return shared.bias[group]


def _first_slot(segment: Segment, window: int | None) -> int:
    """First slot that a row of a segment sees; slots of nodes are not left out."""
    if window is None:
        return segment.cache.first
    first = max(segment.cache.first, min(segment.positions) - window + 1)
    return min(first, _first_node(segment))


def _first_node(segment: Segment) -> int:
    """First slot after the chain, which is that of the tree's first node."""
    if segment.parents is None:
        return segment.slot + segment.count
    return segment.start + segment.count - len(segment.parents)


def padded_mask(
    segments: Sequence[Segment],
    window: int | None,
    firsts: Sequence[int],
    num_rows: int,
    num_slots: int,
    device: torch.device,
) -> Tensor:
    """Return which slots the rows of several sessions see, computed on the device from a few numbers per row.

    A row of the chain sees the slots in [low, limit). A tree's node sees such a range and nodes.

    Args:
        segments: With at most `num_rows` rows each.
        window: Number of positions a row sees, including itself; None for all.
        firsts: Slot of each session that is column 0 of its mask.
        num_rows: Rows per session; those past a session's own repeat its last row.

    Returns:
        Boolean [sessions, num_rows, num_slots].
    """
    num_nodes = max(segment.num_kept + len(segment.parents or ()) for segment in segments)
    ranges: list[list[tuple[int, int]]] = []
    nodes = np.zeros((len(segments), num_rows, num_nodes), dtype=bool)
    for index, (segment, first) in enumerate(zip(segments, firsts, strict=True)):
        rows = [_seen(segment, row, window) for row in range(segment.count)]
        rows += [rows[-1]] * (num_rows - len(rows))
        ranges.append([(low - first, limit - first) for low, limit, _ in rows])
        if segment.parents is not None:
            for row, (_, _, seen) in enumerate(rows):
                nodes[index, row, seen] = True
    low, limit = torch.tensor(ranges, device=device)[..., None, :].unbind(-1)
    column = torch.arange(num_slots, device=device)
    mask = (column >= low) & (column < limit)
    if num_nodes:
        origins = [_first_node(s) - first for s, first in zip(segments, firsts, strict=True)]
        node = column - torch.tensor(origins, device=device)[:, None, None]
        is_node = (node >= 0) & (node < num_nodes)
        node = node.clamp(0, num_nodes - 1).expand(-1, num_rows, -1)
        mask |= is_node & torch.from_numpy(nodes).to(device).gather(2, node)
    return mask


def _seen(segment: Segment, row: int, window: int | None) -> tuple[int, int, list[int]]:
    """Return the first slot of the chain that a row sees, the slot after the last, and its nodes."""
    position = segment.positions[row]
    low = segment.cache.first if window is None else max(segment.cache.first, position - window + 1)
    num_nodes = len(segment.parents or ())
    node = row - (segment.count - num_nodes)
    if node < 0 or segment.parents is None:
        return low, segment.slot + row + 1, []
    limit, slots = node_path(segment, segment.num_kept + node)
    origin = _first_node(segment)
    # A path's nodes have the positions limit, limit + 1, ...
    return low, limit, [slot - origin for slot in slots[max(0, low - limit) :]]
