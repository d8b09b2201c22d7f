"""Checks of what the files of a model, draft or head say, before a kernel computes with it.

The compiled kernels take sizes on trust: they divide by numbers of heads, and read as many numbers as the
configuration says. transformers checks types and little else, and allocates what a configuration asks for
before it compares that with the weights. Every loader therefore calls the checks of this module, whose errors
name the file, the field, what was got and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.initialization import no_init_weights

from services.engine.core.errors import InvalidModelError, UnsupportedModelError

CONFIG = "config.json"
_WEIGHTS = "model.safetensors"

_MOST = 2**31 - 1
"""The kernels count in 32 bits."""

_MOST_LAYERS = 1024
_LEAST_EPS = 1e-37
"""Smaller ones are zero in float32, which divides zero by zero."""

_SIZES = frozenset(
    {
        *("block_size", "d_model", "draft_vocab_size", "ffn_dim", "head_dim", "hidden_size"),
        *("intermediate_size", "kv_lora_rank", "max_position_embeddings", "max_seq_len", "n_embd", "n_group"),
        *("n_head", "n_inner", "n_positions", "num_attention_heads", "num_heads", "num_key_value_heads"),
        *("num_kv_heads", "original_max_position_embeddings", "q_lora_rank", "qk_head_dim"),
        *("qk_nope_head_dim", "qk_rope_head_dim", "sliding_window", "target_hidden_size", "topk_group"),
        *("v_head_dim", "vocab_size", "word_embed_proj_dim"),
    }
)
_LAYERS = frozenset({"n_layer", "num_hidden_layers", "num_layers"})
_EXPERTS = frozenset(
    {
        *("moe_intermediate_size", "n_routed_experts", "n_shared_experts"),
        *("num_experts", "num_experts_per_tok", "num_local_experts"),
    }
)
"""Zero in models of an architecture with experts that have none."""

_EPS = frozenset({"layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "rms_norm_eps"})
_POSITIVE = frozenset(
    {
        *("attn_logit_softcapping", "factor", "final_logit_softcapping", "query_pre_attn_scalar"),
        *("rope_local_base_freq", "rope_theta", "rotary_emb_base"),
    }
)
_SHARES = frozenset({"partial_rotary_factor", "rotary_pct"})
_ROTARY = ("rope_parameters", "rope_scaling")
_INSIDE = ("text_config", "transformer_layer_config", "eagle_config")
"""Keys of configurations inside a configuration."""

_HEADS = ("num_attention_heads", "n_head")
_FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
_FLOATING = "floating-point numbers"
_NARROW = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


def check_fields(name: str, stored: Mapping[str, Any]) -> None:
    """Check the numbers of a configuration, as stored or as completed, and of the configurations in it.

    InvalidModelError if one is of another type, out of range or not finite, or contradicts another.
    """
    for key, value in stored.items():
        if isinstance(value, Mapping):
            if key in _ROTARY:
                _check_rotary(name, key, value)
            elif key in _INSIDE:
                check_fields(name, value)
        elif value is not None:
            _check_value(name, key, key, value)
    heads = next((stored[key] for key in _HEADS if stored.get(key) is not None), None)
    kv_heads = stored.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        allowed = f"a divisor of the {heads} query heads, which share them in groups of one size"
        raise InvalidModelError(name, CONFIG, "num_key_value_heads", kv_heads, allowed)


def _check_rotary(name: str, path: str, stored: Mapping[str, Any]) -> None:
    for key, value in stored.items():
        place = f"{path}.{key}"
        if isinstance(value, Mapping):
            _check_rotary(name, place, value)
        elif isinstance(value, (list, tuple)):  # factors of frequencies
            for factor in value:
                if not _is_number(factor) or not 0 < factor < math.inf:
                    raise InvalidModelError(name, CONFIG, place, factor, "finite numbers above 0")
        elif value is not None:
            _check_value(name, key, place, value)


def _check_value(name: str, key: str, place: str, value: Any) -> None:
    """Check a value by its name; other numbers must be finite."""
    if key in _SIZES | _LAYERS | _EXPERTS:
        least, most = int(key not in _EXPERTS), _MOST_LAYERS if key in _LAYERS else _MOST
        # Some architectures have a size per layer.
        for size in value if isinstance(value, (list, tuple)) else [value]:
            if type(size) is not int or not least <= size <= most:
                raise InvalidModelError(name, CONFIG, place, size, f"an integer in [{least}, {most}]")
    elif key in _EPS:
        if not _is_number(value) or not _LEAST_EPS <= value < math.inf:
            raise InvalidModelError(name, CONFIG, place, value, f"a finite number of at least {_LEAST_EPS}")
    elif key in _POSITIVE:
        if not _is_number(value) or not 0 < value < math.inf:
            raise InvalidModelError(name, CONFIG, place, value, "a finite number above 0")
    elif key in _SHARES:
        if not _is_number(value) or not 0 < value <= 1:
            raise InvalidModelError(name, CONFIG, place, value, "a number in (0, 1]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidModelError(name, CONFIG, place, value, "a finite number")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def skeleton(config: PretrainedConfig) -> PreTrainedModel | None:
    """Return the module of a configuration, with shapes but no values; None if transformers has none."""
    try:
        with torch.device("meta"), no_init_weights():
            module: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except Exception:  # of any kind; loading the weights fails with the same, and says so
        return None
    return module


def stored_as(module: PreTrainedModel, keys: Iterable[str]) -> dict[str, str]:
    """Return the module's name of each tensor of a checkpoint, as transformers maps them when it loads it."""
    transforms = get_model_conversion_mapping(module)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    weights = module.state_dict()
    mapped = {}
    for key in keys:
        renamed, _ = rename_source_key(key, renamings, converters, module.base_model_prefix, weights)
        mapped[key] = key if renamed not in weights and key in weights else renamed
    return mapped


def input_names(module: PreTrainedModel) -> list[str]:
    """Return the names of the input embedding's weight: its own, then the output matrix's if that is tied."""
    tied = _names_of(module, _output(module)) if module.config.tie_word_embeddings else []
    return _names_of(module, module.get_input_embeddings()) + tied


def output_names(module: PreTrainedModel) -> list[str]:
    """Return the names of the output matrix: its own, then the input embedding's if that is tied."""
    tied = _names_of(module, module.get_input_embeddings()) if module.config.tie_word_embeddings else []
    return _names_of(module, _output(module)) + tied


def _output(module: PreTrainedModel) -> nn.Module | None:
    output: nn.Module | None = module.get_output_embeddings()  # type: ignore[no-untyped-call]
    return output


def _names_of(root: nn.Module, part: nn.Module | None) -> list[str]:
    return [f"{name}.weight" for name, module in root.named_modules() if module is part]


def check_size(name: str, module: PreTrainedModel | None, num_bytes: int) -> None:
    """Raise InvalidModelError if a model's files, of `num_bytes`, are too small for its configuration.

    The weights are not allocated yet. 0 bytes pass, as a size that is not known.
    """
    if module is None or not num_bytes:
        return
    described = sum(parameter.numel() for parameter in module.parameters())
    output = _output(module)
    if module.config.tie_word_embeddings and isinstance(output, nn.Linear):
        described -= output.weight.numel()
    if described > num_bytes:
        allowed = f"at most {num_bytes:,}, as its files have {num_bytes:,} bytes"
        raise InvalidModelError(name, CONFIG, "weights that it describes", f"{described:,}", allowed)


def size_of(name: str) -> int:
    """Return the bytes of the weights of a file or directory; 0 for a name on the hub."""
    folder = Path(name)
    if folder.is_file():
        return folder.stat().st_size
    return sum(file.stat().st_size for kind in ("safetensors", "bin") for file in folder.glob(f"*.{kind}"))


def check_shape(name: str, key: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise InvalidModelError if a tensor has another shape."""
    if tuple(tensor.shape) != shape:
        allowed = f"{list(shape)}, which its configuration says"
        raise _invalid(name, key, f"the shape {list(tensor.shape)}", allowed)


def check_weights(name: str, expected: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Check stored weights against the parameters of a module, which need no values, by the same names.

    UnsupportedModelError if weights are missing, or have no place in the module; InvalidModelError if one is
    of another shape or type, or not finite.
    """
    for verb, keys in (
        ("lacks", expected.keys() - weights.keys()),
        ("has no place for", weights.keys() - expected.keys()),
    ):
        if keys:
            raise UnsupportedModelError(name, f"it {verb} {len(keys)} weights, such as {min(keys)}")
    for key, tensor in weights.items():
        check_shape(name, key, tensor, tuple(expected[key].shape))
        if tensor.dtype not in _FLOATS | _NARROW:
            raise _invalid(name, key, f"numbers of type {tensor.dtype}", _FLOATING)
    check_finite(name, weights)


def check_types(name: str, module: PreTrainedModel | None, types: Mapping[str, str]) -> None:
    """Raise InvalidModelError if the weights of a checkpoint are not stored as floating-point numbers.

    transformers would take integers for weights. `types` has the type of each stored tensor, by safetensors'
    names.
    """
    if module is None or all(_is_float(kind) for kind in types.values()):
        return
    parameters = {key for key, _ in module.named_parameters()}
    for key, parameter in stored_as(module, types).items():
        if parameter in parameters and not _is_float(types[key]):
            raise _invalid(name, key, f"numbers of type {types[key]}", _FLOATING)


def _is_float(kind: str) -> bool:
    return kind.startswith(("F", "BF"))


def check_finite(name: str, weights: Mapping[str, Tensor], file: str = "") -> None:
    """Raise InvalidModelError unless all floating-point tensors have finite numbers, also in float32."""
    for key, tensor in weights.items():
        if not tensor.numel():
            continue
        if tensor.dtype in _NARROW | {torch.float64}:
            tensor = tensor.float()
        if tensor.dtype in _FLOATS and not torch.stack(torch.aminmax(tensor.detach())).isfinite().all():
            raise _invalid(name, key, "numbers that are not finite", "finite numbers", file)


def check_head_dim(name: str, head_dim: int) -> None:
    """Raise InvalidModelError unless the width of a head has halves, which are rotated."""
    if head_dim < 2 or head_dim % 2:
        raise InvalidModelError(name, CONFIG, "head_dim", head_dim, "an even number above 0")


def check_rotary(name: str, rotary: nn.Module, head_dim: int) -> None:
    """Raise InvalidModelError unless a rotary embedding is finite and rotates all numbers of a head."""
    check_finite(name, dict(rotary.named_buffers()), CONFIG)
    cos, _ = rotary(torch.zeros(1), torch.zeros(1, 1, dtype=torch.long))
    if cos.shape[-1] != head_dim:
        allowed = f"one of all {head_dim} numbers of a head"
        raise InvalidModelError(name, CONFIG, "rope_parameters", f"a rotation of {cos.shape[-1]}", allowed)


def check_token_map(name: str, count: int | None, vocab_size: int, d2t: Tensor | None) -> Tensor | None:
    """Return the target's token of each row of a drafter's head; None: row i is token i.

    `count` is its `draft_vocab_size`, if it has one, and `d2t` [count] how far each row's token lies above
    the row. InvalidModelError if these give no ascending ids below the target's `vocab_size`.
    """
    if count is None or (d2t is None and count == vocab_size):
        return None
    if d2t is None:
        raise _invalid(name, "d2t", "no tensor", f"one, as draft_vocab_size is {count}")
    check_shape(name, "d2t", d2t, (count,))
    if d2t.is_floating_point() or d2t.is_complex() or d2t.dtype == torch.bool:
        raise _invalid(name, "d2t", f"numbers of type {d2t.dtype}", "integers")
    ids = torch.arange(count) + d2t.long()
    if ids.min() < 0 or ids.max() >= vocab_size or (ids.diff() <= 0).any():
        allowed = f"offsets that give ascending ids in [0, {vocab_size})"
        raise _invalid(name, "d2t", f"ids in [{ids.min()}, {ids.max()}]", allowed)
    return ids


def _invalid(name: str, field: str, got: str, allowed: str, file: str = "") -> InvalidModelError:
    return InvalidModelError(name, file or weights_file(name), field, got, allowed)


def weights_file(name: str) -> str:
    """Return the name of the file of weights of a model, draft or head, for errors."""
    path = Path(name)
    if path.is_file():
        return path.name
    return "its weights" if path.is_dir() and not (path / _WEIGHTS).is_file() else _WEIGHTS
