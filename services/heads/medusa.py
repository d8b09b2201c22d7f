"""Medusa heads (arXiv 2401.10774): each predicts the token of one depth from one hidden state of the target.

Head k reads the last hidden state at position t, through the target's last norm, and predicts the token at
t + k + 2: the target's own output predicts the one at t + 1. When a proposal is drafted the target has just
emitted that token, and its own state is not computed yet. So head k gives depth k + 1 of the proposal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MedusaConfig", "MedusaHeads"]


@dataclass(frozen=True)
class MedusaConfig:
    """Shape and variant of the heads of one target.

    Attributes:
        num_heads: Heads, one per depth.
        num_layers: Residual layers of a head.
        hidden_size: Width of the target's states.
        vocab_size: Number of the target's token ids.
        num_outputs: Rows of an output matrix; below `vocab_size` for a reduced vocabulary.
        last_layer: Id of the state that they read: the target's number of layers.
        norm_eps: Of the target's last norm.
        has_bias: Whether the residual layers have biases.
        is_shared: Whether all heads have one output matrix.
        logit_scale: Factor on the logits.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_outputs: int
    last_layer: int
    norm_eps: float
    has_bias: bool
    is_shared: bool
    logit_scale: float = 1.0


class MedusaHeads(nn.Module):
    """All heads of a target; the parameters have the names of vLLM's format.

    Args:
        config: Their shape and variant.
    """

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.feature_norm = nn.RMSNorm(size, config.norm_eps)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "layers": nn.ModuleList(
                        nn.Linear(size, size, config.has_bias) for _ in range(config.num_layers)
                    )
                }
            )
            for _ in range(config.num_heads)
        )
        num_matrices = 1 if config.is_shared else config.num_heads
        self.lm_heads = nn.ModuleList(nn.Linear(size, config.num_outputs, False) for _ in range(num_matrices))

    def fuse(self, states: Tensor) -> Tensor:
        """Return features [..., hidden_size] from the target's states [..., 1, hidden_size]."""
        normed: Tensor = self.feature_norm(states[..., 0, :])
        return normed

    def forward(self, features: Tensor, depth: int) -> Tensor:
        """Return the logits of the first `depth` heads, [positions, depth, num_outputs].

        Args:
            features: [positions, hidden_size].
            depth: At most `num_heads`.
        """
        rows = torch.stack([self.reshaped(features, head) for head in range(depth)], dim=1)
        if self.config.is_shared:
            logits: Tensor = self.lm_heads[0](rows)
        else:
            logits = torch.stack([self.lm_heads[head](rows[:, head]) for head in range(depth)], dim=1)
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    def reshaped(self, x: Tensor, head: int) -> Tensor:
        """Return what a head's output matrix takes for features, both [..., hidden_size]."""
        block = self.blocks[head]
        assert isinstance(block, nn.ModuleDict)
        layers = block["layers"]
        assert isinstance(layers, nn.ModuleList)
        for layer in layers:
            x = x + F.silu(layer(x))
        return x
