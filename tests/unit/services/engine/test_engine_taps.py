"""Hidden states that the engine records, against those of plain forwards of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from gammaray.errors import InvalidArgumentError
from services.engine.core.batch import SequenceInput
from services.engine.core.errors import CacheGapError
from services.engine.engine import Engine
from services.engine.loader import load_engine
from services.engine.native import weights
from services.engine.native.build import VARIANTS
from services.engine.native.library import Kernel, open_kernel
from services.engine.native.runner import NativeRunner
from tests.support.engine_helpers import LEAN, MAX_CONTEXT, SUPPORTED, plain_model, random_tokens, tiny_model
from tests.support.tap_helpers import CheckedTaps, FaultyRunner, node_text, plain_states

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
    return load_engine(str(directory), engine="transformers", deterministic=True)


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


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gemma3", "qwen3", "gpt_neox"])
def test_taps_of_padded_rows_are_the_hidden_states(arch: str, tmp_path: Path) -> None:
    """Deterministic mode feeds more rows than the step has."""
    directory = tiny_model(arch, tmp_path)
    run = CheckedTaps(fixed(directory), plain_model(directory), LAYERS)
    run_session(run)
    assert run.worst <= TOLERANCE


def loadable(variant: str) -> bool:
    kernel: Kernel = open_kernel(variant)
    levels = {"x86-64-v3": "AVX2", "x86-64-v4": "AVX512"}
    usable = torch.backends.cpu.get_cpu_capability()
    return kernel.library is not None and (variant not in levels or usable in (levels[variant], "AVX512"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_taps_of_every_instruction_set_are_the_hidden_states(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 20 numbers are no whole vectors."""
    if not loadable(variant):
        pytest.skip(f"this processor or compiler lacks {variant}")
    monkeypatch.setattr(weights, "load_kernel", lambda *_: open_kernel(variant))
    directory = tiny_model("qwen3", tmp_path, hidden_size=20)
    run = CheckedTaps(native(directory), plain_model(directory), LAYERS)
    run_session(run)
    assert run.worst <= TOLERANCE


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    ("layers", "fault"),
    [
        ((0, 1, 2), {"layers_late": 1}),
        ((1, 2, LAST), {"layers_late": -1}),
        ((0,), {"rows_late": 1}),
        ((LAST,), {"rows_late": -1}),
    ],
    ids=["a layer late", "a layer early", "a position late", "a position early"],
)
def test_taps_of_another_layer_or_position_are_caught(
    build: Callable[[Path], Engine], layers: Sequence[int], fault: dict[str, int], llama: Path
) -> None:
    engine = build(llama)
    run = CheckedTaps(engine, plain_model(llama), layers)
    feed = SequenceInput("a", 0, random_tokens(9, 1), 0)
    run.step(feed)
    assert run.worst <= TOLERANCE
    engine.runner = FaultyRunner(engine.runner, **fault)
    run.step(feed)
    assert run.worst > 1000 * TOLERANCE


@pytest.mark.parametrize("build", BUILDS)
def test_last_state_after_its_norm_is_caught(build: Callable[[Path], Engine], llama: Path) -> None:
    engine, text = build(llama), random_tokens(9, 1)
    plain = plain_model(llama)
    run = CheckedTaps(engine, plain, [0, LAST])
    engine.runner = FaultyRunner(engine.runner)
    run.step(SequenceInput("a", 0, text, 1))
    assert run.worst <= TOLERANCE
    engine.runner = FaultyRunner(engine.runner, last=plain.model.norm(plain_states(plain, text)[:, LAST]))
    run.step(SequenceInput("a", 0, text, 1))
    assert run.worst > 1000 * TOLERANCE


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "build"), [("llama", native), ("qwen3", fixed), ("gemma2", fixed), ("gpt_neox", fixed)]
)
def test_taps_of_nodes_and_chunks_have_the_bits_of_single_tokens(
    arch: str, build: Callable[[Path], Engine], tmp_path: Path
) -> None:
    engine = build(tiny_model(arch, tmp_path))
    engine.tap(LAYERS)
    text, nodes = random_tokens(20, 1), random_tokens(len(TREE), 2)

    def fed(session_id: str, token_ids: list[int]) -> torch.Tensor:
        rows = []
        for index, token_id in enumerate(token_ids):
            engine.step([SequenceInput(session_id, index, [token_id], 0)])
            rows.append(engine.taps[0][0])
        engine.release(session_id)
        return torch.stack(rows)

    engine.step([SequenceInput("b", 0, nodes[:3], 1), SequenceInput("a", 0, text, 1)])
    assert torch.equal(engine.taps[1], fed("alone", text))
    engine.step([SequenceInput("a", 20, nodes, 1, TREE), SequenceInput("b", 3, text, 20)])
    tree = engine.taps[0]
    for node in range(len(nodes)):
        alone = fed("alone", node_text(text, nodes, TREE, node))
        assert torch.equal(tree[node], alone[-1]), node


@pytest.mark.parametrize("build", BUILDS)
def test_taps_stay_valid_after_the_next_steps(build: Callable[[Path], Engine], llama: Path) -> None:
    engine = build(llama)
    engine.tap([0, LAST])
    engine.step([SequenceInput("a", 0, [1, 2, 3], 1), SequenceInput("b", 0, [4], 1)])
    taps = engine.taps
    kept = [states.clone() for states in taps]
    # The same sizes: a runner may use the same buffers again.
    for _ in range(2):
        engine.step([SequenceInput("a", 3, [7, 8, 9], 1), SequenceInput("b", 1, [5], 1)])
    assert all(torch.equal(states, before) for states, before in zip(taps, kept, strict=True))
    assert not torch.equal(engine.taps[0], kept[0])
    taps[0].add_(1.0)  # callers may change them
    assert torch.equal(taps[1], kept[1])


def test_taps_are_those_of_the_last_step(llama: Path) -> None:
    engine = native(llama)
    assert engine.taps == []
    engine.step([SequenceInput("a", 0, [1], 1)])
    assert engine.taps == []
    engine.tap([1])
    assert engine.taps == []
    engine.step([SequenceInput("a", 1, [2, 3], 0)])
    assert [states.shape for states in engine.taps] == [(2, 1, 32)]
    engine.tap([0, 1, 2])
    assert engine.taps == []
    engine.step([SequenceInput("b", 0, [2], 0), SequenceInput("a", 3, [2, 3], 0)])
    assert [states.shape for states in engine.taps] == [(1, 3, 32), (2, 3, 32)]
    with pytest.raises(CacheGapError):
        engine.step([SequenceInput("a", 9, [2], 0)])
    assert engine.taps == []
    assert engine.step([]) == []
    assert engine.taps == []


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


def test_taps_of_a_model_with_a_narrower_head_are_the_hidden_states(tmp_path: Path) -> None:
    """OPT's smallest models project the last state to another length before the head."""
    directory = tiny_model("opt", tmp_path, word_embed_proj_dim=16)
    run = CheckedTaps(load_engine(str(directory)), plain_model(directory), LAYERS)
    run_session(run)
    assert run.worst <= TOLERANCE


def test_chain_does_not_record(llama: Path) -> None:
    engine, other = native(llama), native(llama)
    engine.tap(LAYERS)
    engine.step([SequenceInput("a", 0, [1, 2], 1)])
    (before,) = engine.taps
    kept = before.clone()
    token_ids, logits = engine.chain(SequenceInput("a", 2, [5] * 4, 4))
    other.step([SequenceInput("a", 0, [1, 2], 1)])
    expected = other.chain(SequenceInput("a", 2, [5] * 4, 4))
    assert token_ids == expected[0]
    assert torch.equal(logits, expected[1])
    assert engine.taps[0] is before
    assert torch.equal(before, kept)


def test_taps_in_bfloat16_stay_close(tmp_path: Path) -> None:
    directory = tiny_model("llama", tmp_path, head_dim=16, bfloat16=True)
    engine = load_engine(str(directory), dtype="bfloat16")
    engine.tap(LAYERS)
    text = random_tokens(30, 1)
    engine.step([SequenceInput("a", 0, text, 0)])
    (got,) = engine.taps
    assert got.dtype == torch.bfloat16
    expected = plain_states(plain_model(directory), text)[:, list(LAYERS)]
    assert ((got - expected).abs().mean((0, 2)) <= 0.02 * expected.abs().mean((0, 2))).all()


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


def test_taps_reach_the_end_of_the_context(llama: Path) -> None:
    for build in BUILDS:
        run = CheckedTaps(build(llama), plain_model(llama), LAYERS)
        run.step(SequenceInput("a", 0, random_tokens(MAX_CONTEXT, 1), 0))
        assert run.worst <= TOLERANCE
