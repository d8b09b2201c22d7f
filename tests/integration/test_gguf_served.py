"""A GGUF file served without a draft model: its chat template, its tokens, look-ups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gammaray.gguf import pretrained_arguments
from tests.support.gguf_helpers import END, tiny_gguf
from tests.support.http_helpers import call
from tests.support.workers.service_helpers import running, worker_process

pytestmark = [pytest.mark.integration, pytest.mark.slow]

MESSAGES = [{"role": "user", "content": "the inn then the inn"}]
NUM_TOKENS = 40


def expected(path: Path) -> list[int]:
    """Return the greedy answer of transformers, with the weights and the tokenizer that it reads itself."""
    with pretrained_arguments(str(path)) as (source, arguments):
        model = AutoModelForCausalLM.from_pretrained(source, **arguments, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source, **arguments)
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_tensors="pt")
    out = model.generate(
        prompt["input_ids"], do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=END, pad_token_id=0
    )
    answer: list[int] = out[0, prompt["input_ids"].shape[1] :].tolist()
    return answer


async def test_chat_with_a_file_is_that_of_transformers(redis_server, tmp_path: Path) -> None:
    path, _ = tiny_gguf("llama", tmp_path, quantised="Q8_0")
    body = {"model": path.stem, "messages": MESSAGES, "temperature": 0, "max_tokens": NUM_TOKENS}
    with worker_process("target", str(path)) as (_, target):
        async with running(redis_server, target, "", model=str(path)) as orchestrator:
            answer = await call(orchestrator, path="/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()["gammaray"]
    assert found["token_ids"] == expected(path)
    assert found["cycles_by_drafter"]["model"] == 0
