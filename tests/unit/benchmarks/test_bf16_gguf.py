"""GGUF files for llama.cpp have the weights that gammaray serves."""

from __future__ import annotations

import gguf
import torch

from benchmarks.peers.bf16_gguf import write_bf16
from services.engine.convert import convert
from services.engine.loader import load_engine
from tests.support.gguf_helpers import VOCAB_SIZE, dequantised, tiny_gguf


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
    assert load_engine(str(tmp_path / "converted")).vocab_size == VOCAB_SIZE
