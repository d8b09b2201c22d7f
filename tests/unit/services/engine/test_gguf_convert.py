"""Conversion of GGUF files to directories: the same model and tokenizer, all of it or a reason why not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gammaray.errors import InvalidArgumentError
from services.engine.convert import convert
from services.engine.core.batch import SequenceInput
from services.engine.core.errors import UnsupportedModelError
from services.engine.core.model import load_model
from services.engine.loader import load_engine
from tests.support.gguf_helpers import END, SETTINGS, START, TEMPLATE, dequantised, tiny_gguf

TEXTS = ["the inn", " the", "<|start|>user: an inn<|end|>", "", "x" * 50]
PROMPT = [5, 17, 90, 3, 44, 61]
NUM_TOKENS = 24


def converted(path):
    directory = path.parent / "converted"
    convert(str(path), directory, "float32")
    return str(directory)


def read_alone(kind, path, empty, **arguments):
    """Return what transformers reads from a file alone: it would prefer files next to it."""
    empty.mkdir()
    return kind.from_pretrained(empty, gguf_file=str(path), **arguments)


def refusal(path):
    with pytest.raises(InvalidArgumentError) as caught:
        convert(str(path), Path(path).parent / "refused")
    assert caught.value.field == "file"
    return caught.value.allowed


def greedy(engine, prompt, count):
    tokens: list[int] = []
    feed = list(prompt)
    for _ in range(count):
        (logits,) = engine.step([SequenceInput("s", len(prompt) + len(tokens) - len(feed), tuple(feed), 1)])
        feed = [int(logits[-1].argmax())]
        tokens += feed
    return tokens


def test_directory_has_the_files_weights_and_tokenizer(tmp_path):
    path, _ = tiny_gguf("qwen2", tmp_path, quantised="Q8_0")
    (tmp_path / "tokenizer.json").write_text("{")  # another model's, or broken: it does not count
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
    own = read_alone(AutoTokenizer, path, tmp_path / "empty")
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


@pytest.mark.parametrize("arch", SETTINGS)
def test_unquantised_weights_are_those_of_the_model_that_was_written(arch, tmp_path):
    path, model = tiny_gguf(arch, tmp_path)
    loaded = load_model(converted(path), device="cpu").module
    assert type(loaded).__name__ == type(model).__name__
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, weight in loaded.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=3e-7, msg=name)  # norms: + 1, - 1
    tokens = torch.tensor([PROMPT])
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "BF16"])
def test_quantised_weights_are_those_that_gguf_dequantises(kind, tmp_path):
    path, _ = tiny_gguf("qwen2", tmp_path, quantised=kind)
    found = load_model(converted(path), device="cpu").module.state_dict()
    weights = dequantised(path)
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output.weight": "lm_head.weight",
        "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
        "blk.1.attn_q.bias": "model.layers.1.self_attn.q_proj.bias",
        "blk.2.ffn_down.weight": "model.layers.2.mlp.down_proj.weight",
        "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
    }
    for stored, name in names.items():
        assert torch.equal(found[name], weights[stored].float()), name


@pytest.mark.parametrize("arch", SETTINGS)
def test_greedy_tokens_are_those_of_transformers(arch, tmp_path):
    path, _ = tiny_gguf(arch, tmp_path, quantised="Q8_0", seed=3)
    model = read_alone(AutoModelForCausalLM, path, tmp_path / "empty", dtype=torch.float32)
    lengths = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}
    out = model.generate(torch.tensor([PROMPT]), do_sample=False, pad_token_id=0, **lengths)
    engine = load_engine(converted(path), device="cpu")
    assert greedy(engine, PROMPT, NUM_TOKENS) == out[0, len(PROMPT) :].tolist()


def test_file_of_the_same_name_in_the_working_directory_does_not_count(tmp_path, monkeypatch):
    path, model = tiny_gguf("llama", tmp_path)
    other, _ = tiny_gguf("llama", tmp_path / "other", seed=1)
    assert other.name == path.name
    monkeypatch.chdir(tmp_path / "other")
    assert torch.equal(load_model(converted(path), device="cpu").module.lm_head.weight, model.lm_head.weight)


def test_unknown_architecture_is_refused(tmp_path):
    path, _ = tiny_gguf("llama", tmp_path)
    path.write_bytes(path.read_bytes().replace(b"llama", b"lhama"))
    with pytest.raises(UnsupportedModelError, match="lhama"):
        converted(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _, tensors: tensors.pop("blk.1.ffn_up.weight"), "lacks 1 weights of the model, such as"),
        (lambda _, tensors: tensors.update(extra=np.ones((2, 32), np.float32)), "weights"),
        (lambda writer, _: writer.add_sliding_window(16), "sliding window of 16 tokens"),
        (lambda writer, _: writer.add_uint16("split.count", 3), "one part of several"),
        (lambda writer, _: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), r"\(yarn\)"),
        (
            lambda _, tensors: tensors.update({"rope_freqs.weight": np.ones(4, np.float32)}),
            r"rope_freqs\.weight",
        ),
    ],
    ids=["missing", "unknown", "window", "split", "scaled", "factors"],
)
def test_files_that_would_be_another_model_are_refused(change, reason, tmp_path):
    path, _ = tiny_gguf("llama", tmp_path, change=change)
    with pytest.raises((UnsupportedModelError, InvalidArgumentError), match=reason):
        converted(path)


def test_shapes_other_than_those_of_the_metadata_are_refused(tmp_path):
    path, _ = tiny_gguf("qwen3", tmp_path, head_dim=8)  # transformers does not read it, and takes 128
    with pytest.raises(UnsupportedModelError, match=r"k_norm.weight: got the shape \[8\], allowed: \[128\]"):
        converted(path)


def test_file_truncated_anywhere_is_refused(tmp_path):
    path, _ = tiny_gguf("llama", tmp_path, quantised="Q8_0")
    data, cut = path.read_bytes(), tmp_path / "cut.gguf"
    start = min(tensor.data_offset for tensor in gguf.GGUFReader(path).tensors)
    for length in (0, 3, 4, 10, 24, 40, 100, start // 2, start - 40, start, start + 1, len(data) - 1):
        cut.write_bytes(data[:length])
        assert "a complete GGUF file" in refusal(cut), length
    assert "No such file" in refusal(tmp_path / "none.gguf")
    assert "ends in .gguf" in refusal(tmp_path / "model.bin")


def test_missing_reader_is_named(tmp_path, monkeypatch):
    path, _ = tiny_gguf("llama", tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedModelError, match="pip install gguf"):
        converted(path)
