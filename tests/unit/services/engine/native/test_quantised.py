"""Quantised drafts: the kernel runs the dequantised model exactly, on each instruction set."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gammaray.config import DraftSettings, TargetSettings
from gammaray.errors import InvalidArgumentError
from services.engine import loader as loading
from services.engine.core.batch import SequenceInput
from services.engine.core.errors import UnsupportedModelError
from services.engine.core.model import load_model
from services.engine.core.quantised import QuantisedMatrix, quantise, quantise_model
from services.engine.loader import load_engine, load_worker_engine
from services.engine.native import weights as packing
from services.engine.native.library import open_kernel, usable_variants
from services.engine.native.runner import NativeRunner
from tests.support.engine_helpers import LEAN, CheckedEngine, random_tokens, tiny_model

INT8 = 2


def dequantised(directory: Path) -> PreTrainedModel:
    """The quantised model as transformers runs it."""
    module = load_model(str(directory), device="cpu").module
    quantise_model(module)
    return module


def random_matrix(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs)) * 0.1


@pytest.mark.parametrize("variant", usable_variants())
@pytest.mark.parametrize("arch", ["qwen3", "llama-bias"])
def test_every_instruction_set_runs_the_dequantised_model(arch, variant, tmp_path, monkeypatch):
    """Rows in all numbers that have a product of their own; `deterministic` compares them bit by bit."""
    monkeypatch.setattr(packing, "load_kernel", lambda *_: open_kernel(variant))
    # 45 inputs are no whole number of steps, 97 outputs none of panels; with biases and tied embeddings.
    directory = tiny_model(arch, tmp_path, intermediate_size=45)
    engine = load_engine(str(directory), weights="int8", deterministic=True)
    assert isinstance(engine.runner, NativeRunner)
    weights = engine.runner.model.weights
    assert weights.layer[0].down.kind == weights.head.kind == INT8
    assert engine.kernel.endswith(", int8 weights")
    run = CheckedEngine(engine, dequantised(directory))
    run.step(SequenceInput("a", 0, random_tokens(40, 1), 40))
    for rows in range(1, 9):
        run.step(SequenceInput("a", 40, random_tokens(rows, rows), rows))
    run.step(SequenceInput("a", 40, random_tokens(3, 3), 3, (-1, -1, 1)), SequenceInput("b", 0, [5], 1))
    assert run.worst <= 1e-4


@pytest.mark.parametrize("arch", LEAN)
def test_every_covered_architecture_is_quantised(arch, tmp_path):
    directory = tiny_model(arch, tmp_path, bfloat16=True)
    run = CheckedEngine(load_engine(str(directory), weights="int8"), dequantised(directory))
    run.step(SequenceInput("a", 0, random_tokens(50, 1), 50))
    assert 0 < run.worst <= 1e-4


def test_int8_is_the_nearest_of_255_steps_of_a_row():
    weight = random_matrix(20, 70)
    weight[3] = 0
    matrix = quantise(weight)
    assert matrix.values.dtype == torch.int8
    assert matrix.values.abs().amax(1).tolist() == [127] * 3 + [0] + [127] * 16
    assert ((matrix.dequantised() - weight).abs() <= matrix.scales * 0.5001).all()
    assert not matrix.dequantised()[3].any()


def test_check_of_the_start_compares_with_the_dequantised_model(tmp_path, monkeypatch):
    """One wrong integer in a layer is refused."""
    right = loading.quantise_model

    def spoilt(module: PreTrainedModel) -> Mapping[int, QuantisedMatrix]:
        quantised = dict(right(module))
        address = module.get_parameter("model.layers.1.mlp.down_proj.weight").data_ptr()
        values = quantised[address].values.clone()
        values[3, 5] ^= 64
        return quantised | {address: replace(quantised[address], values=values)}

    directory = str(tiny_model("llama", tmp_path))
    load_engine(directory, weights="int8")
    monkeypatch.setattr(loading, "quantise_model", spoilt)
    with pytest.raises(UnsupportedModelError, match="differ from the model's own"):
        load_engine(directory, weights="int8")


def test_draft_setting_quantises_drafts_and_never_targets(tmp_path, monkeypatch):
    monkeypatch.setenv("GAMMARAY_DRAFT_WEIGHTS", "int8")
    directory = str(tiny_model("llama", tmp_path))
    draft = load_worker_engine(directory, DraftSettings(device="cpu"))
    target = load_worker_engine(directory, TargetSettings(device="cpu"))
    assert draft.kernel == f"{target.kernel}, int8 weights"
    feed = SequenceInput("a", 0, random_tokens(20, 1), 20)
    assert torch.equal(target.step([feed])[0], load_engine(directory).step([feed])[0])
    assert not torch.equal(draft.step([feed])[0], target.step([feed])[0])


@pytest.mark.parametrize(
    ("arch", "how", "reason"),
    [
        ("llama", {"engine": "transformers"}, "the engine is transformers"),
        ("llama", {"dtype": "bfloat16"}, "bfloat16 is not covered"),
        ("gemma2", {}, "gemma2 is not covered"),
    ],
)
def test_weights_without_a_kernel_are_refused(arch, how, reason, tmp_path):
    with pytest.raises(InvalidArgumentError) as refused:
        load_engine(str(tiny_model(arch, tmp_path)), weights="int8", device="cpu", **how)  # type: ignore[arg-type]
    assert str(refused.value) == (
        f"draft_weights: got int8, allowed: auto: int8 needs the compiled CPU kernel ({reason})"
    )
