"""Weak drafts: the first layers of a model, and a model with noise on its weights."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.weak_drafts import cut, noise
from services.engine.convert import convert
from tests.support.gguf_helpers import tiny_gguf


@pytest.fixture
def source(tmp_path):
    path, _ = tiny_gguf("llama", tmp_path, num_hidden_layers=3)
    convert(str(path), tmp_path / "source", "float32")
    return str(tmp_path / "source")


def _weights(path):
    return AutoModelForCausalLM.from_pretrained(path).state_dict()


def test_cut_draft_has_the_first_layers_and_the_rest_unchanged(source, tmp_path):
    cut(source, tmp_path / "cut", 2)
    whole, part = _weights(source), _weights(tmp_path / "cut")
    assert {name for name in whole if ".layers.2." not in name} == part.keys()
    assert all(torch.equal(part[name], whole[name]) for name in part)


@pytest.mark.parametrize("num_layers", [0, 3])
def test_cut_of_no_or_all_layers_is_refused(source, tmp_path, num_layers):
    with pytest.raises(ValueError, match="allowed are 1 to 2"):
        cut(source, tmp_path / "cut", num_layers)


def test_noise_has_the_strength_and_depends_on_the_seed_alone(source, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        noise(source, tmp_path / name, 0.5, seed)
    whole, first, same, other = (_weights(path) for path in (source, *(tmp_path / name for name in "abc")))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])
    ratio = (first[name] - whole[name]).std() / whole[name].std()
    assert ratio == pytest.approx(0.5, rel=0.1)
    norm = "model.layers.0.input_layernorm.weight"
    assert torch.equal(first[norm], whole[norm])
