"""Which drafters vLLM serves; those that it cannot serve are refused before it is loaded."""

from pathlib import Path

import pytest

from gammaray.config import DraftSettings
from gammaray.demo_pair import resolve_model
from gammaray.errors import InvalidArgumentError
from services.vllm.loading import check_draft
from tests.support.engine_helpers import tiny_model

TARGET, DRAFT = (resolve_model("demo", role, "model") for role in ("target", "draft"))
HEAD = Path(__file__).parents[4] / "benchmarks/heads/smollm2"


def test_a_draft_model_of_the_same_vocabulary_is_served():
    check_draft(DRAFT, TARGET, DraftSettings())
    check_draft(DRAFT, "", DraftSettings())


@pytest.mark.parametrize(
    ("name", "settings", "field", "words"),
    [
        (DRAFT, {"draft_weights": "int8"}, "draft_weights", ""),
        (DRAFT, {"deterministic": True}, "deterministic", ""),
        ("early-exit:2", {}, "model", "causal model"),
        (str(HEAD), {}, "model", "causal model"),
        ({"pard_token": 5}, {}, "model", "causal model"),
        ({"draft_vocab_size": 50}, {}, "model", "causal model"),
        ({}, {}, "model", "vocabulary"),
    ],
)
def test_drafters_and_settings_of_other_engines_are_refused(tmp_path, name, settings, field, words):
    name = str(tiny_model("llama", tmp_path, **name)) if isinstance(name, dict) else name
    with pytest.raises(InvalidArgumentError, match=f"^{field}: got .*{words}.* with vLLM as the engine"):
        check_draft(name, TARGET, DraftSettings(**settings))
