"""Medusa heads in the published formats, and a target whose next token is a permutation of the last one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

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


def reference(weights: dict[str, Tensor], target: Path, states: Tensor) -> Tensor:
    """Return the published formula's logits [positions, heads, vocab_size] of states before the last norm."""
    stored = json.loads((target / "config.json").read_text())
    norm = load_file(target / "model.safetensors")["model.norm.weight"]
    rows = []
    for head in range(HEADS):
        x = F.rms_norm(states, (states.shape[-1],), norm, stored["rms_norm_eps"])
        for layer in range(LAYERS):
            x = x + F.silu(
                F.linear(
                    x, weights[f"{head}.{layer}.linear.weight"], weights.get(f"{head}.{layer}.linear.bias")
                )
            )
        rows.append(F.linear(x, weights[f"{head}.{LAYERS}.weight"]))
    return torch.stack(rows, 1)


def write_own(folder: Path, weights: dict[str, Tensor], **changes: Any) -> Path:
    """Write heads in the format of FasterDecoding/Medusa."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps({**OWN, **changes}))
    return folder


def write_vllm(folder: Path, weights: dict[str, Tensor], **changes: Any) -> Path:
    """Write heads in the format of vLLM."""
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
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in stored.items() if value is not None})
    )
    return folder


def cyclic_target(folder: Path, vocab_size: int = 97, step: int = 3, scale: float = 12.0) -> Path:
    """Write a target after whose token i nearly always token i + `step` follows: its layers add nothing."""
    torch.manual_seed(12)
    size = 128
    config = AutoConfig.for_model(
        "llama",
        vocab_size=vocab_size,
        hidden_size=size,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    rows = torch.eye(vocab_size, size) * size**0.5
    model.model.embed_tokens.weight.data = rows
    model.lm_head.weight.data = rows.roll(step, 0) * scale / size
    model.save_pretrained(folder)
    return folder


def cyclic_heads(folder: Path, target: Path, *, late: int = 0, step: int = 3) -> Path:
    """Write Medusa heads that predict a cyclic target: head k the token k + 2 positions after a state.

    Args:
        folder: Where to.
        target: The target.
        late: Planted fault: the heads are trained for tokens that many positions later.
        step: The target's.
    """
    matrix = load_file(target / "model.safetensors")["lm_head.weight"]
    size = matrix.shape[1]
    weights = {}
    for head in range(HEADS):
        for layer in range(LAYERS):
            weights[f"{head}.{layer}.linear.weight"] = torch.zeros(size, size)
            weights[f"{head}.{layer}.linear.bias"] = torch.zeros(size)
        weights[f"{head}.{LAYERS}.weight"] = matrix.roll(step * (head + 1 + late), 0).contiguous()
    return write_own(folder, weights)
