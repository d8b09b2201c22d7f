"""Settings, models, tokenizers and heads that rule a worker out are refused before weights are read."""

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gammaray.config import DraftSettings, TargetSettings
from gammaray.demo_pair import resolve_model
from gammaray.errors import GammarayError, InvalidArgumentError
from services.draft_worker.worker import DraftWorker
from services.engine.core.errors import UnsupportedModelError
from services.heads.loading import names_head
from services.own.head_loading import check_local_drafter
from services.process.addresses import check_announced
from services.process.main import EXIT_BAD_SETTINGS, run
from services.target_worker.worker import TargetWorker
from tests.support.engine_helpers import tiny_model
from tests.support.head_helpers import DATA, VARIANTS, as_official, bigram_head, bigram_target, changed
from tests.support.medusa_helpers import random_heads, write_own

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


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    target = bigram_target(folder / "target")
    heads = [*(DATA / variant for variant in VARIANTS), as_official(folder / "official")]
    return target, [*heads, bigram_head(folder / "exact", target)]


def test_heads_are_told_from_models(folders, tmp_path):
    target, heads = folders
    for name in (*heads, target, tiny_model("llama", tmp_path)):
        assert names_head(str(name)) == (name in heads)
    for name in ("demo", "early-exit:3", "absent/model", "a/b/c", "./absent", "/absent"):
        assert not names_head(name)


EAGLE, MEDUSA, DFLASH = "an EAGLE-1 or EAGLE-2 head", "a Medusa head", "a DFlash head"


@pytest.mark.parametrize(
    ("config", "served_by_vllm"),
    [
        ({"speculators_model_type": "eagle3"}, ""),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, ""),
        ({"speculators_model_type": "eagle"}, EAGLE),
        ({"model_type": "eagle"}, EAGLE),
        ({"model_type": "llama", "num_hidden_layers": 1}, EAGLE),
        ({"speculators_model_type": "dflash"}, DFLASH),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, DFLASH),
        ({"model_type": "medusa"}, MEDUSA),
        ({"medusa_num_heads": 3}, MEDUSA),
    ],
)
def test_a_head_is_refused_as_a_draft_and_by_an_engine_that_does_not_serve_it(
    config, served_by_vllm, folders, tmp_path
):
    target = str(folders[0])
    head = str(changed("llama", tmp_path, config=lambda _: config))
    draft = DraftWorker(DraftSettings(model=head, target=target))
    with pytest.raises(
        InvalidArgumentError, match=r"model: got .*, a head, allowed: a draft model; .* --head"
    ):
        asyncio.run(draft.start())
    words = (
        f"it is {served_by_vllm}, served by the engine vllm only" if served_by_vllm else "cannot be served"
    )
    with pytest.raises(UnsupportedModelError, match=words):
        check_local_drafter(TargetSettings(model=target, head=head))


def test_medusa_heads_in_files_of_their_own_are_refused(folders, tmp_path):
    """In the format of FasterDecoding/Medusa, which has no model.safetensors."""
    target = folders[0]
    settings = TargetSettings(model=str(target), head=str(write_own(tmp_path / "m", random_heads(target))))
    with pytest.raises(UnsupportedModelError, match=f"it is {MEDUSA}, served by the engine vllm only"):
        check_local_drafter(settings)


# A documentation network (RFC 5737): no host has such an address, and nothing is sent to it.
ELSEWHERE = "redis://:secret@192.0.2.1:6379/0"


@pytest.mark.parametrize(
    ("listen", "redis_url", "host"),
    [
        ("127.0.0.1:0", "redis://127.0.0.1:6379", ""),
        ("127.0.0.1:0", "redis://localhost", ""),
        ("[::1]:0", "redis://[::1]:6379", ""),
        ("127.0.0.1:0", "unix:///run/redis.sock", ""),
        ("127.0.0.1:0", "redis+sentinel://127.0.0.1:1,localhost:2/main", ""),
        ("10.77.0.3:50051", ELSEWHERE, ""),
        ("target:50051", ELSEWHERE, ""),
        ("0.0.0.0:50051", ELSEWHERE, "10.77.0.3"),  # a Ray node's address is announced
        ("127.0.0.1:0", ELSEWHERE, "127.0.0.1"),  # a Ray cluster of this machine alone
    ],
)
def test_address_that_orchestrators_can_dial_is_announced(listen, redis_url, host):
    check_announced(listen, redis_url, host)


@pytest.mark.parametrize(
    ("listen", "redis_url", "host", "words"),
    [
        ("127.0.0.1:0", ELSEWHERE, "", r"such as [0-9.]+:50051, since Redis is on 192\.0\.2\.1|dial, since"),
        ("127.0.0.1:7000", ELSEWHERE, "", "got 127.0.0.1:7000, allowed: an address of this machine"),
        ("[::1]:0", "redis://192.0.2.1", "", "since Redis is on 192.0.2.1"),
        ("localhost:0", "redis+sentinel://127.0.0.1:1,192.0.2.1:2/main", "", "since Redis is on 192.0.2.1"),
        ("127.0.0.1:0", "redis://no.such.name.invalid", "", "since Redis is on no.such.name.invalid"),
        ("0.0.0.0:0", "redis://127.0.0.1", "", "got 0.0.0.0:0, allowed: an address of this machine"),
        ("[::]:0", ELSEWHERE, "", r"got \[::\]:0, allowed: an address of this machine"),
        ("127.0.0.1:0", ELSEWHERE, "10.77.0.3", "since Redis is on 192.0.2.1"),
    ],
)
def test_address_that_others_cannot_dial_is_refused(listen, redis_url, host, words):
    with pytest.raises(InvalidArgumentError, match=f"listen: .*({words})"):
        check_announced(listen, redis_url, host)
