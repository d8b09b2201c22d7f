"""Medusa heads in training (arXiv 2401.10774), and the directory that they become.

The target is not trained (Medusa-1). One output matrix, which begins as the target's, serves all heads: a
drafted block then reads it once.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gammaray.errors import FailedPreconditionError, InvalidArgumentError
from services.heads.formats import RMS_NORMED
from services.heads.medusa import MedusaConfig, MedusaHeads
from services.heads.medusa_formats import load_medusa
from services.train.answers.states import StateStore
from services.train.answers.store import Sequence
from services.train.drafter import write_drafter
from services.train.features import FeatureDrafter, HeadBatch, head_card

__all__ = ["MedusaDrafter"]

_LAYERS = 2
"""Residual layers of a head."""


class MedusaDrafter(FeatureDrafter):
    """Medusa heads that begin as the target's own output.

    Args:
        target: A causal model whose last norm is a plain root mean square norm.
        taps: The target's number of layers: the last state.
        target_ids: Ascending ids of the output's rows.
        depth: Number of heads.
        states: Where states are read.

    Raises:
        FailedPreconditionError: The target has another norm.
    """

    def __init__(
        self, target: PreTrainedModel, taps: Items[int], target_ids: Tensor, depth: int, states: StateStore
    ) -> None:
        config: Any = target.config
        if config.model_type not in RMS_NORMED:
            allowed = ", ".join(sorted(RMS_NORMED))
            raise FailedPreconditionError(
                f"model_type {config.model_type}: Medusa is served for targets of types {allowed}"
            )
        super().__init__(taps, config.hidden_size, config.vocab_size, target_ids, depth, states)
        self.num_steps = depth
        self.config = MedusaConfig(
            num_heads=depth,
            num_layers=_LAYERS,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_outputs=len(target_ids),
            last_layer=config.num_hidden_layers,
            norm_eps=config.rms_norm_eps,
            has_bias=True,
            is_shared=True,
        )
        self.module = MedusaHeads(self.config)
        self._begin(target, target_ids)

    @torch.no_grad()
    def _begin(self, target: PreTrainedModel, target_ids: Tensor) -> None:
        model: Any = target
        for parameter in self.module.blocks.parameters():
            nn.init.zeros_(parameter)
        self.module.feature_norm.weight.copy_(model.get_decoder().norm.weight.float())
        self.module.feature_norm.requires_grad_(False)
        self.head.copy_(model.get_output_embeddings().weight.float()[target_ids])

    @property
    def head(self) -> Tensor:
        """The output matrix, [rows, hidden_size]."""
        matrix = self.module.lm_heads[0]
        assert isinstance(matrix, nn.Linear)
        return matrix.weight

    @property
    def num_weights(self) -> int:
        """Number of weights that a drafted block reads."""
        return sum(parameter.numel() for parameter in self.parameters())

    def batch(
        self, sequences: Items[Sequence], *, keep: float = 0.0, generator: torch.Generator | None = None
    ) -> HeadBatch:
        """Return a batch of all depths, see `FeatureDrafter.batch`; what came before changes nothing."""
        return super().batch(sequences, keep=keep)

    def forward(self, batch: HeadBatch) -> Tensor:
        """Return log-probabilities of each prediction, float32 [predictions, rows of the output]."""
        number, anchor, depth = batch.place.unbind(1)
        features = self.module.fuse(batch.states[number, anchor - 1].float())
        rows = [
            self.module.reshaped(features[depth == head + 1], head) for head in range(int(depth.max()))
        ]  # the places are in the order of their depths
        logits: Tensor = self.module.lm_heads[0](torch.cat(rows))
        return logits.float().log_softmax(-1)

    def start_from(self, init: str, target: str) -> None:
        """Take the weights and the output's ids of other heads, see `FeatureDrafter.start_from`."""
        heads, ids = load_medusa(init, target)
        if heads.config != self.config:
            own = self.config
            allowed = f"{own.num_heads} heads of {own.num_layers} layers and {own.num_outputs} output tokens"
            raise InvalidArgumentError("init", init, f"{allowed}, which share one output matrix")
        self.module.load_state_dict(heads.state_dict())
        if ids is not None:
            self.take_ids(ids)

    def save(self, folder: Path, identity: dict[str, str], name: str, card: dict[str, Any]) -> int:
        """Write a directory in vLLM's format, see `FeatureDrafter.save`."""
        config = self.config
        weights = {
            key: value.detach().to("cpu", torch.bfloat16).contiguous()
            for key, value in self.module.state_dict().items()
            if not key.startswith("feature_norm.")
        }
        stored = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "base_model_name_or_path": name,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "medusa_fc_bias": config.has_bias,
            "original_lm_head": config.is_shared,
            "truncated_vocab_size": config.num_outputs,
            "dtype": "bfloat16",
        }
        if config.num_outputs < config.vocab_size:
            weights["token_map"] = self.target_ids.cpu()
        about = (
            f"{config.num_heads} heads read the target's last state, and have {config.num_outputs} output "
            "tokens. They share its tokenizer."
        )
        text = head_card("Medusa heads", name, about, card)
        return write_drafter(folder, weights, stored, identity, name, card, text)
