"""Attention of all sessions at once: its calls per layer."""

from typing import Any

import pytest
import torch

from services.engine.core.batch import SequenceInput
from services.engine.hf import batched_attention
from tests.support.engine_helpers import batched_engine, random_tokens, tiny_model


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
