"""Attention of all sessions at once: masks, and calls per layer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.core import batch as batch_module
from services.engine.core.batch import SequenceInput
from services.engine.hf import batched_attention
from services.engine.hf.batched_attention import MAX_PADDED_ROWS
from tests.support.engine_helpers import CheckedEngine, batched_engine, plain_model, random_tokens, tiny_model

TOLERANCE = 1e-4


def checked(directory: Path) -> CheckedEngine:
    return CheckedEngine(batched_engine(directory), plain_model(directory))


@pytest.mark.parametrize(("arch", "masked"), [("llama", False), ("mistral", True), ("gpt_oss", True)])
def test_prompts_have_a_mask_only_if_their_layers_need_one(arch, masked, tmp_path, monkeypatch):
    """Chunks of one session alone, then one too long to be padded in a step with other sessions."""
    run = checked(tiny_model(arch, tmp_path))
    masks = []
    right = batch_module.allowed_slots
    monkeypatch.setattr(batch_module, "allowed_slots", lambda *given: masks.append(given) or right(*given))
    run.step(SequenceInput("a", 0, random_tokens(20, 1), 2))
    run.step(SequenceInput("a", 20, random_tokens(30, 2), 2))
    run.step(
        SequenceInput("b", 0, random_tokens(3, 3), 1),
        SequenceInput("a", 50, random_tokens(MAX_PADDED_ROWS + 1, 4), 2),
    )
    assert run.worst <= TOLERANCE
    assert bool(masks) == masked


@pytest.mark.parametrize("num_sessions", [2, 32])
def test_one_call_per_layer_attends_for_all_sessions(num_sessions, tmp_path, monkeypatch):
    engine, calls = batched_engine(tiny_model("llama", tmp_path)), []
    right = batched_attention.F.scaled_dot_product_attention

    def counted(*given: Any, **options: Any) -> torch.Tensor:
        calls.append(given)
        return right(*given, **options)

    names = [str(number) for number in range(num_sessions)]
    engine.step([SequenceInput(name, 0, random_tokens(16, 1), 0) for name in names])
    monkeypatch.setattr(batched_attention.F, "scaled_dot_product_attention", counted)
    engine.step([SequenceInput(name, 16, random_tokens(5, 2), 5) for name in names])
    assert len(calls) == 3
