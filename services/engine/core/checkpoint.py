"""Checks of what a checkpoint stores, and of what transformers made of it.

transformers skips tensors without a place in the model, and returns weights that the checkpoint lacks
initialised at random. Each gives a model that answers but is not the checkpoint's; both are refused here, and
so are quantised weights, which vLLM alone reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from services.engine.core.errors import InvalidModelError, UnsupportedModelError
from services.engine.core.shapes import weights_file

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


def check_unquantised(name: str, config: PretrainedConfig) -> None:
    """Raise UnsupportedModelError, which names the method, if a checkpoint's weights are quantised."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        stored = getattr(config.get_text_config(), "quantization_config", None)
    if stored is None and (Path(name) / "hf_quant_config.json").is_file():
        stored = {"quant_method": "modelopt"}  # older ones have no other sign of it
    if stored is None:
        return
    method = stored.get("quant_method") if isinstance(stored, Mapping) else None
    by = f" by {method}" if isinstance(method, str) else ""
    raise UnsupportedModelError(
        name,
        f"its weights are quantised{by}, which the engine vllm alone serves; name the unquantised checkpoint",
    )


def check_loading(name: str, info: Mapping[str, Iterable[Any]], num_layers: int) -> None:
    """Check that a checkpoint has the model's weights, and no others but of layers from `num_layers` on.

    By `info`, the loading report of transformers: UnsupportedModelError if weights are missing, or have no
    place in the model, InvalidModelError if one has another shape.
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
