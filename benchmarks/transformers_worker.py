"""The peers from `transformers`, served over stdin and stdout to `benchmarks.baselines`; one JSON per line.

A separate process, so that its arithmetic has its own threads and shares none with the benchmark.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.generation import BaseStreamer
from transformers.utils import logging


class Worker:
    """Holds target and, unless its name is empty, draft in float32 and generates with each of the peers.

    Attributes:
        tokenizer: That of the target.
    """

    def __init__(self, target: str, draft: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.tokenizer = AutoTokenizer.from_pretrained(target)
        self._target = _load(target)
        self._draft = _load(draft) if draft else None

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return one completion and its times; `request` is made by `Baselines.generate`."""
        prompt = request["prompt"]
        token_ids = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        ids = torch.tensor([token_ids])
        options: dict[str, Any] = {"max_new_tokens": request["max_tokens"], "do_sample": False}
        if request["temperature"] > 0:
            torch.manual_seed(request["seed"])
            options |= {"do_sample": True, "temperature": request["temperature"], "top_k": 0, "top_p": 1.0}
        # Without an end-of-sequence token `generate` goes on to max_new_tokens.
        eos = None if request["ignore_eos"] else self.tokenizer.eos_token_id
        for model in filter(None, (self._target, self._draft)):
            model.generation_config.eos_token_id = eos
        options |= self._peer(request["system"]) | {"return_dict_in_generate": True}
        options["output_logits"] = request["with_gaps"]
        stream = _Stream()
        out = self._target.generate(ids, attention_mask=torch.ones_like(ids), streamer=stream, **options)
        seconds = time.perf_counter() - stream.started
        tokens = out.sequences
        return {
            "token_ids": tokens[0, ids.size(1) :].tolist(),
            "seconds": seconds,
            "arrivals": stream.arrivals,
            "gaps": self._gaps(tokens, torch.cat(out.logits)) if request["with_gaps"] else None,
        }

    @torch.inference_mode()
    def _gaps(self, tokens: Tensor, logits: Tensor) -> dict[str, Any]:
        """Return how far the second largest logit of each new token was below the largest.

        `noise` is the largest difference to the same gaps, computed by one forward over all tokens.

        Args:
            tokens: Prompt and completion.
            logits: Those by which `generate` chose each new token.
        """
        whole = self._target(tokens[:, :-1]).logits[0, -logits.size(0) :]
        values, first_two = logits.topk(2)
        gaps = values[:, 0] - values[:, 1]
        again = whole.gather(1, first_two)
        return {
            "gaps": gaps.tolist(),
            "runners_up": first_two[:, 1].tolist(),
            "noise": float((again[:, 0] - again[:, 1] - gaps).abs().max()),
        }

    def _peer(self, system: str) -> dict[str, Any]:
        kind, _, gamma = system.partition("-")
        if kind == "generate":
            return {}
        if kind == "lookup":
            return {"prompt_lookup_num_tokens": int(gamma)}
        if kind == "assisted" and self._draft is not None:
            config = self._draft.generation_config
            config.num_assistant_tokens = int(gamma)
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0
            return {"assistant_model": self._draft}
        raise ValueError(f"system: got {system!r}, allowed: generate, lookup-N, with a draft assisted-N")


class _Stream(BaseStreamer):
    """Records when `generate` passes on tokens; it first passes on the prompt."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.arrivals: list[tuple[float, int]] = []
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        if not self._is_prompt:
            self.arrivals.append((time.perf_counter() - self.started, value.numel()))
        self._is_prompt = False

    def end(self) -> None:
        pass


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
