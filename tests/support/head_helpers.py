"""Heads in the published formats, made from those that `speculators` wrote.

tests/data/heads holds random weights in classes of `speculators` 0.9.0 and the logits that these gave:
[step, row] of "logits" is after the row's feature, its token and `step` further ones. The library leaves out
what is the target's; for DFlash it is in shared.safetensors. The script, which needs the library, is in this
repository's history at f6d64936 as tests/data/heads/make.py.
"""

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


def bigram_target(folder: Path, head_dim: int = 8, max_positions: int = 256) -> Path:
    """Write a target whose next token depends on its last token only: its layers add nothing."""
    vocab_size = 97
    torch.manual_seed(11)
    sizes = {"vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim}
    others = {"max_position_embeddings": max_positions, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    config = AutoConfig.for_model("llama", **sizes, **heads, **others)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    rows = torch.randn(vocab_size, 32)
    model.model.embed_tokens.weight.data = rows / rows.square().mean(-1, keepdim=True).sqrt()
    model.lm_head.weight.data = torch.randn(vocab_size, 32) * 3.0 / 32**0.5
    model.save_pretrained(folder)
    return folder


def bigram_head(folder: Path, target: Path) -> Path:
    """Write an EAGLE-3 head whose next token depends on the last one only.

    It predicts a bigram target exactly, as both share embedding and output: each position attends to itself
    only and adds its normalised embedding to nothing, as features are multiplied by 0.
    """
    stored = json.loads((target / "config.json").read_text())
    size, inner, heads = stored["hidden_size"], stored["intermediate_size"], stored["num_attention_heads"]
    width = heads * stored["head_dim"]
    layer = {**stored, "num_hidden_layers": 1, "num_key_value_heads": heads, "attention_bias": True}
    written = json.loads((DATA / "llama" / "config.json").read_text())
    config = {
        **{key: written[key] for key in ("architectures", "speculators_config", "speculators_model_type")},
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "draft_vocab_size": stored["vocab_size"],
        "target_hidden_size": size,
        "transformer_layer_config": layer,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    nothing, itself = torch.zeros(width, 2 * size), torch.eye(width, size)
    # The rotary embedding turns equal queries and keys apart, the more the farther they are.
    constant = torch.full((width,), 30.0)
    weights = {
        "fc.weight": torch.randn(size, 3 * size),
        "layers.0.hidden_norm.weight": torch.zeros(size),
        "layers.0.input_layernorm.weight": torch.ones(size),
        "layers.0.self_attn.q_proj.weight": nothing,
        "layers.0.self_attn.q_proj.bias": constant,
        "layers.0.self_attn.k_proj.weight": nothing.clone(),
        "layers.0.self_attn.k_proj.bias": constant.clone(),
        "layers.0.self_attn.v_proj.weight": torch.cat([itself, torch.zeros(width, size)], 1),
        "layers.0.self_attn.v_proj.bias": torch.zeros(width),
        "layers.0.self_attn.o_proj.weight": itself.T.contiguous(),
        "layers.0.self_attn.o_proj.bias": torch.zeros(size),
        "layers.0.post_attention_layernorm.weight": torch.ones(size),
        "layers.0.mlp.gate_proj.weight": torch.randn(inner, size),
        "layers.0.mlp.up_proj.weight": torch.randn(inner, size),
        "layers.0.mlp.down_proj.weight": torch.zeros(size, inner),
        "norm.weight": torch.ones(size),
    }
    save_file(weights, folder / "model.safetensors")
    return folder
