"""The demo pair's training: how models start from one another, the optimiser, and a run of a few steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from benchmarks.demo_pair import corpus, distil, models, train

VOCAB_SIZE = 320


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pair")
    corpus.write(directory, vocab_size=VOCAB_SIZE, limit=30)
    return directory


def _model(num_layers: int, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return models.build(num_layers, hidden_size=64, vocab_size=VOCAB_SIZE).eval()


def _trained(num_layers: int) -> LlamaForCausalLM:
    """A model none of whose matrices is zero."""
    model = _model(num_layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@torch.no_grad()
def _logits(model: LlamaForCausalLM) -> torch.Tensor:
    return model(torch.arange(1, 20)[None]).logits


def test_grow_starts_as_the_same_function() -> None:
    source, model = _trained(2), _model(6, seed=1)
    assert not torch.allclose(_logits(model), _logits(source))
    models.grow(model, source)
    torch.testing.assert_close(_logits(model), _logits(source))


@pytest.mark.slow
def test_corpus_split_is_encoded_without_loss(work: Path) -> None:
    tokenizer = corpus.Tokenizer.from_file(str(work / "tokenizer.json"))
    held = corpus.read_split(work, "held")
    documents = [d.text for d in corpus.documents(30) if d.is_held_out]
    assert np.count_nonzero(held == corpus.END_ID) == len(documents)
    assert tokenizer.decode(held[1:].tolist()) == "".join(documents)
    assert corpus.read_split(work, "train").max() < VOCAB_SIZE


@pytest.mark.slow
def test_train_all_stages_learns_and_exports_a_target_that_loads(work: Path) -> None:
    reports: list[str] = []
    options = train.TrainingOptions(work, "cpu", batch=4, length=64, hidden_size=64, report=reports.append)
    windows = train.held_out_windows(corpus.read_split(work, "held"), length=64, stride=65)
    untrained = train.held_out_loss(_model(4), windows)
    tokens = {"base": 60 * 256, "target": 5 * 256}
    losses = {
        name: train.train_stage(name, train.Budget(None, tokens[name]), options) for name in train.STAGES
    }
    assert losses["base"] < untrained - 0.5
    assert losses["target"] < untrained - 0.5
    assert len(reports) == len(train.STAGES)
    assert models.export(work / "target", work / "tokenizer.json", work / "pair") > 50_000
    model = AutoModelForCausalLM.from_pretrained(work / "pair")
    assert model.config.num_hidden_layers == 16
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(work / "pair")
    ids = tokenizer("def read_lines(path):").input_ids
    assert tokenizer.decode(ids) == "def read_lines(path):"
    assert 0 not in ids

    target = models.load(work / "pair").eval()
    draft = models.truncated(target, 4).eval()
    _, alpha = distil.agreement(target, draft, windows[:8])
    _, of_a_stranger = distil.agreement(target, _trained(2).eval(), windows[:8])
    assert alpha > of_a_stranger
    assert distil.agreement(draft, draft, windows[:2]) == (1.0, pytest.approx(1.0, abs=1e-4))
