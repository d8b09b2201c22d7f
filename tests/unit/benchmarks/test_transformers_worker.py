"""The peers from transformers: prompts as text or token ids, and when their tokens came."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.transformers_worker import Worker
from services.demo_pair import DRAFT_DIR, TARGET_DIR

PROMPT = "for i in range(10):\n    print(i)\nfor i in range(10):\n    print("


@pytest.fixture(scope="module")
def worker() -> Worker:
    return Worker(str(TARGET_DIR), str(DRAFT_DIR), 1)


def request(system: str, prompt: str | list[int] = PROMPT, **changes: Any) -> dict[str, Any]:
    """A request as of `Baselines.generate`."""
    given = {"number": 1, "max_tokens": 24, "temperature": 0.0, "seed": 0, "ignore_eos": True}
    return {**given, "system": system, "prompt": prompt, **changes}


@pytest.mark.parametrize("system", ["lookup-8", "assisted-4"])
def test_speculation_delivers_generates_tokens_in_fewer_chunks(worker: Worker, system: str) -> None:
    plain, faster = worker.generate(request("generate")), worker.generate(request(system))
    assert faster["token_ids"] == plain["token_ids"]
    assert [count for _, count in plain["arrivals"]] == [1] * 24
    assert sum(count for _, count in faster["arrivals"]) == 24
    assert len(faster["arrivals"]) < 24


@pytest.mark.parametrize("system", ["generate", "lookup-8"])
def test_arrivals_are_in_order_and_end_with_the_completion(worker: Worker, system: str) -> None:
    made = worker.generate(request(system))
    times = [at for at, _ in made["arrivals"]]
    assert times[0] > 0
    assert times == sorted(times)
    assert times[-1] <= made["seconds"]


def test_token_ids_are_continued_like_their_text(worker: Worker) -> None:
    token_ids = worker.tokenizer(PROMPT).input_ids
    as_ids, as_text = worker.generate(request("generate", token_ids)), worker.generate(request("generate"))
    assert as_ids["token_ids"] == as_text["token_ids"]


def test_assisted_without_a_draft_raises() -> None:
    with pytest.raises(ValueError, match="with a draft assisted-N"):
        Worker(str(TARGET_DIR), "", 1).generate(request("assisted-4"))
