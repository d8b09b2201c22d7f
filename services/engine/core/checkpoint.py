"""What the weights of a checkpoint are stored as, and the checks of what transformers made of them.

transformers skips a quantisation that it does not know with a warning, and then casts the stored numbers
without their scales. It skips tensors without a place in the model, too, and returns weights that the
checkpoint lacks initialised at random. Each gives a model that answers but is not the checkpoint's; all are
refused here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, __version__
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.import_utils import is_kernels_available

from services.engine.core.device import device_capability
from services.engine.core.errors import InvalidModelError, UnsupportedModelError
from services.engine.core.shapes import weights_file
from services.engine.core.tensor_files import checkpoint_folder, tensor_types

_PARTS = ("weights", "input_activations")
_FINE_GRAINED = ("fp8", "mxfp8")
_FP8_CAPABILITY = (8, 9)
"""Least compute capability of a CUDA device that multiplies in FP8."""

# Tensors that many checkpoints have and that change no logit of the text model: buffers that are computed
# anew, layers that predict further tokens, towers of other modalities, value heads of reinforcement learning,
# and scales of a quantised KV cache, which is not quantised here.
_HARMLESS = re.compile(
    r"rotary_emb\.|\.masked_bias$|\.attn\.bias$|position_ids$"
    r"|(^|\.)mtp(_layers)?\.|^v_head\."
    r"|(^|\.)(vision|visual|audio|image|multi_modal|multimodal)[a-z_]*\."
    r"|\.(k|v|kv|q|prob)_scale$|\.[kv]_proj\.output_scale$"
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_SCALE = re.compile(r"scale|absmax|SCB")
_SCALED_TYPES = ("F8", "F4", "F6", "I8", "U8", "I4", "U4")


@dataclass(frozen=True)
class StoredWeights:
    """How a checkpoint with quantised weights is served.

    Attributes:
        method: Its `quant_method`.
        is_expanded: Whether the weights were dequantised when they were loaded.
    """

    method: str
    is_expanded: bool

    def described(self, dtype: torch.dtype) -> str:
        """Return a text for logs and status."""
        if self.is_expanded:
            return f"{self.method} weights dequantised to {str(dtype).removeprefix('torch.')}"
        return f"{self.method} weights"


def quant_method(name: str, config: PretrainedConfig) -> str | None:
    """Return the method by which a checkpoint's weights are quantised; None if they are not.

    Raises:
        UnsupportedModelError: transformers does not know the method.
    """
    given = _quantisation(config)
    if given is None and (Path(name) / "hf_quant_config.json").is_file():
        given = {"quant_method": _modelopt_method(Path(name) / "hf_quant_config.json")}
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if isinstance(given, Mapping) and (given.get("load_in_8bit") or given.get("load_in_4bit")):
        return "bitsandbytes"
    known = {key.removesuffix("_4bit").removesuffix("_8bit") for key in AUTO_QUANTIZATION_CONFIG_MAPPING}
    known.discard("gguf")  # a file, which has no configuration
    if not isinstance(method, str) or method not in known:
        raise UnsupportedModelError(
            name,
            f"its weights are quantised by {method!r}, which transformers {__version__} does not read; it "
            f"reads {', '.join(sorted(known))}",
        )
    return method


def _quantisation(config: PretrainedConfig) -> Any:
    given = getattr(config, "quantization_config", None)
    return given if given is not None else getattr(config.get_text_config(), "quantization_config", None)


def _modelopt_method(path: Path) -> str:
    """The method of a checkpoint of NVIDIA's ModelOpt, of which older ones name it in a file of its own."""
    try:
        producer = json.loads(path.read_text())["producer"]["name"]
    except (OSError, ValueError, KeyError, TypeError):
        producer = path.name
    return str(producer)


def choose_expansion(config: PretrainedConfig, method: str, device: torch.device) -> None:
    """Decide, in the configuration, whether FP8 and compressed-tensors weights are dequantised at load.

    Left to itself, transformers dequantises the latter in the first forward, after the checks of loading, and
    fails there with FP8 weights on a GPU without the package kernels.
    """
    given = _quantisation(config)
    capability = device_capability(device)
    has_fp8 = capability is not None and capability >= _FP8_CAPABILITY
    if method == "compressed-tensors":
        given["use_optimized_inference" if has_fp8 and _is_fp8(given) else "dequantize"] = True
    elif method in _FINE_GRAINED and not (has_fp8 and is_kernels_available()):
        given["dequantize"] = True


def _is_fp8(given: Mapping[str, Any]) -> bool:
    """Whether all weights and activations of compressed-tensors are in FP8."""
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return False  # transformers refuses it
    return all(
        isinstance(group, Mapping) and all(_is_fp8_part(group.get(part)) for part in _PARTS)
        for group in groups.values()
    )


def _is_fp8_part(given: object) -> bool:
    return isinstance(given, Mapping) and (given.get("type"), given.get("num_bits")) == ("float", 8)


def is_expanded(module: nn.Module) -> bool:
    """Whether all parameters are ordinary floating-point tensors."""
    plain = {torch.float32, torch.bfloat16, torch.float16}
    return all(
        type(parameter) is nn.Parameter and type(parameter.data) is Tensor and parameter.dtype in plain
        for parameter in module.parameters()
    )


def check_loading(name: str, info: Mapping[str, Iterable[Any]], num_layers: int) -> None:
    """Check that a checkpoint has the model's weights, and no others.

    Args:
        info: The loading report of transformers.
        num_layers: Layers of the model; those from this one on may be in the checkpoint.

    Raises:
        UnsupportedModelError: Weights are missing, or have no place in the model.
        InvalidModelError: A weight has another shape.
    """
    if mismatched := sorted(info["mismatched_keys"]):
        key, stored, expected = mismatched[0]
        allowed = f"{list(expected)}, which its configuration says"
        raise InvalidModelError(name, weights_file(name), key, f"the shape {list(stored)}", allowed)
    if missing := sorted(info["missing_keys"]):
        raise UnsupportedModelError(name, f"it lacks {_counted(missing)}, such as {_first(missing)}")
    unexpected = [key for key in sorted(info["unexpected_keys"]) if not _is_harmless(key, num_layers)]
    if unexpected:
        reason = f"its checkpoint has {_counted(unexpected)} without a place in it: {_first(unexpected)}"
        raise UnsupportedModelError(name, reason)


def _is_harmless(key: str, num_layers: int) -> bool:
    layer = _LAYER.search(key)
    return _HARMLESS.search(key) is not None or (layer is not None and int(layer[1]) >= num_layers)


def _counted(keys: Sequence[Any]) -> str:
    return f"{len(keys)} weight{'s' if len(keys) > 1 else ''}"


def _first(keys: Sequence[str]) -> str:
    return ", ".join(keys[:3])


def check_scales(name: str) -> None:
    """Check that the narrow weights of a quantised checkpoint have their scales.

    transformers does not report the missing ones of each method, and takes the stored numbers without them.

    Raises:
        UnsupportedModelError: A weight has none.
    """
    folder = checkpoint_folder(name)
    types = {} if folder is None else tensor_types(folder)
    scaled = {key.rpartition(".")[0] for key in types if _SCALE.search(key.rpartition(".")[2])}
    for key, kind in sorted(types.items()):
        stem, _, last = key.rpartition(".")
        is_narrow = last == "weight" and kind.startswith(_SCALED_TYPES)
        if is_narrow and not {stem, key} & scaled:
            raise UnsupportedModelError(name, f"its weight {key} is stored as {kind}, without a scale")
