"""Probes how a model's layers call the engine's attention function, with one small forward at load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from services.engine.core.errors import UnsupportedModelError
from services.engine.core.model import LoadedModel
from services.engine.hf.attention import ATTENTION_NAME, LayerCall, LayerInput, active, unknown_arguments


@dataclass(frozen=True)
class ModelLayout:
    """Shapes found by the probe."""

    num_layers: int  # number of layers, all with attention
    vocab_size: int  # size of the logits; token ids lie below it
    kv_heads: int  # largest number of key heads of a layer
    kv_dim: int  # length of a key and its value together, the maximum over layers
    windows: tuple[int | None, ...]  # sliding window of each layer, None for full attention
    layer_of: dict[int, int]  # index of each attention module's layer, by id of the module


@dataclass(frozen=True)
class _Call:
    module: nn.Module
    kv_heads: int
    kv_dim: int
    window: int | None
    unknown: list[str]


@contextmanager
def handling(handler: LayerCall) -> Iterator[None]:
    """Use `handler` for the attention of forwards in this thread."""
    token = active.set(handler)
    try:
        yield
    finally:
        active.reset(token)


@torch.no_grad()
def probe_model(loaded: LoadedModel) -> ModelLayout:
    """Switch a model to our attention; UnsupportedModelError unless each layer calls it as expected."""
    calls: list[_Call] = []

    def record(module: nn.Module, inputs: LayerInput, arguments: dict[str, Any]) -> Tensor:
        key, value, query = inputs.key, inputs.value, inputs.query
        dim = key.shape[3] + value.shape[3]
        calls.append(_Call(module, key.shape[1], dim, inputs.window, unknown_arguments(arguments)))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    loaded.module.set_attn_implementation(ATTENTION_NAME)
    with handling(record):
        token_ids = torch.zeros(1, 2, dtype=torch.long, device=loaded.device)
        positions = torch.arange(2, device=loaded.device)[None]
        logits = loaded.module(token_ids, position_ids=positions, use_cache=False).logits
    _check_calls(loaded, calls)
    # torch types the attributes of any module as Tensor | Module.
    rows = cast(Tensor, loaded.module.get_input_embeddings().weight).shape[0]
    return ModelLayout(
        num_layers=len(calls),
        vocab_size=min(logits.shape[-1], rows),
        kv_heads=max(call.kv_heads for call in calls),
        kv_dim=max(call.kv_dim for call in calls),
        windows=tuple(call.window for call in calls),
        layer_of={id(call.module): index for index, call in enumerate(calls)},
    )


def _check_calls(loaded: LoadedModel, calls: list[_Call]) -> None:
    config = loaded.config
    num_layers = config.num_hidden_layers
    reached = len({id(call.module) for call in calls})
    if reached != num_layers or len(calls) != num_layers:
        raise UnsupportedModelError(
            loaded.name,
            f"{config.model_type}: {reached} of {num_layers} layers attend through transformers' "
            "AttentionInterface; state that other layers keep could not be rolled back",
        )
    for layer, call in enumerate(calls):
        if call.unknown:
            reason = f"layer {layer} passes {call.unknown} to its attention, which would be ignored"
            raise UnsupportedModelError(loaded.name, reason)
        if getattr(call.module, "is_causal", True) is False:
            raise UnsupportedModelError(loaded.name, f"layer {layer} attends in both directions")
        expected = _has_window(loaded, layer)
        if expected != (call.window is not None):
            setting = f"layer {layer} {'slides' if expected else 'does not slide'} by its configuration"
            reason = f"{setting}, but its attention is called with window {call.window}"
            raise UnsupportedModelError(loaded.name, reason)


def _has_window(loaded: LoadedModel, layer: int) -> bool:
    config = loaded.config
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return bool(layer_types[layer] == "sliding_attention")
    return bool(getattr(config, "sliding_window", None)) and bool(getattr(config, "use_sliding_window", True))
