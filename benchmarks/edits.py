"""What masks, bias and penalties cost at a large vocabulary: once per session, and in every cycle.

    python -m benchmarks.edits

CPU time of one thread, the least of many repetitions, for one row of logits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gammaray.types import SamplingParams
from services.engine.sampling.edits import LogitEdits
from services.engine.sampling.logits import edited_logits

EOS = (0,)


def cases(vocab_size: int) -> Mapping[str, tuple[dict[str, Any], int]]:
    """Return sampling parameters and the length of the prompt, by name."""
    ids = tuple(range(vocab_size))
    return {
        "logit bias of the whole vocabulary": ({"logit_bias": dict.fromkeys(ids, 1.0)}, 1),
        "logit bias of 300 tokens": ({"logit_bias": dict.fromkeys(ids[:300], 1.0)}, 1),
        "banned and allowed, the whole vocabulary": (
            {"banned_token_ids": ids[1:], "allowed_token_ids": ids},
            1,
        ),
        "banned, every second token": ({"banned_token_ids": ids[1::2]}, 1),
        "repetition penalty, 100,000 tokens of prompt": ({"repetition_penalty": 1.1}, 100_000),
        "all penalties, 1,000 tokens of prompt": (
            {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2},
            1_000,
        ),
    }


def least_cpu_ms(call: Callable[[], object], repetitions: int) -> float:
    """Return the least CPU time of a call, in milliseconds."""
    taken = []
    for _ in range(repetitions):
        began = time.process_time()
        call()
        taken.append(time.process_time() - began)
    return 1000 * min(taken)


def measure(setting: dict[str, Any], prompt_length: int, vocab_size: int) -> tuple[float, float]:
    """Return the milliseconds of the first cycle's preparation and of each later cycle."""
    params = SamplingParams(temperature=0.0, seed=1, **setting)
    tokens, logits = list(range(prompt_length)), torch.randn(1, vocab_size)

    def built() -> LogitEdits:
        edits = LogitEdits(params, EOS, prompt_length, vocab_size)
        edits.follow(tokens)
        return edits

    edits = built()

    def cycle() -> None:
        tokens.append(len(tokens) % 1000)
        edits.follow(tokens)
        edited_logits(logits, edits, [()])

    return least_cpu_ms(built, 5), least_cpu_ms(cycle, 300)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="Cost of masks, bias and penalties.")
    parser.add_argument("--vocab-size", type=int, default=151_936)
    vocab_size = parser.parse_args().vocab_size
    torch.set_num_threads(1)
    print(f"{'ms, vocabulary of ' + str(vocab_size):46} once a session  each cycle")
    for name, (setting, prompt_length) in cases(vocab_size).items():
        once, each = measure(setting, prompt_length, vocab_size)
        print(f"{name:46} {once:14.2f}  {each:10.3f}")


if __name__ == "__main__":
    main()
