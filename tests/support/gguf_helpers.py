"""Tiny GGUF files, written with gguf's own writer from tiny models as llama.cpp's converter lays them out."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from tests.support.engine_helpers import plain_model, tiny_model

TOKENS = [*(chr(c) for c in range(33, 127)), "Ġ", "th", "the", "Ġthe", "in", "an", "<|start|>", "<|end|>"]
MERGES = ["t h", "th e", "Ġ the", "i n", "a n"]
START, END = len(TOKENS) - 2, len(TOKENS) - 1
VOCAB_SIZE = 128
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}: {{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)

# Model type of the tiny models -> settings without which llama.cpp has no place for a weight, or no key.
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "gemma2": {
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        **{"query_pre_attn_scalar": 256, "layer_types": None},
    },
    "gemma3": {"query_pre_attn_scalar": 256, "layer_types": None},
    "phi3": {"sliding_window": None},
}
_ZERO_CENTRED_NORMS = ("gemma2", "gemma3", "gemma3_text")


def tiny_gguf(
    arch: str, folder: Path, *, quantised: str = "F32", change: Any = None, seed: int = 0, **overrides: Any
) -> tuple[Path, PreTrainedModel]:
    """Write a tiny model as a GGUF file with a tokenizer; return the file and the model before quantisation.

    Args:
        arch: Key of SETTINGS.
        folder: Where to write.
        quantised: Type of the matrices, such as "Q8_0"; vectors are F32.
        change: Called with the writer and the tensors by name before they are written; may change both.
        seed: Of the weights.
        overrides: Settings of the model's configuration.
    """
    settings = {"vocab_size": VOCAB_SIZE, "intermediate_size": 64, **SETTINGS[arch], **overrides}
    model = plain_model(tiny_model(arch, folder, seed=seed, **settings))
    path = folder / f"{arch}-{quantised}.gguf"
    _write(model, path, quantised, change)
    return path, model


def _write(model: PreTrainedModel, path: Path, quantised: str, change: Any) -> None:
    """Write a model as llama.cpp's converter would, with a tiny tokenizer."""
    config, name = model.config, model.config.model_type.removesuffix("_text")
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    writer = gguf.GGUFWriter(path, name)
    _write_metadata(writer, config)
    _write_tokenizer(writer)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = {}
    for key, weight in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.numpy()
        if name == "llama" and (".q_proj." in key or ".k_proj." in key):
            heads = config.num_attention_heads if ".q_proj." in key else config.num_key_value_heads
            # As llama.cpp rotates them: neighbours instead of halves.
            split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = split.swapaxes(1, 2).reshape(values.shape)
        if name in _ZERO_CENTRED_NORMS and key.endswith("norm.weight"):
            values = values + 1
        stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert stored is not None, key
        tensors[stored] = np.ascontiguousarray(values)
    if change is not None:
        change(writer, tensors)
    kind = gguf.GGMLQuantizationType[quantised]
    for stored, values in tensors.items():
        if values.ndim > 1:
            writer.add_tensor(stored, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def dequantised(path: Path) -> dict[str, torch.Tensor]:
    """Return a file's weights by their names in it, as gguf's own code reads them."""
    return {
        tensor.name: torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        for tensor in gguf.GGUFReader(path).tensors
    }


def _write_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters.get("rope_theta", 10000.0))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    unused = [f"[unused{number}]" for number in range(VOCAB_SIZE - len(TOKENS))]
    kinds = [gguf.TokenType.NORMAL] * START + [gguf.TokenType.CONTROL] * 2
    writer.add_token_list([*TOKENS, *unused])
    writer.add_token_types([*kinds, *[gguf.TokenType.UNUSED] * len(unused)])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(START)
    writer.add_eos_token_id(END)
    writer.add_pad_token_id(END)
    writer.add_chat_template(TEMPLATE)
