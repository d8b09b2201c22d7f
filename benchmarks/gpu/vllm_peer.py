"""vLLM on a checkpoint, in a process of its own: tokens per second by batch, plain or with a draft model.

    python -m benchmarks.gpu.vllm_peer --model TARGET --draft DRAFT --gamma 5 --batches 1,8,32

Prints one JSON object per batch. Needs vLLM (0.25 or newer for `--draft`) in the same environment, which
gammaray does not install. `benchmarks.gpu.run` calls it with the weights of its controlled pair.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.pair import random_tokens

__all__ = ["main"]

_SEED = 17


def main(argv: Sequence[str] | None = None) -> int:
    """Load the checkpoint with vLLM, decode, print."""
    options = _parser().parse_args(argv)
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        print(f"vLLM is not installed: {error}", file=sys.stderr)
        return 2
    speculative = (
        {"method": "draft_model", "model": options.draft, "num_speculative_tokens": options.gamma}
        if options.draft
        else None
    )
    model = LLM(
        model=options.model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=options.prompt + options.tokens + 64,
        gpu_memory_utilization=options.memory,
        enable_prefix_caching=False,
        seed=_SEED,
        speculative_config=speculative,
    )

    def seconds(batch: int, num_tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": random_tokens(options.prompt, index, options.vocab)}
            for index in range(batch)
        ]
        sampling = SamplingParams(
            temperature=1.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, seed=_SEED
        )
        began = time.perf_counter()
        found = model.generate(prompts, sampling, use_tqdm=False)
        took = time.perf_counter() - began
        counts = {len(one.outputs[0].token_ids) for one in found}
        if counts != {num_tokens}:
            raise RuntimeError(f"vLLM returned {sorted(counts)} tokens, asked for {num_tokens}")
        return took

    name = f"vllm-draft-{options.gamma}" if options.draft else "vllm"
    for batch in map(int, options.batches.split(",")):
        seconds(batch, options.tokens)
        # The prompt's share is that of a run which ends after the first token.
        runs = [
            batch * (options.tokens - 1) / (seconds(batch, options.tokens) - seconds(batch, 1))
            for _ in range(3)
        ]
        row: dict[str, Any] = {
            "peer": name,
            "batch": batch,
            "tokens_per_s": statistics.median(runs),
            "runs": runs,
        }
        print(json.dumps(row), flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.vllm_peer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="directory of the target")
    parser.add_argument("--draft", default="", help="directory of a draft model; default: plain decoding")
    parser.add_argument("--gamma", type=int, default=5, help="tokens per proposal (default %(default)s)")
    parser.add_argument("--batches", default="1,8,32", help="sessions at a time (default %(default)s)")
    parser.add_argument("--vocab", type=int, default=32_000, help="token ids (default %(default)s)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens decoded (default %(default)s)")
    parser.add_argument("--memory", type=float, default=0.3, help="share of the card's memory")
    return parser


if __name__ == "__main__":
    sys.exit(main())
