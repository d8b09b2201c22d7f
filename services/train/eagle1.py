"""An EAGLE-1 head in training (arXiv 2401.15077), and the directory that it becomes.

It learns the target's next last state from the last one and the token between, and the token that the
target's own output matrix makes of it. As an EAGLE-3 head it is trained on its own states, too, in further
steps; the paper adds noise to the target's states instead.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, PretrainedConfig

from gammaray.errors import FailedPreconditionError
from services.heads.eagle import EagleConfig
from services.heads.formats import RMS_NORMED
from services.train.drafter import write_drafter
from services.train.features import HeadBatch, head_card
from services.train.head import HeadDrafter

__all__ = ["Eagle1Drafter"]

TOKEN_WEIGHT = 0.1
"""Weight of the tokens' loss beside that of the states, as in the paper."""


class Eagle1Drafter(HeadDrafter):
    """An EAGLE-1 head; the target's embedding, last norm and output matrix are not trained.

    Args:
        target: A causal model with layers as Llama's, whose last norm is a plain root mean square norm.
        taps: The target's number of layers: the last state.
        target_ids: All token ids: the format has no smaller vocabulary.
        depth: Steps that are evaluated.
        states: Where states are read.

    Raises:
        FailedPreconditionError: The target has other layers, or another norm.
    """

    @staticmethod
    def check_target(config: PretrainedConfig) -> None:
        """Check that a head can be trained for a target.

        Raises:
            FailedPreconditionError: It has other layers, or another last norm.
        """
        HeadDrafter.check_target(config)
        if config.model_type not in RMS_NORMED:
            raise FailedPreconditionError(
                f"model_type {config.model_type}: EAGLE-1 is served for targets of types "
                f"{', '.join(sorted(RMS_NORMED))}"
            )

    def _head_config(self, layer: LlamaConfig, taps: tuple[int, ...], num_outputs: int) -> EagleConfig:
        config = super()._head_config(layer, taps, num_outputs)
        return replace(
            config, is_fused=False, fc_norm=False, fc_bias=True, feature_eps=float(layer.rms_norm_eps)
        )

    def _begin_variant(self, decoder: Any, output: Tensor) -> None:
        module = self.module
        nn.init.zeros_(module.fc.bias)
        module.feature_norm.weight.copy_(decoder.norm.weight.float())
        module.feature_norm.requires_grad_(False)
        del module.lm_head
        module.lm_head = _FixedOutput(output)  # type: ignore[assignment]

    @property
    def num_weights(self) -> int:
        """Number of weights that one drafted token reads."""
        return sum(parameter.numel() for parameter in self.parameters()) + self.head.numel()

    def loss(self, batch: HeadBatch, kind: str) -> Tensor:
        """Return the mean loss of the states and, with a lower weight, of the tokens, of this `kind`."""
        hidden = self._unrolled(batch)
        number, anchor, depth = batch.place.unbind(1)
        with torch.no_grad():
            wanted = self.module.fuse(batch.states[number, anchor - 1 - batch.starts[number] + depth].float())
        states = F.smooth_l1_loss(hidden.float(), wanted, reduction="none").mean(-1)
        return self._mean(batch, states + TOKEN_WEIGHT * self._each(batch, self._logs(hidden), kind))

    def save(self, folder: Path, identity: dict[str, str], name: str, card: dict[str, Any]) -> int:
        """Write a directory in the format of SafeAILab/EAGLE, see `FeatureDrafter.save`."""
        weights = {
            key: value.detach().to("cpu", torch.bfloat16).contiguous()
            for key, value in self.module.state_dict().items()
            if not key.startswith("feature_norm.")
        }
        stored = self.layer_config.to_diff_dict() | {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 1,
            "bias": True,
            "dtype": "bfloat16",
        }
        return write_drafter(
            folder, weights, stored, identity, name, card, head_card("EAGLE-1 head", name, _ABOUT, card)
        )


_ABOUT = "It reads the target's last state, and shares its input embedding, output matrix and tokenizer."


class _FixedOutput(nn.Module):
    """An output matrix that is not trained and not saved."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight: Tensor
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)
