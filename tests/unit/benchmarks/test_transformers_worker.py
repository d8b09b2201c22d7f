"""The peers from transformers: prompts as text or token ids, and when their tokens came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.transformers_worker import Worker
from services.demo_pair import DRAFT_DIR, TARGET_DIR

PROMPT = "for i in range(10):\n    print(i)\nfor i in range(10):\n    print("


@pytest.fixture(scope="module")
def worker() -> Worker:
    return Worker(str(TARGET_DIR), str(DRAFT_DIR), 1)


def request(system: str, prompt: str | list[int] = PROMPT, **changes: Any) -> dict[str, Any]:
    given = {
        "max_tokens": 24,
        "temperature": 0.0,
        "seed": 0,
        "ignore_eos": True,
        "with_gaps": False,
    }
    return {**given, "system": system, "prompt": prompt, **changes}


@pytest.mark.parametrize("system", ["lookup-8", "assisted-4"])
def test_speculation_delivers_generates_tokens_in_fewer_chunks(worker: Worker, system: str) -> None:
    plain, faster = worker.generate(request("generate")), worker.generate(request(system))
    assert faster["token_ids"] == plain["token_ids"]
    assert [count for _, count in plain["arrivals"]] == [1] * 24
    assert sum(count for _, count in faster["arrivals"]) == 24
    assert len(faster["arrivals"]) < 24
    for made in (plain, faster):
        times = [at for at, _ in made["arrivals"]]
        assert times[0] > 0
        assert times == sorted(times)
        assert times[-1] <= made["seconds"]


def test_token_ids_are_continued_like_their_text(worker: Worker) -> None:
    token_ids = worker.tokenizer(PROMPT).input_ids
    as_ids, as_text = worker.generate(request("generate", token_ids)), worker.generate(request("generate"))
    assert as_ids["token_ids"] == as_text["token_ids"]


def test_gaps_are_between_the_two_largest_logits_of_each_token(worker: Worker) -> None:
    made = worker.generate(request("generate", with_gaps=True))
    assert made["token_ids"] == worker.generate(request("generate"))["token_ids"]
    gaps = made["gaps"]
    assert len(gaps["gaps"]) == len(gaps["runners_up"]) == len(made["token_ids"])
    # An independent forward over prompt and completion.
    ids = torch.tensor([[*worker.tokenizer(PROMPT).input_ids, *made["token_ids"]]])
    model = AutoModelForCausalLM.from_pretrained(TARGET_DIR, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(ids).logits[0, -len(made["token_ids"]) - 1 : -1]
    told = zip(made["token_ids"], gaps["runners_up"], gaps["gaps"], strict=True)
    for row, (token, second, gap) in zip(logits, told, strict=True):
        assert row.argmax() == token
        assert row.topk(2).indices.tolist() == [token, second]
        assert float(row[token] - row[second]) == pytest.approx(gap, abs=2 * gaps["noise"] + 1e-6)
    assert 0 < gaps["noise"] < 1e-3
