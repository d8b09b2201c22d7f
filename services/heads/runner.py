"""Runs heads in an engine: keys, values and own states of each token are in the session's cache."""

from __future__ import annotations

import torch
from torch import Tensor

from services.engine.core.batch import Batch, Segment, node_path
from services.engine.core.drafter import DraftFormat
from services.engine.core.kv_cache import CacheShape, CacheStore
from services.engine.engine import Engine
from services.engine.hf.attention import LayerInput, attend
from services.heads.eagle import EagleHead

__all__ = ["HEAD_CACHE_BYTES", "HeadRunner", "head_engine"]

HEAD_CACHE_BYTES = 1 << 30
"""Default budget of the caches of a head's sessions."""


class HeadRunner:
    """Runs steps on an EAGLE head.

    A row reads the feature of the position before its token: the given one, else the head's own state there.
    Those states are kept in the cache like the keys of further layers, so that rollback and tree paths move
    them, too.

    Args:
        head: The head, on its device.
    """

    def __init__(self, head: EagleHead) -> None:
        self.head = head
        config = head.config
        self._rows, self._dim = config.num_kv_heads, 2 * config.head_dim
        self._state_layers = -(-config.hidden_size // (self._rows * self._dim))
        weight = head.fc.weight
        self._device, self._dtype = weight.device, weight.dtype

    @property
    def cache_shape(self) -> CacheShape:
        """The entry of a token: its keys and values, then its state."""
        return CacheShape(1 + self._state_layers, self._rows, self._dim, self._dtype, self._device)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits [wanted rows, num_outputs] in float32; writes the new keys, values and states.

        Raises:
            ValueError: A row has no feature, and its predecessor is fed in the same step.
        """
        features = torch.cat([self._features(segment) for segment in batch.segments])

        def mix(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(batch, 0, LayerInput(query, key, value, None, None, None, None))

        hidden, states = self.head(
            torch.tensor([batch.token_ids], device=self._device),
            features[None],
            torch.tensor([batch.positions], device=self._device),
            mix,
        )
        for segment in batch.segments:
            here = slice(segment.row, segment.row + segment.count)
            self._keep(segment, states[0, here])
        wanted = hidden[0] if batch.logit_rows is None else hidden[0, batch.logit_rows]
        logits: Tensor = self.head.logits(wanted)
        return logits.float()

    def _features(self, segment: Segment) -> Tensor:
        """The feature of the position before each row of a segment, [rows, hidden_size]."""
        given = segment.features
        num_given = 0 if given is None else len(given)
        slots = [self._slot_before(segment, row) for row in range(num_given, segment.count)]
        if any(not segment.cache.first <= slot < segment.slot for slot in slots):
            raise ValueError("features: a token has none, and the state before it was not computed")
        parts = [] if given is None else [given.to(self._device, self._dtype)]
        if slots:
            kept = segment.cache.data[1:, :, slots]  # [layers, rows, slots, dim]
            size = self.head.config.hidden_size
            parts.append(kept.permute(2, 0, 1, 3).flatten(1)[:, :size])
        return torch.cat(parts)

    def _slot_before(self, segment: Segment, row: int) -> int:
        """Return the slot of the token before a row's."""
        num_nodes = len(segment.parents or ())
        if row < segment.count - num_nodes:
            return segment.slot + row - 1
        seen, nodes = node_path(segment, segment.num_kept + row - (segment.count - num_nodes))
        return nodes[-2] if len(nodes) > 1 else seen - 1

    def _keep(self, segment: Segment, states: Tensor) -> None:
        width = self._state_layers * self._rows * self._dim
        padded = torch.nn.functional.pad(states, (0, width - states.shape[1]))
        shaped = padded.view(-1, self._state_layers, self._rows, self._dim)
        end = segment.slot + segment.count
        segment.cache.data[1:, :, segment.slot : end] = shaped.permute(1, 2, 0, 3)


def head_engine(
    head: EagleHead, target_ids: Tensor | None, *, name: str, max_context: int, budget_bytes: int
) -> Engine:
    """Return an engine that runs a head; its sessions have the target's positions.

    Args:
        head: The head, on its device, in its type.
        target_ids: The target's token of each row of its output; None: row i is token i.
        name: Directory or hub name.
        max_context: The target's.
        budget_bytes: Upper bound of the caches of all sessions.
    """
    runner = HeadRunner(head)
    engine = Engine(
        runner,
        CacheStore(runner.cache_shape, budget_bytes),
        model_name=name,
        vocab_size=head.config.vocab_size,
        max_context=max_context,
        kernel="none: a head",
    )
    engine.draft_for(DraftFormat(head.config.vocab_size, None, target_ids))
    return engine
