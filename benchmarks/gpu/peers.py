"""What a user would run instead, on the same weights: transformers' own generation, and vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.pair import Pair, random_tokens

__all__ = ["peers", "vllm_peers", "vllm_rows"]

_GAMMA = 5
_VLLM_TIMEOUT_S = 240


def peers(
    pair: Pair, num_layers: int, num_prompt: int, num_tokens: int, expired: Callable[[], bool]
) -> Iterator[dict[str, Any]]:
    """Tokens per second of `generate` alone and with the draft as assistant, sampled at temperature 1."""
    prompt = torch.tensor(
        [random_tokens(num_prompt, 0, pair.model.shape.vocab_size)], device=pair.model.device
    )
    assistant = pair.draft_module(num_layers)
    settings = assistant.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = _GAMMA, "constant"
    settings.assistant_confidence_threshold = 0.0
    for name, extra in (("generate", {}), (f"assisted-{_GAMMA}", {"assistant_model": assistant})):
        rates = []
        for turn in range(3):
            if expired() and turn:
                break
            torch.manual_seed(turn)
            began = time.perf_counter()
            output = pair.module.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=True,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                pad_token_id=0,
                **extra,
            )
            count = output.shape[1] - num_prompt
            rates.append(count / (time.perf_counter() - began))
        # The first call warms up.
        yield {"peer": name, "batch": 1, "tokens_per_s": max(rates[1:] or rates), "runs": rates}


def vllm_peers(
    pair: Pair, num_layers: int, batches: Sequence[int], num_prompt: int, num_tokens: int
) -> Iterator[dict[str, Any]]:
    """Likewise for vLLM, plain and with the draft; nothing when it is not installed.

    Raises:
        RuntimeError: It failed.
    """
    if find_spec("vllm") is None:
        return
    with tempfile.TemporaryDirectory() as directory:
        target, draft = Path(directory) / "target", Path(directory) / "draft"
        pair.module.save_pretrained(target)
        pair.draft_module(num_layers).save_pretrained(draft)
        arguments = {
            "--model": str(target),
            "--batches": ",".join(map(str, batches)),
            "--vocab": str(pair.model.shape.vocab_size),
            "--prompt": str(num_prompt),
            "--tokens": str(num_tokens),
        }
        command = [sys.executable, "-m", "benchmarks.gpu.vllm_peer"]
        command += [part for pair_ in arguments.items() for part in pair_]
        yield from vllm_rows(command)
        yield from vllm_rows([*command, "--draft", str(draft), "--gamma", str(_GAMMA)])


def vllm_rows(command: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows that a process prints as JSON objects among other lines.

    Raises:
        RuntimeError: It failed, printed none, or took longer than four minutes.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_VLLM_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"vLLM took longer than {_VLLM_TIMEOUT_S} s") from error
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"peer"')]
    if done.returncode or not rows:
        raise RuntimeError(f"vLLM ended with {done.returncode}: {done.stderr[-500:]}")
    return rows
