"""The setting `head` with vLLM: kinds of drafters, a worker that serves one, and what is refused at start."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from gammaray.config import TargetSettings
from gammaray.errors import InvalidArgumentError
from gammaray.v1 import target_service_pb2 as pb
from services.vllm.heads import drafter_config
from services.vllm.loading import load_target
from tests.support import vllm_head_helpers as heads
from tests.support.head_helpers import as_official, changed
from tests.support.medusa_helpers import random_heads, write_own, write_vllm
from tests.support.workers.workers_helpers import running, verify_block
from tests.vllm.conftest import LIMITS


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return heads.wide_bigram(tmp_path_factory.mktemp("target") / "bigram")


@pytest.fixture(scope="module")
def eagle(target, tmp_path_factory):
    """An EAGLE-1 head that predicts it exactly."""
    return heads.bigram_eagle(tmp_path_factory.mktemp("eagle") / "eagle", target)


def test_kinds_are_told_apart_by_their_files(target, eagle, tmp_path):
    """With the most tokens that each proposes."""
    weights = random_heads(target)
    sizes = {"hidden_size": 32, "vocab_size": 97}
    found = {
        "eagle": [eagle],
        "eagle3": [changed("llama", tmp_path / "a"), as_official(tmp_path / "b")],
        "medusa": [write_own(tmp_path / "c", weights), write_vllm(tmp_path / "d", weights, **sizes)],
        "dflash": [heads.complete_dflash(tmp_path / "e"), heads.as_official_dflash(tmp_path / "f")],
        "draft_model": [target],
    }
    most = {"medusa": 3, "dflash": 4}
    for method, folders in found.items():
        for folder in folders:
            wanted = {"method": method, "model": str(folder), "num_speculative_tokens": most.get(method, 8)}
            assert drafter_config(str(folder)) == wanted
    assert drafter_config("mtp") == {"method": "mtp", "num_speculative_tokens": 8}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", ["config.json that can be read"]),
        ("[]", ["config.json that is an object"]),
        ('{"pard_token": 3}', ["parallel draft model", "draft workers"]),
        ('{"speculators_model_type": "dspark"}', ["kind dspark", "eagle, eagle3"]),
        ('{"speculators_model_type": "dflash", "sample_from_anchor": true}', ["sample_from_anchor"]),
    ],
)
def test_other_kinds_are_refused(tmp_path, config, words):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(InvalidArgumentError) as caught:
        drafter_config(str(tmp_path))
    assert all(word in str(caught.value) for word in ["head", *words]), caught.value


async def test_a_worker_names_its_head_and_verifies_what_it_drafts(target, eagle):
    options = {"engine": "vllm", "head": str(eagle), "cache_budget_mb": 8, "max_batch_tokens": 256}
    async with running("target", target, **options) as (link, _):
        assert (await link.info()).head == str(eagle)
        tokens = [5, 6, 7]
        for length in (0, 4, 4):
            result = await link.ask(verify_block(tokens, head=pb.HeadDraft(gamma=4)))
            drafted, accepted = list(result.drafted.token_ids), len(result.verdict.accepted_path)
            assert (len(drafted), accepted) == (length, length)
            tokens += [*drafted, result.verdict.next_token_id]


def refusal(target: Path, **settings: object) -> InvalidArgumentError:
    given = {"model": str(target), "engine": "vllm", "device": "cpu", "cache_budget_mb": 8, **settings}
    with pytest.raises(InvalidArgumentError) as caught:
        load_target(str(target), TargetSettings(**given), LIMITS)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_head_of_another_target_is_refused(target, eagle, tmp_path):
    """By the fingerprint that `gammaray train` stores."""
    shutil.copytree(eagle, tmp_path / "eagle")
    about = {name: {"name": "another", "fingerprint": "0" * 64} for name in ("target", "tokenizer")}
    (tmp_path / "eagle" / "gammaray.json").write_text(json.dumps({"format": 1, **about}))
    assert "it was trained for another" in str(refusal(target, head=str(tmp_path / "eagle")))


def test_a_draft_model_with_other_tokens_is_refused(target, tmp_path):
    shutil.copytree(target, tmp_path / "draft")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "draft")
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path / "draft")
    assert "a drafter with the vocabulary of" in str(refusal(target, head=str(tmp_path / "draft")))


def test_a_head_that_does_not_fit_is_refused_with_its_name(target, tmp_path):
    """A tensor with another shape than the target's width demands, and layers that a target does not have."""
    head = heads.eagle3(tmp_path / "narrow", target)
    config = json.loads((head / "config.json").read_text())
    config["transformer_layer_config"]["hidden_size"] = 64
    (head / "config.json").write_text(json.dumps(config))
    for name in (str(head), "mtp"):
        error = refusal(target, head=name)
        assert (error.field, "that vLLM 0.32 loads with the model" in error.allowed) == ("head", True), error
