"""gammaray's engine in one process: its tokens do not depend on lookups and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.baselines import running_engine
from benchmarks.engine_worker import Answer, EngineWorker
from benchmarks.systems import Peer
from gammaray.bench.systems import Ask
from services.engine.engine import Engine
from services.engine.loader import load_engine
from tests.support.engine_helpers import plain_model, random_tokens, tiny_model

TOKENS = 40


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, on which greedy text soon repeats itself: lookups find something."""
    return tiny_model("llama", tmp_path_factory.mktemp("engine"), gain=0.7)


@pytest.fixture(scope="module")
def engine(directory: Path) -> Engine:
    return load_engine(str(directory))


def request(number: int, system: str, temperature: float = 0.0, **changes: Any) -> dict[str, Any]:
    given = {
        "number": number,
        "system": system,
        "prompt": random_tokens(12 + number, number),
        "max_tokens": TOKENS,
        "temperature": temperature,
        "seed": number,
        "ignore_eos": True,
    }
    return {**given, **changes}


def answers(worker: EngineWorker, requests: list[dict[str, Any]]) -> dict[int, Answer]:
    for one in requests:
        worker.add(one, 0.0)
    found: dict[int, Answer] = {}
    while not worker.is_idle:
        found |= {answer["number"]: answer for answer in worker.step()}
    return found


@torch.no_grad()
def test_plain_greedy_tokens_are_those_of_generate(directory: Path, engine: Engine) -> None:
    model = plain_model(directory)
    model.generation_config.eos_token_id = None
    made = answers(EngineWorker(engine), [request(3, "engine")])[3]
    prompt = torch.tensor([random_tokens(15, 3)])
    expected = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS, do_sample=False
    )
    assert made["token_ids"] == expected[0, 15:].tolist()
    assert [count for _, count in made["arrivals"]] == [1] * TOKENS


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lookup_does_not_change_the_tokens(engine: Engine, temperature: float) -> None:
    for number in range(4):
        plain = answers(EngineWorker(engine), [request(number, "engine", temperature)])[number]
        found = answers(EngineWorker(engine), [request(number, "engine-lookup-8", temperature)])[number]
        assert found["token_ids"] == plain["token_ids"]
        assert sum(count for _, count in found["arrivals"]) == TOKENS
        assert len(found["arrivals"]) < TOKENS or temperature > 0
        assert engine.length(f"session-{number}") == 0


def test_batched_completions_are_those_of_single_ones(engine: Engine) -> None:
    requests = [request(number, "engine-lookup-8", 1.0) for number in range(5)]
    single = {one["number"]: answers(EngineWorker(engine), [one])[one["number"]] for one in requests}
    together = answers(EngineWorker(engine), requests)
    assert together.keys() == single.keys()
    for number, made in together.items():
        assert made["token_ids"] == single[number]["token_ids"]


def test_target_time_lies_within_the_decoding_and_leaves_out_the_prefill(engine: Engine) -> None:
    (made,) = answers(EngineWorker(engine), [request(1, "engine")]).values()
    decoding = made["arrivals"][-1][0] - made["arrivals"][0][0]
    assert 0 < made["target_s"] < decoding


@pytest.mark.parametrize("system", ["engine", "engine-lookup-8"])
def test_completion_ends_at_an_end_of_sequence_token_unless_it_ignores_it(
    engine: Engine, system: str
) -> None:
    whole = answers(EngineWorker(engine), [request(0, system)])[0]["token_ids"]
    end = whole.index(whole[5])
    worker = EngineWorker(engine, frozenset({whole[5]}))
    assert answers(worker, [request(0, system)])[0]["token_ids"] == whole
    made = answers(worker, [request(0, system, ignore_eos=False)])[0]
    assert made["token_ids"] == whole[: end + 1]
    assert sum(count for _, count in made["arrivals"]) == end + 1


@pytest.mark.slow
async def test_running_engine_serves_systems_over_its_pipe(directory: Path, engine: Engine) -> None:
    prompt = tuple(random_tokens(12, 0))
    async with running_engine(str(directory)) as process:
        plain, lookup = Peer("engine", process), Peer("engine-lookup-8", process)
        first = await plain.sample(Ask(prompt, TOKENS))
        second = await lookup.sample(Ask(prompt, TOKENS))
        with pytest.raises(RuntimeError, match="has ended"):
            await Peer("unknown", process).sample(Ask(prompt, TOKENS))
        with pytest.raises(RuntimeError, match="has ended"):
            await plain.sample(Ask(prompt, TOKENS))
    expected = answers(EngineWorker(engine), [request(0, "engine")])[0]["token_ids"]
    assert first.token_ids == second.token_ids == tuple(expected)
    assert first.target_s is not None
    assert first.arrivals[-1][0] <= first.seconds
