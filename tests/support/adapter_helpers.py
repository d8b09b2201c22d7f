"""LoRA adapters in PEFT's format, made for tests."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 4, 8
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WORDS = ("embed_tokens", "lm_head")


def make_adapter(
    directory: Path, base: Path, seed: int, rank: int = RANK, *, has_words: bool = False
) -> dict[str, torch.Tensor]:
    """Save a random adapter, `has_words`: of embedding and output, too; return what it adds."""
    generator = torch.Generator().manual_seed(seed)
    tensors, added = {}, {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        if module not in (*PROJECTIONS, *(WORDS if has_words else ())):
            continue
        rows, columns = weight.shape
        down = torch.randn(rank, columns, generator=generator) / columns**0.5
        up = torch.randn(rows, rank, generator=generator) * weight.std()
        key = f"base_model.model.{name.removesuffix('.weight')}"
        added[name] = up @ down * (ALPHA / rank)
        if module == "embed_tokens":  # PEFT stores its matrices transposed
            tensors |= {f"{key}.lora_embedding_A": up.T, f"{key}.lora_embedding_B": down.T}
        else:
            tensors |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
    directory.mkdir(parents=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "adapter_model.safetensors")
    config = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base)},
        **{"r": rank, "lora_alpha": ALPHA, "lora_dropout": 0.0, "bias": "none"},
        "target_modules": [*PROJECTIONS, *(WORDS if has_words else ())],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return added
