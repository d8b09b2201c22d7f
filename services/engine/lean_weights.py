"""Weights of Llama-like models, fused and laid out for few calls per layer.

Query, key and value rows are one matrix, gate and up another. The rows of queries and keys are permuted so
that the two numbers which rotary embedding mixes lie side by side: the rotation is then one complex
product, and scores do not change because queries and keys are permuted alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from services.engine.matrices import Matrix, pack_matrix
from services.engine.model import LoadedModel

__all__ = ["LeanLayer", "LeanModel", "LeanShape", "build_lean", "has_lean_path"]

_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": torch._C._nn.silu_}


@dataclass(frozen=True, slots=True)
class LeanLayer:
    """One layer.

    Attributes:
        attention_norm: [hidden], times what `x / |x|` lacks to be RMSNorm and the gain of `qkv`.
        qkv: Rows of queries, keys, values: [(num_heads + 2 * num_kv_heads) * head_dim, hidden].
        out: Attention output [hidden, num_heads * head_dim].
        mlp_norm: [hidden], like `attention_norm` for `gate_up`.
        gate_up: [2 * intermediate, hidden].
        down: [hidden, intermediate].
        head_norm: [num_heads + num_kv_heads, head_dim] of the norm on query and key heads, if any.
        window: Sliding window, None for full attention.
    """

    attention_norm: Tensor
    qkv: Matrix
    out: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix
    head_norm: Tensor | None
    window: int | None


@dataclass(frozen=True)
class LeanShape:
    """Sizes of a Llama-like model; `scaling` multiplies the scores."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    norm_eps: float


@dataclass(frozen=True)
class LeanModel:
    """All weights.

    Attributes:
        shape: Sizes.
        layers: Bottom to top.
        embedding: [vocab_size, hidden].
        last_norm: [hidden], like the layers' norms, for `head`.
        head: [vocab_size, hidden].
        activation: In-place activation of the gate.
        rotation: Given a count, returns complex factors [count, head_dim / 2] for positions 0..count-1, or
            fewer where the context ends before.
    """

    shape: LeanShape
    layers: tuple[LeanLayer, ...]
    embedding: Tensor
    last_norm: Tensor
    head: Matrix
    activation: Callable[[Tensor], Tensor]
    rotation: Callable[[int], Tensor]


def has_lean_path(loaded: LoadedModel) -> bool:
    """Whether `build_lean` covers it: Llama, Mistral, Qwen2 or Qwen3, float32, on a CPU with oneDNN."""
    config = loaded.config
    return (
        config.model_type in _MODEL_TYPES
        and config.hidden_act in _ACTIVATIONS
        and loaded.dtype == torch.float32
        and loaded.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
    )


@torch.no_grad()
def build_lean(
    loaded: LoadedModel, windows: tuple[int | None, ...], vocab_size: int, *, invariant: bool = False
) -> LeanModel:
    """Fuse and lay out the weights of a model that `has_lean_path`; `invariant` as in `pack_matrix`."""
    config, body = loaded.config, loaded.module.model
    attention, rotary, max_context = body.layers[0].self_attn, body.rotary_emb, loaded.max_context
    shape = LeanShape(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
        norm_eps=config.rms_norm_eps,
    )
    output = loaded.module.get_output_embeddings()
    head = _fused([(output.weight[:vocab_size], output.bias)], invariant)
    return LeanModel(
        shape=shape,
        layers=tuple(
            _layer(layer, shape, window, invariant)
            for layer, window in zip(body.layers, windows, strict=True)
        ),
        embedding=loaded.module.get_input_embeddings().weight.detach().clone(),
        last_norm=_norm_weight(body.norm, head),
        head=head,
        activation=_ACTIVATIONS[config.hidden_act],
        # Past the model's context some kinds of rotation would change for all positions.
        rotation=lambda count: _rotation(rotary, min(count, max_context), shape.head_dim),
    )


def _layer(layer: nn.Module, shape: LeanShape, window: int | None, invariant: bool) -> LeanLayer:
    attention, mlp = layer.self_attn, layer.mlp
    pairs = _pair_order(shape.head_dim)
    qkv = _fused(
        [
            _permuted(attention.q_proj, pairs),
            _permuted(attention.k_proj, pairs),
            (attention.v_proj.weight, attention.v_proj.bias),
        ],
        invariant,
    )
    gate_up = _fused(
        [(mlp.gate_proj.weight, mlp.gate_proj.bias), (mlp.up_proj.weight, mlp.up_proj.bias)], invariant
    )
    return LeanLayer(
        attention_norm=_norm_weight(layer.input_layernorm, qkv),
        qkv=qkv,
        out=_fused([(attention.o_proj.weight, attention.o_proj.bias)], invariant),
        mlp_norm=_norm_weight(layer.post_attention_layernorm, gate_up),
        gate_up=gate_up,
        down=_fused([(mlp.down_proj.weight, mlp.down_proj.bias)], invariant),
        head_norm=_head_norm(attention, shape, pairs),
        window=window,
    )


def _head_norm(attention: nn.Module, shape: LeanShape, pairs: Tensor) -> Tensor | None:
    if getattr(attention, "q_norm", None) is None:
        return None
    queries = attention.q_norm.weight[pairs].expand(shape.num_heads, -1)
    keys = attention.k_norm.weight[pairs].expand(shape.num_kv_heads, -1)
    return torch.cat((queries, keys)) * shape.head_dim**0.5


def _pair_order(head_dim: int) -> Tensor:
    """Order of a head's rows that brings i and i + head_dim / 2 together."""
    return torch.arange(head_dim).view(2, -1).t().reshape(-1)


def _permuted(linear: nn.Linear, pairs: Tensor) -> tuple[Tensor, Tensor | None]:
    head_dim = pairs.numel()
    weight = linear.weight.unflatten(0, (-1, head_dim))[:, pairs].flatten(0, 1)
    bias = linear.bias
    return weight, None if bias is None else bias.view(-1, head_dim)[:, pairs].reshape(-1)


def _fused(parts: list[tuple[Tensor, Tensor | None]], invariant: bool) -> Matrix:
    weight = torch.cat([part for part, _ in parts])
    if all(bias is None for _, bias in parts):
        return pack_matrix(weight, None, invariant=invariant)
    biases = [part.new_zeros(part.shape[0]) if bias is None else bias for part, bias in parts]
    return pack_matrix(weight, torch.cat(biases), invariant=invariant)


def _norm_weight(norm: nn.Module, matrix: Matrix) -> Tensor:
    """x / rms(x) = x / |x| * sqrt(hidden); the matrix behind expects its gain here, but not on its bias."""
    if matrix.bias is not None:
        matrix.bias *= matrix.gain
    weight: Tensor = norm.weight * (norm.weight.numel() ** 0.5 * matrix.gain)
    return weight


def _rotation(rotary: nn.Module, count: int, head_dim: int) -> Tensor:
    positions = torch.arange(count)[None]
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), positions)
    half = head_dim // 2
    return torch.complex(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
