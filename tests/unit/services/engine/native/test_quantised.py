"""Quantised drafts: the kernel runs the dequantised model exactly, on each instruction set."""

from __future__ import annotations

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
from services.engine.core.model import LoadedModel, load_model
from services.engine.core.quantised import (
    GROUP,
    QuantisedMatrix,
    quantise_int4,
    quantise_int8,
    quantise_model,
)
from services.engine.loader import load_engine, load_worker_engine
from services.engine.native import weights as packing
from services.engine.native.library import open_kernel, usable_variants
from services.engine.native.runner import NativeRunner
from tests.support.engine_helpers import LEAN, CheckedEngine, chained, random_tokens, tiny_model

KINDS = {"int8": 2, "int4": 3}


def dequantised(directory: Path, weights: str) -> PreTrainedModel:
    """The quantised model as transformers runs it."""
    loaded = load_model(str(directory), device="cpu")
    quantise_model(loaded, weights)
    return loaded.module


def random_matrix(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs)) * 0.1


@pytest.mark.parametrize("variant", usable_variants())
@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("arch", ["qwen3", "llama-bias"])
def test_every_instruction_set_runs_the_dequantised_model(
    arch: str, weights: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in all numbers that have a product of their own; `deterministic` compares them bit by bit."""
    monkeypatch.setattr(packing, "load_kernel", lambda *_: open_kernel(variant))
    # 44 inputs are no whole number of groups, 97 outputs none of panels; with biases and tied embeddings.
    directory = tiny_model(arch, tmp_path, intermediate_size=44)
    engine = load_engine(str(directory), weights=weights, deterministic=True)
    assert isinstance(engine.runner, NativeRunner)
    assert engine.runner.model.weights.layer[0].down.kind == KINDS[weights]
    assert engine.runner.model.weights.head.kind == KINDS["int8"]
    assert engine.kernel.endswith(f", {weights} weights")
    run = CheckedEngine(engine, dequantised(directory, weights))
    run.step(SequenceInput("a", 0, random_tokens(40, 1), 40))
    for rows in range(1, 9):
        run.step(SequenceInput("a", 40, random_tokens(rows, rows), rows))
    run.step(SequenceInput("a", 40, random_tokens(3, 3), 3, (-1, -1, 1)), SequenceInput("b", 0, [5], 1))
    assert run.worst <= 1e-4


@pytest.mark.parametrize("arch", LEAN)
@pytest.mark.parametrize("weights", KINDS)
def test_every_covered_architecture_is_quantised(arch: str, weights: str, tmp_path: Path) -> None:
    directory = tiny_model(arch, tmp_path, bfloat16=True)
    run = CheckedEngine(load_engine(str(directory), weights=weights), dequantised(directory, weights))
    run.step(SequenceInput("a", 0, random_tokens(50, 1), 50))
    assert 0 < run.worst <= 1e-4


@pytest.mark.parametrize("variant", usable_variants())
@pytest.mark.parametrize("weights", KINDS)
def test_chain_equals_single_steps(
    weights: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "load_kernel", lambda *_: open_kernel(variant))
    directory = str(tiny_model("llama", tmp_path))
    chained(*(load_engine(directory, weights=weights) for _ in range(2)))


def test_int8_is_the_nearest_of_255_steps_of_a_row() -> None:
    weight = random_matrix(20, 70)
    weight[3] = 0
    matrix = quantise_int8(weight)
    assert matrix.values.dtype == torch.int8
    assert matrix.values.abs().amax(1).tolist() == [127] * 3 + [0] + [127] * 16
    assert ((matrix.dequantised() - weight).abs() <= matrix.scales * 0.5001).all()
    assert not matrix.dequantised()[3].any()


def test_int4_is_the_nearest_of_16_steps_of_a_group() -> None:
    weight = random_matrix(20, 70)
    weight[3, :GROUP] = 0
    matrix = quantise_int4(weight)
    assert matrix.offsets is not None
    assert (matrix.values.dtype, matrix.values.max(), matrix.values.shape) == (torch.uint8, 15, (20, 70))
    assert matrix.scales.shape == matrix.offsets.shape == (20, 3)
    assert torch.equal(matrix.scales.bfloat16().float(), matrix.scales)
    assert not matrix.dequantised()[3, :GROUP].any()
    error = (matrix.dequantised() - weight).square().mean() / weight.square().mean()
    assert error < 0.0055  # between the least and the largest weight of each group alone: 0.0056

    exact = torch.randint(0, 16, (4, 64), generator=torch.Generator().manual_seed(0))
    exact[:, ::GROUP], exact[:, 1::GROUP] = 0, 15
    grid = exact * 0.125 - 0.5
    assert torch.equal(quantise_int4(grid).dequantised(), grid)  # as weights of a Q4_1 file are


def test_matrices_that_do_not_fill_a_vector_of_int4_stay_int8(tmp_path: Path) -> None:
    engine = load_engine(str(tiny_model("llama", tmp_path, intermediate_size=46)), weights="int4")
    assert isinstance(engine.runner, NativeRunner)
    layer = engine.runner.model.weights.layer[0]
    assert (layer.down.kind, layer.gate_up.kind) == (KINDS["int8"], KINDS["int4"])


def test_check_of_the_start_compares_with_the_dequantised_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wrong integer in a layer is refused."""
    right = loading.quantise_model

    def spoilt(loaded: LoadedModel, weights: str) -> Mapping[int, QuantisedMatrix]:
        quantised = dict(right(loaded, weights))
        address = loaded.llama.layers[1].mlp.down_proj.weight.data_ptr()
        values = quantised[address].values.clone()
        values[3, 5] ^= 8
        return quantised | {address: replace(quantised[address], values=values)}

    directory = str(tiny_model("llama", tmp_path))
    load_engine(directory, weights="int4")
    monkeypatch.setattr(loading, "quantise_model", spoilt)
    with pytest.raises(UnsupportedModelError, match="differ from the model's own"):
        load_engine(directory, weights="int4")


def test_draft_setting_quantises_drafts_and_never_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GAMMARAY_DRAFT_WEIGHTS", "int8")
    directory = str(tiny_model("llama", tmp_path))
    draft = load_worker_engine(directory, DraftSettings(device="cpu"))
    target = load_worker_engine(directory, TargetSettings(device="cpu"))
    assert draft.kernel == f"{target.kernel}, int8 weights"
    feed = SequenceInput("a", 0, random_tokens(20, 1), 20)
    assert torch.equal(target.step([feed])[0], load_engine(directory).step([feed])[0])
    assert not torch.equal(draft.step([feed])[0], target.step([feed])[0])


@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize(
    ("arch", "how", "reason"),
    [
        ("llama", {"engine": "transformers"}, "the engine is transformers"),
        ("llama", {"dtype": "bfloat16"}, "bfloat16 is not covered"),
        ("gemma2", {}, "gemma2 is not covered"),
    ],
)
def test_weights_without_a_kernel_are_refused(
    arch: str, how: dict[str, object], reason: str, weights: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        load_engine(str(tiny_model(arch, tmp_path)), weights=weights, device="cpu", **how)  # type: ignore[arg-type]
    assert str(refused.value) == (
        f"draft_weights: got {weights}, allowed: auto: {weights} needs the compiled CPU kernel ({reason})"
    )
