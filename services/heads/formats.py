"""Reads the configurations of EAGLE-3 heads in the formats in which they are published.

- `speculators` (vllm-project/speculators): `speculators_model_type` "eagle3".
- Official EAGLE-3 (SafeAILab/EAGLE, SpecForge, SGLang): an architecture `LlamaForCausalLMEagle3`.

Heads of other kinds are refused: vLLM serves EAGLE-1 and 2, Medusa and DFlash.
A flag that is unknown, or missing where programs disagree about its default, is refused: read wrongly it
would lower acceptance without an error.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PretrainedConfig

from services.engine.core.errors import UnsupportedModelError
from services.engine.core.shapes import check_fields, check_head_dim
from services.heads.eagle import EagleConfig

EAGLE_3 = "eagle3"
"""The kind of head that gammaray's own engines serve; vLLM serves others, too."""

_FIRST_MATRIX = "fc.weight"

LAYER, OFFICIAL_LAYER = "layers.0.", "midlayer."
"""Where the layer's tensors are: in the `speculators` format and in the official one."""

_OFFICIAL = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"})
_SERVED_BY_VLLM = {
    "eagle": "an EAGLE-1 or EAGLE-2 head",
    "medusa": "a Medusa head",
    "dflash": "a DFlash head",
}
_LAYER_TYPES = frozenset({"llama", "qwen3"})
_SPECULATORS_KEYS = frozenset(
    {
        *("architectures", "auto_map", "draft_vocab_size", "dtype", "eagle_aux_hidden_state_layer_ids"),
        *("embed_requires_grad", "fc_norm", "has_no_defaults_at_init", "model_type", "norm_before_fc"),
        *("norm_before_residual", "norm_output", "speculators_config", "speculators_model_type"),
        *("speculators_version", "target_hidden_size", "tie_word_embeddings", "torch_dtype"),
        *("transformer_layer_config", "transformers_version"),
    }
)
_EAGLE_CONFIG_KEYS = frozenset({"use_aux_hidden_state", "eagle_aux_hidden_state_layer_ids", "norm_before_fc"})
_OFFICIAL_KEYS = frozenset(
    {
        *("architectures", "bias", "draft_vocab_size", "eagle_config", "modules_to_save", "rope_scaling"),
        *("rope_theta", "target_hidden_size", "target_model_type", "torch_dtype", "transformers_version"),
    }
)


def kind_of_config(config: Mapping[str, Any], tensors: Collection[str]) -> str:
    """Return the kind of a head: "eagle3", "eagle" (1 and 2), "medusa", "dflash", or its `speculators` type.

    It is empty for a model.
    """
    if kind := config.get("speculators_model_type"):
        return str(kind)
    names = " ".join(map(str, [config.get("model_type"), *_architectures(config)])).lower()
    for kind, key in (("medusa", "medusa_num_heads"), ("dflash", "dflash_config"), (EAGLE_3, None)):
        if kind in names or key in config:
            return kind
    # The configuration of an EAGLE-1 head may be that of a Llama with one layer.
    return "eagle" if "eagle" in names or _FIRST_MATRIX in tensors else ""


def is_head(folder: Path, tensors: Sequence[str]) -> bool:
    """Return whether a directory holds a head and no model."""
    return kind_of_config(_stored(folder), tensors) != ""


def read_config(name: str, folder: Path, tensors: Sequence[str], target: PretrainedConfig) -> EagleConfig:
    """Return the configuration of a head; UnsupportedModelError names what does not fit the target."""
    stored = _stored(folder)
    check_fields(name, stored)
    kind = kind_of_config(stored, tensors)
    if kind in _SERVED_BY_VLLM:
        served = "served by the engine vllm only; this engine serves EAGLE-3 heads"
        raise UnsupportedModelError(name, f"it is {_SERVED_BY_VLLM[kind]}, {served}")
    if "speculators_model_type" in stored:
        if kind != EAGLE_3:
            raise UnsupportedModelError(name, f"its speculators_model_type is {kind!r}; served is 'eagle3'")
        config = _speculators(name, stored, target)
    elif not _OFFICIAL.isdisjoint(map(str, _architectures(stored))):
        config = _official(name, stored, target)
    else:
        raise UnsupportedModelError(name, "it is no head in the format of speculators or the official one")
    return _checked(name, config, target)


def _stored(folder: Path) -> dict[str, Any]:
    try:
        stored = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(str(folder), f"its config.json cannot be read: {error}") from error
    if not isinstance(stored, dict):
        raise UnsupportedModelError(str(folder), "its config.json is no object")
    return stored


def _architectures(stored: Mapping[str, Any]) -> list[Any]:
    names = stored.get("architectures")
    return names if isinstance(names, list) else []


def _speculators(name: str, stored: Mapping[str, Any], target: PretrainedConfig) -> EagleConfig:
    _refuse_unknown(name, "flag", stored, _SPECULATORS_KEYS)
    if "norm_before_residual" not in stored:
        reason = "it lacks norm_before_residual, of which programs assume different defaults"
        raise UnsupportedModelError(name, reason)
    layer = stored.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise UnsupportedModelError(name, "it lacks transformer_layer_config")
    kind = layer.get("model_type", "qwen3")
    if kind not in _LAYER_TYPES:
        raise UnsupportedModelError(name, f"its layer is of type {kind!r}; served are {sorted(_LAYER_TYPES)}")
    return _config(
        name,
        stored,
        layer,
        target,
        # These ids name the layers which the states enter.
        taps=stored.get("eagle_aux_hidden_state_layer_ids"),
        has_head_norms=kind == "qwen3",
        norm_before_fc=_flag(name, stored, "norm_before_fc"),
        fc_norm=_flag(name, stored, "fc_norm"),
        norm_before_residual=_flag(name, stored, "norm_before_residual"),
        norm_output=_flag(name, stored, "norm_output"),
    )


def _official(name: str, stored: Mapping[str, Any], target: PretrainedConfig) -> EagleConfig:
    _refuse_unknown(name, "flag", stored, _OFFICIAL_KEYS | LlamaConfig().to_dict().keys())
    eagle = stored.get("eagle_config") or {}
    if not isinstance(eagle, dict):
        raise UnsupportedModelError(name, f"its eagle_config is {eagle!r}, no object")
    _refuse_unknown(name, "flag of eagle_config", eagle, _EAGLE_CONFIG_KEYS)
    if eagle.get("use_aux_hidden_state", True) is not True:
        raise UnsupportedModelError(name, "its use_aux_hidden_state is not true")
    outputs = eagle.get("eagle_aux_hidden_state_layer_ids")
    # These ids name the layers whose outputs the states are, which enter the next one.
    taps = None if outputs is None else [number + 1 for number in _numbers(name, outputs)]
    norm_before_fc = _flag(name, eagle, "norm_before_fc")
    return _config(name, stored, stored, target, taps=taps, norm_before_fc=norm_before_fc)


def _config(
    name: str,
    stored: Mapping[str, Any],
    layer: Mapping[str, Any],
    target: PretrainedConfig,
    *,
    taps: Sequence[int] | None,
    **variant: bool,
) -> EagleConfig:
    """Return the configuration of a head whose one layer is described in transformers' words."""
    try:
        own = LlamaConfig(**{key: value for key, value in layer.items() if key != "model_type"})
    except Exception as error:  # transformers raises different ones
        raise UnsupportedModelError(name, f"its configuration cannot be read: {error}") from error
    check_fields(name, own.to_dict())
    if layer.get("num_hidden_layers", 1) != 1:
        raise UnsupportedModelError(name, f"it has {layer['num_hidden_layers']} layers; served is one")
    if own.hidden_act != "silu":
        raise UnsupportedModelError(name, f"its hidden_act is {own.hidden_act!r}; served is 'silu'")
    if "sliding_attention" in (layer.get("layer_types") or ()):
        raise UnsupportedModelError(name, "its attention slides, which is not served")
    if taps is None:
        depth = target.num_hidden_layers
        taps = (2, depth // 2, depth - 3)
    config = EagleConfig(
        taps=tuple(_numbers(name, taps)),
        target_hidden_size=stored.get("target_hidden_size") or own.hidden_size,
        num_outputs=stored.get("draft_vocab_size") or own.vocab_size,
        layer=own,
        **variant,
    )
    check_head_dim(name, config.head_dim)
    return config


def _checked(name: str, config: EagleConfig, target: PretrainedConfig) -> EagleConfig:
    if config.target_hidden_size != target.hidden_size:
        width = config.target_hidden_size
        reason = f"it reads states of width {width}, the target's are {target.hidden_size}"
        raise UnsupportedModelError(name, reason)
    if (vocab_size := config.layer.vocab_size) != target.vocab_size:
        reason = f"it is for {vocab_size} token ids, the target has {target.vocab_size}"
        raise UnsupportedModelError(name, reason)
    if not config.taps or any(not 0 <= tap <= target.num_hidden_layers for tap in config.taps):
        taps, allowed = list(config.taps), f"[0, {target.num_hidden_layers}]"
        raise UnsupportedModelError(name, f"it reads the states at layers {taps}, allowed: {allowed}")
    if config.norm_before_fc and config.fc_norm:
        raise UnsupportedModelError(name, "norm_before_fc and fc_norm exclude each other")
    return config


def _flag(name: str, stored: Mapping[str, Any], key: str) -> bool:
    value = stored.get(key, False)
    if not isinstance(value, bool):
        raise UnsupportedModelError(name, f"its {key} is {value!r}, no boolean")
    return value


def _numbers(name: str, ids: object) -> list[int]:
    if not isinstance(ids, (list, tuple)) or not all(type(number) is int for number in ids):
        raise UnsupportedModelError(name, f"its layer ids are {ids!r}, no list of integers")
    return list(ids)


def _refuse_unknown(name: str, what: str, stored: Mapping[str, Any], known: Set[str]) -> None:
    """Refuse keys of a configuration that are not known: read without them it would be another head."""
    if unknown := sorted(stored.keys() - known):
        raise UnsupportedModelError(name, f"its {what} {unknown[0]!r} is not known here")
