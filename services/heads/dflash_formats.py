"""Loads DFlash heads in the formats in which they are published.

- Official (z-lab/dflash): a Qwen3 configuration with `dflash_config{target_layer_ids, mask_token_id}` and
  `block_size`. Its ids name layers whose outputs the states are.
- `speculators` (vllm-project/speculators): `speculators_model_type` "dflash". Its ids name the layers which
  the states enter.

Tensors are the same in both: `fc`, `hidden_norm`, `layers.N.*` as of Qwen3, `norm`; the embedding and the
output matrix are the target's where they are absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from services.engine.core.drafter import target_tensor
from services.engine.core.errors import UnsupportedModelError
from services.engine.core.model import load_config
from services.engine.core.shapes import (
    check_fields,
    check_head_dim,
    check_rotary,
    check_token_map,
    check_weights,
)
from services.engine.core.tensor_files import checkpoint_folder, read_tensor, tensor_names
from services.heads.dflash import DFlashConfig, DFlashHead, head_dim
from services.heads.formats import refuse_unknown

__all__ = ["load_dflash", "names_dflash"]

_OFFICIAL_KEYS = frozenset(
    {
        "architectures",
        "auto_map",
        "block_size",
        "dflash_config",
        "dtype",
        "num_target_layers",
        "torch_dtype",
        "transformers_version",
    }
)
_DFLASH_KEYS = frozenset({"block_size", "mask_token_id", "target_layer_ids"})
_SPECULATORS_KEYS = frozenset(
    {
        "architectures",
        "auto_map",
        "aux_hidden_state_layer_ids",
        "block_size",
        "draft_vocab_size",
        "dtype",
        "has_no_defaults_at_init",
        "mask_token_id",
        "model_type",
        "sample_from_anchor",
        "sliding_window_non_causal",
        "speculators_config",
        "speculators_model_type",
        "speculators_version",
        "target_hidden_size",
        "tie_word_embeddings",
        "torch_dtype",
        "transformer_layer_config",
        "transformers_version",
    }
)
# The target's mask of the tokens that have a row follows from d2t; the verifier's weights are of training.
_UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_MOST_BLOCK, _MOST_LAYERS = 65, 64


def names_dflash(name: str) -> bool:
    """Return whether a directory or hub name is that of a DFlash head."""
    folder = checkpoint_folder(name)
    stored = {} if folder is None else _stored(folder)
    return "dflash_config" in stored or stored.get("speculators_model_type") == "dflash"


def load_dflash(name: str, target: str) -> tuple[DFlashHead, Tensor | None]:
    """Load a DFlash head for a target.

    Args:
        name: Directory or hub name.
        target: The target's directory or hub name.

    Returns:
        The head in float32, and the target's token of each row of its output, int64; None: row i is token i.

    Raises:
        UnsupportedModelError: The format, a flag, a size or a tensor is not supported, missing, damaged, or
            does not fit the target.
        InvalidArgumentError: The head shares a weight of the target which cannot be read.
    """
    folder = checkpoint_folder(name)
    tensors = [] if folder is None else tensor_names(folder)
    if folder is None or not tensors:
        raise UnsupportedModelError(name, "it is no head with its weights in safetensors")
    config = _config(name, _stored(folder), load_config(target).get_text_config())
    weights = {key: read_tensor(name, folder, key) for key in tensors if key not in _UNUSED}
    vocab_size = config.layer.vocab_size
    count = config.num_outputs if "d2t" in weights or config.num_outputs != vocab_size else None
    target_ids = check_token_map(name, count, vocab_size, weights.pop("d2t", None))
    if _EMBEDDING not in weights:
        weights[_EMBEDDING] = target_tensor(name, target, "embedding")
    if _HEAD not in weights:
        if target_ids is not None:
            raise UnsupportedModelError(name, f"it lacks {_HEAD}")
        weights[_HEAD] = target_tensor(name, target, "output matrix")
    with torch.device("meta"):
        head = DFlashHead(config)
    check_weights(name, head.state_dict(), weights)
    with torch.device("cpu"):
        rotary = type(head.rotary)(config.layer)  # its buffers are no weights
        check_rotary(name, rotary, head_dim(config.layer))
    head.load_state_dict({key: tensor.float() for key, tensor in weights.items()}, assign=True)
    head.rotary = rotary
    return head.eval().requires_grad_(False), target_ids


def _stored(folder: Path) -> dict[str, Any]:
    """Return the configuration; empty if there is none that can be read."""
    try:
        stored = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _config(name: str, stored: Mapping[str, Any], target: PretrainedConfig) -> DFlashConfig:
    check_fields(name, stored)
    if "dflash_config" not in stored:
        refuse_unknown(name, "flag", stored, _SPECULATORS_KEYS)
        layer, given = stored.get("transformer_layer_config"), stored
        taps = _numbers(name, stored, "aux_hidden_state_layer_ids")
        samples_anchor = stored.get("sample_from_anchor", False)
        if not isinstance(samples_anchor, bool):
            raise UnsupportedModelError(name, f"its sample_from_anchor is {samples_anchor!r}, no boolean")
        first_row = 0 if samples_anchor else 1
    else:
        refuse_unknown(name, "flag", stored, _OFFICIAL_KEYS | Qwen3Config().to_dict().keys())
        layer, given, first_row = stored, stored["dflash_config"], 1
        if not isinstance(given, dict):
            raise UnsupportedModelError(name, f"its dflash_config is {given!r}, no object")
        refuse_unknown(name, "flag of dflash_config", given, _DFLASH_KEYS)
        taps = tuple(number + 1 for number in _numbers(name, given, "target_layer_ids"))
        if stored.get("num_target_layers", target.num_hidden_layers) != target.num_hidden_layers:
            raise UnsupportedModelError(
                name,
                f"it is for {stored['num_target_layers']} layers, the target has {target.num_hidden_layers}",
            )
    # The last state is that after the last norm here, and that before it there.
    if any(not 0 <= tap < target.num_hidden_layers for tap in taps):
        allowed = f"[0, {target.num_hidden_layers})"
        raise UnsupportedModelError(
            name, f"it reads the states that enter layers {list(taps)}, allowed: {allowed}"
        )
    made = _layer(name, layer, target)
    num_outputs = stored.get("draft_vocab_size") or made.vocab_size
    if type(num_outputs) is not int or not 0 < num_outputs <= made.vocab_size:
        raise UnsupportedModelError(name, f"its draft_vocab_size is {num_outputs!r}")
    sizes = {**given, "block_size": stored.get("block_size") or given.get("block_size")}
    return DFlashConfig(
        taps=taps,
        block_size=_number(name, sizes, "block_size", 2, _MOST_BLOCK),
        mask_token=_number(name, given, "mask_token_id", 0, made.vocab_size - 1),
        first_row=first_row,
        num_layers=_number(
            name, {"num_hidden_layers": made.num_hidden_layers}, "num_hidden_layers", 1, _MOST_LAYERS
        ),
        num_outputs=num_outputs,
        layer=made,
    )


def _layer(name: str, layer: object, target: PretrainedConfig) -> LlamaConfig:
    """Return the shape of the layers.

    Raises:
        UnsupportedModelError: It is missing, of another kind than Qwen3's, or does not fit the target.
    """
    if not isinstance(layer, dict):
        raise UnsupportedModelError(name, "it lacks transformer_layer_config")
    if layer.get("model_type", "qwen3") != "qwen3":
        raise UnsupportedModelError(
            name, f"its layers are of type {layer['model_type']!r}; served is 'qwen3'"
        )
    ours = {key: value for key, value in layer.items() if key not in ("model_type", "dflash_config")}
    try:
        # Qwen3's defaults hold for what the file leaves out.
        made = LlamaConfig(**{**Qwen3Config(**ours).to_dict(), "model_type": "llama"})
    except Exception as error:  # transformers raises different ones
        raise UnsupportedModelError(name, f"its configuration cannot be read: {error}") from error
    check_fields(name, made.to_dict())
    check_head_dim(name, head_dim(made))
    if made.hidden_act != "silu":
        raise UnsupportedModelError(name, f"its hidden_act is {made.hidden_act!r}; served is 'silu'")
    if "sliding_attention" in (layer.get("layer_types") or ()) or layer.get("use_sliding_window"):
        raise UnsupportedModelError(name, "its attention slides, which is not served")
    for key in ("hidden_size", "vocab_size"):
        if getattr(made, key) != getattr(target, key):
            got, wanted = getattr(made, key), getattr(target, key)
            raise UnsupportedModelError(name, f"its {key} is {got}, the target's is {wanted}")
    return made


def _number(name: str, stored: Mapping[str, Any], key: str, least: int, most: int) -> int:
    value = stored.get(key)
    if type(value) is not int or not least <= value <= most:
        raise UnsupportedModelError(name, f"its {key} is {value!r}, allowed: {least} to {most}")
    return value


def _numbers(name: str, stored: Mapping[str, Any], key: str) -> tuple[int, ...]:
    given = stored.get(key)
    if not isinstance(given, list) or not given or not all(type(number) is int for number in given):
        raise UnsupportedModelError(name, f"its {key} is {given!r}, no list of layers")
    return tuple(given)
