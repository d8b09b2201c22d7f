"""Heads in the published formats, made from those that `speculators` wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

DATA = Path(__file__).parents[1] / "data" / "heads"
VARIANTS = ("llama", "llama-residual", "qwen3")
Weights = dict[str, Tensor]


def changed(
    variant: str,
    folder: Path,
    config: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda config: config,
    weights: Callable[[Weights], Weights | None] = lambda weights: weights,
) -> Path:
    """Copy a variant with its configuration and weights changed in place, or replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = json.loads((DATA / variant / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config(stored) or stored))
    tensors = load_file(DATA / variant / "model.safetensors")
    save_file(weights(tensors) or tensors, folder / "model.safetensors")
    return folder


def as_official(folder: Path) -> Path:
    """Write the plain variant in the official EAGLE-3 format."""

    def config(stored: dict[str, Any]) -> dict[str, Any]:
        layer = dict(stored["transformer_layer_config"])
        taps = stored["eagle_aux_hidden_state_layer_ids"]
        return {
            **layer,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": stored["draft_vocab_size"],
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps],
            },
        }

    def weights(tensors: Weights) -> Weights:
        return {key.replace("layers.0.", "midlayer."): tensor for key, tensor in tensors.items()}

    return changed("llama", folder, config, weights)
