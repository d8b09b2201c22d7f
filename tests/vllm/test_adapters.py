"""LoRA adapters of a target on vLLM: the tokens are those of a model with the adapter merged into it."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from gammaray.errors import InvalidArgumentError
from gammaray.types import SamplingParams
from services.engine.loader import load_engine
from services.own.target_scheduler import TargetScheduler
from services.process.adapters import RANKS, adapter_sha256, max_rank
from tests.support.adapter_helpers import make_adapter
from tests.support.vllm_helpers import Session, answers, ask, end, generate
from tests.vllm.conftest import LIMITS, start_vllm

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def adapters(llama, tmp_path_factory) -> dict[str, Path]:
    """Two adapters, and beside each the model that it is merged into."""
    folder = tmp_path_factory.mktemp("adapters")
    found = {}
    for seed, name in enumerate(("sql", "legal")):
        added = make_adapter(folder / name, llama, seed)
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
    """The scheduler with both adapters."""
    scheduler = start_vllm(llama, adapters={name: str(path) for name, path in adapters.items()})
    yield scheduler
    scheduler.close()


@pytest.fixture(scope="module")
def merged(llama, adapters) -> dict[str, TargetScheduler]:
    """The CPU engine with the base and with each merged model."""
    paths = {"": llama, **{name: path.with_name(f"{name}-merged") for name, path in adapters.items()}}
    return {name: TargetScheduler(load_engine(str(path)), LIMITS) for name, path in paths.items()}


def sessions(adapter, temperature=1.0, salt=None):
    rng = random.Random(5)
    return [
        Session(
            [rng.randrange(4, 97) for _ in range(5 + 20 * at)],
            SamplingParams(seed=at, temperature=temperature),
            salt=salt,
            adapter=adapter,
        )
        for at in range(2)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_adapters_and_base_in_one_batch_give_the_tokens_of_the_merged_models(served, merged, temperature):
    kinds = ("", "sql", "legal")
    wanted = {kind: generate(merged[kind], sessions("", temperature), NUM_TOKENS) for kind in kinds}
    assert len({str(outputs) for outputs in wanted.values()}) == len(kinds)
    rng = random.Random(0)

    def guess(session):
        known = wanted[session.adapter][session.params.seed]
        rest = known[len(session.output) : len(session.output) + rng.randrange(6)]
        return [token if rng.random() < 0.8 else rng.randrange(4, 97) for token in rest]

    for propose in (lambda session: [], guess):
        batch = [session for kind in kinds for session in sessions(kind, temperature)]
        outputs = generate(served, batch, NUM_TOKENS, propose)
        assert outputs == [output for kind in kinds for output in wanted[kind]]


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


def test_a_directory_that_is_no_adapter_of_the_target_ends_the_start_with_its_reason(llama, tmp_path):
    with pytest.raises(
        InvalidArgumentError, match=r"lora: got sql=.*none, allowed: a LoRA adapter .*cannot be read"
    ):
        max_rank({"sql": str(tmp_path / "none")})
    wide = tmp_path / "wide"
    make_adapter(wide, llama, 0)
    config = json.loads((wide / "adapter_config.json").read_text())
    (wide / "adapter_config.json").write_text(json.dumps({**config, "r": RANKS[-1] + 1}))
    with pytest.raises(InvalidArgumentError, match=r"lora: got wide=.* its rank 513, at most 512"):
        max_rank({"wide": str(wide)})
    (wide / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "IA3"}))
    with pytest.raises(InvalidArgumentError, match="its kind is IA3"):
        max_rank({"wide": str(wide)})


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


def test_the_fingerprint_of_an_adapter_is_that_of_its_files(adapters):
    one, other = (adapter_sha256(str(path)) for path in adapters.values())
    assert one != other
    assert adapter_sha256(str(adapters["sql"])) == one
