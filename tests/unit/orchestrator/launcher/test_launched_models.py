"""What the launcher checks and says about models: GGUF files, and targets without a draft model."""

from __future__ import annotations

from pathlib import Path

import pytest

import gammaray
from gammaray.config import ClusterSettings, PoolSize
from gammaray.errors import InvalidArgumentError
from orchestrator.launcher.notes import model_notes
from orchestrator.launcher.options import parse_options
from orchestrator.launcher.preflight import (
    check_drafting_head,
    check_models,
    vocab_size,
)
from tests.support.gguf_helpers import VOCAB_SIZE, tiny_gguf

ROOT = Path(gammaray.__file__).parents[1]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path, _ = tiny_gguf("llama", tmp_path_factory.mktemp("gguf"), quantised="Q8_0")
    return path


def edited(file, folder, change):
    path = folder / "edited.gguf"
    path.write_bytes(change(file.read_bytes()))
    return str(path)


BROKEN = {
    "truncated": lambda data: data[:-1],
    "unknown architecture": lambda data: data.replace(b"llama", b"lhama"),
}
"""`tests/unit/gammaray/test_gguf.py` has other damage."""


def test_vocabulary_is_that_of_the_file(file):
    assert vocab_size("target", str(file)) == VOCAB_SIZE
    assert check_models(str(file), str(file)) == []
    (note,) = check_models(str(file), "demo")
    assert f"the target {VOCAB_SIZE}" in note


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_is_refused_by_its_setting(name, file, tmp_path):
    with pytest.raises(InvalidArgumentError) as caught:
        vocab_size("draft", edited(file, tmp_path, BROKEN[name]))
    assert caught.value.field == "draft"


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
    (note,) = model_notes(ClusterSettings(target="x"), 0)
    assert "look-ups in the text" in note


@pytest.mark.parametrize(
    ("dtype", "num_gpus", "reported"),
    [("auto", 0, "float32"), ("auto", 1, "bfloat16"), ("float16", 0, "float16")],
)
def test_notes_say_what_a_file_becomes(dtype, num_gpus, reported, file):
    settings = ClusterSettings(target=str(file), draft=str(file), dtype=dtype)
    target, draft = model_notes(settings, num_gpus)
    assert target.startswith(f"target {file}: llama")
    assert draft.startswith(f"draft {file}: llama")
    assert f"dequantised to {reported} (" in target


def test_head_replaces_draft_workers_and_must_exist(tmp_path):
    settings = ClusterSettings(head="some/head")
    assert settings.draft_workers.maximum == 0
    assert model_notes(settings, 0) == ["the head some/head drafts in the target workers"]
    with pytest.raises(InvalidArgumentError, match="head: got some/head, allowed: none with draft workers"):
        ClusterSettings(head="some/head", draft="demo", draft_workers="1")
    check_drafting_head("")
    check_drafting_head("a/name-on-the-hub")
    with pytest.raises(InvalidArgumentError, match=r"head: got .*absent"):
        check_drafting_head(str(tmp_path / "absent"))
