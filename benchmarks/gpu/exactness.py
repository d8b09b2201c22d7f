"""Are completions with the plug-in and a drafter the plain ones, in both types and in both model runners?"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from gammaray_vllm import RUNNER_VARIABLE

from benchmarks import vllm_plugin
from benchmarks.cluster import ClusterError

TEMPERATURES = (0.0, 0.7, 1.0)
CLOSE = {"bfloat16": 0.25, "float32": 1e-3}
"""Scores closer than this are a tie: of logits of 16 to 32, two neighbours in bfloat16 differ by 0.125."""


def settings(given: argparse.Namespace, **others: Any) -> argparse.Namespace:
    """Return the options of `benchmarks.vllm_plugin`."""
    models = {"target": given.target_path, "draft": given.draft_path, "head": given.head}
    load = {"workload": given.workload, "prompts": given.prompts, "prompt_tokens": 256, "concurrency": 8}
    lengths = {"tokens": min(given.tokens, 64), "counts": [given.gamma], "temperatures": TEMPERATURES}
    fixed = {"standard": False, "memory_share": given.memory_share}
    return argparse.Namespace(**models, **load, **lengths, **fixed, **others)


async def run(given: argparse.Namespace, found: dict[str, Any]) -> None:
    """Compare; `found` gets `rows`; a row of what could not run has an `error`."""
    found["rows"] = []
    dtypes = ("float32",) if given.tiny else ("bfloat16", "float32")
    for dtype, runner in product(dtypes, given.runners):
        os.environ[RUNNER_VARIABLE] = str(int(runner == "V2"))
        print(f"{runner}, {dtype}:", flush=True)
        rows: list[dict[str, Any]] = []
        try:
            with tempfile.TemporaryDirectory() as folder:
                options = settings(given, dtype=dtype, tie=CLOSE[dtype])
                await vllm_plugin.run(options, Path(folder), rows)
        except ClusterError as error:
            print(f"not measured: {error}", flush=True)
            rows.append({"method": "plain", "error": str(error)})
        finally:
            found["rows"] += [{"runner": runner, "dtype": dtype, **row} for row in rows]


def summary(found: dict[str, Any]) -> Iterator[str]:
    """Yield lines of the table at the end."""
    for row in found["rows"]:
        if "error" in row:
            last = row["error"].strip().splitlines()[-1]
            yield f"{row['runner']}, {row['dtype']}, {row['method']}: failed: {last}"
    good = [row for row in found["rows"] if "error" not in row]
    for key in dict.fromkeys((row["runner"], row["dtype"], row["method"]) for row in good):
        rows = [row for row in good if (row["runner"], row["dtype"], row["method"]) == key]
        equal, ties, different = (sum(row[name] for row in rows) for name in ("equal", "ties", "different"))
        accepted = ", ".join(f"{row['accepted']:.2f}" for row in rows)
        yield f"{', '.join(key)}: {equal} equal, {ties} ties, {different} different; accepted {accepted}"
