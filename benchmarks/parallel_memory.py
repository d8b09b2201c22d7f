"""Memory of a target model in one process, and of each rank of a tensor-parallel one.

    python -m benchmarks.parallel_memory                  # a random Llama, two ranks
    python -m benchmarks.parallel_memory --model build/models/smollm2 --ranks 3

Each variant is loaded in a new process as by a worker, in float32 with transformers' layers,
and gets one session of `--tokens` tokens. Memory is what the kernel calls anonymous (`smaps_rollup`): weights
and caches are in it, mapped files and shared libraries are not. A checkpoint in bfloat16 is converted, so
that no weight stays mapped from its file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.provenance import write_result
from gammaray.bench.tables import plain_table
from services.engine.engine import SequenceInput
from services.engine.loader import load_engine
from services.engine.tensor_parallel.engine import ParallelEngine

_CHUNK = 256
_TIMEOUT_S = 500.0
RANDOM_LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def anonymous_mib(pid: int) -> float:
    """Return the anonymous resident memory of a process."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"no anonymous memory is reported for process {pid}")


def load(model: str, num_ranks: int, num_tokens: int) -> dict[str, Any]:
    """Load a model in this process and its ranks, feed a session, and return the memory, in MiB."""
    own = psutil.Process()
    before = anonymous_mib(own.pid)
    if num_ranks > 1:
        engine = ParallelEngine.load_parallel(model, num_ranks=num_ranks, device="cpu", timeout_s=_TIMEOUT_S)
    else:
        engine = load_engine(model, device="cpu", fast_kernels=False)
    pids = [own.pid, *(child.pid for child in own.children())]
    loaded = [anonymous_mib(pid) for pid in pids]
    for start in range(0, num_tokens, _CHUNK):
        count = min(_CHUNK, num_tokens - start)
        engine.step([SequenceInput("s", start, [token % 1000 for token in range(start, start + count)], 1)])
    cache_mib = engine.stats().cache_bytes / 2**20
    engine.close()
    return {"num_ranks": num_ranks, "before_mib": before, "loaded_mib": loaded, "rank_cache_mib": cache_mib}


@contextmanager
def _random_llama() -> Iterator[str]:
    """Write a Llama with random weights in bfloat16; yields its directory."""
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        module: Any = LlamaForCausalLM(LlamaConfig(**RANDOM_LLAMA))
        module.to(torch.bfloat16).save_pretrained(directory)
        yield directory


def _in_new_process(model: str, num_ranks: int, num_tokens: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.parallel_memory", "--model", model]
    command += ["--load", str(num_ranks), "--tokens", str(num_tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(model: str, num_ranks: int, num_tokens: int) -> dict[str, Any]:
    """Return the memory of one process and of each rank, JSON-ready."""
    config = json.loads((Path(model) / "config.json").read_text())
    rows = [_in_new_process(model, ranks, num_tokens) for ranks in (1, num_ranks)]
    one, several = rows
    return {
        "model": {name: config.get(name) for name in RANDOM_LLAMA},
        "tokens": num_tokens,
        "rows": rows,
        "largest_rank_over_one": max(several["loaded_mib"]) / one["loaded_mib"][0],
        "rank_cache_over_one": several["rank_cache_mib"] / one["rank_cache_mib"],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="", help="directory of a model (default: a random Llama)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the session")
    parser.add_argument("--load", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="result file (default: in benchmarks/results)")
    options = parser.parse_args(argv)
    if options.load:
        print(json.dumps(load(options.model, options.load, options.tokens)))
        return
    if options.model:
        result = measure(options.model, options.ranks, options.tokens)
    else:
        with _random_llama() as model:
            result = measure(model, options.ranks, options.tokens)
    table = plain_table(
        "Anonymous memory per process (MiB)",
        ("ranks", "before loading", "model loaded, by rank", f"cache of {options.tokens} tokens, each rank"),
    )
    for row in result["rows"]:
        table.add_row(
            str(row["num_ranks"]),
            f"{row['before_mib']:.0f}",
            ", ".join(f"{mib:.0f}" for mib in row["loaded_mib"]),
            f"{row['rank_cache_mib']:.0f}",
        )
    Console().print(table)
    print(f"written to {write_result('parallel-memory', result, options.out)}")


if __name__ == "__main__":
    main()
