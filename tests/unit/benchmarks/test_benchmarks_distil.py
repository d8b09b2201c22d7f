"""Distilling the draft further: its losses, the target's own text, and a run of a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.demo_pair import distil, models

VOCAB_SIZE = 320


@pytest.fixture(scope="module")
def saved_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of which every matrix counts, on disk."""
    directory = tmp_path_factory.mktemp("target")
    _model(3, seed=1).save_pretrained(directory)
    return directory


def _model(num_layers: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = models.build(num_layers, hidden_size=64, vocab_size=VOCAB_SIZE).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def test_losses_treat_the_truncated_rest_as_one_token() -> None:
    """By hand: the target has 0.6, 0.2 and a rest of 0.2; the draft 0.3, 0.3 and 0.4."""
    target, draft = torch.tensor([[0.6, 0.2]]), torch.tensor([[0.3, 0.3]])
    assert distil.variation(draft, target).item() == pytest.approx(0.3)
    wanted = 0.6 * torch.tensor(2.0).log() + 0.2 * torch.tensor(2 / 3).log() + 0.2 * torch.tensor(0.5).log()
    assert distil.divergence(draft, target).item() == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.slow
def test_distil_brings_the_draft_nearer_to_the_target(saved_target: Path) -> None:
    target, draft = models.load(saved_target).eval(), _model(1, seed=4)
    torch.manual_seed(0)
    windows = torch.randint(VOCAB_SIZE, (32, 24), generator=torch.Generator().manual_seed(5))
    before = distil.agreement(target, draft, windows)
    lessons = distil.read_lessons(target, windows)
    reports = list(distil.distil(draft, lessons, num_steps=200, learning_rate=0.02, batch=8))
    after = distil.agreement(target, draft.eval(), windows)
    assert [round(progress, 3) for progress, _ in reports] == [0.495, 0.995]
    assert after[0] > before[0] + 0.05
    assert after[1] > before[1] + 0.1
