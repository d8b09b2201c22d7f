"""The engine's logits and hidden states against the model's own plain forward, for every architecture.

On each path: the compiled kernel, transformers' layers with an attention per session, as on CPUs, or with
one of all sessions, as on GPUs.
"""

from pathlib import Path

import pytest
import torch

from services.engine.core.batch import SequenceInput
from services.engine.hf.batched_attention import MAX_PADDED_ROWS
from services.engine.loader import load_engine
from services.engine.native.runner import NativeRunner
from tests.support.engine_helpers import (
    LEAN,
    SUPPORTED,
    CheckedEngine,
    batched_engine,
    plain_logits,
    plain_model,
    random_tokens,
    tiny_model,
)

TOLERANCE = 1e-4
TAP_TOLERANCE = 1e-5
LAYERS = (2, 3, 0, 1, 2)
"""Layers whose states are compared: in any order, the last one and one of them twice."""

# Two roots, a chain below one, siblings with equal positions, a leaf deeper than the window of 8.
TREE = (-1, -1, 0, 0, 1, 2, 4, 5, 6, 8, 9, 10, 11)
PATHS = [
    *((arch, path) for path in ("transformers", "batched") for arch in SUPPORTED),
    *((arch, "native") for arch in LEAN),
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
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


def checked(directory: Path, path: str, taps: tuple[int, ...] = ()) -> CheckedEngine:
    engine = batched_engine(directory) if path == "batched" else load_engine(str(directory), engine=path)
    return CheckedEngine(engine, plain_model(directory), taps)


@pytest.mark.parametrize(("arch", "path"), PATHS)
def test_steps_of_several_sessions_match_plain_forwards(directories, arch, path):
    run = checked(directories[arch], path, LAYERS)
    assert isinstance(run.engine.runner, NativeRunner) == (path == "native")
    text, tree = random_tokens(128, 1), random_tokens(len(TREE), 4)
    run.step(
        SequenceInput("a", 0, text[:70], 3),
        SequenceInput("b", 0, text[40:47], 1),
        SequenceInput("c", 0, text[50:73], 0),
    )
    run.step(
        *[SequenceInput(name, n, random_tokens(1, n), 1) for name, n in (("a", 70), ("b", 7), ("c", 23))]
    )
    # Ragged rows, a rollback, a tree and a new session; the lengths call for two groups of padded rows.
    run.step(
        SequenceInput("c", 24, [5, *tree], len(TREE) + 1, TREE),
        SequenceInput("d", 0, text[:2], 2),
        SequenceInput("a", 71, random_tokens(4, 3), 4),
        SequenceInput("b", 4, random_tokens(9, 5), 9),
    )
    run.engine.keep_path("c", 25, [0, 2, 5, 7])
    assert run.engine.tokens("c")[24:] == [5, tree[0], tree[2], tree[5], tree[7]]
    run.engine.fork("c", "e", 27)
    # A chunk that begins behind cached tokens and is longer than padded rows may be, with others.
    run.step(
        SequenceInput("d", 2, random_tokens(MAX_PADDED_ROWS + 6, 6), 5),
        SequenceInput("c", 29, random_tokens(3, 7), 3),
        SequenceInput("e", 27, random_tokens(6, 8), 4, (-1, -1, 0)),
    )
    # Nodes that join the cached tree, one of them after an earlier token of the chain.
    run.step(
        SequenceInput("e", 30, random_tokens(3, 6), 3, (2, -3, 1), num_kept=3),
        SequenceInput("b", 13, random_tokens(2, 3), 1),
    )
    run.step(
        SequenceInput("e", 30, random_tokens(2, 4), 2, (5, 3), num_kept=6),
        SequenceInput("b", 15, random_tokens(2, 5), 1),
    )
    run.step(*[SequenceInput(s, run.engine.length(s), random_tokens(5, 9), 5) for s in "abcde"])
    run.step(SequenceInput("d", 20, random_tokens(6, 2), 6))
    assert run.worst <= TOLERANCE
    assert run.worst_tap <= TAP_TOLERANCE


@pytest.mark.parametrize("path", ["transformers", "batched"])
@pytest.mark.parametrize("arch", ["llama", "gemma2", "mixtral", "gpt_oss", "deepseek_v3"])
def test_bfloat16_stays_within_its_rounding(directories, arch, path):
    directory = str(directories[arch])
    engine = (
        batched_engine(directories[arch], dtype="bfloat16")
        if path == "batched"
        else load_engine(directory, dtype="bfloat16")
    )
    text = random_tokens(30, 1)
    feeds = [SequenceInput("a", 0, text[:21], 21), SequenceInput("b", 0, text[:9], 1)]
    got = torch.cat([engine.step(feeds)[0], engine.step([SequenceInput("a", 21, text[21:], 9)])[0]])
    expected = plain_logits(plain_model(directories[arch]).to(torch.bfloat16), text)
    assert got.dtype == torch.float32
    # Experts may be chosen differently within rounding: compare means.
    assert (got - expected).abs().mean() <= 0.05 * expected.abs().mean()
