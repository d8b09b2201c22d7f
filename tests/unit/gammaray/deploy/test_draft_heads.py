"""A head is recognised by its files, and refused as the draft of draft workers."""

import asyncio
import json
import struct

import pytest

from gammaray.config import DraftSettings
from gammaray.deploy.heads import check_no_head, head_kind
from gammaray.errors import InvalidArgumentError
from orchestrator.launcher.preflight import check_models
from services.draft_worker.worker import DraftWorker
from services.heads.loading import names_head
from tests.support.engine_helpers import tiny_model
from tests.support.head_helpers import DATA, VARIANTS, as_official, bigram_head, bigram_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    target = bigram_target(folder / "target")
    heads = [*(DATA / variant for variant in VARIANTS), as_official(folder / "official")]
    return target, [*heads, bigram_head(folder / "exact", target)]


def test_heads_are_told_from_models_as_the_workers_do(folders, tmp_path):
    target, heads = folders
    for name in (*heads, target, tiny_model("llama", tmp_path)):
        assert (head_kind(str(name)) == "eagle3") == names_head(str(name)) == (name in heads)


def test_names_and_damaged_files_are_no_heads(tmp_path):
    for name in (
        "demo",
        "early-exit:3",
        "nobody/nothing",
        "a/b/c",
        "./absent",
        "/absent",
        "",
    ):
        assert head_kind(name) == ""
    for content in (b"", b"\xff" * 8, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b"{"):
        (tmp_path / "model.safetensors").write_bytes(content)
        for config in ("[]", "{", json.dumps({"architectures": 3})):
            (tmp_path / "config.json").write_text(config)
            assert head_kind(str(tmp_path)) == ""


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "eagle3"),
        ({"model_type": "eagle"}, "eagle"),
        ({"speculators_model_type": "dflash"}, "dflash"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, "dflash"),
        ({"model_type": "medusa"}, "medusa"),
        ({"medusa_num_heads": 3}, "medusa"),
    ],
)
def test_a_head_as_the_draft_is_refused_and_told_where_it_belongs(config, kind, folders, tmp_path):
    target, _ = folders
    (tmp_path / "config.json").write_text(json.dumps(config))
    reason = rf"got .*\(a head: {kind}\).*, allowed: a draft model; .* --head"
    with pytest.raises(InvalidArgumentError, match=f"draft: {reason}"):
        check_models(str(target), str(tmp_path))
    worker = DraftWorker(DraftSettings(model=str(tmp_path), target=str(target)))
    with pytest.raises(InvalidArgumentError, match=f"model: {reason}"):
        asyncio.run(worker.start())


def test_other_drafts_are_not_refused(folders):
    target, _ = folders
    for name in (str(target), "demo", "early-exit:3", "./absent"):
        check_no_head("draft", name)
