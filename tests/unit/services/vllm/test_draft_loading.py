"""Which drafters vLLM serves; those that it cannot serve are refused before it is loaded."""

from pathlib import Path

import pytest

from gammaray.config import DraftSettings
from gammaray.demo_pair import resolve_model
from gammaray.errors import InvalidArgumentError
from services.vllm.loading import check_draft
from tests.support.engine_helpers import tiny_model

HEAD = Path(__file__).parents[4] / "benchmarks/heads/smollm2"


@pytest.fixture
def target():
    return resolve_model("demo", "target", "model")


@pytest.fixture
def draft():
    return resolve_model("demo", "draft", "model")


def test_a_draft_model_of_the_same_vocabulary_is_served(draft, target):
    check_draft(draft, target, DraftSettings())
    check_draft(draft, "", DraftSettings())


@pytest.mark.parametrize(
    ("name", "settings", "field", "words"),
    [
        ("", {"draft_weights": "int8"}, "draft_weights", ""),
        ("", {"deterministic": True}, "deterministic", ""),
        ("early-exit:2", {}, "model", "causal model"),
        (str(HEAD), {}, "model", "causal model"),
        ({"pard_token": 5}, {}, "model", "causal model"),
        ({"draft_vocab_size": 50}, {}, "model", "causal model"),
        ({}, {}, "model", "vocabulary"),
    ],
)
def test_drafters_and_settings_of_other_engines_are_refused(
    tmp_path, draft, target, name, settings, field, words
):
    name = str(tiny_model("llama", tmp_path, **name)) if isinstance(name, dict) else name or draft
    with pytest.raises(InvalidArgumentError, match=f"^{field}: got .*{words}.* with vLLM as the engine"):
        check_draft(name, target, DraftSettings(**settings))
