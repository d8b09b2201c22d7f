"""LoRA adapters of a target on vLLM: the tokens are those of a model with the adapter merged into it."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gammaray.errors import InvalidArgumentError
from gammaray.types import SamplingParams
from services.engine.loader import load_engine
from services.own.target_scheduler import TargetScheduler
from services.process.adapters import RANKS, max_rank
from tests.support.adapter_helpers import make_adapter
from tests.support.vllm_helpers import Session, answers, ask, end, generate, proposer
from tests.vllm.conftest import LIMITS, start_vllm

KINDS = ("", "sql", "legal", "words")
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def adapters(llama, tmp_path_factory) -> dict[str, Path]:
    """Three adapters, one of embedding and output, too, and beside each the model that it is merged into."""
    folder = tmp_path_factory.mktemp("adapters")
    found = {}
    for seed, name in enumerate(KINDS[1:]):
        added = make_adapter(folder / name, llama, seed, has_words=name == "words")
        merged = shutil.copytree(llama, folder / f"{name}-merged")
        weights = load_file(llama / "model.safetensors")
        save_file(
            {key: weight + added.get(key, 0) for key, weight in weights.items()},
            merged / "model.safetensors",
            {"format": "pt"},
        )
        found[name] = folder / name
    return found


@pytest.fixture(scope="module")
def served(llama, adapters) -> Iterator:
    scheduler = start_vllm(llama, adapters={name: str(path) for name, path in adapters.items()})
    yield scheduler
    scheduler.close()


@pytest.fixture(scope="module")
def merged(llama, adapters) -> dict[str, TargetScheduler]:
    """The CPU engine with the base and with each merged model."""
    paths = {"": llama, **{name: path.with_name(f"{name}-merged") for name, path in adapters.items()}}
    return {name: TargetScheduler(load_engine(str(path)), LIMITS) for name, path in paths.items()}


def sessions(adapter, temperature):
    rng = random.Random(5)
    return [
        Session(
            [rng.randrange(4, 97) for _ in range(5 + 20 * at)],
            SamplingParams(seed=at, temperature=temperature),
            adapter=adapter,
        )
        for at in range(2)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_adapters_and_base_in_one_batch_give_the_tokens_of_the_merged_models(served, merged, temperature):
    wanted = {kind: generate(merged[kind], sessions("", temperature), NUM_TOKENS) for kind in KINDS}
    assert len({str(outputs) for outputs in wanted.values()}) == len(KINDS)
    for has_proposals in (False, True):
        batch = [session for kind in KINDS for session in sessions(kind, temperature)]
        expected = {one.name: wanted[one.adapter][one.params.seed] for one in batch}
        propose = proposer(expected, random.Random(0)) if has_proposals else lambda session: ()
        assert generate(served, batch, NUM_TOKENS, propose) == list(expected.values())


def test_prompts_of_one_step_are_scored_each_with_its_adapter(served, merged):
    """They have other rows than the tokens that the step draws."""
    prompts = {kind: [7 + 13 * at % 80 for at in range(9 + 4 * number)] for number, kind in enumerate(KINDS)}
    tasks = [Session(prompt, adapter=kind).block(num_prompt_logprobs=1) for kind, prompt in prompts.items()]
    for kind, reply in zip(KINDS, answers(served, tasks), strict=True):
        alone = Session(prompts[kind]).block(num_prompt_logprobs=1)
        (expected,) = answers(merged[kind], [alone])
        found, wanted = (one.outcome.prompt_logprobs.logprobs for one in (reply, expected))
        assert found == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("end", ["safetensors", "bin"])
def test_what_is_no_adapter_of_the_target_is_refused(llama, tmp_path, end):
    """With other ranks than it says its scale would be another one."""
    folder, adapter = tmp_path / "adapter", {"a": str(tmp_path / "adapter")}
    with pytest.raises(InvalidArgumentError, match=r"lora: got a=.*adapter, .* directory does not exist"):
        max_rank(adapter)
    make_adapter(folder, llama, 0, rank=8)
    if end == "bin":
        torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
        (folder / "adapter_model.safetensors").unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert max_rank(adapter) == 8
    for changes, words in (
        ({"r": 16}, r"lora_[AB]\.weight has rank 8, adapter_config\.json says 16"),
        ({"r": 4, "rank_pattern": {"up_proj": 16}}, r"has rank 8, adapter_config\.json says 4 or 16"),
        ({"rank_pattern": [4]}, "cannot be read"),
        ({"rank_pattern": {"up_proj": 513}}, "its rank 8 or 513, at most 512"),
        ({"r": RANKS[-1] + 1}, r"lora: got a=.* its rank 513, at most 512"),
        ({"peft_type": "IA3"}, "its kind is IA3"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(InvalidArgumentError, match=words):
            max_rank(adapter)
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 4, "rank_pattern": {".*": 8}}))
    assert max_rank(adapter) == 8
    weights = next(folder.glob("adapter_model.*"))
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(InvalidArgumentError, match=r"adapter_model.* cannot be read"):
        max_rank(adapter)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        max_rank(adapter)


def test_an_adapter_has_a_prefix_cache_of_its_own(served):
    prompt = [7 + at % 80 for at in range(200)]
    cached = {}
    for kind in ("sql", "sql", "legal", ""):
        session = Session(prompt, salt="one", adapter=kind)
        (reply,) = answers(served, [task := session.block()])
        session.take(task, reply)
        cached.setdefault(kind, []).append(reply.timing.cached_tokens)
        end(served, session)
    assert cached["sql"][0] == 0
    assert cached["sql"][1] >= 128
    assert cached["legal"] == cached[""] == [0]


def test_a_session_without_a_salt_leaves_nothing_of_its_adapter_in_the_cache(served):
    prompt = [5 + at % 70 for at in range(200)]
    first = Session(prompt, adapter="legal", name="again")
    ask(served, first)
    end(served, first, forgets=True)
    session = Session(prompt, adapter="legal", name="again")
    (reply,) = answers(served, [task := session.block()])
    assert reply.timing.cached_tokens == 0
    session.take(task, reply)
    end(served, session)


def test_an_adapter_of_another_model_is_refused_with_the_tensor_that_does_not_fit(llama, tmp_path):
    foreign = tmp_path / "foreign"
    make_adapter(foreign, llama, 0)
    tensors = load_file(foreign / "adapter_model.safetensors")
    renamed = {name.replace("q_proj", "query"): tensor for name, tensor in tensors.items()}
    save_file(renamed, foreign / "adapter_model.safetensors")
    with pytest.raises(InvalidArgumentError, match=f"lora: got foreign={foreign}"[:60]) as refused:
        start_vllm(llama, adapters={"foreign": str(foreign)})
    assert refused.value.allowed.startswith("a LoRA adapter of the target in PEFT's format: ")
    assert "query" in refused.value.allowed
