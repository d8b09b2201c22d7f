"""Heads in the published formats, made from those that `speculators` wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

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


def complete_dflash(variant: str, folder: Path, taps: list[int] | None = None) -> Path:
    """Write a DFlash variant with the embedding and output matrix of its expected logits.

    Args:
        variant: Its name.
        folder: Where to.
        taps: Other layers, at most as many.
    """
    expected = load_file(DATA / variant / "expected.safetensors")

    def config(stored: dict[str, Any]) -> dict[str, Any]:
        return stored if taps is None else {**stored, "aux_hidden_state_layer_ids": taps}

    def weights(tensors: Weights) -> Weights:
        width = tensors["fc.weight"].shape[1] if taps is None else 32 * len(taps)
        return tensors | {
            "fc.weight": tensors["fc.weight"][:, :width].contiguous(),
            "embed_tokens.weight": expected["embed_tokens"],
            "lm_head.weight": expected["lm_head"],
        }

    return changed(variant, folder, config, weights)


def as_official_dflash(folder: Path) -> Path:
    """Write the plain DFlash variant in the official format, on the outputs of layers 0 and 1."""
    complete_dflash("dflash", folder, [1, 2])
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


def bigram_target(
    folder: Path, vocab_size: int = 97, scale: float = 3.0, head_dim: int = 8, max_positions: int = 256
) -> Path:
    """Write a target whose next token depends on its last token only: its layers add nothing."""
    torch.manual_seed(11)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    rows = torch.randn(vocab_size, 32)
    model.model.embed_tokens.weight.data = rows / rows.square().mean(-1, keepdim=True).sqrt()
    model.lm_head.weight.data = torch.randn(vocab_size, 32) * scale / 32**0.5
    model.save_pretrained(folder)
    return folder


def bigram_head(folder: Path, target: Path) -> Path:
    """Write an EAGLE-1 head whose layer adds nothing: its next token depends on the last one only.

    It predicts a bigram target exactly, as both share embedding and output.
    """
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
