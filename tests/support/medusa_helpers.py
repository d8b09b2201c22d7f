"""Medusa heads in the published formats."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HEADS, LAYERS = 3, 2
OWN = {"medusa_num_heads": HEADS, "medusa_num_layers": LAYERS, "base_model_name_or_path": "target"}
VLLM = {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": HEADS, "topk": 10}


def random_heads(target: Path, seed: int = 0) -> dict[str, Tensor]:
    """Return random weights by the names of FasterDecoding/Medusa."""
    torch.manual_seed(seed)
    vocab_size, size = load_file(target / "model.safetensors")["lm_head.weight"].shape
    weights = {}
    for head in range(HEADS):
        for layer in range(LAYERS):
            weights[f"{head}.{layer}.linear.weight"] = torch.randn(size, size) * 0.3
            weights[f"{head}.{layer}.linear.bias"] = torch.randn(size) * 0.3
        weights[f"{head}.{LAYERS}.weight"] = torch.randn(vocab_size, size) * 0.3
    return weights


def write_own(folder: Path, weights: dict[str, Tensor], **changes: Any) -> Path:
    """Write heads in the format of FasterDecoding/Medusa."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps({**OWN, **changes}))
    return folder


def write_vllm(folder: Path, weights: dict[str, Tensor], **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    named = {}
    for key, tensor in weights.items():
        parts = key.split(".")
        if "linear" in key:
            named[f"blocks.{parts[0]}.layers.{parts[1]}.{parts[3]}"] = tensor
        elif key[0].isdigit():
            named[f"lm_heads.{parts[0]}.weight"] = tensor
        else:
            named[key] = tensor
    save_file(named, folder / "model.safetensors")
    stored = {**VLLM, "num_hidden_layers": LAYERS, "medusa_fc_bias": True, **changes}
    given = {key: value for key, value in stored.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(given))
    return folder
