"""Runs heads that draft a block in one forward, DFlash and Medusa, in engines of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from gammaray.errors import InvalidArgumentError
from services.engine.core.batch import Batch, Segment, SequenceInput
from services.engine.core.drafter import DraftFormat
from services.engine.core.kv_cache import CacheShape, CacheStore
from services.heads.dflash import DFlashConfig, DFlashHead, head_dim, kv_heads
from services.heads.medusa import MedusaHeads
from services.heads.runner import CHECK, HEAD_CACHE_BYTES, HeadEngine

__all__ = ["DFlashEngine", "DFlashRunner", "MedusaEngine", "MedusaRunner", "dflash_engine", "medusa_engine"]


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
        InvalidModelError: It computes no finite logits.
    """
    if weights != "auto":
        raise InvalidArgumentError("draft_weights", weights, "auto: a DFlash head is computed as stored")
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
    count = min(config.block_size, max_context - 1)
    features = engine.fuse(torch.ones(1, len(config.taps), config.layer.hidden_size))
    tokens = [0, 0, *[config.mask_token] * (count - 1)]
    engine.probe(SequenceInput(CHECK, 0, tokens, count, features=features))
    return engine


class MedusaRunner:
    """Answers feeds of a last token and masks: the row of mask i has the logits of head i, from the feature.

    The heads keep nothing of a session: only its tokens are in the engine's cache.

    Args:
        heads: The heads, on their device.
    """

    def __init__(self, heads: MedusaHeads) -> None:
        self._heads = heads

    @property
    def cache_shape(self) -> CacheShape:
        """The entry of a token, of which nothing is used."""
        weight = self._heads.feature_norm.weight
        return CacheShape(1, 1, 1, weight.dtype, weight.device)

    def fuse(self, states: Tensor) -> Tensor:
        """Return the features of the target's states, see `MedusaHeads.fuse`."""
        weight = self._heads.feature_norm.weight
        return self._heads.fuse(states.to(weight.device, weight.dtype))

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits [rows, outputs] in float32.

        Raises:
            ValueError: A segment has no feature.
        """
        given = [segment.features for segment in batch.segments]
        features = [one for one in given if one is not None]
        if len(features) < len(given):
            raise ValueError("features: a session has none")
        counts = [segment.count for segment in batch.segments]
        logits = self._heads(torch.cat([one[-1:] for one in features]), max(counts))
        return torch.cat([rows[:count] for rows, count in zip(logits, counts, strict=True)]).float()


class MedusaEngine(HeadEngine):
    """An engine that runs Medusa heads; built by `medusa_engine`.

    Attributes:
        num_heads: Tokens of the longest proposal.
    """

    num_heads: int = 0

    def fuse(self, states: Tensor) -> Tensor:
        """Return features [positions, width] from the target's states [positions, 1, hidden_size]."""
        assert isinstance(self.runner, MedusaRunner)
        with torch.inference_mode():
            return self.runner.fuse(states)


def medusa_engine(
    heads: MedusaHeads, target_ids: Tensor | None, *, name: str, max_context: int, weights: str = "auto"
) -> MedusaEngine:
    """Return an engine that runs Medusa heads: a parallel drafter, whose feeds need a feature.

    Args:
        heads: The heads, on their device, in their type.
        target_ids: The target's token of each row of their output; None: row i is token i.
        name: Directory or hub name.
        max_context: The target's.
        weights: Only "auto".

    Raises:
        InvalidArgumentError: Other weights.
        InvalidModelError: It computes no finite logits.
    """
    if weights != "auto":
        raise InvalidArgumentError("draft_weights", weights, "auto: Medusa heads are computed as stored")
    runner = MedusaRunner(heads)
    vocab_size = heads.config.vocab_size
    engine = MedusaEngine(
        runner,
        CacheStore(runner.cache_shape, HEAD_CACHE_BYTES),
        model_name=name,
        vocab_size=vocab_size,
        max_context=max_context,
        kernel="none: Medusa heads",
    )
    engine.num_heads = heads.config.num_heads
    # The id after the target's stands for a mask; it is never embedded.
    engine.draft_for(DraftFormat(vocab_size, vocab_size, target_ids))
    count = min(heads.config.num_heads, max_context - 1)
    features = engine.fuse(torch.ones(1, 1, heads.config.hidden_size))
    engine.skip(CHECK, [0])
    tokens = [0, *[vocab_size] * (count - 1)]
    engine.probe(SequenceInput(CHECK, 1, tokens, count, features=features))
    return engine
