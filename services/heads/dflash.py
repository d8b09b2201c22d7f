"""DFlash heads (arXiv 2602.06036): layers that see fused states of the target, and predict a block in a pass.

The states of each committed position become its keys and values in every layer. A block is the last committed
token, whose states are not known yet, and masks; its tokens see each other in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from services.heads.eagle import Mlp, Norm

__all__ = ["DFlashConfig", "DFlashHead"]


@dataclass(frozen=True)
class DFlashConfig:
    """Shape and variant of a head.

    Attributes:
        taps: The hidden states that it reads, by the ids of `Engine.tap`.
        block_size: Tokens of a block, the last committed one included.
        mask_token: Token that stands for the others.
        first_row: Row of a block that predicts the first token of a proposal: 1, the first mask, or 0.
        num_layers: Layers.
        num_outputs: Rows of the output matrix; below the vocabulary's size for a reduced vocabulary.
        layer: Shape of the layers; its `vocab_size` and `hidden_size` are the target's.
    """

    taps: tuple[int, ...]
    block_size: int
    mask_token: int
    first_row: int
    num_layers: int
    num_outputs: int
    layer: LlamaConfig

    @property
    def depth(self) -> int:
        """Tokens of the longest proposal."""
        return self.block_size - self.first_row


class _Attention(nn.Module):
    """Attention of a block to itself and to the target's states."""

    def __init__(self, layer: LlamaConfig) -> None:
        super().__init__()
        size, dim, bias = layer.hidden_size, head_dim(layer), layer.attention_bias
        self.q_proj = nn.Linear(size, layer.num_attention_heads * dim, bias=bias)
        self.k_proj = nn.Linear(size, kv_heads(layer) * dim, bias=bias)
        self.v_proj = nn.Linear(size, kv_heads(layer) * dim, bias=bias)
        self.o_proj = nn.Linear(layer.num_attention_heads * dim, size, bias=bias)
        self.q_norm, self.k_norm = Norm(dim, layer.rms_norm_eps), Norm(dim, layer.rms_norm_eps)
        self._dim = dim

    def queries(self, x: Tensor) -> Tensor:
        """Return normalised queries [1, heads, rows, dim]."""
        made: Tensor = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self._dim)))
        return made.transpose(0, 1)[None]

    def entries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return rotated keys beside values, [heads, rows, 2 dim]."""
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self._dim))).transpose(0, 1)[None]
        value = self.v_proj(x).unflatten(-1, (-1, self._dim)).transpose(0, 1)
        key, _ = apply_rotary_pos_emb(key, key, cos, sin)
        return torch.cat([key[0], value], dim=-1)

    def forward(self, x: Tensor, seen: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the mixed rows [rows, size]; `seen` are entries of all that the rows see."""
        query = self.queries(x)
        query, _ = apply_rotary_pos_emb(query, query, cos, sin)
        key, value = seen[None, ..., : self._dim], seen[None, ..., self._dim :]
        mixed = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        out: Tensor = self.o_proj(mixed[0].transpose(0, 1).flatten(1))
        return out


class _Layer(nn.Module):
    def __init__(self, layer: LlamaConfig) -> None:
        super().__init__()
        size, eps = layer.hidden_size, layer.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = Norm(size, eps), Norm(size, eps)
        self.self_attn = _Attention(layer)
        self.mlp = Mlp(size, layer.intermediate_size, bias=layer.mlp_bias)

    def forward(self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        seen = torch.cat([context, self.self_attn.entries(normed, cos, sin)], dim=1)
        x = x + self.self_attn(normed, seen, cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DFlashHead(nn.Module):
    """A DFlash head; its parameters have the names of the published formats.

    Args:
        config: Its shape and variant.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        layer = config.layer
        size, eps = layer.hidden_size, layer.rms_norm_eps
        self.embed_tokens = nn.Embedding(layer.vocab_size, size)
        self.fc = nn.Linear(len(config.taps) * size, size, bias=False)
        self.hidden_norm, self.norm = Norm(size, eps), Norm(size, eps)
        self.layers = nn.ModuleList(_Layer(layer) for _ in range(config.num_layers))
        self.lm_head = nn.Linear(size, config.num_outputs, bias=False)
        self.rotary = LlamaRotaryEmbedding(layer)

    def fuse(self, states: Tensor) -> Tensor:
        """Return features [..., hidden_size] from the target's states [..., taps, hidden_size]."""
        fused: Tensor = self.hidden_norm(self.fc(states.flatten(-2)))
        return fused

    def context(self, features: Tensor, positions: Tensor) -> Tensor:
        """Return keys beside values of committed positions, [layers, heads, positions, 2 head_dim].

        Args:
            features: [positions, hidden_size].
            positions: Absolute, [positions].
        """
        cos, sin = self.rotary(features[None], positions[None])
        return torch.stack([_attention(layer).entries(features, cos, sin) for layer in self.layers])

    def forward(self, token_ids: Tensor, positions: Tensor, context: Tensor) -> Tensor:
        """Return what `logits` takes for the tokens of one block, [tokens, hidden_size].

        Args:
            token_ids: [tokens].
            positions: Absolute, [tokens].
            context: Keys beside values of the positions that it sees, as of `context`.
        """
        x = self.embed_tokens(token_ids)
        cos, sin = self.rotary(x[None], positions[None])
        for layer, seen in zip(self.layers, context, strict=True):
            x = layer(x, seen, cos, sin)
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., num_outputs] of states of `forward`."""
        out: Tensor = self.lm_head(hidden)
        return out


def head_dim(layer: LlamaConfig) -> int:
    """Return the width of a head of the attention."""
    return int(layer.head_dim or layer.hidden_size // layer.num_attention_heads)


def kv_heads(layer: LlamaConfig) -> int:
    """Return the number of heads of keys and values."""
    return int(layer.num_key_value_heads or layer.num_attention_heads)


def _attention(layer: nn.Module) -> _Attention:
    assert isinstance(layer, _Layer)
    return layer.self_attn
