"""GGUF files for llama.cpp have the weights that gammaray serves."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.peers.bf16_gguf import write_bf16, write_llama
from gammaray.demo_pair import resolve_model
from gammaray.errors import InvalidArgumentError
from services.engine.convert import convert
from services.engine.loader import load_engine
from tests.support.gguf_helpers import dequantised, tiny_gguf


def test_weights_are_the_dequantised_ones_rounded_to_bfloat16(tmp_path):
    source, _ = tiny_gguf("llama", tmp_path, quantised="Q8_0")
    out = tmp_path / "out.gguf"
    write_bf16(source, out)
    expected = {name: values.to(torch.bfloat16).float() for name, values in dequantised(source).items()}
    written = dequantised(out)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name].float(), expected[name]) for name in expected)
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
    assert set(types.values()) == {"BF16", "F32"}
    assert all("norm" in name for name, kind in types.items() if kind == "F32")


def test_metadata_is_kept_so_that_the_file_can_be_served(tmp_path):
    source, _ = tiny_gguf("llama", tmp_path, quantised="Q8_0")
    out = tmp_path / "out.gguf"
    write_bf16(source, out)
    before, after = (gguf.GGUFReader(path).fields for path in (source, out))
    assert {name for name in before if name.startswith("tokenizer")} <= after.keys()
    assert after["tokenizer.ggml.tokens"].contents() == before["tokenizer.ggml.tokens"].contents()
    convert(str(out), tmp_path / "converted")
    assert load_engine(str(tmp_path / "converted")).vocab_size == load_engine(str(out)).vocab_size


@pytest.mark.slow
def test_directory_of_a_llama_model_keeps_its_weights_and_tokens(tmp_path):
    source = Path(resolve_model("demo", "target"))
    out = tmp_path / "demo.gguf"
    write_llama(source, out)
    convert(str(out), tmp_path / "converted")
    expected = load_file(source / "model.safetensors")
    found = load_file(tmp_path / "converted" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].float(), expected[name].float()) for name in expected)
    config, read = (
        json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "converted")
    )
    kept = ("num_key_value_heads", "head_dim", "eos_token_id", "max_position_embeddings")
    assert {key: read[key] for key in kept} == {key: config[key] for key in kept}
    assert read["rms_norm_eps"] == pytest.approx(config["rms_norm_eps"], rel=1e-6), "stored as float32"
    assert read["rope_parameters"]["rope_theta"] == config["rope_parameters"]["rope_theta"]
    vocab = [
        json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        for folder in (source, tmp_path / "converted")
    ]
    assert vocab[1] == vocab[0]


def test_directory_of_another_architecture_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(InvalidArgumentError, match="a Llama model without scaled RoPE"):
        write_llama(tmp_path, tmp_path / "out.gguf")
