"""The engine's logits against the model's own plain forward, for every architecture it serves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.engine.core import batch
from services.engine.core import batch as feeds_module
from services.engine.core.batch import SequenceInput
from services.engine.hf import attention
from services.engine.hf import runner as general
from services.engine.loader import load_engine
from tests.support.engine_helpers import (
    LEAN,
    SUPPORTED,
    CheckedEngine,
    plain_logits,
    plain_model,
    random_tokens,
    tiny_model,
)

TOLERANCE = 1e-4
# Two roots, a chain below one, siblings with equal positions, a leaf deeper than the window is narrow.
TREE = (-1, -1, 0, 0, 1, 2, 4, 5, 6, 8)
PATHS = [(arch, "transformers") for arch in SUPPORTED] + [(arch, "native") for arch in LEAN]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One saved model per architecture, made on first use."""
    root = tmp_path_factory.mktemp("models")
    return _Directories(root)


class _Directories(dict[str, Path]):
    def __init__(self, root: Path) -> None:
        self._root = root

    def __missing__(self, arch: str) -> Path:
        # Large logits: soft-caps and softmaxes are far from linear.
        self[arch] = tiny_model(arch, self._root, gain=2.0 if arch.startswith("gemma") else 1.0)
        return self[arch]


def checked(directory: Path, choice: str) -> CheckedEngine:
    engine = load_engine(str(directory), engine=choice)
    return CheckedEngine(engine, plain_model(directory))


@pytest.mark.parametrize(("arch", "choice"), PATHS)
def test_engine_session_operations_match_plain_forwards(
    directories: dict[str, Path], arch: str, choice: str
) -> None:
    run = checked(directories[arch], choice)
    text = random_tokens(110, 1)
    run.step(SequenceInput("a", 0, text[:20], 20), SequenceInput("b", 0, text[40:47], 1))
    run.step(SequenceInput("a", 20, random_tokens(6, 2), 6))
    # Rollback after wrong tokens, ragged rows, and another session's first chunk.
    run.step(
        SequenceInput("a", 20, text[20:21], 1),
        SequenceInput("b", 4, random_tokens(9, 3), 3),
        SequenceInput("c", 0, text[:30], 0),
    )
    run.step(
        SequenceInput("c", 30, text[30:61], 1),
        SequenceInput("a", 21, text[21:26], 5),
        SequenceInput("b", 13, text[:2], 2),
    )
    tree = random_tokens(len(TREE), 4)
    run.step(SequenceInput("c", 60, [text[60], *tree], 11, TREE), SequenceInput("a", 26, text[26:70], 44))
    run.engine.keep_path("c", 61, [0, 2, 5, 7])
    run.engine.fork("c", "d", 63)
    run.step(SequenceInput("c", 65, random_tokens(9, 5), 9), SequenceInput("d", 63, random_tokens(3, 6), 3))
    run.step(
        SequenceInput("a", 70, text[70:110], 2, None),
        SequenceInput("d", 66, random_tokens(4, 7), 3, (-1, -1, 0)),
    )
    assert run.engine.tokens("c")[:65] == [*text[:61], tree[0], tree[2], tree[5], tree[7]]
    assert run.worst <= TOLERANCE


@pytest.mark.parametrize("arch", ["mistral", "gemma3"])
def test_tree_deeper_than_the_window_counts_positions_not_slots(
    directories: dict[str, Path], arch: str
) -> None:
    for choice in ("auto", "transformers"):
        run = checked(directories[arch], choice)
        run.step(SequenceInput("a", 0, random_tokens(12, 1), 1))
        # Two interleaved chains of 11: the window of 8 covers 16 slots of which it sees 8.
        parents = [-1, -1, *range(20)]
        run.step(SequenceInput("a", 12, random_tokens(22, 2), 22, parents))
        assert run.worst <= TOLERANCE


@pytest.mark.parametrize("choice", ["auto", "transformers"])
def test_kept_tree_path_continues_as_a_chain(directories: dict[str, Path], choice: str) -> None:
    run = checked(directories["llama"], choice)
    context, nodes = random_tokens(10, 1), random_tokens(len(TREE), 2)
    for path in ([], [1], [0, 3], [1, 4, 6, 8, 9]):
        run.step(SequenceInput("a", 0, [*context, *nodes], 1, TREE))
        assert run.engine.length("a") == 10
        run.engine.keep_path("a", 10, path)
        assert run.engine.tokens("a") == [*context, *(nodes[i] for i in path)]
        run.step(SequenceInput("a", 10 + len(path), random_tokens(3, 3), 3))
    assert run.worst <= TOLERANCE


def test_softcap_large_logits_bends_them(directories: dict[str, Path]) -> None:
    """The soft-cap must be far from linear in these tests, else a missing one would pass."""
    model = plain_model(directories["gemma2"])
    capped = plain_logits(model, random_tokens(20, 1))
    model.config.attn_logit_softcapping = None
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert (capped - plain_logits(model, random_tokens(20, 1))).abs().max() > 100 * TOLERANCE


def test_position_off_by_one_after_rollback_is_caught(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(feed: SequenceInput, kept_parents: list[int]) -> list[int]:
        shift = 1 if feed.start else 0
        return [feed.start + shift + i for i in range(len(feed.token_ids))]

    run = checked(directories["gpt2"], False)
    monkeypatch.setattr(feeds_module, "feed_positions", shifted)
    run.step(SequenceInput("a", 0, random_tokens(9, 1), 1))
    assert run.worst <= TOLERANCE
    run.step(SequenceInput("a", 9, random_tokens(2, 2), 2))
    assert run.worst > TOLERANCE


def test_window_off_by_one_is_caught(directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    right = batch.allowed_slots
    run = checked(directories["mistral"], "transformers")
    monkeypatch.setattr(batch, "allowed_slots", lambda s, w: right(s, None if w is None else w + 1))
    run.step(SequenceInput("a", 0, random_tokens(8, 1), 1))
    assert run.worst <= TOLERANCE
    run.step(SequenceInput("a", 8, random_tokens(5, 2), 5))
    assert run.worst > TOLERANCE


def test_stale_slots_after_rollback_are_caught(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = checked(directories["llama"], "transformers")
    run.step(SequenceInput("a", 0, random_tokens(9, 1), 1))
    run.step(SequenceInput("a", 9, random_tokens(4, 2), 4))
    right = attention.attend

    def without_writing(batch_, layer, given, **options):  # type: ignore[no-untyped-def]
        kept = [segment.cache.data[layer].clone() for segment in batch_.segments]
        output = right(batch_, layer, given, **options)
        for segment, data in zip(batch_.segments, kept, strict=True):
            segment.cache.data[layer] = data
        return output

    monkeypatch.setattr(general, "attend", without_writing)
    run.step(SequenceInput("a", 9, random_tokens(1, 3), 1))
    assert run.worst <= TOLERANCE
    run.step(SequenceInput("a", 10, random_tokens(1, 4), 1))
    assert run.worst > TOLERANCE


def test_step_logits_can_be_written_to(directories: dict[str, Path]) -> None:
    for choice in ("auto", "transformers"):
        engine = load_engine(str(directories["llama"]), engine=choice)
        first, second = engine.step([SequenceInput("a", 0, [1, 2, 3], 2), SequenceInput("b", 0, [4], 1)])
        kept = second.clone()
        first.add_(1.0)
        assert torch.equal(second, kept)
        engine.step([SequenceInput("a", 3, [5], 1)])
        assert torch.equal(second, kept)


@pytest.mark.parametrize("arch", ["llama", "gemma2", "mixtral", "gpt_oss", "deepseek_v3"])
def test_bfloat16_stays_within_its_rounding(directories: dict[str, Path], arch: str) -> None:
    engine = load_engine(str(directories[arch]), dtype="bfloat16")
    text = random_tokens(30, 1)
    got = torch.cat(
        [
            *engine.step([SequenceInput("a", 0, text[:21], 21)]),
            *engine.step([SequenceInput("a", 21, text[21:], 9)]),
        ]
    )
    expected = plain_logits(plain_model(directories[arch]).to(torch.bfloat16), text)
    assert got.dtype == torch.float32
    assert (got - expected).abs().mean() <= 0.05 * expected.abs().mean()
