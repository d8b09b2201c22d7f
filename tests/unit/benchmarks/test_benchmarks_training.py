"""The demo pair's training: how models start from one another, optimiser, losses, and runs of a few steps."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from benchmarks.demo_pair import corpus, distil, models, train

VOCAB_SIZE = 320


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pair")
    corpus.write(directory, vocab_size=VOCAB_SIZE, limit=30)
    return directory


def _model(num_layers: int, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return models.build(num_layers, hidden_size=64, vocab_size=VOCAB_SIZE).eval()


def _trained(num_layers: int, seed: int = 0, noise: float = 0.05) -> LlamaForCausalLM:
    """A model none of whose matrices is zero."""
    model = _model(num_layers, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return model


@torch.no_grad()
def _logits(model: LlamaForCausalLM) -> torch.Tensor:
    return model(torch.arange(1, 20)[None]).logits


def test_grow_starts_as_the_same_function():
    source, model = _trained(2), _model(6, seed=1)
    assert not torch.allclose(_logits(model), _logits(source))
    models.grow(model, source)
    torch.testing.assert_close(_logits(model), _logits(source))


@pytest.mark.nightly
@pytest.mark.slow
def test_train_all_stages_learns_and_exports_a_target_that_loads(work):
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


def test_losses_treat_the_truncated_rest_as_one_token():
    """By hand: the target has 0.6, 0.2 and a rest of 0.2; the draft 0.3, 0.3 and 0.4."""
    target, draft = torch.tensor([[0.6, 0.2]]), torch.tensor([[0.3, 0.3]])
    assert distil.variation(draft, target).item() == pytest.approx(0.3)
    wanted = 0.6 * torch.tensor(2.0).log() + 0.2 * torch.tensor(2 / 3).log() + 0.2 * torch.tensor(0.5).log()
    assert distil.divergence(draft, target).item() == pytest.approx(wanted.item(), rel=1e-5)
