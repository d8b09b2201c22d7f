"""Attention of all sessions at once against the models' own forwards, and its calls per layer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import (
    SUPPORTED,
    CheckedEngine,
    plain_model,
    random_tokens,
    tiny_model,
)
from torch.utils._python_dispatch import TorchDispatchMode

from services.engine.core.batch import Segment, allowed_slots
from services.engine.core.kv_cache import CacheShape, CacheStore
from services.engine.core.model import load_model
from services.engine.core.session_cache import SessionCache
from services.engine.engine import Engine, SequenceInput
from services.engine.hf import batched_attention
from services.engine.hf.batched_attention import MAX_PADDED_ROWS, padded_mask
from services.engine.hf.probe import probe_model
from services.engine.hf.runner import TransformersRunner

TOLERANCE = 1e-4
# Two roots, a chain below one, siblings with equal positions, a leaf deeper than the window of 8.
TREE = (-1, -1, 0, 0, 1, 2, 4, 5, 6, 8, 9, 10, 11)


def load(directory: Path, *, batched: bool = True, dtype: str = "float32") -> Engine:
    loaded = load_model(str(directory), device="cpu", dtype=dtype)
    layout = probe_model(loaded)
    shape = CacheShape(layout.num_layers, layout.kv_heads, layout.kv_dim, loaded.dtype, loaded.device)
    return Engine(
        TransformersRunner(loaded, layout, batched=batched),
        CacheStore(shape, 1 << 26),
        model_name=str(directory),
        vocab_size=layout.vocab_size,
        max_context=loaded.max_context,
    )


def checked(directory: Path) -> CheckedEngine:
    return CheckedEngine(load(directory), plain_model(directory))


def gain_of(arch: str) -> float:
    """Large logits: soft-caps and softmaxes are far from linear."""
    return 2.0 if arch.startswith("gemma") else 1.0


def converse(run: CheckedEngine) -> None:
    """Steps of several sessions: prompts, single tokens, ragged rows, trees, rollback, a prompt's chunk."""
    text = random_tokens(128, 1)
    prompts = [
        SequenceInput("a", 0, text[:70], 3),
        SequenceInput("b", 0, text[40:47], 1),
        SequenceInput("c", 0, text[50:73], 2),
    ]
    run.step(*prompts)
    run.step(*[SequenceInput(name, n, random_tokens(1, n), 1) for name, n in (("a", 70), ("b", 7), ("c", 23))])
    # Single tokens, a tree and a new session; the lengths call for two groups.
    run.step(
        SequenceInput("c", 24, [5, *random_tokens(len(TREE), 4)], len(TREE) + 1, TREE),
        SequenceInput("d", 0, text[:2], 2),
        SequenceInput("a", 71, random_tokens(4, 3), 4),
        SequenceInput("b", 4, random_tokens(9, 5), 9),
    )
    run.engine.keep_path("c", 25, [0, 2, 5, 7])
    run.engine.fork("c", "e", 27)
    # A chunk that begins behind cached tokens and is longer than padded rows may be, with others.
    run.step(
        SequenceInput("d", 2, random_tokens(MAX_PADDED_ROWS + 6, 6), 5),
        SequenceInput("c", 29, random_tokens(3, 7), 3),
        SequenceInput("e", 27, random_tokens(6, 8), 4, (-1, -1, 0)),
    )
    run.step(*[SequenceInput(s, run.engine.length(s), random_tokens(5, 9), 5) for s in "abcde"])


@pytest.mark.parametrize("arch", SUPPORTED)
def test_steps_of_several_sessions_match_plain_forwards(arch: str, tmp_path: Path) -> None:
    run = checked(tiny_model(arch, tmp_path, gain=gain_of(arch)))
    converse(run)
    assert run.worst <= TOLERANCE
