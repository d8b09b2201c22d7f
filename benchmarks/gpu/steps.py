"""The time of a forward with 1 + gamma rows per session, over that of one with one row per session.

All requests may give one token only, which prompts consist of, so that look-ups propose gamma tokens in each
step and all of them are accepted. A process measures plain decoding, another one speculation; each prints a
line of JSON per number of sessions. The time is that of vLLM's `execute_model` between two synchronisations:
inputs and forward.

    python -m benchmarks.gpu.steps MODEL_DIR DTYPE GAMMA SESSIONS,SESSIONS ...     # gamma 0: plain
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.cluster import ClusterError

STEPS = 32
_PROMPT_TOKENS = 128
_LINES = 12
_KILLED_WITHIN_S = 5.0


async def run(given: argparse.Namespace, found: dict[str, Any]) -> None:
    """Measure both; `found` gets `rows`.

    Raises:
        ClusterError: A process failed.
    """
    found["rows"] = []
    for gamma in (0, given.gamma):
        command = [sys.executable, "-m", "benchmarks.gpu.steps", given.target_path, given.dtype, str(gamma)]
        command += [",".join(map(str, given.sessions)), str(given.memory_share), str(int(given.tiny))]
        with tempfile.TemporaryFile("w+") as log:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True
            )
            try:
                assert process.stdout is not None
                async for line in process.stdout:
                    if line.startswith(b'{"sessions"'):
                        print(line.decode().rstrip(), flush=True)
                        found["rows"].append(json.loads(line))
                if await process.wait():
                    log.seek(0)
                    raise ClusterError(f"gamma {gamma}: {''.join(log.readlines()[-_LINES:])}")
            finally:
                if process.returncode is None:
                    process.kill()
                    await asyncio.wait([asyncio.ensure_future(process.wait())], timeout=_KILLED_WITHIN_S)


def summary(found: dict[str, Any]) -> Iterator[str]:
    """Yield lines of the table at the end."""
    times = {(row["sessions"], row["rows"]): row["forward_ms"] for row in found["rows"]}
    for (sessions, rows), verify in times.items():
        if rows > 1 and (plain := times.get((sessions, 1))):
            ratio = verify / plain
            yield f"{sessions} sessions: {plain:.2f} ms with 1 row, {verify:.2f} with {rows}: x {ratio:.2f}"


def timed(taken: list[tuple[int, int, float]]) -> None:
    """Let vLLM append sessions, rows of each and seconds of the forwards in which all have as many rows."""
    import torch
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    execute = WorkerWrapperBase.execute_model
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def execute_model(self: Any, scheduled: Any, *others: Any, **options: Any) -> Any:
        counts = list(scheduled.num_scheduled_tokens.values())
        wait()
        started = time.perf_counter()
        output = execute(self, scheduled, *others, **options)
        wait()
        if len(set(counts)) == 1:
            taken.append((len(counts), counts[0], time.perf_counter() - started))
        return output

    WorkerWrapperBase.execute_model = execute_model


def measure(
    model: str, dtype: str, gamma: int, sessions: list[int], memory_share: float, is_tiny: bool
) -> None:
    """Print the median time of a forward for each number of sessions."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams

    taken: list[tuple[int, int, float]] = []
    timed(taken)
    rows = 1 + gamma
    lookups = {
        "method": "ngram",
        "num_speculative_tokens": gamma,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 2,
    }
    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=_PROMPT_TOKENS + (STEPS + 2) * rows,
        max_num_seqs=max(sessions),
        gpu_memory_utilization=memory_share,
        enable_prefix_caching=False,
        enforce_eager=is_tiny,
        speculative_config=lookups if gamma else None,
    )
    token = llm.get_tokenizer().encode(" the")[-1]
    prompt = {"prompt_token_ids": [token] * _PROMPT_TOKENS}
    params = SamplingParams(
        temperature=0, max_tokens=STEPS * rows, ignore_eos=True, allowed_token_ids=[token], detokenize=False
    )
    for count in sessions:
        for _ in range(2):  # the first one compiles
            taken.clear()
            llm.generate([prompt] * count, params, use_tqdm=False)
        times = [seconds for number, size, seconds in taken if (number, size) == (count, rows)]
        if not times:
            sys.exit(f"no forward had {count} sessions with {rows} rows each")
        row = {"sessions": count, "rows": rows, "forward_ms": round(statistics.median(times) * 1e3, 4)}
        print(json.dumps({**row, "least_ms": round(min(times) * 1e3, 4), "forwards": len(times)}), flush=True)


if __name__ == "__main__":
    _, name, kind, length, numbers, share, tiny = sys.argv
    measure(name, kind, int(length), list(map(int, numbers.split(","))), float(share), bool(int(tiny)))
