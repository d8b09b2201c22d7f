"""Runs heads in an engine of their own, whose sessions have the target's positions."""

from __future__ import annotations

import torch
from torch import Tensor

from gammaray.errors import InvalidArgumentError
from services.engine.core.batch import Batch, Runner, SequenceInput
from services.engine.core.drafter import DraftFormat
from services.engine.core.errors import InvalidModelError
from services.engine.core.kv_cache import CacheShape
from services.engine.core.shapes import weights_file
from services.engine.engine import Engine
from services.engine.hf.attention import LayerInput, attend
from services.engine.native.library import load_kernel
from services.heads.eagle import EagleConfig, EagleHead
from services.heads.kernel import HeadKernelRunner, kernel_obstacle
from services.heads.states import HeadStates

_CHECK = "check"  # session of the check at the end of loading
HEAD_CACHE_BYTES = 1 << 30
"""Budget of the caches of what drafts in a target worker."""


class HeadRunner(Runner):
    """Runs steps of a head with torch, on any device."""

    def __init__(self, head: EagleHead) -> None:
        config = head.config
        self.head, self.target_taps = head, config.taps
        self._states = HeadStates(config.num_kv_heads, 2 * config.head_dim, config.layer.hidden_size)

    @property
    def cache_shape(self) -> CacheShape:
        """The entry of a token: its keys with its values, then its state."""
        weight = self.head.fc.weight
        return self._states.cache_shape(weight.dtype, weight.device)

    def fuse(self, states: Tensor) -> Tensor:
        weight = self.head.fc.weight
        return self.head.fuse(states.to(weight.device, weight.dtype))

    def forward(self, batch: Batch) -> Tensor:
        features = self._states.features(batch)

        def mix(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(batch, 0, LayerInput(query, key, value, None, None, None, None))

        hidden, states = self.head(
            torch.tensor([batch.token_ids], device=features.device),
            features[None],
            torch.tensor([batch.positions], device=features.device),
            mix,
        )
        self._states.keep(batch, states[0])
        wanted = hidden[0] if batch.logit_rows is None else hidden[0, batch.logit_rows]
        return self.head.logits(wanted).float()


def head_engine(
    head: EagleHead,
    target_ids: Tensor | None,
    *,
    name: str,
    max_context: int,
    weights: str = "auto",
    uses_kernel: bool = True,
) -> Engine:
    """Return an engine that runs a head on its device, in its type.

    `target_ids` are the target's token of each row of its output; None: row i is token i. `weights` are
    "auto" or "int8", which needs the compiled kernel; `uses_kernel` is whether it is used where it covers the
    head.
    """
    obstacle = kernel_obstacle(head) if uses_kernel else "the engine is transformers"
    if obstacle and weights != "auto":
        allowed = f"auto: {weights} needs the compiled CPU kernel ({obstacle})"
        raise InvalidArgumentError("draft_weights", weights, allowed)
    runner = HeadRunner(head) if obstacle else HeadKernelRunner(name, head, max_context, weights)
    engine = Engine(
        runner,
        runner.cache_shape,
        HEAD_CACHE_BYTES,
        model_name=name,
        vocab_size=head.config.layer.vocab_size,
        max_context=max_context,
        kernel=f"none: {obstacle}" if obstacle else load_kernel().variant,
    )
    engine.draft_for(DraftFormat(head.config.layer.vocab_size, None, target_ids))
    _check(engine, head.config)
    return engine


def _check(engine: Engine, config: EagleConfig) -> None:
    """Run a few tokens of a new session, and forget it; logits that are not finite are an error."""
    count = min(3, engine.max_context - 1)
    features = engine.fuse(torch.ones(count, len(config.taps), config.target_hidden_size))
    engine.skip(_CHECK, [0])
    (logits,) = engine.step([SequenceInput(_CHECK, 1, [0] * count, count, features=features)])
    engine.release(_CHECK)
    if not logits.isfinite().all():
        name, got = engine.model_name, "numbers that are not finite"
        raise InvalidModelError(name, weights_file(name), "its logits", got, "finite numbers")
