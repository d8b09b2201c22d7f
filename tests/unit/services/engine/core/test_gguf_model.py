"""Models from GGUF files: the weights of the file, the tokens of transformers, or a reason why not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gammaray.gguf import pretrained_arguments
from services.engine.core.batch import SequenceInput
from services.engine.core.errors import UnsupportedModelError
from services.engine.core.model import load_model
from services.engine.loader import load_engine
from tests.support.gguf_helpers import SETTINGS, dequantised, tiny_gguf

PROMPT = [5, 17, 90, 3, 44, 61]
NUM_TOKENS = 24


def greedy(engine, prompt, count):
    tokens: list[int] = []
    feed = list(prompt)
    for _ in range(count):
        (logits,) = engine.step([SequenceInput("s", len(prompt) + len(tokens) - len(feed), tuple(feed), 1)])
        feed = [int(logits[-1].argmax())]
        tokens += feed
    return tokens


def generated(path, prompt, count):
    """Return the likeliest continuation by transformers' generate, on the weights that it reads itself."""
    with pretrained_arguments(str(path)) as (source, arguments):
        model = AutoModelForCausalLM.from_pretrained(source, **arguments, dtype=torch.float32)
    out = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("arch", SETTINGS)
def test_unquantised_weights_are_those_of_the_model_that_was_written(arch, tmp_path):
    path, model = tiny_gguf(arch, tmp_path)
    loaded = load_model(str(path), device="cpu").module
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
    found = load_model(str(path), device="cpu").module.state_dict()
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
    engine = load_engine(str(path), device="cpu")
    assert greedy(engine, PROMPT, NUM_TOKENS) == generated(path, PROMPT, NUM_TOKENS)


def test_file_of_the_same_name_in_the_working_directory_does_not_count(tmp_path, monkeypatch):
    path, model = tiny_gguf("llama", tmp_path)
    other, _ = tiny_gguf("llama", tmp_path / "other", seed=1)
    assert other.name == path.name
    monkeypatch.chdir(tmp_path / "other")
    assert torch.equal(load_model(str(path), device="cpu").module.lm_head.weight, model.lm_head.weight)


def test_unknown_architecture_is_refused(tmp_path):
    path, _ = tiny_gguf("llama", tmp_path)
    path.write_bytes(path.read_bytes().replace(b"llama", b"lhama"))
    with pytest.raises(UnsupportedModelError, match="lhama"):
        load_engine(str(path))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda _, tensors: tensors.pop("blk.1.ffn_up.weight"),
            "lacks 1 weights of the model, such as model.la",
        ),
        (lambda _, tensors: tensors.update(extra=np.ones((2, 32), np.float32)), "weights"),
    ],
    ids=["missing", "unknown"],
)
def test_weights_without_a_counterpart_are_refused(change, reason, tmp_path):
    path, _ = tiny_gguf("llama", tmp_path, change=change)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_engine(str(path))


def test_shapes_other_than_those_of_the_metadata_are_refused(tmp_path):
    path, _ = tiny_gguf("qwen3", tmp_path, head_dim=8)  # transformers does not read it, and takes 128
    with pytest.raises(UnsupportedModelError, match=r"k_norm.weight: got the shape \[8\], allowed: \[128\]"):
        load_engine(str(path))


def test_sliding_window_that_would_be_lost_is_refused(tmp_path):
    path, _ = tiny_gguf("llama", tmp_path, change=lambda writer, _: writer.add_sliding_window(16))
    with pytest.raises(UnsupportedModelError, match="sliding window of 16 tokens"):
        load_engine(str(path))
