"""LoRA adapters in PEFT's format, made for tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 4, 8
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(directory: Path, base: Path, seed: int, rank: int = RANK) -> dict[str, torch.Tensor]:
    """Save a random adapter of all projections; return what it adds to the base model's weights."""
    generator = torch.Generator().manual_seed(seed)
    tensors, added = {}, {}
    for name, weight in load_file(base / "model.safetensors").items():
        if not name.endswith(tuple(f"{projection}.weight" for projection in PROJECTIONS)):
            continue
        rows, columns = weight.shape
        down = torch.randn(rank, columns, generator=generator) / columns**0.5
        up = torch.randn(rows, rank, generator=generator) * weight.std()
        key = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
        added[name] = up @ down * (ALPHA / rank)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(PROJECTIONS),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return added
