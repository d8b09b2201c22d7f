"""Whether vLLM's batch-invariant mode makes completions equal in any batch and with drafts, and its cost.

The same requests are completed one at a time and several at once by a plain server, and several at once by
one with look-ups; all with the plug-in, without the mode and with it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.cluster import ClusterError
from benchmarks.gpu.exactness import TEMPERATURES, settings
from benchmarks.vllm_plugin import complete, encoded, serving

VARIABLE = "VLLM_BATCH_INVARIANT"
_AT_ONCE = 8


async def run(given: argparse.Namespace, found: dict[str, Any]) -> None:
    """Measure; `found` gets `rows`.

    Raises:
        ClusterError: A server failed with the mode.
    """
    found["rows"] = []
    lookups = {
        "method": "ngram",
        "num_speculative_tokens": given.gamma,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
    options = settings(given, dtype=given.dtype)
    texts = encoded(options)
    try:
        for is_on in (False, True):
            os.environ[VARIABLE] = str(int(is_on))
            alone: dict[float, Any] = {}
            for name, drafter in (("plain", None), ("ngram", lookups)):
                async with serving(options, drafter, True) as client:
                    await complete(client, options, texts[:1], 0.0)  # look-ups compile
                    for t in TEMPERATURES:
                        if drafter is None:
                            options.concurrency = 1
                            alone[t] = await complete(client, options, texts, t)
                        options.concurrency = _AT_ONCE
                        started = time.perf_counter()
                        done = await complete(client, options, texts, t)
                        seconds = time.perf_counter() - started
                        equal = sum(
                            one.token_ids == two.token_ids for one, two in zip(alone[t], done, strict=True)
                        )
                        row = {"is_on": is_on, "drafter": name, "temperature": t, "completions": len(texts)}
                        row |= {
                            "equal_to_alone": equal,
                            "tokens_per_s": len(texts) * options.tokens / seconds,
                        }
                        print(row, flush=True)
                        found["rows"].append(row)
    except ClusterError as error:
        raise ClusterError(f"{VARIABLE}={os.environ[VARIABLE]}: {error}") from None


def summary(found: dict[str, Any]) -> Iterator[str]:
    """Yield lines of the table at the end."""
    for row in found["rows"]:
        equal = f"{row['equal_to_alone']} of {row['completions']} equal those one at a time"
        mode = "with" if row["is_on"] else "without"
        yield f"{mode}, {row['drafter']}, T {row['temperature']:g}: {equal}; {row['tokens_per_s']:.0f} tok/s"
