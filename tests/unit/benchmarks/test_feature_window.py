"""Batches of a head that lacks the first states."""

from __future__ import annotations

import torch

from benchmarks.feature_window import behind, overlaps
from services.engine.core.model import load_model
from services.train.head import TrainableHead
from tests.support.engine_helpers import tiny_model
from tests.support.train_helpers import make_sequence


def test_states_before_the_start_are_not_seen(tmp_path):
    target = load_model(str(tiny_model("llama", tmp_path)), device="cpu", dtype="float32").module
    torch.manual_seed(0)
    states = torch.randn(13, 2, 32).bfloat16()

    class States:
        def of(self, sequences):
            return [states.clone() for _ in sequences]

    drafter = TrainableHead(target, (1, 3), torch.arange(0, 64, 2), 3, States()).eval()
    batch = drafter.batch([make_sequence(0, 4, 9)], 3)
    everything, later = overlaps(drafter, batch), overlaps(drafter, behind(batch, 5))
    assert overlaps(drafter, behind(batch, 0)) == everything
    assert {anchor for anchor, _ in later} == {anchor for anchor, _ in everything if anchor > 5}
    assert any(abs(later[place] - everything[place]) > 1e-6 for place in later)
    batch.states[0, :5] += 3.0
    assert overlaps(drafter, behind(batch, 5)) == later
