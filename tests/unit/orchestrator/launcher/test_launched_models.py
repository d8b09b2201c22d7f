"""What the launcher checks and says about models: vocabularies, and targets without a draft model."""

import json
from pathlib import Path

import pytest

from gammaray.config import ClusterSettings, PoolSize
from gammaray.demo_pair import resolve_model
from gammaray.errors import InvalidArgumentError
from orchestrator.launcher.options import parse_options
from orchestrator.launcher.preflight import check_drafting_head, check_models, check_workers, drafting_notes


def test_gguf_file_is_refused_by_its_setting_with_the_command_that_converts_it(tmp_path):
    (tmp_path / "folder.gguf").mkdir()
    assert resolve_model(str(tmp_path / "folder.gguf")) == str(tmp_path / "folder.gguf")
    for target, draft, field in (("Model.GGUF", "demo", "target"), ("demo", "m.gguf", "draft")):
        with pytest.raises(InvalidArgumentError, match=r"services\.engine\.convert FILE\.gguf DIR") as caught:
            check_models(target, draft)
        assert caught.value.field == field


def test_target_without_a_draft_has_no_draft_workers_and_a_note(monkeypatch):
    own = [("--target x", 0), ("--target x --draft y", 1), ("--target x --draft-workers 2", 2)]
    for line, count in (*own, ("--target demo", 1), ("", 1)):
        assert parse_options(line.split()).cluster.draft_workers == PoolSize(count), line
    monkeypatch.setenv("GAMMARAY_TARGET", "x")
    assert parse_options([]).cluster.draft_workers == PoolSize(0)
    monkeypatch.setenv("GAMMARAY_DRAFT", "y")
    assert parse_options([]).cluster.draft_workers == PoolSize(1)
    monkeypatch.delenv("GAMMARAY_DRAFT")
    (note,) = drafting_notes(ClusterSettings(target="x"))
    assert "look-ups in the text" in note


def test_head_replaces_draft_workers_and_must_exist(tmp_path):
    settings = ClusterSettings(head="some/head")
    assert settings.draft_workers.maximum == 0
    assert drafting_notes(settings) == ["the head some/head drafts in the target workers"]
    with pytest.raises(InvalidArgumentError, match="head: got some/head, allowed: none with draft workers"):
        ClusterSettings(head="some/head", draft="demo", draft_workers="1")
    check_drafting_head("")
    check_drafting_head("a/name-on-the-hub")
    with pytest.raises(InvalidArgumentError, match=r"head: got .*absent"):
        check_drafting_head(str(tmp_path / "absent"))


ORDINARY, OWN = "an ordinary draft model", "one of demo's vocabulary"


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        *(("early-exit:2", ORDINARY), ({"draft_vocab_size": 50}, ORDINARY), ({"pard_token": 5}, ORDINARY)),
        ({"vocab_size": 96}, OWN),
    ],
    ids=str,
)
def test_drafts_that_vllm_does_not_serve_are_refused_before_the_cluster_starts(tmp_path, draft, words):
    if isinstance(draft, dict):
        stored = json.loads((Path(resolve_model("demo", "draft")) / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**stored, **draft}))
        draft = str(tmp_path)
    with pytest.raises(InvalidArgumentError, match=f"draft: got .*{words} with the engine vllm"):
        check_models("demo", draft, "vllm")
    check_models("demo", draft)


def test_directories_that_do_not_exist_are_named_as_such(tmp_path):
    missing = str(tmp_path / "missing")
    for field, target, draft in (("target", missing, "demo"), ("draft", "demo", missing)):
        with pytest.raises(InvalidArgumentError, match=f"{field}: got '{missing}', which does not exist"):
            check_models(target, draft)
    with pytest.raises(InvalidArgumentError, match=f"lora: got x={missing}, .*does not exist"):
        check_workers(ClusterSettings(lora=f"x={missing}"))
