"""What a user would run instead: transformers' own plain and assisted generation, one stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.pair import Pair, random_tokens

__all__ = ["peers"]

_GAMMA = 5


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
        yield {"peer": name, "tokens_per_s": max(rates[1:] or rates), "runs": rates}
