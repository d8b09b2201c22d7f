"""Conversion of GGUF files to directories: the same model and tokenizer, all of it or a reason why not."""

import json
import sys

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gammaray.errors import InvalidArgumentError
from services.engine.convert import convert
from services.engine.core.errors import UnsupportedModelError
from services.engine.core.model import load_model
from services.engine.loader import load_engine
from tests.support.gguf_helpers import END, SETTINGS, START, TEMPLATE, dequantised, tiny_gguf

TEXTS = ["the inn", " the", "<|start|>user: an inn<|end|>", "", "x" * 50]


def converted(path):
    directory = path.parent / "converted"
    convert(str(path), directory)
    return load_model(str(directory), device="cpu").module


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_directory_has_the_files_weights_and_tokenizer(kind, tmp_path):
    path, _ = tiny_gguf("qwen2", tmp_path, quantised=kind)
    (tmp_path / "tokenizer.json").write_text("{")  # another model's, or broken: it does not count
    directory = tmp_path / "made" / "here"
    convert(str(path), directory)
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in directory.iterdir()
    }
    config = json.loads((directory / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    weights, stored = load_file(directory / "model.safetensors"), dequantised(path)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output.weight": "lm_head.weight",
        "blk.1.attn_q.bias": "model.layers.1.self_attn.q_proj.bias",
        "blk.2.ffn_down.weight": "model.layers.2.mlp.down_proj.weight",
        "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
    }
    for own, name in names.items():
        assert torch.equal(weights[name], stored[own].bfloat16()), name
    (tmp_path / "empty").mkdir()
    expected = AutoTokenizer.from_pretrained(tmp_path / "empty", gguf_file=str(path))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.chat_template == expected.chat_template == TEMPLATE
    assert tokenizer.get_vocab() == expected.get_vocab()
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == expected(text)["input_ids"]
    load_engine(str(directory))


def test_every_token_that_ends_a_completion_is_kept(tmp_path):
    path, _ = tiny_gguf("llama", tmp_path, change=lambda writer, _: writer.add_eot_token_id(START))
    convert(str(path), tmp_path / "made")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert model.generation_config.eos_token_id == [START, END]


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


@pytest.mark.parametrize("arch", SETTINGS)
def test_model_is_the_one_that_was_written(arch, tmp_path):
    path, model = tiny_gguf(arch, tmp_path)
    made = converted(path)
    assert type(made) is type(model)
    weights, expected = made.state_dict(), model.state_dict()
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():  # bfloat16 has eight bits; norms: + 1, - 1
        torch.testing.assert_close(weight, expected[name], rtol=2**-8, atol=3e-7, msg=name)
    model.load_state_dict(weights)
    tokens = torch.tensor([[5, 17, 90, 3, 44, 61]])
    torch.testing.assert_close(made(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)


def test_file_of_the_same_name_in_the_working_directory_does_not_count(tmp_path, monkeypatch):
    path, model = tiny_gguf("llama", tmp_path)
    other, _ = tiny_gguf("llama", tmp_path / "other", seed=1)
    assert other.name == path.name
    monkeypatch.chdir(tmp_path / "other")
    assert torch.equal(converted(path).lm_head.weight, model.lm_head.weight.bfloat16().float())


def test_unknown_architecture_is_refused(tmp_path):
    path, _ = tiny_gguf("llama", tmp_path)
    path.write_bytes(path.read_bytes().replace(b"llama", b"lhama"))
    with pytest.raises(UnsupportedModelError, match="lhama"):
        converted(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _, tensors: tensors.pop("blk.1.ffn_up.weight"), "lacks 1 weight, such as"),
        (lambda _, tensors: tensors.update(extra=np.ones((2, 32), np.float32)), "read all but .* weights"),
        (lambda writer, _: writer.add_sliding_window(16), "read its sliding window of 16 tokens"),
        (lambda writer, _: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), "read the scaling"),
        (
            lambda _, tensors: tensors.update({"rope_freqs.weight": np.ones(4, np.float32)}),
            "read the scaling of its rotary embedding",
        ),
    ],
    ids=["missing", "unknown", "window", "scaled", "factors"],
)
def test_files_that_would_be_another_model_are_refused(change, reason, tmp_path):
    path, _ = tiny_gguf("llama", tmp_path, change=change)
    with pytest.raises(UnsupportedModelError, match=reason):
        converted(path)


def test_shapes_other_than_those_of_the_metadata_are_refused(tmp_path):
    path, _ = tiny_gguf("qwen3", tmp_path, head_dim=8)  # transformers does not read it, and takes 128
    with pytest.raises(UnsupportedModelError, match=r"k_norm.weight: got the shape \[8\], allowed: \[128\]"):
        converted(path)


def test_file_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    path, _ = tiny_gguf("llama", tmp_path, quantised="Q8_0")
    data, cut = path.read_bytes(), tmp_path / "cut.gguf"
    start = min(tensor.data_offset for tensor in gguf.GGUFReader(path).tensors)
    for length in (0, 3, 24, start // 2, start + 1, len(data) - 1):
        cut.write_bytes(data[:length])
        with pytest.raises(InvalidArgumentError, match="a GGUF file that can be read"):
            converted(cut)
    with pytest.raises(InvalidArgumentError, match="No such file"):
        converted(tmp_path / "none.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InvalidArgumentError, match="gguf"):
        converted(path)
