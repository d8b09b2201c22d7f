"""Hidden states that the engine records are the model's own, at each position and layer."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import random_tokens, tiny_model
from transformers import AutoModelForCausalLM

from gammaray.errors import InvalidArgumentError
from services.engine.engine import SequenceInput
from services.engine.loader import load_engine

WITH_KERNEL = ("llama", "mistral", "qwen2", "qwen3")
ARCHITECTURES = (*WITH_KERNEL, "gemma2", "phi3", "gpt_neox", "gpt2", "opt")
LAYERS = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("taps")
    return {name: tiny_model(name, folder, seed=2) for name in ARCHITECTURES}


def expected_states(folder, token_ids):
    """What enters each layer of transformers' own model, and its last norm: [tokens, layers, size]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    last = {}
    stack = next(
        module
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == model.config.num_hidden_layers
    )
    stack[-1].register_forward_hook(
        lambda _module, _given, made: last.update(state=made[0] if isinstance(made, tuple) else made)
    )
    with torch.no_grad():
        states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    rows = [state[0] for state in states[:-1]] + [last["state"].view(len(token_ids), -1)]
    return torch.stack(rows, dim=1)


def agree(found, expected):
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "fast_kernels"),
    [*((name, True) for name in WITH_KERNEL), *((name, False) for name in ARCHITECTURES)],
)
def test_states_are_the_models_own(models, name, fast_kernels):
    engine = load_engine(str(models[name]), fast_kernels=fast_kernels)
    assert engine.kernel.startswith("none") is not fast_kernels
    engine.tap(LAYERS)
    first, second = random_tokens(11, seed=1), random_tokens(7, seed=2)
    engine.step([SequenceInput("a", 0, first[:4], 0)])
    early = engine.taps[0]
    engine.step([SequenceInput("b", 0, second, 2), SequenceInput("a", 4, first[4:], 1)])
    states = expected_states(models[name], first), expected_states(models[name], second)
    assert [taps.shape for taps in engine.taps] == [(7, 4, 32), (7, 4, 32)]
    assert agree(torch.cat([early, engine.taps[1]]), states[0])
    assert agree(engine.taps[0], states[1])


@pytest.mark.parametrize("fault", ["layer", "position", "normed"])
def test_comparison_catches_states_of_another_place(models, fault):
    token_ids = random_tokens(9, seed=4)
    engine = load_engine(str(models["llama"]))
    engine.tap([1, 2, 3, 3] if fault == "layer" else LAYERS)
    engine.step([SequenceInput("s", 0, token_ids, 1)])
    found, expected = engine.taps[0], expected_states(models["llama"], token_ids)
    if fault == "position":
        found = found.roll(1, 0)
    if fault == "normed":
        found = torch.cat([found[:, :3], torch.nn.functional.rms_norm(found[:, 3:], (32,))], dim=1)
    assert not agree(found, expected)


@pytest.mark.parametrize("fast_kernels", [True, False])
def test_nodes_of_a_tree_have_the_states_of_their_paths(models, fast_kernels):
    engine = load_engine(str(models["llama"]), fast_kernels=fast_kernels)
    engine.tap([1, 3])
    prompt, nodes, parents = random_tokens(6, seed=5), [3, 4, 5, 6], [-1, -1, 0, 1]
    engine.step([SequenceInput("t", 0, [*prompt, *nodes], 5, parents)])
    tree = engine.taps[0]
    for path in ([0, 2], [1, 3]):
        engine.step([SequenceInput("c", 0, [*prompt, *(nodes[node] for node in path)], 1)])
        rows = [*range(6), *(6 + node for node in path)]
        assert agree(tree[rows], engine.taps[0])


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("fast_kernels", [True, False])
def test_recording_does_not_change_a_bit(models, fast_kernels, deterministic):
    options = {"fast_kernels": fast_kernels, "deterministic": deterministic}
    plain, tapped = (load_engine(str(models["llama"]), **options) for _ in range(2))
    tapped.tap(LAYERS)
    feed = SequenceInput("s", 0, random_tokens(13, seed=6), 13)
    assert torch.equal(plain.step([feed])[0], tapped.step([feed])[0])
    assert plain.taps == []
    kept = tapped.taps[0].clone()
    first = tapped.taps[0]
    tapped.step([SequenceInput("other", 0, random_tokens(13, seed=7), 1)])
    assert torch.equal(first, kept)  # of its own memory
    tapped.tap([])
    tapped.step([SequenceInput("more", 0, [1, 2], 1)])
    assert tapped.taps == []


def test_layers_that_do_not_exist_are_refused(models):
    engine = load_engine(str(models["llama"]))
    with pytest.raises(InvalidArgumentError, match=r"layers: got \[4\], allowed: \[0, 3\]"):
        engine.tap([4])
