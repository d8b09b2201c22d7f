"""The states of a head's tokens in their sessions' caches, where they stand in for the next feature."""

from __future__ import annotations

import torch
from torch import Tensor

from services.engine.core.batch import Batch, Segment, node_path
from services.engine.core.kv_cache import CacheShape


class HeadStates:
    """Lays out states like keys of further layers, so that rollback and tree paths move them, too.

    The head's one layer has `rows` vectors of length `dim` per token, keys and values; a state has `size`.
    """

    def __init__(self, rows: int, dim: int, size: int) -> None:
        self._rows, self._dim, self._size = rows, dim, size
        self._state_layers = -(-size // (rows * dim))

    def cache_shape(self, dtype: torch.dtype, device: torch.device) -> CacheShape:
        """The entry of a token: its keys and values, then its state."""
        return CacheShape(1 + self._state_layers, self._rows, self._dim, dtype, device)

    def features(self, batch: Batch) -> Tensor:
        """Return the feature before each row, else the head's state there: [rows, size], contiguous.

        ValueError if a row has no feature, and the state before it is not in the cache.
        """
        parts = [self.of_first(segment, segment.count) for segment in batch.segments]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def keep(self, batch: Batch, states: Tensor) -> None:
        """Write the states of a batch's rows, [rows, size], to their slots."""
        width = self._state_layers * self._rows * self._dim
        padded = torch.nn.functional.pad(states, (0, width - self._size)) if width > self._size else states
        shaped = padded.reshape(-1, self._state_layers, self._rows, self._dim).permute(1, 2, 0, 3)
        for segment in batch.segments:
            end, row = segment.slot + segment.count, segment.row
            kept = shaped[:, :, row : row + segment.count]
            segment.cache.data[1:, :, segment.slot : end] = kept

    def of_first(self, segment: Segment, count: int) -> Tensor:
        """Return the feature of the position before each of the first rows of a segment, [count, size]."""
        features, like = segment.features, segment.cache.data
        num_features = 0 if features is None else len(features)
        parts = [] if features is None else [features.to(like.device, like.dtype)]
        if num_features < count:
            slots = [_slot_before(segment, row) for row in range(num_features, count)]
            if any(not segment.cache.first <= slot < segment.slot for slot in slots):
                raise ValueError("features: a token has none, and the state before it was not computed")
            kept = like[1:, :, slots]  # [layers, rows, slots, dim]
            parts.append(kept.permute(2, 0, 1, 3).flatten(1)[:, : self._size])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _slot_before(segment: Segment, row: int) -> int:
    num_nodes = len(segment.parents or ())
    if row < segment.count - num_nodes:
        return segment.slot + row - 1
    seen, nodes = node_path(segment, segment.num_kept + row - (segment.count - num_nodes))
    return nodes[-2] if len(nodes) > 1 else seen - 1
