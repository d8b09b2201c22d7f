"""Our attention function inside transformers' models: packed rows in, our own cache behind it.

The models run with `use_cache=False` on one packed row [1, sum of counts]; this function, registered with
transformers' AttentionInterface, sees each layer's queries, keys and values after rotary embedding, writes
the new keys and values into the sessions' slots and attends per session. Extras reach it as keyword
arguments; one it does not know would give silently wrong logits, so it refuses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from services.engine.batch import Batch

__all__ = ["ATTENTION_NAME", "LayerCall", "active", "attend", "unknown_arguments"]

ATTENTION_NAME = "gammaray"

# Keyword arguments that change nothing about the attention itself.
_HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "output_router_logits"})

LayerCall = Callable[..., Tensor]


class _Active(threading.local):
    """The handler of the forward that this thread is in; engines in other threads have their own."""

    handler: LayerCall | None = None


active = _Active()


def unknown_arguments(arguments: dict[str, Any]) -> list[str]:
    """Return the names of arguments that would change the attention in a way we do not follow."""
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
    if active.handler is None:
        raise RuntimeError("a model with gammaray's attention runs only inside its engine")
    if attention_mask is not None:
        arguments["attention_mask"] = attention_mask
    if dropout:
        arguments["dropout"] = dropout
    output = active.handler(module, query, key, value, scaling, sliding_window, softcap, s_aux, arguments)
    return output, None


AttentionInterface.register(ATTENTION_NAME, _attention_forward)


def attend(
    batch: Batch,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend per session over its slots, after writing this layer's new keys and values there.

    Args:
        batch: The step.
        layer: Index of the layer.
        query: [1, num_heads, rows, key_dim].
        key: [1, num_kv_heads, rows, key_dim].
        value: [1, num_kv_heads, rows, value_dim].
        scaling: Factor on the scores; None for key_dim ** -0.5.
        window: A row sees this many positions, itself included; None for all.
        softcap: Scores are softcap * tanh(score / softcap).
        sinks: [num_heads], a score per head that takes probability but gives nothing.

    Returns:
        [1, rows, num_heads, value_dim].
    """
    num_heads, rows = query.shape[1], query.shape[2]
    num_kv_heads, key_dim, value_dim = key.shape[1], key.shape[3], value.shape[3]
    groups = num_heads // num_kv_heads
    scale = key_dim**-0.5 if scaling is None else scaling
    output = query.new_empty(rows, num_heads, value_dim)
    for index, segment in enumerate(batch.segments):
        first, last, end = segment.row, segment.row + segment.count, segment.start + segment.count
        slots = segment.cache.data[layer, :num_kv_heads, :end]
        keys, values = slots[..., :key_dim], slots[..., key_dim : key_dim + value_dim]
        keys[:, segment.start :] = key[0, :, first:last]
        values[:, segment.start :] = value[0, :, first:last]
        # Heads of a group share keys and values: their rows are stacked instead of copying those.
        queries = query[0, :, first:last].reshape(num_kv_heads, groups * segment.count, key_dim)
        mask = batch.mask(index, window, query.device)
        if mask is not None and groups > 1:
            mask = mask.repeat(groups, 1)
        if softcap is None and sinks is None:
            mixed = F.scaled_dot_product_attention(
                queries[None], keys[None], values[None], attn_mask=mask, scale=scale
            )[0]
        else:
            mixed = _explicit_attention(queries, keys, values, mask, scale, softcap, sinks)
        output[first:last] = mixed.reshape(num_heads, segment.count, value_dim).transpose(0, 1)
    return output[None]


def _explicit_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention [kv_heads, groups * count, value_dim] with what SDPA does not know, softmax in float32."""
    scores = torch.matmul(queries, keys.transpose(1, 2)).mul_(scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    if sinks is None:
        probs = torch.softmax(scores, dim=-1, dtype=torch.float32)
    else:
        per_row = sinks.view(queries.shape[0], -1, 1).to(scores.dtype)
        per_row = per_row.repeat_interleave(queries.shape[1] // per_row.shape[1], dim=1)
        probs = torch.softmax(torch.cat((scores, per_row), dim=-1), dim=-1, dtype=torch.float32)[..., :-1]
    return torch.matmul(probs.to(values.dtype), values)
