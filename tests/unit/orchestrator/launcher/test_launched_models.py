"""What the launcher checks and says about models: vocabularies, and targets without a draft model."""

import pytest

from gammaray.config import ClusterSettings, PoolSize
from gammaray.demo_pair import resolve_model
from gammaray.errors import InvalidArgumentError
from orchestrator.launcher.options import parse_options
from orchestrator.launcher.preflight import check_drafting_head, check_models, drafting_notes


def test_gguf_file_is_refused_by_its_setting_with_the_command_that_converts_it(tmp_path):
    (tmp_path / "folder.gguf").mkdir()
    assert resolve_model(str(tmp_path / "folder.gguf")) == str(tmp_path / "folder.gguf")
    for target, draft, field in (("Model.GGUF", "demo", "target"), ("demo", "m.gguf", "draft")):
        with pytest.raises(InvalidArgumentError, match=r"services\.engine\.convert FILE\.gguf DIR") as caught:
            check_models(target, draft)
        assert caught.value.field == field


def test_target_without_a_draft_has_no_draft_workers_and_a_note(monkeypatch):
    for line, count in (
        ("--target x", 0),
        ("--target x --draft y", 1),
        ("--target x --draft-workers 2", 2),
        ("--target demo", 1),
        ("", 1),
    ):
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
