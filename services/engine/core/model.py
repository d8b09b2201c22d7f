"""Loads a causal language model from a directory or the hub, if it can be served exactly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from gammaray.errors import InvalidArgumentError, NotFoundError
from services.engine.core.checkpoint import check_loading, check_unquantised
from services.engine.core.device import device_capability, raise_if_lost
from services.engine.core.errors import InvalidModelError, UnsupportedModelError
from services.engine.core.shapes import (
    CONFIG,
    check_fields,
    check_finite,
    check_size,
    check_types,
    size_of,
    skeleton,
)
from services.engine.core.tensor_files import tensor_types

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM, LlamaModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LEAST_CONTEXT = 2

_TRANSIENT = (MemoryError, torch.OutOfMemoryError)
"""Errors of loading that are not the model's."""

_BFLOAT16_CAPABILITY = (8, 0)
"""Least compute capability of a CUDA device that computes in bfloat16."""

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Layer types of a configuration that can be served."""

LLAMA_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types with the layers of `LlamaModel`, which the CPU kernel supports."""


def embeddings(module: PreTrainedModel) -> tuple[nn.Embedding, nn.Linear]:
    """Return a model's embedding of token ids, and its map from hidden states to logits."""
    output = module.get_output_embeddings()  # type: ignore[no-untyped-call]
    return cast(nn.Embedding, module.get_input_embeddings()), cast(nn.Linear, output)


def head_norms(attention: LlamaAttention) -> tuple[Tensor, Tensor] | None:
    """Return the weights of the norms of query and key heads; None for a model without them."""
    query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return None if query_norm is None or key_norm is None else (query_norm.weight, key_norm.weight)


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, with its own eager attention, and the configuration of its text part."""

    name: str
    module: PreTrainedModel
    config: PretrainedConfig
    max_context: int

    @property
    def device(self) -> torch.device:
        return self.module.device

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtype

    @property
    def llama(self) -> LlamaModel:
        """The layers of `LLAMA_TYPES`, which have Llama's names."""
        body: LlamaModel = cast("LlamaForCausalLM", self.module).model
        return body


def load_model(
    name: str, *, device: str = "auto", dtype: str = "auto", num_layers: int | None = None
) -> LoadedModel:
    """Load a model as transformers does, with eager attention.

    Args:
        device: "auto" (cuda if available), "cpu", "cuda" or "cuda:N".
        dtype: "auto" (float32 on CPU, elsewhere bfloat16, or float16 on cards without it), "float32",
            "bfloat16" or "float16".
        num_layers: Leave out the layers from this one on, whose weights are not read; None: all layers.

    Raises:
        NotFoundError: There is no such model.
        UnsupportedModelError: Its configuration rules it out, or its weights are damaged, incomplete or
            quantised.
        InvalidArgumentError: Unknown device or dtype.
    """
    where = torch_device(device)
    kind = torch_dtype(dtype, where)
    config = load_config(name)
    check_config(name, config)
    text = config.get_text_config()
    if num_layers is not None:
        text.num_hidden_layers = num_layers
        if layer_types := getattr(text, "layer_types", None):
            text.layer_types = layer_types[:num_layers]
    max_context_of(name, text)  # refused before the weights are read
    described = skeleton(config)
    check_size(name, described, size_of(name))
    if Path(name).is_dir():
        check_types(name, described, tensor_types(Path(name)))
    module = _load_pretrained(name, None if num_layers is None else config, kind)
    return loaded_model(name, module, config, where)


def loaded_model(
    name: str, module: PreTrainedModel, config: PretrainedConfig, device: torch.device
) -> LoadedModel:
    """Return a module in evaluation mode, moved to a device; InvalidModelError if a weight is not finite."""
    typed: nn.Module = module  # transformers overrides `to` and `eval` without types
    typed.to(device).eval().requires_grad_(False)
    text = config.get_text_config()
    check_finite(name, module.state_dict())
    return LoadedModel(name, module, text, max_context_of(name, text))


def _load_pretrained(name: str, config: PretrainedConfig | None, dtype: torch.dtype) -> PreTrainedModel:
    how: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}
    if config is not None:
        how["config"] = config
    try:
        result: Any = AutoModelForCausalLM.from_pretrained(
            name, **how, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except SafetensorError as error:
        raise UnsupportedModelError(name, f"its weights are truncated or damaged: {error}") from error
    except OSError as error:
        raise NotFoundError(f"model {name!r}: {error}") from error
    except _TRANSIENT:
        raise
    except Exception as error:  # its kind depends on the checkpoint's content
        raise_if_lost(error)
        reason = str(error).strip() or type(error).__name__
        message = f"transformers cannot load it as a causal model: {reason}"
        raise UnsupportedModelError(name, message) from error
    module: PreTrainedModel = result[0]
    check_loading(name, result[1], module.config.get_text_config().num_hidden_layers)
    return module


def torch_device(name: str) -> torch.device:
    """Return the device that a setting names; InvalidArgumentError if there is no such device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidArgumentError("device", name, "auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidArgumentError("device", name, "cpu: this torch has no CUDA device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidArgumentError("device", name, f"cuda:N with N below {torch.cuda.device_count()}")
    return device


def torch_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype that a setting names; InvalidArgumentError if there is none on the device."""
    capability = device_capability(device)
    lacks_bfloat16 = capability is not None and capability < _BFLOAT16_CAPABILITY
    if name == "auto":
        half = torch.float16 if lacks_bfloat16 else torch.bfloat16
        return torch.float32 if device.type == "cpu" else half
    if name not in DTYPES:
        raise InvalidArgumentError("dtype", name, f"auto, {', '.join(DTYPES)}")
    if name == "bfloat16" and capability is not None and lacks_bfloat16:
        card = f"compute capability {capability[0]}.{capability[1]}"
        raise InvalidArgumentError("dtype", name, f"auto, float16 or float32: {card} lacks bfloat16")
    return DTYPES[name]


def load_config(name: str) -> PretrainedConfig:
    """Return a model's configuration.

    NotFoundError if there is no such model, UnsupportedModelError if transformers does not know the
    architecture, InvalidModelError if a number of the configuration is not one that a model can have.
    """
    try:
        stored, _ = PretrainedConfig.get_config_dict(name)
        check_fields(name, stored)  # transformers divides by some
        config: PretrainedConfig = AutoConfig.from_pretrained(name)
    except StrictDataclassError as error:
        raise InvalidModelError(name, CONFIG, "a field", str(error), "what transformers reads") from error
    except ValueError as error:
        raise UnsupportedModelError(name, f"transformers does not know it: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # fields of a wrong type
        raise UnsupportedModelError(name, f"transformers cannot read its configuration: {error}") from error
    except OSError as error:
        raise NotFoundError(f"model {name!r}: {error}") from error
    return config


def eos_token_ids(model: str) -> tuple[int, ...]:
    """Return the tokens that end a completion, from the same files as `generate` of transformers."""
    try:
        ids: Any = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # no such file: older models have none
        ids = None
    if ids is None:
        ids = getattr(load_config(model).get_text_config(), "eos_token_id", None)
    return tuple(ids) if isinstance(ids, (list, tuple)) else () if ids is None else (ids,)


def check_config(name: str, config: PretrainedConfig) -> None:
    """Raise UnsupportedModelError for configurations whose problems a short probe forward cannot reveal."""
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise UnsupportedModelError(name, "it is an encoder-decoder model, not a causal one")
    check_unquantised(name, config)
    odd = set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES
    if odd:
        reason = f"its layers are of types {sorted(odd)}; served are {sorted(LAYER_TYPES)}"
        raise UnsupportedModelError(name, reason)
    check_fields(name, text.to_dict())


def max_context_of(name: str, config: PretrainedConfig) -> int:
    """Return the largest number of tokens in a sequence of a model.

    UnsupportedModelError if the configuration does not say it, InvalidModelError if a token and its successor
    do not fit.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        raise UnsupportedModelError(name, "its configuration has no max_position_embeddings")
    if limit < _LEAST_CONTEXT:
        raise InvalidModelError(name, CONFIG, "max_position_embeddings", limit, f"at least {_LEAST_CONTEXT}")
    rotary = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in rotary.values() if isinstance(value, dict)]
    for rope in by_layer_type or [rotary]:
        # Past this length longrope changes the rotation of all positions, so cached keys would be wrong; up
        # to it, it is exact.
        if rope.get("rope_type") == "longrope":
            limit = min(limit, rope.get("original_max_position_embeddings") or limit)
    return limit
