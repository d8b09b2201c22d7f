"""A draft that is a head makes the targets send features."""

import asyncio
import json
import struct

import pytest

from gammaray.config import ClusterSettings, DraftSettings
from gammaray.deploy.draft_heads import check_draft_head, is_draft_head
from gammaray.deploy.serve_config import role_settings, serve_document
from gammaray.errors import InvalidArgumentError
from orchestrator.launcher.notes import model_notes
from orchestrator.launcher.preflight import check_models
from services.draft.worker import DraftWorker
from services.heads.loading import names_head
from tests.support.engine_helpers import tiny_model
from tests.support.head_helpers import DATA, VARIANTS, as_official, bigram_head, bigram_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    target = bigram_target(folder / "target")
    heads = [*(DATA / variant for variant in VARIANTS), as_official(folder / "official")]
    return target, [*heads, bigram_head(folder / "first", target)]


def test_heads_are_told_from_models_as_the_workers_do(folders, tmp_path):
    target, heads = folders
    for name in (*heads, target, tiny_model("llama", tmp_path)):
        assert is_draft_head(str(name)) == names_head(str(name)) == (name in heads)


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
        assert not is_draft_head(name)
    for content in (b"", b"\xff" * 8, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b"{"):
        (tmp_path / "model.safetensors").write_bytes(content)
        for config in ("[]", "{", json.dumps({"architectures": 3})):
            (tmp_path / "config.json").write_text(config)
            assert not is_draft_head(str(tmp_path))


def test_targets_of_a_cluster_make_features_for_its_head(folders):
    target, heads = folders
    for head in heads:
        settings = ClusterSettings(target=str(target), draft=str(head))
        roles = role_settings(settings)
        assert roles["target"]["features"] == roles["draft"]["model"] == str(head)
        assert roles["draft"]["target_model"] == str(target)
        assert check_models(str(target), str(head)) == []
        (note,) = model_notes(settings, 0)
        assert "drafts on draft workers" in note
    without = ClusterSettings(target=str(target), draft=str(heads[0]), draft_workers="0")
    assert "features" not in role_settings(without)["target"]  # left to the environment


def test_draft_workers_of_a_chart_are_told_the_target(folders):
    target, heads = folders
    document = serve_document(ClusterSettings(target=str(target), draft=str(heads[-1])))
    settings = {one["name"]: one["args"]["settings"] for one in document["applications"]}
    assert settings["gammaray-draft"]["target_model"] == str(target)
    assert settings["gammaray-target"]["features"] == str(heads[-1])


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"speculators_model_type": "dflash"}, "DFlash"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, "DFlash"),
        ({"model_type": "medusa"}, "Medusa"),
        ({"medusa_num_heads": 3}, "Medusa"),
    ],
)
def test_heads_that_only_targets_run_are_refused(config, kind, folders, tmp_path):
    target, _ = folders
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgumentError, match=rf"draft: got .*{kind}.*, allowed: .*EAGLE head"):
        check_models(str(target), str(tmp_path))
    worker = DraftWorker(DraftSettings(model=str(tmp_path), target_model=str(target)))
    with pytest.raises(InvalidArgumentError, match=rf"model: got .*{kind}.*, allowed: .*EAGLE head"):
        asyncio.run(worker.start())


def test_other_drafts_are_not_refused(folders):
    target, heads = folders
    for name in (*map(str, heads), str(target), "demo", "early-exit:3", "./absent"):
        check_draft_head("draft", name)
