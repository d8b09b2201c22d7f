"""The peers from `transformers`, served over stdin and stdout to `benchmarks.baselines`; one JSON per line.

A process of its own, so that the arithmetic has its own threads and nothing of the benchmark runs beside it.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

__all__ = ["Worker"]


class Worker:
    """Holds target and draft in float32 and generates with each of the peers."""

    def __init__(self, target: str, draft: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._tokenizer = AutoTokenizer.from_pretrained(target)
        self._target = _load(target)
        self._draft = _load(draft)

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return token ids and seconds of one completion; `request` is made by `Baselines.generate`."""
        ids = self._tokenizer(request["prompt"], return_tensors="pt").input_ids
        options: dict[str, Any] = {"max_new_tokens": request["max_tokens"], "do_sample": False}
        if request["temperature"] > 0:
            torch.manual_seed(request["seed"])
            options |= {"do_sample": True, "temperature": request["temperature"], "top_k": 0, "top_p": 1.0}
        # Without an end-of-sequence token `generate` goes on to max_new_tokens.
        eos = None if request["ignore_eos"] else self._tokenizer.eos_token_id
        for model in (self._target, self._draft):
            model.generation_config.eos_token_id = eos
        options |= self._peer(request["system"])
        started = time.perf_counter()
        out = self._target.generate(ids, attention_mask=torch.ones_like(ids), **options)
        seconds = time.perf_counter() - started
        return {"token_ids": out[0, ids.size(1) :].tolist(), "seconds": seconds}

    def _peer(self, system: str) -> dict[str, Any]:
        kind, _, gamma = system.partition("-")
        if kind == "generate":
            return {}
        if kind == "lookup":
            return {"prompt_lookup_num_tokens": int(gamma)}
        if kind == "assisted":
            config = self._draft.generation_config
            config.num_assistant_tokens = int(gamma)
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0
            return {"assistant_model": self._draft}
        raise ValueError(f"system: got {system!r}, allowed: generate, assisted-N, lookup-N")


def _load(name: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()


def main() -> None:
    """Answer requests until stdin closes; the first line written says that the models are loaded."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    target, draft, threads = sys.argv[1:]
    worker = Worker(target, draft, int(threads))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.generate(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
