"""How much sooner the first token comes when the beginning of a prompt is cached.

    python -m benchmarks.prefix_cache

For prompts of several lengths, cut from held-out text: a request that no cache knows (a salt of its own), and
then the next message of that conversation, whose prompt is the first one, the answer and some more text. The
latter is asked twice: where its beginning is cached, and under another salt, where it has to be read again.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from transformers import AutoTokenizer

from benchmarks.cluster import connected, run_or_exit
from benchmarks.provenance import write_result
from benchmarks.workloads import documents
from gammaray import AsyncClient
from gammaray.bench.tables import plain_table
from gammaray.errors import InternalError
from gammaray.types import Usage
from services.demo_pair import TARGET_DIR

MORE = "\n\n\ndef report(values):\n    return"
ANSWER_TOKENS = 32


async def ask(client: AsyncClient, prompt: Sequence[int], salt: str) -> tuple[float, list[int], Usage]:
    """Return the milliseconds to the first token, the answer, and the usage."""
    tokens: list[int] = []
    first = usage = None
    started = time.perf_counter()
    async for chunk in client.generate(
        prompt, max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True, cache_salt=salt
    ):
        if chunk.tokens and first is None:
            first = (time.perf_counter() - started) * 1e3
        tokens += [token.token_id for token in chunk.tokens]
        usage = chunk.usage or usage
    if first is None or usage is None:
        raise InternalError("the stream ended without tokens or usage")
    return first, tokens, usage


async def measure(lengths: Sequence[int], repetitions: int) -> dict[str, Any]:
    """Run all lengths in turn, `repetitions` times, and return the result."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR).backend_tokenizer
    text = tokenizer.encode("\n".join(document.text for document in documents() if document.is_held_out)).ids
    more = tokenizer.encode(MORE).ids
    rows: dict[int, dict[str, list[float]]] = {length: {"cached": [], "read": []} for length in lengths}
    shares: dict[int, float] = {}
    async with connected() as client:
        for repetition in range(-1, repetitions):
            for number, length in enumerate(lengths):
                begin = ((repetition + 1) * len(lengths) + number) * max(lengths)
                prompt, salt = text[begin : begin + length], secrets.token_hex(8)
                _, answer, _ = await ask(client, prompt, salt)
                turn = [*prompt, *answer, *more]
                cached, own, usage = await ask(client, turn, salt)
                read, again, none = await ask(client, turn, secrets.token_hex(8))
                if own != again or none.cached_tokens:
                    raise InternalError("a cache changed the text, or was shared between salts")
                if repetition >= 0:  # the first is a warm-up
                    rows[length]["cached"].append(cached)
                    rows[length]["read"].append(read)
                    shares[length] = usage.cached_tokens / usage.prompt_tokens
    return {"points": [_point(length, times, shares[length]) for length, times in rows.items()]}


def _point(length: int, times: dict[str, list[float]], share: float) -> dict[str, Any]:
    ratios = [cached / read for cached, read in zip(times["cached"], times["read"], strict=True)]
    return {
        "prompt_tokens": length,
        "cached_share": share,
        "first_token_ms": {name: statistics.median(values) for name, values in times.items()},
        "cached_over_read": statistics.median(ratios),
    }


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024, 1800], help="in tokens")
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    result = run_or_exit(measure(options.lengths, options.repetitions))
    table = plain_table(
        "Milliseconds to the first token of a second message",
        ("first prompt", "cached of the second", "read again (ms)", "cached (ms)", "ratio"),
    )
    for point in result["points"]:
        times = point["first_token_ms"]
        table.add_row(
            f"{point['prompt_tokens']} tokens",
            f"{point['cached_share']:.0%}",
            f"{times['read']:.1f}",
            f"{times['cached']:.1f}",
            f"{point['cached_over_read']:.2f}",
        )
    Console().print(table)
    print(f"written to {write_result('prefix-cache', result)}")


if __name__ == "__main__":
    main()
