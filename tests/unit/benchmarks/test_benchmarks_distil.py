"""Distilling the draft further: its losses, the target's own text, and a run of a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.demo_pair import distil, models
from benchmarks.demo_pair.evaluate import agreement
from services.engine.loader import load_engine

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


def test_losses_of_equal_distributions_are_zero() -> None:
    probs = torch.tensor([[0.5, 0.3], [0.9, 0.05]])
    assert distil.divergence(probs, probs).item() == pytest.approx(0.0, abs=1e-6)
    assert distil.variation(probs, probs).item() == pytest.approx(0.0, abs=1e-6)


def test_losses_treat_the_truncated_rest_as_one_token() -> None:
    """By hand: the target has 0.6, 0.2 and a rest of 0.2; the draft 0.3, 0.3 and 0.4."""
    target, draft = torch.tensor([[0.6, 0.2]]), torch.tensor([[0.3, 0.3]])
    assert distil.variation(draft, target).item() == pytest.approx(0.3)
    wanted = 0.6 * torch.tensor(2.0).log() + 0.2 * torch.tensor(2 / 3).log() + 0.2 * torch.tensor(0.5).log()
    assert distil.divergence(draft, target).item() == pytest.approx(wanted.item(), rel=1e-5)


def test_samples_are_the_targets_own(saved_target: Path) -> None:
    """Every third window is greedy: each of its tokens is what a plain forward finds likeliest."""
    train = torch.randint(VOCAB_SIZE, (500,), generator=torch.Generator().manual_seed(2))
    windows = distil.write_samples(load_engine(str(saved_target)), train, 6, batch=4)
    assert windows.shape == (6, 256)
    texts = " ".join(map(str, train.tolist()))
    assert all(" ".join(map(str, window[:32].tolist())) in texts for window in windows)
    with torch.no_grad():
        top_k_tokens = models.load(saved_target)(windows[:, :-1]).logits.argmax(-1)
    agrees = (top_k_tokens == windows[:, 1:])[:, 32:].float().mean(-1)
    assert agrees[0] > 0.99 < agrees[4], "the first window of a batch is greedy"
    assert agrees[2] < 0.9 > agrees[5], "the last of three is drawn at temperature 1"


def test_lessons_are_the_top_k_tokens_and_their_log_probabilities(saved_target: Path) -> None:
    target = models.load(saved_target).eval()
    windows = torch.randint(VOCAB_SIZE, (3, 20), generator=torch.Generator().manual_seed(3))
    lessons = distil.read_lessons(target, windows, batch=2)
    with torch.no_grad():
        wanted = torch.log_softmax(target(windows).logits, -1).topk(5)
    torch.testing.assert_close(lessons.logs[..., :5].float(), wanted.values, atol=0.1, rtol=0)
    assert (lessons.ids[..., 0] == wanted.indices[..., 0]).float().mean() > 0.9


@pytest.mark.slow
def test_distil_brings_the_draft_nearer_to_the_target(saved_target: Path) -> None:
    target, draft = models.load(saved_target).eval(), _model(1, seed=4)
    torch.manual_seed(0)
    windows = torch.randint(VOCAB_SIZE, (32, 24), generator=torch.Generator().manual_seed(5))
    before = agreement(target, draft, windows)
    lessons = distil.read_lessons(target, windows)
    reports = list(distil.distil(draft, lessons, num_steps=200, learning_rate=0.02, batch=8))
    after = agreement(target, draft.eval(), windows)
    assert [round(progress, 3) for progress, _ in reports] == [0.495, 0.995]
    assert after.alpha > before.alpha + 0.1
    assert after.argmax_match > before.argmax_match + 0.05
