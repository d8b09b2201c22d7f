"""What settings, configurations and tokenizers rule out is refused before weights are read."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gammaray.config import DraftSettings, TargetSettings
from gammaray.demo_pair import resolve_model
from gammaray.errors import GammarayError
from services.draft_worker.worker import DraftWorker
from services.process.main import EXIT_BAD_SETTINGS, run
from services.target_worker.worker import TargetWorker
from tests.support.engine_helpers import tiny_model
from tests.support.head_helpers import DATA

REDIS = "redis://127.0.0.1:1/0"


@pytest.fixture
def damaged(tmp_path):
    """A model whose weights are no numbers: a worker that reads them says so."""
    folder = Path(shutil.copytree(resolve_model("demo", "target"), tmp_path / "damaged"))
    weights = load_file(folder / "model.safetensors")
    spoilt = {name: torch.full_like(weight, torch.nan) for name, weight in weights.items()}
    save_file(spoilt, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "not finite"),  # nothing to refuse: the weights are read
        ({"listen": "0.0.0.0:0", "redis_url": REDIS}, "listen: got 0.0.0.0:0, .*can dial"),
        ({"listen": "[::]:0", "redis_url": REDIS}, r"listen: got \[::\]:0, .*can dial"),
        ({"listen": "here"}, "listen: got here"),
        ({"redis_url": "foo"}, "redis_url: got foo"),
        ({"metrics_listen": "x"}, "metrics_listen: got x"),
        ({"tls_dir": "/nonexistent"}, "tls_dir: got /nonexistent"),
        ({"head": "/nonexistent/head"}, "head: got '/nonexistent/head', which does not exist"),
        ({"head": "other tokens"}, "head: .*an ordinary draft model with the vocabulary of"),
        ({"head": "parallel"}, "head: .*an ordinary draft model with the vocabulary of"),
        ({"head": "medusa"}, "a Medusa head, served by the engine vllm only"),
        ({"head": "foreign"}, "it was trained for another"),
        ({"head": str(DATA / "llama"), "learn": "folder"}, "no head of gammaray train"),
    ],
    ids=str,
)
async def test_target_worker(damaged, tmp_path, settings, words):
    if "head" in settings:
        settings = {**settings, "head": made(tmp_path, damaged, settings["head"])}
    with pytest.raises(GammarayError, match=words):
        await TargetWorker(TargetSettings(model=str(damaged), **settings)).start()


def made(folder, target, name):
    """Return the directory of a drafter that cannot draft for the target."""
    if name == "medusa":
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"model_type": "medusa"}))
    elif name == "parallel":
        size = json.loads((target / "config.json").read_text())["vocab_size"]
        return str(tiny_model("llama", folder, vocab_size=size, pard_token=5))
    elif name == "other tokens":
        return str(tiny_model("llama", folder))
    elif name == "foreign":
        shutil.copytree(resolve_model("demo", "draft"), folder / name)
        about = {key: {"name": "another", "fingerprint": "0" * 64} for key in ("target", "tokenizer")}
        (folder / name / "gammaray.json").write_text(json.dumps({"format": 1, **about}))
    else:
        return name
    return str(folder / name)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "not finite"),
        ({"target": "/nonexistent"}, "target: got '/nonexistent', which does not exist"),
    ],
    ids=str,
)
async def test_draft_worker(damaged, settings, words):
    with pytest.raises(GammarayError, match=words):
        await DraftWorker(DraftSettings(model=str(damaged), **settings)).start()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "/nonexistent/model"], "model: got '/nonexistent/model', which does not exist"),
        (["--head", "./nonexistent"], "head: got './nonexistent', which does not exist"),
        (["--lora", "x=/nonexistent"], "lora: got x=/nonexistent, .*the directory does not exist"),
        (["--listen", "0.0.0.0:0", "--redis-url", REDIS], "listen: got 0.0.0.0:0"),
    ],
    ids=str,
)
def test_processes_refuse_before_they_import_a_worker(capsys, argv, words):
    assert run("worker", TargetSettings, "no.such.module:Worker", argv) == EXIT_BAD_SETTINGS
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(words, line), line
