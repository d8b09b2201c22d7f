"""A cluster that serves a GGUF file without a draft model: its chat template, its tokens, look-ups."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gammaray.gguf import pretrained_arguments
from tests.support.cluster.cluster_helpers import running_cluster
from tests.support.gguf_helpers import END, tiny_gguf

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

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


def test_chat_with_a_file_is_that_of_transformers(tmp_path: Path) -> None:
    path, _ = tiny_gguf("llama", tmp_path, quantised="Q8_0")
    with open(tmp_path / "stderr", "w+") as log:
        with running_cluster("--target", str(path), stderr=log.fileno()) as cluster:
            with cluster.openai() as client:
                answer = client.chat.completions.create(
                    model=path.stem, messages=MESSAGES, temperature=0, max_tokens=NUM_TOKENS
                )
            roles = {process.role for process in cluster.status()}
            cluster.check_stop(signal.SIGINT)
        log.seek(0)
        notes = log.read()
    assert answer.gammaray["token_ids"] == expected(path)
    assert answer.gammaray["cycles_by_drafter"]["model"] == 0
    assert "target" in roles
    assert "draft" not in roles
    assert f"gammaray: target {path}: llama" in notes
    assert "dequantised to " in notes
    assert "gammaray: no draft workers: speculates by look-ups in the text" in notes
