"""Weights of Llama-like models for the GPU: fused, in the model's own type, without a second copy.

Query, key and value rows are one matrix, gate and up another. The module's parameters become views of the
fused matrices, so that the transformers model stays usable and no weight is held twice.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from services.engine.core.device import device_capability
from services.engine.core.model import LLAMA_TYPES, LlamaLayer, LoadedModel, head_norms

__all__ = ["GraphLayer", "GraphModel", "GraphShape", "build_graph_model", "has_graph_path", "prefers_graphs"]

_log = logging.getLogger(__name__)

_CAPABILITY = (8, 0)
"""Least compute capability for which the kernels were compiled."""


@dataclass(frozen=True)
class GraphShape:
    """Sizes of a Llama-like model; `scaling` multiplies the scores."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    norm_eps: float
    vocab_size: int

    @property
    def num_qkv_heads(self) -> int:
        """Heads of queries, keys and values together."""
        return self.num_heads + 2 * self.num_kv_heads


@dataclass(frozen=True)
class GraphLayer:
    """One layer.

    Attributes:
        attention_norm: [hidden].
        qkv: Rows of queries, keys, values: [num_qkv_heads * head_dim, hidden].
        qkv_bias: [num_qkv_heads * head_dim] or None.
        out: [hidden, num_heads * head_dim].
        out_bias: [hidden] or None.
        mlp_norm: [hidden].
        gate_up: [2 * intermediate, hidden].
        down: [hidden, intermediate].
        head_norm: [2, head_dim] for query and key heads, None when there is no such norm.
    """

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    head_norm: Tensor | None


@dataclass(frozen=True)
class GraphModel:
    """All weights.

    Attributes:
        shape: Sizes.
        layers: Bottom to top.
        embedding: [rows, hidden].
        last_norm: [hidden].
        head: [vocab_size, hidden].
        rotation: Cosines and sines of every position, float32 [2, max_context, head_dim / 2].
    """

    shape: GraphShape
    layers: tuple[GraphLayer, ...]
    embedding: Tensor
    last_norm: Tensor
    head: Tensor
    rotation: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and cache."""
        return self.head.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head.device

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that one step reads, whatever the number of rows (embedding rows left out)."""
        read = [self.head, *(m for x in self.layers for m in (x.qkv, x.out, x.gate_up, x.down))]
        return sum(matrix.numel() * matrix.element_size() for matrix in read)

    def first_layers(self, count: int) -> GraphModel:
        """Return the model of the first `count` layers under the same head; shares all weights."""
        return replace(self, layers=self.layers[:count])


def has_graph_path(loaded: LoadedModel) -> bool:
    """Whether `build_graph_model` covers it: Llama, Mistral, Qwen2 or Qwen3 with full attention.

    Quantised weights are not covered, unless they were dequantised at load.
    """
    config = loaded.config
    if not loaded.has_plain_weights or config.model_type not in LLAMA_TYPES or config.hidden_act != "silu":
        return False
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = (config.hidden_size, config.intermediate_size, config.num_attention_heads * head_dim)
    return (
        not _slides(loaded)
        and not getattr(config, "mlp_bias", False)
        # Tiles of the kernels: heads are powers of two, rows whole vectors of 16 numbers.
        and head_dim & (head_dim - 1) == 0
        and head_dim >= 16
        and all(size % 16 == 0 for size in sizes)
    )


def prefers_graphs(loaded: LoadedModel) -> bool:
    """Whether the captured path is the best that the model has on its device; if that is too old, log it."""
    capability = device_capability(loaded.device)
    if capability is None or not has_graph_path(loaded):
        return False
    if capability < _CAPABILITY:
        _log.warning(
            "%s runs through transformers' layers: the kernels of CUDA graphs need compute capability 8.0, "
            "this card has %d.%d",
            loaded.name,
            *capability,
        )
    return capability >= _CAPABILITY


@torch.no_grad()
def build_graph_model(loaded: LoadedModel, vocab_size: int) -> GraphModel:
    """Fuse the weights of a model that `has_graph_path`; its parameters become views of the result."""
    config, body = loaded.config, loaded.llama.model
    attention = body.layers[0].self_attn
    shape = GraphShape(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
        norm_eps=config.rms_norm_eps,
        vocab_size=vocab_size,
    )
    return GraphModel(
        shape=shape,
        layers=tuple(_layer(layer) for layer in body.layers),
        embedding=loaded.llama.get_input_embeddings().weight,
        last_norm=body.norm.weight,
        head=loaded.llama.get_output_embeddings().weight[:vocab_size],
        rotation=_rotation(body.rotary_emb, loaded.max_context, shape.head_dim, loaded.device),
    )


def _slides(loaded: LoadedModel) -> bool:
    """Whether some layer's window is shorter than the context."""
    config = loaded.config
    window = getattr(config, "sliding_window", None)
    if not window or window >= loaded.max_context or not getattr(config, "use_sliding_window", True):
        return False
    layer_types = getattr(config, "layer_types", None)
    return layer_types is None or "sliding_attention" in layer_types


def _layer(layer: LlamaLayer) -> GraphLayer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    norms = head_norms(attention)
    return GraphLayer(
        attention_norm=layer.input_layernorm.weight,
        qkv=_fuse(projections),
        qkv_bias=_fuse_biases(projections),
        out=attention.o_proj.weight,
        out_bias=attention.o_proj.bias,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=_fuse((mlp.gate_proj, mlp.up_proj)),
        down=mlp.down_proj.weight,
        head_norm=None if norms is None else torch.stack(norms),
    )


def _fuse(linears: Sequence[nn.Linear]) -> Tensor:
    """The weights below each other; the modules keep views."""
    fused = torch.cat([linear.weight for linear in linears])
    for linear, part in zip(linears, fused.split_with_sizes([len(x.weight) for x in linears]), strict=True):
        linear.weight = nn.Parameter(part, requires_grad=False)
    return fused


def _fuse_biases(linears: Sequence[nn.Linear]) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat([x.weight.new_zeros(x.weight.shape[0]) if x.bias is None else x.bias for x in linears])


def _rotation(rotary: nn.Module, count: int, head_dim: int, device: torch.device) -> Tensor:
    positions = torch.arange(count, device=device)[None]
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32, device=device), positions)
    half = head_dim // 2
    return torch.stack((cos[0, :, :half], sin[0, :, :half])).float().contiguous()
