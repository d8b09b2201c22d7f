"""Hidden states that the engine records, against those of plain forwards of the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gammaray.errors import InvalidArgumentError
from services.engine.core.batch import SequenceInput
from services.engine.engine import Engine
from services.engine.loader import load_engine
from services.engine.native import weights
from services.engine.native.library import open_kernel, usable_variants
from services.engine.native.runner import NativeRunner
from tests.support.engine_helpers import LEAN, SUPPORTED, plain_model, random_tokens, tiny_model
from tests.support.tap_helpers import CheckedTaps, plain_states

TOLERANCE = 1e-5
LAST = 3
# Any order, one of them twice.
LAYERS = (2, LAST, 0, 1, 2)
TREE = (-1, -1, 0, 0, 1, 2, 4, 5, 6, 8)
PATHS = [(arch, "transformers") for arch in SUPPORTED] + [(arch, "native") for arch in LEAN]


def native(directory: Path) -> Engine:
    engine = load_engine(str(directory))
    assert isinstance(engine.runner, NativeRunner)
    return engine


def general(directory: Path) -> Engine:
    return load_engine(str(directory), engine="transformers")


def fixed(directory: Path) -> Engine:
    return load_engine(str(directory), deterministic=True)


BUILDS = (native, general, fixed)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"), head_dim=16)


def run_session(run: CheckedTaps) -> None:
    """Chunks without logits, rollbacks, proposals after committed tokens, trees and several sessions."""
    text = random_tokens(110, 1)
    run.step(SequenceInput("a", 0, text[:20], 0), SequenceInput("b", 0, text[40:47], 1))
    run.step(SequenceInput("a", 20, text[20:21], 1))
    run.step(
        SequenceInput("a", 18, random_tokens(6, 2), 4),
        SequenceInput("b", 7, text[47:80], 0),
        SequenceInput("c", 0, text[:2], 2),
    )
    tree = random_tokens(len(TREE), 4)
    run.step(SequenceInput("c", 1, [text[1], *tree], 1, TREE), SequenceInput("a", 24, text[26:70], 44))
    run.engine.keep_path("c", 2, [0, 2, 5, 7])
    run.step(SequenceInput("c", 6, random_tokens(3, 5), 3, (-1, -1, 0)), SequenceInput("b", 40, [7], 1))
    # Nodes that join the cached tree, one of them after an earlier token of the chain.
    run.step(SequenceInput("c", 6, random_tokens(3, 6), 3, (2, -3, 1), num_kept=3))


@pytest.mark.parametrize(("arch", "choice"), PATHS)
def test_taps_are_the_hidden_states_of_plain_forwards(arch: str, choice: str, tmp_path: Path) -> None:
    # Large logits: soft-caps and softmaxes are far from linear.
    directory = tiny_model(arch, tmp_path, gain=2.0 if arch.startswith("gemma") else 1.0)
    engine = load_engine(str(directory), engine=choice)
    assert isinstance(engine.runner, NativeRunner) == (choice == "native")
    run = CheckedTaps(engine, plain_model(directory), LAYERS)
    run_session(run)
    assert run.worst <= TOLERANCE


@pytest.mark.parametrize("variant", usable_variants())
def test_taps_of_every_instruction_set_are_the_hidden_states(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 20 numbers are no whole vectors."""
    monkeypatch.setattr(weights, "load_kernel", lambda *_: open_kernel(variant))
    directory = tiny_model("qwen3", tmp_path, hidden_size=20)
    run = CheckedTaps(native(directory), plain_model(directory), LAYERS)
    run_session(run)
    assert run.worst <= TOLERANCE


@pytest.mark.parametrize("build", BUILDS)
def test_logits_have_the_same_bits_with_taps(build: Callable[[Path], Engine], llama: Path) -> None:
    tapped, plain = build(llama), build(llama)
    tapped.tap(LAYERS)
    text = random_tokens(60, 1)
    for feeds in (
        [SequenceInput("a", 0, text[:40], 40), SequenceInput("b", 0, text[:5], 1)],
        [SequenceInput("a", 40, text[40:41], 1)],
        [SequenceInput("a", 41, text[41:51], 10, TREE), SequenceInput("b", 5, text[5:9], 0)],
    ):
        for got, expected in zip(tapped.step(feeds), plain.step(feeds), strict=True):
            assert torch.equal(got, expected)
        assert len(tapped.taps) == len(feeds)
        assert plain.taps == []
    tapped.tap([])
    feed = [SequenceInput("b", 9, text[:3], 3)]
    assert torch.equal(tapped.step(feed)[0], plain.step(feed)[0])
    assert tapped.taps == []


@pytest.mark.parametrize("build", BUILDS)
def test_tap_of_no_layer_is_refused(build: Callable[[Path], Engine], llama: Path) -> None:
    engine = build(llama)
    engine.tap([1])
    wrong: list[list[object]] = [[-1], [LAST + 1], [0, 10**30], [1.0], ["1"], [None], [[1]]]
    for layers in wrong:
        with pytest.raises(InvalidArgumentError, match=r"layers: got .*, allowed: integers in \[0, 3\]"):
            engine.tap(layers)  # type: ignore[arg-type]
        engine.step([SequenceInput("a", engine.length("a"), [1, 2], 0)])
        assert engine.taps[0].shape == (2, 1, 32), layers


def test_taps_of_a_quantised_draft_are_recorded(tmp_path: Path) -> None:
    """Its embedding is integers, so the state that enters the first layer is not a copy of a row."""
    directory = tiny_model("llama", tmp_path)
    engine = load_engine(str(directory), weights="int8")
    assert isinstance(engine.runner, NativeRunner)
    engine.tap([0, LAST])
    text = random_tokens(20, 1)
    engine.step([SequenceInput("a", 0, text, 0)])
    expected = plain_states(plain_model(directory), text)[:, [0, LAST]]
    assert (engine.taps[0] - expected).abs().mean() <= 0.05 * expected.abs().mean()
