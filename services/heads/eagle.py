"""EAGLE-3 heads (arXiv 2503.01840): one layer over a token's embedding and the hidden states before it.

A head reads the states that enter several layers of the target, fused by a matrix into a feature. It predicts
the token after x_p from x_p and the feature of position p - 1. Where the target has not computed that
feature, the head's own state of position p - 1 stands in for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From query, key and value [1, heads, rows, head_dim] to the mixed values [1, rows, heads, head_dim]."""


@dataclass(frozen=True)
class EagleConfig:
    taps: tuple[int, ...]  # the hidden states that it reads, by the ids of `Engine.tap`
    target_hidden_size: int  # width of each state that it reads
    num_outputs: int  # rows of the output matrix; below the target's token ids for a reduced vocabulary
    layer: LlamaConfig  # of its one layer, its norms and its embedding of the target's token ids
    has_head_norms: bool = False  # whether queries and keys are normalised, as in Qwen3
    norm_before_fc: bool = False  # whether all states are normalised together before they are fused
    fc_norm: bool = False  # whether each state is normalised on its own before they are fused
    norm_before_residual: bool = False  # whether the residual begins with the normalised feature
    norm_output: bool = False  # whether the normalised state stands in for the next feature

    @property
    def head_dim(self) -> int:
        assert self.layer.head_dim is not None  # transformers has set it
        return self.layer.head_dim

    @property
    def num_kv_heads(self) -> int:
        assert self.layer.num_key_value_heads is not None  # as well
        return self.layer.num_key_value_heads


def _normed(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype)


class _Attention(nn.Module):
    """Projections of the attention; the mixing itself is the caller's."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        layer, dim = config.layer, config.head_dim
        size, num_heads, bias = layer.hidden_size, layer.num_attention_heads, layer.attention_bias
        # The embedding and the feature are side by side.
        self.q_proj = nn.Linear(2 * size, num_heads * dim, bias=bias)
        self.k_proj = nn.Linear(2 * size, config.num_kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(2 * size, config.num_kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * dim, size, bias=bias)
        if config.has_head_norms:
            self.q_norm, self.k_norm = (LlamaRMSNorm(dim, layer.rms_norm_eps) for _ in range(2))
        self._has_head_norms, self._dim = config.has_head_norms, dim

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        projections = self.q_proj, self.k_proj, self.v_proj
        query, key, value = (project(x).unflatten(-1, (-1, self._dim)) for project in projections)
        if self._has_head_norms:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
        mixed: Tensor = self.o_proj(attend(query, key, value.transpose(1, 2)).flatten(2))
        return mixed


class EagleLayer(nn.Module):
    """The one layer of a head."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self._config = config
        self.input_layernorm, self.hidden_norm = LlamaRMSNorm(size, eps), LlamaRMSNorm(size, eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.mlp = LlamaMLP(config.layer)  # type: ignore[no-untyped-call]

    def forward(self, embedded: Tensor, feature: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        normed = self.hidden_norm(feature)
        residual = normed if self._config.norm_before_residual else feature
        x = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        hidden = residual + self.self_attn(x, cos, sin, attend)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class EagleHead(nn.Module):
    """An EAGLE-3 head; its parameters have the names of the `speculators` format."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        size, eps, num_taps = config.layer.hidden_size, config.layer.rms_norm_eps, len(config.taps)
        self.embed_tokens = nn.Embedding(config.layer.vocab_size, size)
        width = num_taps * config.target_hidden_size
        self.fc = nn.Linear(width, size, bias=False)
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(width, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                LlamaRMSNorm(config.target_hidden_size, eps) for _ in range(num_taps)
            )
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.norm = LlamaRMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.num_outputs, bias=False)
        self.rotary = LlamaRotaryEmbedding(config.layer)

    def fuse(self, states: Tensor, fc: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return features [..., hidden_size] from the target's states [..., taps, target_hidden_size]."""
        config = self.config
        if config.fc_norm:
            norms = cast("Iterable[LlamaRMSNorm]", self.fc_norm)
            weights = torch.stack([norm.weight for norm in norms])
            states = weights * _normed(states, config.layer.rms_norm_eps)
        flat = states.flatten(-2)
        if config.norm_before_fc:
            flat = self.input_norm(flat)
        return (fc or self.fc)(flat)

    def forward(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Run the layer on token ids [1, rows], with the feature of the position before each.

        Features are [1, rows, hidden_size], positions [1, rows]; `attend` sees what was fed before and these
        rows. Returns what `logits` takes and what stands in for the next feature, both [1, rows,
        hidden_size].
        """
        embedded = self.embed_tokens(token_ids)
        cos, sin = self.rotary(embedded, positions)
        hidden = self.layers[0](embedded, features, cos, sin, attend)
        normed = self.norm(hidden)
        return normed, normed if self.config.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., num_outputs] of states of `forward`."""
        out: Tensor = self.lm_head(hidden)
        return out
