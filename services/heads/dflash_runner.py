"""Runs DFlash heads in an engine of their own, whose sessions have the target's positions."""

from __future__ import annotations

import torch
from torch import Tensor

from gammaray.errors import InvalidArgumentError
from services.engine.core.batch import Batch, Segment
from services.engine.core.drafter import DraftFormat
from services.engine.core.kv_cache import CacheShape, CacheStore
from services.heads.dflash import DFlashConfig, DFlashHead, head_dim, kv_heads
from services.heads.runner import HEAD_CACHE_BYTES, HeadEngine

__all__ = ["DFlashEngine", "DFlashRunner", "dflash_engine"]


class DFlashRunner:
    """Answers feeds of committed tokens, each with the feature of its position, and then of one block.

    Args:
        head: The head, on its device.
    """

    def __init__(self, head: DFlashHead) -> None:
        self.head = head

    @property
    def cache_shape(self) -> CacheShape:
        """The entry of a token: its keys beside its values."""
        config, weight = self.head.config, self.head.fc.weight
        dim = 2 * head_dim(config.layer)
        return CacheShape(config.num_layers, kv_heads(config.layer), dim, weight.dtype, weight.device)

    def fuse(self, states: Tensor) -> Tensor:
        """Return the features of the target's states, see `DFlashHead.fuse`."""
        weight = self.head.fc.weight
        return self.head.fuse(states.to(weight.device, weight.dtype))

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits [wanted rows, outputs] in float32; only rows of blocks have any of use."""
        hidden = torch.cat([self._hidden(batch, segment) for segment in batch.segments])
        return self.head.logits(hidden if batch.logit_rows is None else hidden[batch.logit_rows]).float()

    def _hidden(self, batch: Batch, segment: Segment) -> Tensor:
        features, data, slot = segment.features, segment.cache.data, segment.slot
        count = 0 if features is None else len(features)
        positions = torch.tensor(segment.positions, device=data.device)
        if features is not None and count:
            made = self.head.context(features.to(data.device, data.dtype), positions[:count])
            data[:, :, slot : slot + count] = made
        seen = data[:, :, segment.cache.first : slot + count]
        token_ids = batch.token_ids[segment.row + count : segment.row + segment.count]
        block = self.head(torch.tensor(token_ids, device=data.device), positions[count:], seen)
        return torch.cat([block.new_zeros(count, block.shape[1]), block])


class DFlashEngine(HeadEngine):
    """An engine that runs a DFlash head; built by `dflash_engine`."""

    @property
    def config(self) -> DFlashConfig:
        """The head's shape."""
        assert isinstance(self.runner, DFlashRunner)
        return self.runner.head.config

    def fuse(self, states: Tensor) -> Tensor:
        """Return features [positions, width] from the target's states [positions, taps, hidden_size]."""
        assert isinstance(self.runner, DFlashRunner)
        with torch.inference_mode():
            return self.runner.fuse(states)


def dflash_engine(
    head: DFlashHead,
    target_ids: Tensor | None,
    *,
    name: str,
    max_context: int,
    budget_bytes: int = HEAD_CACHE_BYTES,
    weights: str = "auto",
) -> DFlashEngine:
    """Return an engine that runs a DFlash head: a parallel drafter, whose feeds need features.

    Args:
        head: The head, on its device, in its type.
        target_ids: The target's token of each row of its output; None: row i is token i.
        name: Directory or hub name.
        max_context: The target's.
        budget_bytes: Upper bound of the caches of all sessions.
        weights: Only "auto".

    Raises:
        InvalidArgumentError: Other weights.
    """
    if weights != "auto":
        raise InvalidArgumentError("head_weights", weights, "auto: a DFlash head is computed as stored")
    runner, config = DFlashRunner(head), head.config
    engine = DFlashEngine(
        runner,
        CacheStore(runner.cache_shape, budget_bytes),
        model_name=name,
        vocab_size=config.layer.vocab_size,
        max_context=max_context,
        kernel="none: a DFlash head",
    )
    engine.draft_for(DraftFormat(config.layer.vocab_size, config.mask_token, target_ids))
    return engine
