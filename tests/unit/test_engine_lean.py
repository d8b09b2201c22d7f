"""The lean path against the general one, and the matrices under it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from engine_helpers import CheckedEngine, plain_model, random_tokens, tiny_model

from services.engine import engine as engine_module
from services.engine import matrices
from services.engine.engine import Engine, Feed
from services.engine.lean import LeanRunner
from services.engine.matrices import FullMatrix, HalfMatrix, pack_matrix
from services.engine.model import LoadedModel, resolve_model


def bfloat16_weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).mul(0.05).bfloat16().float()


def scripted_steps() -> list[list[Feed]]:
    """Prefill over several blocks, then what draft and target do all day, then trees."""
    tree = (-1, -1, 0, 0, 1, 2)
    return [
        [Feed("a", 0, random_tokens(150, 1, 2048), 3), Feed("b", 0, random_tokens(63, 2, 2048), 1)],
        [Feed("a", 150, random_tokens(1, 3, 2048), 1)],
        [Feed("a", 151, random_tokens(9, 4, 2048), 9)],
        [Feed("a", 155, random_tokens(5, 5, 2048), 5), Feed("b", 63, random_tokens(2, 6, 2048), 2)],
        [Feed("a", 160, random_tokens(7, 7, 2048), 7, tree), Feed("b", 65, random_tokens(17, 8, 2048), 17)],
        [Feed("b", 70, random_tokens(1, 9, 2048), 0)],
    ]


@pytest.mark.parametrize("role", ["target", "draft"])
def test_lean_path_demo_pair_matches_general_path(role: str) -> None:
    lean = Engine.load(resolve_model("demo", role))
    general = Engine.load(resolve_model("demo", role), lean=False)
    assert isinstance(lean._runner, LeanRunner)
    worst = 0.0
    for feeds in scripted_steps():
        for one, other in zip(lean.step(feeds), general.step(feeds), strict=True):
            worst = max(worst, (one - other).abs().max().item() if one.numel() else 0.0)
    assert worst <= 1e-4


@pytest.mark.parametrize("arch", ["llama-bias", "qwen2", "qwen3", "mistral"])
def test_lean_path_bfloat16_weights_stay_exact(arch: str, tmp_path: Path) -> None:
    """Published weights are bfloat16: they take half-size matrices, biases included, without loss."""
    directory = tiny_model(arch, tmp_path, bfloat16=True)
    engine = Engine.load(str(directory))
    assert isinstance(engine._runner, LeanRunner)
    assert isinstance(engine._runner._model.layers[0].qkv, HalfMatrix)
    run = CheckedEngine(engine, plain_model(directory))
    run.step(Feed("a", 0, random_tokens(70, 1), 70))
    run.step(Feed("a", 70, random_tokens(1, 2), 1))
    run.step(Feed("a", 71, random_tokens(3, 3), 3, (-1, -1, 1)), Feed("b", 0, [5], 1))
    assert run.worst <= 1e-4


@pytest.mark.parametrize("scale", [1e-6, 1.0, 300.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_half_matrix_equals_float64_product(scale: float, with_bias: bool) -> None:
    weight = bfloat16_weight(48, 96) * scale
    bias = torch.linspace(-1, 1, 48) * scale if with_bias else None
    weight = weight.bfloat16().float()
    matrix = pack_matrix(weight, bias)
    assert isinstance(matrix, HalfMatrix)
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    got = matrix.product(x) * matrix.gain
    assert (got - expected).abs().max() <= 1e-6 * expected.abs().max()
    out = torch.empty(7, 48)
    matrix.product_into(x, out)
    assert torch.equal(out * matrix.gain, got)


def test_pack_matrix_float32_weights_are_not_rounded() -> None:
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    assert isinstance(pack_matrix(weight, None), FullMatrix)


def test_pack_matrix_range_beyond_float16_is_not_rounded() -> None:
    weight = bfloat16_weight(8, 8)
    # Too small beside the largest to keep its bits, and large enough to matter in no sum.
    weight[0, 0] = weight.abs().max() * 2.0**-39
    assert isinstance(pack_matrix(weight, None), HalfMatrix)
    weight[0, 0] = float("inf")
    assert isinstance(pack_matrix(weight, None), FullMatrix)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_full_matrix_equals_float64_product(
    invariant: bool, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    bias = torch.linspace(-1, 1, 48) if with_bias else None
    for limit in (matrices._PLAIN_LIMIT, 0):
        monkeypatch.setattr(matrices, "_PLAIN_LIMIT", limit)
        matrix = pack_matrix(weight, bias, invariant=invariant)
        for rows in (1, 5):
            x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows))
            expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
            out = torch.empty(rows, 48)
            matrix.product_into(x, out)
            assert (matrix.product(x) - expected).abs().max() <= 1e-5 * expected.abs().max()
            assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_lean_path_without_half_products_still_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FBGEMM's products are announced to go one day; nothing may depend on them."""
    monkeypatch.setattr(matrices, "_has_half_products", lambda: False)
    directory = tiny_model("qwen2", tmp_path, bfloat16=True)
    run = CheckedEngine(Engine.load(str(directory)), plain_model(directory))
    run.step(Feed("a", 0, random_tokens(9, 1), 9))
    run.step(Feed("a", 9, [3], 1))
    assert run.worst <= 1e-4


def test_lean_path_dynamic_rotation_stays_that_of_the_context(tmp_path: Path) -> None:
    """Asked for positions past the context, dynamic rotary embedding would change all of them."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    directory = tiny_model("llama", tmp_path, rope_parameters=rope)
    run = CheckedEngine(Engine.load(str(directory)), plain_model(directory))
    run.step(Feed("a", 0, random_tokens(126, 1), 3))
    run.step(Feed("a", 126, random_tokens(2, 2), 2))
    run.step(Feed("a", 20, random_tokens(2, 2), 2))
    assert run.worst <= 1e-4


def test_lean_path_does_not_keep_the_loaded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the laid out weights stay in memory."""
    loaded: list[weakref.ref[torch.nn.Module]] = []
    right = engine_module.load_model

    def load(name: str, **settings: str) -> LoadedModel:
        model = right(name, **settings)
        loaded.append(weakref.ref(model.module))
        return model

    monkeypatch.setattr(engine_module, "load_model", load)
    engine = Engine.load(str(tiny_model("llama", tmp_path)))
    gc.collect()
    assert loaded[0]() is None
    assert engine.num_layers == 3
