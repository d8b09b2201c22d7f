"""Conversion of GGUF files to directories: the same model and tokenizer, all of it or nothing."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gammaray.errors import InvalidArgumentError
from gammaray.gguf import pretrained_arguments
from services.engine.convert import convert
from services.engine.core.errors import UnsupportedModelError
from services.engine.loader import load_engine
from tests.support.gguf_helpers import END, START, TEMPLATE, dequantised, tiny_gguf

TEXTS = ["the inn", " the", "<|start|>user: an inn<|end|>", "", "x" * 50]


def test_directory_has_the_files_weights_and_tokenizer(tmp_path):
    path, _ = tiny_gguf("qwen2", tmp_path, quantised="Q8_0")
    directory = tmp_path / "made" / "here"
    convert(str(path), directory)
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in directory.iterdir()
    }
    config = json.loads((directory / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    weights = load_file(directory / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    stored = dequantised(path)["blk.0.ffn_gate.weight"]
    assert torch.equal(weights["model.layers.0.mlp.gate_proj.weight"], stored.bfloat16())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with pretrained_arguments(str(path)) as (source, arguments):
        own = AutoTokenizer.from_pretrained(source, **arguments)
    assert tokenizer.chat_template == own.chat_template == TEMPLATE
    assert tokenizer.get_vocab() == own.get_vocab()
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == own(text)["input_ids"]
    load_engine(str(directory))


def test_every_token_that_ends_a_completion_is_kept(tmp_path):
    path, _ = tiny_gguf("llama", tmp_path, change=lambda writer, _: writer.add_eot_token_id(START))
    convert(str(path), tmp_path / "made")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert model.generation_config.eos_token_id == [START, END]


def test_float32_keeps_the_values(tmp_path):
    path, _ = tiny_gguf("llama", tmp_path, quantised="Q4_1")
    convert(str(path), tmp_path / "made", "float32")
    weights = load_file(tmp_path / "made" / "model.safetensors")
    stored = dequantised(path)
    assert torch.equal(weights["model.embed_tokens.weight"], stored["token_embd.weight"])
    assert torch.equal(weights["model.layers.0.mlp.up_proj.weight"], stored["blk.0.ffn_up.weight"])


def test_failed_conversion_leaves_nothing(tmp_path):
    lacking, _ = tiny_gguf("llama", tmp_path, change=lambda _, tensors: tensors.pop("output_norm.weight"))
    with pytest.raises(UnsupportedModelError):
        convert(str(lacking), tmp_path / "out" / "made")
    assert not list(tmp_path.glob("out/*"))


def test_directory_that_exists_is_kept(tmp_path):
    path, _ = tiny_gguf("llama", tmp_path)
    directory = tmp_path / "made"
    directory.mkdir()
    with pytest.raises(InvalidArgumentError, match="a directory that does not exist"):
        convert(str(path), directory)
    assert not list(directory.iterdir())
