"""The pair's architecture, and how a model starts from another one: grown, or cut down."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.demo_pair.corpus import END_ID, END_TOKEN

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The contents one after the other: the pair continues code and knows no roles."""

_MAX_CONTEXT = 2048


def build(num_layers: int, hidden_size: int = 256, vocab_size: int = 2048) -> LlamaForCausalLM:
    """Return a fresh Llama of which every block starts as the identity (its two output matrices are zero)."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 5 // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=max(1, hidden_size // 128),
        head_dim=64,
        max_position_embeddings=_MAX_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        _silence(layer)
    return model


def grow(model: LlamaForCausalLM, source: LlamaForCausalLM) -> None:
    """Start the deeper `model` as the same function as `source`.

    Each block of `source` is followed by copies of itself whose outputs are zero.

    Raises:
        ValueError: The depth of `model` is no multiple of the source's.
    """
    blocks = source.model.layers
    copies, rest = divmod(len(model.model.layers), len(blocks))
    if rest or not copies:
        raise ValueError(f"layers: got {len(model.model.layers)}, allowed: a multiple of {len(blocks)}")
    _copy_ends(model, source)
    for i, layer in enumerate(model.model.layers):
        layer.load_state_dict(blocks[i // copies].state_dict())
        if i % copies:
            _silence(layer)


def truncated(source: LlamaForCausalLM, num_layers: int) -> LlamaForCausalLM:
    """Return a shallower model of every n-th block of `source`, from the first one on.

    Of a grown model these are the blocks that it grew from.

    Raises:
        ValueError: The depth of `source` is no multiple of `num_layers`.
    """
    blocks = source.model.layers
    if num_layers < 1 or len(blocks) % num_layers:
        raise ValueError(f"layers: got {num_layers}, allowed: a divisor of {len(blocks)}")
    model = build(num_layers, source.config.hidden_size, source.config.vocab_size)
    _copy_ends(model, source)
    for layer, block in zip(model.model.layers, blocks[:: len(blocks) // num_layers], strict=True):
        layer.load_state_dict(block.state_dict())
    return model


def load(directory: Path) -> LlamaForCausalLM:
    """Return a saved model in float32."""
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)


def export(source: Path, tokenizer_file: Path, out: Path) -> int:
    """Save the model of `source` in bf16 with its tokenizer into `out`; return the bytes written."""
    load(source).to(torch.bfloat16).save_pretrained(out)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(tokenizer_file)),
        bos_token=END_TOKEN,
        eos_token=END_TOKEN,
        pad_token=END_TOKEN,
        model_max_length=_MAX_CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)
    return sum(path.stat().st_size for path in out.iterdir())


def _silence(layer: nn.Module) -> None:
    for name, parameter in layer.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(parameter)


def _copy_ends(model: LlamaForCausalLM, source: LlamaForCausalLM) -> None:
    model.model.embed_tokens.load_state_dict(source.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(source.model.norm.state_dict())
