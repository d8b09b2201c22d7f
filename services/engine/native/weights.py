"""Weights of Llama-like models, laid out for `kernel.c`.

Query, key and value rows are one matrix, gate and up another. Weights that bfloat16 represents without loss,
as nearly all published ones, are stored as bfloat16, those of a quantised draft as int8, others as
float32. The arithmetic is float32, or exact as `tiles.h` and `integers.h` have it. Of a model whose dtype is
bfloat16 the inputs of products are rounded to it, see `pairs.h` and `tiles.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from services.engine.core.errors import InvalidModelError
from services.engine.core.model import LLAMA_TYPES, LoadedModel, embeddings, head_norms
from services.engine.core.quantised import QuantisedMatrix, concatenate
from services.engine.core.shapes import check_fields, check_head_dim, check_rotary, weights_file
from services.engine.native.bindings import LayerWeights, MatrixWeights, ModelWeights
from services.engine.native.library import load_kernel

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_ROUNDED = 3

MAX_HEAD_DIM = 256
"""Largest head dimension that the kernel keeps in registers and on its stack."""


@dataclass
class NativeModel:
    """A model, laid out for the kernel: `kept` owns the memory that its structure `weights` points to."""

    kernel: ctypes.CDLL
    weights: ModelWeights
    vocab_size: int
    head_dim: int
    rotary: nn.Module
    max_context: int
    kept: list[object] = field(default_factory=list)

    def rotation(self, count: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [positions, head_dim / 2] of the first `count` positions of the context."""
        # Past the model's context some kinds of rotary embedding would change for all positions.
        positions = torch.arange(min(count, self.max_context))[None]
        cos, sin = self.rotary(torch.zeros(1, dtype=torch.float32), positions)
        half = self.head_dim // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def native_obstacle(loaded: LoadedModel) -> str:
    """Return why the kernel cannot run a model; empty if it can.

    It covers Llama, Mistral, Qwen2 and Qwen3 on a CPU in float32, and in bfloat16 where the processor has
    instructions for it. The library is searched, and compiled if necessary, only for a covered model.
    """
    config = loaded.config
    if loaded.device.type != "cpu":
        return f"the model is on {loaded.device.type}"
    if loaded.dtype == torch.float16:
        return "float16 is not covered"
    if config.model_type not in LLAMA_TYPES:
        return f"{config.model_type} is not covered"
    if config.hidden_act != "silu":
        return f"the activation {config.hidden_act} is not covered"
    head_dim = _layers(loaded)[0].self_attn.head_dim
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        return f"a head of {head_dim} is not covered"
    kernel = load_kernel()
    if loaded.dtype == torch.bfloat16 and kernel.library is not None and not kernel.library.gr_can_round():
        return f"bfloat16 is not covered on {kernel.variant}"
    return kernel.reason


@torch.no_grad()
def build_native(
    loaded: LoadedModel,
    windows: Sequence[int | None],
    vocab_size: int,
    quantised: Mapping[int, QuantisedMatrix] | None = None,
) -> NativeModel:
    """Lay out the weights of a model for which `native_obstacle` is empty, to compute `vocab_size` logits.

    `windows` has the sliding window of each layer, None for full attention; `quantised` is what
    `quantise_model` returned for the model, or nothing.
    """
    library = load_kernel().library
    assert library is not None
    config, body, parts = loaded.config, loaded.llama, _layers(loaded)
    attention = parts[0].self_attn
    embedding, output = embeddings(loaded.module)
    head_dim, rotary = attention.head_dim, body.rotary_emb
    model = NativeModel(library, ModelWeights(), vocab_size, head_dim, rotary, loaded.max_context)
    packer = Packer(library, model.kept, quantised or {}, loaded.dtype)
    layers = (LayerWeights * len(windows))(
        *(
            packer.layer(layer, head_norms(layer.self_attn), window)
            for layer, window in zip(parts, windows, strict=True)
        )
    )
    model.kept.append(layers)
    weights = model.weights
    weights.hidden, weights.intermediate = config.hidden_size, config.intermediate_size
    weights.heads, weights.kv_heads = config.num_attention_heads, config.num_key_value_heads
    weights.head_dim, weights.layers = attention.head_dim, len(windows)
    weights.scaling, weights.norm_eps = attention.scaling, config.rms_norm_eps
    weights.embedding, weights.embedding_scale = packer.embedding(embedding.weight)
    weights.last_norm = packer.vector(body.norm.weight)
    weights.head = packer.matrix([(output.weight[:vocab_size], output.bias)])
    weights.layer = layers
    check_layout(loaded.name, model)
    return model


def check_layout(name: str, model: NativeModel) -> None:
    """Raise InvalidModelError if the kernel would divide by zero or read past a matrix."""
    weights = model.weights
    sizes = {
        "hidden_size": weights.hidden,
        "intermediate_size": weights.intermediate,
        "num_attention_heads": weights.heads,
        "num_key_value_heads": weights.kv_heads,
        "num_hidden_layers": weights.layers,
    }
    check_fields(name, {**sizes, "scaling": weights.scaling})
    check_head_dim(name, weights.head_dim)
    check_rotary(name, model.rotary, weights.head_dim)
    mixed = weights.heads * weights.head_dim
    projected = mixed + 2 * weights.kv_heads * weights.head_dim
    entering = weights.hidden * (2 if weights.is_head else 1)
    matrices = [("head", weights.head, weights.head.outputs, weights.hidden)]
    for number in range(weights.layers):
        layer = weights.layer[number]
        matrices += [
            (f"layer {number}: query, key, value", layer.qkv, projected, entering),
            (f"layer {number}: output", layer.out, weights.hidden, mixed),
            (f"layer {number}: gate, up", layer.gate_up, 2 * weights.intermediate, weights.hidden),
            (f"layer {number}: down", layer.down, weights.hidden, weights.intermediate),
        ]
    for part, matrix, outputs, inputs in matrices:
        got = [matrix.outputs, matrix.inputs]
        if got != [outputs, inputs]:
            shape = f"the shape {got}"
            raise InvalidModelError(name, weights_file(name), part, shape, f"{[outputs, inputs]}")


def pack_panels(weight: Tensor, panel: int, lanes: int, tile_inputs: int = 0) -> Tensor:
    """Lay out a float32 weight [outputs, inputs] as panels [ceil(outputs / panel), inputs, panel].

    They are bfloat16 if that is lossless, else float32. Those of bfloat16 interleave pairs of vectors of
    `lanes`, see `kernel.c`, and have tiles of `tile_inputs` inputs, see `tiles.h`, unless it is 0.
    """
    inputs = weight.shape[1]
    panels = _panels(weight, panel)
    half = panels.bfloat16()
    if not torch.equal(half.float(), panels):
        return panels.contiguous()
    if tile_inputs:
        half = nn.functional.pad(half, (0, 0, 0, -inputs % tile_inputs))
        tiles = half.view(len(half), -1, tile_inputs // 2, 2, 2, 2, lanes)
        return tiles.permute(0, 4, 1, 5, 2, 6, 3).contiguous()
    return torch.unflatten(half, 2, (-1, 2, lanes)).transpose(3, 4).flatten(2).contiguous()


def pack_pairs(weight: Tensor, panel: int) -> Tensor:
    """Lay out a bfloat16 weight [outputs, inputs] as panels of pairs of inputs, see `pairs.h`."""
    pairs = nn.functional.pad(weight, (0, weight.shape[1] % 2)).contiguous().view(torch.int32)
    return _panels(pairs, panel).contiguous()


def pack_integers(weight: Tensor, panel: int, group: int) -> Tensor:
    """Lay out an int8 weight [outputs, inputs] as panels, for sums in integers if `group` is not 0.

    Those have `group` inputs of an output side by side, after -128 times the sums of the outputs' weights as
    32-bit integers, see `integers.h`.
    """
    panels = _panels(weight, panel)
    if not group:
        return panels.contiguous()
    grouped = nn.functional.pad(panels, (0, 0, 0, -weight.shape[1] % group))
    grouped = grouped.reshape(len(panels), -1, group, panel).transpose(2, 3)
    first = (-128 * panels.sum(1, dtype=torch.int32)).view(torch.int8).view(len(panels), 1, panel, group)
    return torch.cat([first, grouped], 1)


def _panels(weight: Tensor, panel: int) -> Tensor:
    """Return a matrix [outputs, inputs] as [panels, inputs, panel], with zeros for missing outputs."""
    outputs, inputs = weight.shape
    return nn.functional.pad(weight, (0, 0, 0, -outputs % panel)).view(-1, panel, inputs).transpose(1, 2)


@dataclass
class Packer:
    """Lays out tensors for the kernel."""

    library: ctypes.CDLL  # the kernel's
    kept: list[object]  # receives the owners of the memory
    quantised: Mapping[int, QuantisedMatrix]  # all matrices, see `quantised_matrices`, or none
    dtype: torch.dtype = torch.float32  # of the arithmetic with matrices that are not quantised

    def vector(self, values: Tensor | None) -> int | None:
        """Address of a float32 copy."""
        if values is None:
            return None
        copy = values.detach().float().clone().contiguous()
        self.kept.append(copy)
        return copy.data_ptr()

    def embedding(self, weight: Tensor) -> tuple[int | None, int | None]:
        """Addresses of the rows, and of their scales if they are integers."""
        if not self.quantised:
            return self.vector(weight), None
        matrix = self.quantised[weight.data_ptr()]
        self.kept.append(matrix.values)
        return matrix.values.data_ptr(), self.vector(matrix.scales)

    def layer(self, layer: Any, norms: tuple[Tensor, Tensor] | None, window: int | None) -> LayerWeights:
        """Lay out a layer with Llama's names, and the norms of its query and key heads."""
        attention, mlp = layer.self_attn, layer.mlp
        query_norm, key_norm = norms or (None, None)
        return LayerWeights(
            self.maps(attention.q_proj, attention.k_proj, attention.v_proj),
            self.maps(attention.o_proj),
            self.maps(mlp.gate_proj, mlp.up_proj),
            self.maps(mlp.down_proj),
            self.vector(layer.input_layernorm.weight),
            self.vector(layer.post_attention_layernorm.weight),
            self.vector(query_norm),
            self.vector(key_norm),
            window or 0,
        )

    def maps(self, *maps: nn.Linear) -> MatrixWeights:
        """Concatenate the outputs of several linear maps into one."""
        return self.matrix([(linear.weight, linear.bias) for linear in maps])

    def matrix(self, parts: Sequence[tuple[Tensor, Tensor | None]]) -> MatrixWeights:
        """Concatenate the outputs of several matrices into one."""
        outputs, inputs = sum(len(weight) for weight, _ in parts), parts[0][0].shape[1]
        scale, layout = None, (self.library.gr_panel(), self.library.gr_lanes())
        if self.quantised:
            joined = concatenate([self.quantised[weight.data_ptr()][: len(weight)] for weight, _ in parts])
            panels = pack_integers(joined.values, layout[0], self.library.gr_integer_inputs())
            scale = self.vector(joined.scales)
        else:
            joined_parts = torch.cat([part.to(self.dtype) for part, _ in parts])
            tile_inputs = self.library.gr_tile_inputs()
            if self.dtype == torch.bfloat16 and not tile_inputs:
                panels = pack_pairs(joined_parts, layout[0])
            else:
                panels = pack_panels(joined_parts.float(), *layout, tile_inputs)
        self.kept.append(panels)
        bias = None
        if any(part is not None for _, part in parts):
            biases = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in parts]
            bias = torch.cat(biases)
        kind = _ROUNDED if scale is None and self.dtype == torch.bfloat16 else _KINDS[panels.dtype]
        return MatrixWeights(panels.data_ptr(), scale, self.vector(bias), kind, outputs, inputs)


def _layers(loaded: LoadedModel) -> Sequence[LlamaDecoderLayer]:
    return cast("Sequence[LlamaDecoderLayer]", loaded.llama.layers)
