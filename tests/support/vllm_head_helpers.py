"""Drafters of every kind for tiny targets, in sizes that vLLM's kernels take (attention heads of 32)."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.engine_helpers import tiny_model
from tests.support.head_helpers import DATA, as_official, bigram_target, changed
from tests.support.medusa_helpers import random_heads, write_vllm
from tests.support.processing_helpers import save_small_tokenizer

HEAD_DIM, MAX_POSITIONS = 32, 384
_ROWS = {"q_proj": 4 * HEAD_DIM, "k_proj": 2 * HEAD_DIM, "v_proj": 2 * HEAD_DIM}


def random_target(folder: Path) -> Path:
    return save_small_tokenizer(
        tiny_model("llama", folder, gain=2.0, head_dim=HEAD_DIM, max_position_embeddings=MAX_POSITIONS)
    )


def eagle3(folder: Path, target: Path) -> Path:
    return changed("llama", folder, lambda stored: _with_heads(stored), _randomised)


def sharing_eagle3(folder: Path, target: Path) -> Path:
    """Write a random EAGLE-3 head that has the target's embedding."""
    eagle3(folder, target)
    weights = load_file(folder / "model.safetensors")
    del weights["embed_tokens.weight"]
    save_file(weights, folder / "model.safetensors")
    return folder


def official_eagle3(folder: Path, target: Path) -> Path:
    """Write a random EAGLE-3 head in the official format, which reads the outputs of layers 1 and 2."""
    as_official(folder)
    stored = json.loads((folder / "config.json").read_text())
    stored["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 2]
    sizes = {"head_dim": HEAD_DIM, "max_position_embeddings": MAX_POSITIONS}
    (folder / "config.json").write_text(json.dumps({**stored, **sizes}))
    weights = load_file(folder / "model.safetensors")
    weights["fc.weight"] = weights["fc.weight"][:, :64]
    save_file(_randomised(weights), folder / "model.safetensors")
    return folder


def eagle(folder: Path, target: Path) -> Path:
    bigram_eagle(folder, target)
    weights = _randomised(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors")
    return folder


def medusa(folder: Path, target: Path) -> Path:
    """Write random Medusa heads; vLLM takes their sizes from the configuration."""
    stored = json.loads((target / "config.json").read_text())
    sizes = {key: stored[key] for key in ("hidden_size", "vocab_size")}
    return write_vllm(folder, random_heads(target), **sizes)


def dflash(folder: Path, target: Path) -> Path:
    complete_dflash(folder)
    stored = json.loads((folder / "config.json").read_text())
    weights = _randomised(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_with_heads(stored)))
    return folder


def itself(folder: Path, target: Path) -> Path:
    return target


def wide_bigram(folder: Path) -> Path:
    """Write a target whose next token depends on its last one only."""
    return save_small_tokenizer(bigram_target(folder, head_dim=HEAD_DIM, max_positions=MAX_POSITIONS))


def constant_target(folder: Path) -> Path:
    """Write a target with the same distribution of the next token after every text, of many likely tokens."""
    wide_bigram(folder)
    weights = load_file(folder / "model.safetensors")
    rows = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = rows[:1].expand_as(rows).contiguous()
    weights["lm_head.weight"] /= 6
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def constant_head(kind: str, folder: Path, target: Path) -> Path:
    """Write a head for a constant target that has its distribution."""
    if kind == "eagle":
        return bigram_eagle(folder, target)
    stored = load_file(target / "model.safetensors")
    embedding, output = stored["model.embed_tokens.weight"], stored["lm_head.weight"]
    made = medusa(folder, target) if kind == "medusa" else dflash(folder, target)
    weights = load_file(made / "model.safetensors")
    for key, tensor in weights.items():
        name = key.rpartition(".")[0]
        if "blocks." in key or name.endswith(("o_proj", "down_proj")):
            weights[key] = torch.zeros_like(tensor)
        elif "lm_head" in key:
            weights[key] = output.clone()
        elif name == "embed_tokens":
            weights[key] = embedding.clone()
    save_file(weights, made / "model.safetensors")
    return made


def mtp_target(folder: Path) -> Path:
    """Write a MiMo with one layer that predicts the token after the next exactly.

    The target's layers add nothing, and so does that layer: the next token depends on the last one only.
    """
    wide_bigram(folder)
    stored = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    for key, tensor in list(weights.items()):
        name, block = key.removeprefix("model.layers.0."), "model.mtp_layers.0."
        if name != key:
            weights[block + name] = tensor.clone()
    size = stored["hidden_size"]
    # Qwen2's layers, which MiMo has, take their heads' width from the hidden size.
    for layer in ("model.layers.0.", "model.layers.1.", "model.layers.2.", "model.mtp_layers.0."):
        for name in _ROWS:
            weights[f"{layer}self_attn.{name}.weight"] = torch.randn(size, size)
            weights[f"{layer}self_attn.{name}.bias"] = torch.zeros(size)
        weights[f"{layer}self_attn.o_proj.weight"] = torch.zeros(size, size)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"model.mtp_layers.0.{name}.weight"] = torch.ones(size)
    weights["model.mtp_layers.0.input_proj.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size)], 1)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    changes = {
        **{"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1},
        **{"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": size},
    }
    (folder / "config.json").write_text(json.dumps({**stored, **changes}))
    return folder


def complete_dflash(folder: Path, taps: list[int] | None = None) -> Path:
    """Write a DFlash head that `speculators` made, with an embedding and an output matrix, on these taps."""
    shared = load_file(DATA / "dflash" / "shared.safetensors")

    def config(stored: dict[str, Any]) -> dict[str, Any]:
        return stored if taps is None else {**stored, "aux_hidden_state_layer_ids": taps}

    def weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        width = tensors["fc.weight"].shape[1] if taps is None else 32 * len(taps)
        return tensors | {
            "fc.weight": tensors["fc.weight"][:, :width].contiguous(),
            "embed_tokens.weight": shared["embed_tokens"],
            "lm_head.weight": shared["lm_head"],
        }

    return changed("dflash", folder, config, weights)


def as_official_dflash(folder: Path) -> Path:
    """Write the DFlash head in the official format, on the outputs of layers 0 and 1."""
    complete_dflash(folder, [1, 2])
    stored = json.loads((folder / "config.json").read_text())
    official = {
        **stored["transformer_layer_config"],
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": stored["block_size"],
        "dflash_config": {"mask_token_id": stored["mask_token_id"], "target_layer_ids": [0, 1]},
        "num_target_layers": 3,
    }
    (folder / "config.json").write_text(json.dumps(official))
    return folder


def bigram_eagle(folder: Path, target: Path) -> Path:
    """Write an EAGLE-1 head whose layer adds nothing: its next token depends on the last one only."""
    stored = json.loads((target / "config.json").read_text())
    size, inner = stored["hidden_size"], stored["intermediate_size"]
    dim = stored.get("head_dim") or size // stored["num_attention_heads"]
    width, narrow = stored["num_attention_heads"] * dim, stored["num_key_value_heads"] * dim
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**stored, "num_hidden_layers": 1}))
    weights = {
        "fc.weight": torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1),
        "layers.0.self_attn.q_proj.weight": torch.randn(width, size),
        "layers.0.self_attn.k_proj.weight": torch.randn(narrow, size),
        "layers.0.self_attn.v_proj.weight": torch.randn(narrow, size),
        "layers.0.self_attn.o_proj.weight": torch.zeros(size, width),
        "layers.0.post_attention_layernorm.weight": torch.ones(size),
        "layers.0.mlp.gate_proj.weight": torch.randn(inner, size),
        "layers.0.mlp.up_proj.weight": torch.randn(inner, size),
        "layers.0.mlp.down_proj.weight": torch.zeros(size, inner),
    }
    save_file(weights, folder / "model.safetensors")
    return folder


def _with_heads(stored: dict[str, Any]) -> dict[str, Any]:
    layer = stored["transformer_layer_config"]
    changes = {"head_dim": HEAD_DIM, "max_position_embeddings": MAX_POSITIONS}
    return {**stored, "transformer_layer_config": {**layer, **changes}}


def _randomised(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights for heads of that width, so large that attention is far from uniform."""
    generator, found = torch.Generator().manual_seed(5), {}
    for key, tensor in sorted(weights.items()):
        name, shape = key.rpartition(".")[0].rpartition(".")[2], list(tensor.shape)
        if name in _ROWS:
            shape[0] = _ROWS[name]
        elif name == "o_proj":
            shape[1] = 4 * HEAD_DIM
        elif name in ("q_norm", "k_norm"):
            shape = [HEAD_DIM]
        if len(shape) == 2:
            found[key] = torch.randn(shape, generator=generator) * 2 * shape[1] ** -0.5
        elif key in ("d2t", "t2d"):
            found[key] = tensor
        else:
            found[key] = torch.ones(shape)
    return found
