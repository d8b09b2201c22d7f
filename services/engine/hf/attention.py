"""The attention function installed in transformers models: packed rows over the engine's own KV cache."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from services.engine.core.batch import Batch, Segment

ATTENTION_NAME = "gammaray"

# Keyword arguments that do not affect the attention itself.
_HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "output_router_logits"})

LayerCall = Callable[[nn.Module, "LayerInput", dict[str, Any]], Tensor]


active: ContextVar[LayerCall | None] = ContextVar("active", default=None)
"""The handler of this thread's forward; engines in other threads have their own."""


def unknown_arguments(arguments: dict[str, Any]) -> list[str]:
    """Return the names of arguments that would change the attention in an unsupported way."""
    return sorted(
        name
        for name, value in arguments.items()
        if name not in _HARMLESS and value is not None and value is not False
    )


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """transformers' calling convention: [1, heads, rows, dim] in, [1, rows, heads, dim] out."""
    handler = active.get()
    if handler is None:
        raise RuntimeError("a model with gammaray's attention runs only inside its engine")
    if attention_mask is not None:
        arguments["attention_mask"] = attention_mask
    if dropout:
        arguments["dropout"] = dropout
    inputs = LayerInput(query, key, value, scaling, sliding_window, softcap, s_aux)
    return handler(module, inputs, arguments), None


AttentionInterface.register(ATTENTION_NAME, _attention_forward)


@dataclass(frozen=True)
class LayerInput:
    """Arguments of one layer's attention call."""

    query: Tensor  # [1, num_heads, rows, key_dim]
    key: Tensor  # [1, num_kv_heads, rows, key_dim]
    value: Tensor  # [1, num_kv_heads, rows, value_dim]
    scaling: float | None  # factor on the scores; None for key_dim ** -0.5
    window: int | None  # number of positions a row sees, including itself; None for all
    softcap: float | None  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None  # [num_heads], a score per head that takes probability but has no value

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return self.key.shape[3] ** -0.5 if self.scaling is None else self.scaling


def attend(batch: Batch, layer: int, inputs: LayerInput, *, flash: bool = False) -> Tensor:
    """Write a layer's new keys and values, and attend per session: [1, rows, num_heads, value_dim].

    Args:
        flash: Let a causal kernel mask a chain that sees all slots before it, as a prompt's chunk does. A
            mask [rows, slots] rules out torch's flash kernels, and takes as much memory as the scores.
    """
    num_heads, rows, value_dim = inputs.query.shape[1], inputs.query.shape[2], inputs.value.shape[3]
    output = inputs.query.new_zeros(rows, num_heads, value_dim)
    for index, segment in enumerate(batch.segments):
        here = slice(segment.row, segment.row + segment.count)
        output[here] = _attend_segment(batch, index, layer, inputs, flash=flash).transpose(0, 1)
    return output[None]


def _attend_segment(batch: Batch, index: int, layer: int, inputs: LayerInput, *, flash: bool) -> Tensor:
    """Return one session's attention, [num_heads, its rows, value_dim]."""
    segment = batch.segments[index]
    num_heads, count = inputs.query.shape[1], segment.count
    num_kv_heads, key_dim, value_dim = inputs.key.shape[1], inputs.key.shape[3], inputs.value.shape[3]
    here = slice(segment.row, segment.row + count)
    end = segment.slot + count
    slots = _written_slots(segment, layer, inputs)
    keys, values = slots[0][:, :end], slots[1][:, :end]
    plain = inputs.softcap is None and inputs.sinks is None
    if flash and plain and count > 1 and _is_causal(segment, inputs.window):
        return F.scaled_dot_product_attention(
            inputs.query[:, :, here],
            keys[None],
            values[None],
            attn_mask=causal_lower_right(count, end),
            scale=inputs.scale,
            enable_gqa=num_heads != num_kv_heads,
        )[0]
    # Heads of a group share keys and values: stack their rows instead of copying keys and values.
    queries = inputs.query[0, :, here].reshape(num_kv_heads, -1, key_dim)
    mask = batch.mask(index, inputs.window, queries.device)
    if mask is not None:
        mask = mask.repeat(num_heads // num_kv_heads, 1)
    if plain:
        mixed = F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=mask, scale=inputs.scale
        )[0]
    else:
        mixed = _explicit_attention(queries, keys, values, mask, inputs)
    return mixed.reshape(num_heads, count, value_dim)


def _written_slots(segment: Segment, layer: int, inputs: LayerInput) -> tuple[Tensor, Tensor]:
    """Write a segment's new keys and values; return all slots of both, [num_kv_heads, capacity, dim]."""
    num_kv_heads, key_dim, value_dim = inputs.key.shape[1], inputs.key.shape[3], inputs.value.shape[3]
    here = slice(segment.row, segment.row + segment.count)
    new = slice(segment.slot, segment.slot + segment.count)
    slots = segment.cache.data[layer, :num_kv_heads]
    keys, values = slots[..., :key_dim], slots[..., key_dim : key_dim + value_dim]
    keys[:, new] = inputs.key[0, :, here]
    values[:, new] = inputs.value[0, :, here]
    return keys, values


def _is_causal(segment: Segment, window: int | None) -> bool:
    """Whether each row sees all slots up to its own."""
    end = segment.slot + segment.count
    return segment.parents is None and segment.cache.first == 0 and (window is None or window >= end)


def _explicit_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, inputs: LayerInput
) -> Tensor:
    """Attention with softcap and sinks, softmax in float32: [kv_heads, stacked rows, value_dim].

    Queries are [kv_heads, stacked rows, key_dim], keys and values [kv_heads, slots, their dim]; the mask of
    the slots that a row sees [stacked rows, slots], None for all.
    """
    scores = torch.matmul(queries, keys.transpose(-2, -1)).mul_(inputs.scale)
    if inputs.softcap is not None:
        scores = torch.tanh(scores / inputs.softcap) * inputs.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if inputs.sinks is None:
        probs = torch.softmax(scores, dim=-1, dtype=torch.float32)
    else:
        per_head = inputs.sinks.view(len(queries), -1, 1).to(queries.dtype)
        sinks = per_head.repeat_interleave(queries.shape[1] // per_head.shape[1], dim=1)
        probs = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1, dtype=torch.float32)[..., :-1]
    return torch.matmul(probs.to(values.dtype).contiguous(), values)
