"""Which drafters vLLM serves; those that it cannot serve are refused before it is loaded."""

from pathlib import Path

import pytest

from gammaray.config import DraftSettings
from gammaray.demo_pair import resolve_model
from gammaray.errors import InvalidArgumentError
from services.draft.worker import drafts_on_vllm
from services.vllm.loading import check_draft
from tests.support.engine_helpers import tiny_model

HEAD = Path(__file__).parents[4] / "benchmarks/heads/smollm2"


@pytest.fixture
def target() -> str:
    return resolve_model("demo", "target", "model")


@pytest.fixture
def draft() -> str:
    return resolve_model("demo", "draft", "model")


def test_a_draft_model_of_the_same_vocabulary_is_served(draft, target):
    check_draft(draft, target, DraftSettings())
    check_draft(draft, "", DraftSettings())


@pytest.mark.parametrize(
    ("field", "value"), [("draft_weights", "int8"), ("draft_weights", "int4"), ("deterministic", True)]
)
def test_settings_of_other_engines_are_refused(draft, field, value):
    with pytest.raises(InvalidArgumentError, match="with vLLM as the engine") as caught:
        check_draft(draft, "", DraftSettings(**{field: value}))
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["model.gguf", "early-exit:2", str(HEAD)])
def test_other_kinds_of_drafters_are_refused(target, name):
    with pytest.raises(InvalidArgumentError, match="causal model with vLLM as the engine") as caught:
        check_draft(name, target, DraftSettings())
    assert caught.value.field == "model"


@pytest.mark.parametrize("config", [{"pard_token": 5}, {"draft_vocab_size": 50}])
def test_drafters_that_need_more_than_a_causal_model_are_refused(tmp_path, config):
    with pytest.raises(InvalidArgumentError, match="causal model with vLLM as the engine"):
        check_draft(str(tiny_model("llama", tmp_path, **config)), "", DraftSettings())


def test_another_vocabulary_is_refused(tmp_path, draft, target):
    with pytest.raises(InvalidArgumentError, match="vocabulary with vLLM as the engine"):
        check_draft(str(tiny_model("llama", tmp_path)), target, DraftSettings())


@pytest.mark.parametrize(
    ("weights", "engine", "is_vllm"),
    [("auto", "auto", True), ("int8", "auto", False), ("auto", "vllm", True)],
)
def test_auto_leaves_a_drafter_that_vllm_cannot_serve_to_the_other_engines(
    monkeypatch, draft, weights, engine, is_vllm
):
    monkeypatch.setattr("services.draft.worker.uses_vllm", lambda engine, device: True)
    settings = DraftSettings(engine=engine, draft_weights=weights)
    assert drafts_on_vllm(draft, "", settings) == is_vllm
