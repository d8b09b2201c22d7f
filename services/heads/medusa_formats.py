"""Loads Medusa heads in the formats in which they are published.

- FasterDecoding/Medusa: `medusa_num_heads` and `medusa_num_layers` in config.json, and the tensors
  `K.L.linear.weight`, `K.L.linear.bias` and `K.N.weight` of head K with N layers in
  `medusa_lm_head.safetensors`.
- vLLM: the model type "medusa", and the tensors `blocks.K.layers.L.weight` and `lm_heads.K.weight` in
  `model.safetensors`. With `original_lm_head` all heads share one output matrix: the stored one, else the
  target's. With a `truncated_vocab_size` row i stands for the token `token_map[i]`.

Weights that are pickled (`medusa_lm_head.pt`) are refused: to read them can run any code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils.hub import cached_file

from services.engine.core.drafter import target_tensor
from services.engine.core.errors import UnsupportedModelError
from services.engine.core.model import load_config
from services.engine.core.shapes import (
    check_fields,
    check_integers,
    check_shape,
    check_weights,
)
from services.engine.core.tensor_files import read_tensor, tensor_names
from services.heads.formats import RMS_NORMED, refuse_unknown
from services.heads.medusa import MedusaConfig, MedusaHeads

__all__ = ["load_medusa", "names_medusa"]

_WEIGHTS, _PICKLED = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
_OWN_KEYS = frozenset(
    {
        "architectures",
        "base_model_name_or_path",
        "dtype",
        "hidden_size",
        "medusa_num_heads",
        "medusa_num_layers",
        "model_type",
        "torch_dtype",
        "transformers_version",
        "version",
        "vocab_size",
    }
)
_VLLM_KEYS = _OWN_KEYS | {
    "logit_scale",
    "max_paths",
    "max_seq_len",
    "medusa_fc_bias",
    "num_heads",
    "num_hidden_layers",
    "original_lm_head",
    "topk",
    "truncated_vocab_size",
}
_MOST_HEADS, _MOST_LAYERS = 64, 64


def names_medusa(name: str) -> bool:
    """Return whether a directory or hub name is that of Medusa heads."""
    stored = _stored(name)
    return stored.get("model_type") == "medusa" or "medusa_num_heads" in stored


def load_medusa(name: str, target: str) -> tuple[MedusaHeads, Tensor | None]:
    """Load Medusa heads for a target.

    Args:
        name: Directory or hub name.
        target: The target's directory or hub name.

    Returns:
        The heads in float32, and the target's token of each row of their output, int64, ascending; None: row
        i is token i.

    Raises:
        UnsupportedModelError: The format, a flag, a size or a tensor is not supported, missing, damaged, or
            does not fit the target.
        InvalidArgumentError: They share a weight of the target which cannot be read.
    """
    stored, config = _stored(name), load_config(target).get_text_config()
    if config.model_type not in RMS_NORMED:
        raise UnsupportedModelError(
            name, f"Medusa is served for targets of types {', '.join(sorted(RMS_NORMED))}"
        )
    is_vllm = stored.get("model_type") == "medusa"
    check_fields(name, stored)
    refuse_unknown(name, "flag", stored, _VLLM_KEYS if is_vllm else _OWN_KEYS)
    weights = _vllm_weights(name) if is_vllm else _own_weights(name)
    shape = _config(name, stored, config, is_vllm=is_vllm)
    target_ids = _target_ids(name, weights.pop("token_map", None), shape)
    if shape.is_shared:
        _share_matrix(name, target, weights)
    if target_ids is not None:
        target_ids, order = target_ids.sort()
        for key in weights:
            if key.startswith("lm_heads."):
                # A matrix of all tokens may be stored, of which the map selects rows.
                is_whole = len(weights[key]) == config.vocab_size
                rows = config.vocab_size if is_whole else shape.num_outputs
                check_shape(name, key, weights[key], (rows, shape.hidden_size))
                weights[key] = weights[key][target_ids if is_whole else order]
    weights["feature_norm.weight"] = target_tensor(name, target, "last norm")
    with torch.device("meta"):
        heads = MedusaHeads(shape)
    check_weights(name, heads.state_dict(), weights, "" if is_vllm else _WEIGHTS)
    heads.load_state_dict({key: tensor.float() for key, tensor in weights.items()}, assign=True)
    return heads.eval().requires_grad_(False), target_ids


def _share_matrix(name: str, target: str, weights: dict[str, Tensor]) -> None:
    """Give the shared output matrix its one name; where none is stored it is the target's."""
    if "lm_head.weight" in weights:
        weights["lm_heads.0.weight"] = weights.pop("lm_head.weight")
    elif "lm_heads.0.weight" not in weights:
        weights["lm_heads.0.weight"] = target_tensor(name, target, "output matrix")


def _stored(name: str) -> dict[str, Any]:
    """Return the configuration; empty if there is none that can be read."""
    path = _file(name, "config.json")
    try:
        stored = json.loads(path.read_text()) if path is not None else None
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _file(name: str, file: str) -> Path | None:
    """Return the path of a file of a directory or hub name; None if it has none."""
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.is_file() else None
    try:
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    except (OSError, HFValidationError):
        return None
    return None if found is None else Path(found)


def _own_weights(name: str) -> dict[str, Tensor]:
    """Return the weights in the format of FasterDecoding/Medusa, by the names of vLLM's.

    Raises:
        UnsupportedModelError: There are none in safetensors.
    """
    path = _file(name, _WEIGHTS)
    if path is None:
        found = f", {_PICKLED} is pickled: to read it can run any code" if _file(name, _PICKLED) else ""
        raise UnsupportedModelError(name, f"it has no {_WEIGHTS}{found}")
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UnsupportedModelError(name, f"its {_WEIGHTS} is truncated or damaged: {error}") from error
    weights = {}
    for key, tensor in stored.items():
        key = key.removeprefix("medusa_head.")
        key = re.sub(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$", r"blocks.\1.layers.\2.\3", key)
        weights[re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", key)] = tensor
    return weights


def _vllm_weights(name: str) -> dict[str, Tensor]:
    path = _file(name, "model.safetensors") or _file(name, "model.safetensors.index.json")
    if path is None:
        raise UnsupportedModelError(name, "it has no weights in safetensors")
    weights = {key: read_tensor(name, path.parent, key) for key in tensor_names(path.parent)}
    return {key.removeprefix("medusa_heads."): tensor for key, tensor in weights.items()}


def _config(name: str, stored: Mapping[str, Any], target: PretrainedConfig, *, is_vllm: bool) -> MedusaConfig:
    """Return the shape of the heads.

    Raises:
        UnsupportedModelError: A size or flag is missing, no number, or does not fit the target.
    """
    for key in ("hidden_size", "vocab_size"):
        theirs = getattr(target, key)
        # vLLM's own defaults are of one target; without them the weights tell.
        if stored.get(key, theirs) != theirs:
            raise UnsupportedModelError(name, f"its {key} is {stored[key]!r}, the target's is {theirs}")
    num_outputs = stored.get("truncated_vocab_size") or target.vocab_size
    if type(num_outputs) is not int or not 0 < num_outputs <= target.vocab_size:
        raise UnsupportedModelError(
            name, f"its truncated_vocab_size is {num_outputs!r}, allowed: [1, {target.vocab_size}]"
        )
    scale = stored.get("logit_scale", 1.0)
    if not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
        raise UnsupportedModelError(name, f"its logit_scale is {scale!r}, no positive number")
    return MedusaConfig(
        num_heads=_count(name, stored, ("medusa_num_heads", "num_heads"), _MOST_HEADS),
        num_layers=_count(name, stored, ("medusa_num_layers", "num_hidden_layers"), _MOST_LAYERS),
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_outputs=num_outputs,
        last_layer=target.num_hidden_layers,
        norm_eps=target.rms_norm_eps,
        has_bias=_flag(name, stored, "medusa_fc_bias") if is_vllm else True,
        is_shared=_flag(name, stored, "original_lm_head"),
        logit_scale=float(scale),
    )


def _count(name: str, stored: Mapping[str, Any], keys: tuple[str, ...], most: int) -> int:
    given = {key: stored[key] for key in keys if key in stored}
    found = set(given.values()) if all(type(value) is int for value in given.values()) else set[int]()
    if len(found) != 1 or not 0 < min(found) <= most:
        # Programs assume different numbers where they are missing.
        raise UnsupportedModelError(name, f"its {keys[0]} is {given or 'missing'}, allowed: 1 to {most}")
    count: int = found.pop()
    return count


def _flag(name: str, stored: Mapping[str, Any], key: str) -> bool:
    value = stored.get(key, False)
    if not isinstance(value, bool):
        raise UnsupportedModelError(name, f"its {key} is {value!r}, no boolean")
    return value


def _target_ids(name: str, token_map: Tensor | None, shape: MedusaConfig) -> Tensor | None:
    """Return the target's token of each row of the output, in the order of the rows.

    Raises:
        UnsupportedModelError: The map is missing, of no use, or names a token twice or one that is none.
    """
    if (token_map is None) != (shape.num_outputs == shape.vocab_size):
        raise UnsupportedModelError(name, "only one of token_map and a smaller truncated_vocab_size is there")
    if token_map is None:
        return None
    check_shape(name, "token_map", token_map, (shape.num_outputs,))
    check_integers(name, "token_map", token_map)
    ids = token_map.long()
    if len(set(ids.tolist())) < len(ids) or ids.min() < 0:
        raise UnsupportedModelError(name, "its token_map names no different tokens")
    if ids.max() >= shape.vocab_size:
        raise UnsupportedModelError(
            name, f"its token_map names {int(ids.max())}, of {shape.vocab_size} tokens"
        )
    return ids
