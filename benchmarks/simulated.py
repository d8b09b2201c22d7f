"""A worker whose forwards take as long as another device's would: it sleeps for the rest of that time.

    python -m benchmarks.simulated draft|target FORWARD_MS ROW_MS OPTIONS...

The options are those of `python -m services.draft_worker` or `services.target_worker`. All but the time of
forwards is the product's. What sleeps leaves the processor to the others, as a GPU does.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.cluster import ClusterError, stop
from gammaray.config import DraftSettings, TargetSettings
from services.engine.core.batch import SequenceInput
from services.engine.engine import Engine
from services.process.main import run

START_S = 120.0
_ROLES = {
    "draft": (DraftSettings, "services.draft_worker.worker:DraftWorker"),
    "target": (TargetSettings, "services.target_worker.worker:TargetWorker"),
}


@asynccontextmanager
async def simulated_worker(role: str, forward_ms: float, row_ms: float, *options: str) -> AsyncIterator[str]:
    """Run a worker in a process of its own until the block ends; yield its address.

    Raises:
        ClusterError: It ended.
    """
    module = ["-m", "benchmarks.simulated", role, str(forward_ms), str(row_ms)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *module, *options, "--listen", "127.0.0.1:0"),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        if not line:
            raise ClusterError(f"the {role} worker ended")
        yield line.decode().split()[-1]
    finally:
        await stop(process)


def slow_down(forward_s: float, row_s: float) -> None:
    """Let each forward take `forward_s` and `row_s` for each of its tokens; one forward in each call."""
    step = Engine.step

    def slow(self: Engine, feeds: Sequence[SequenceInput], *options: Any) -> Any:
        ends = time.perf_counter() + forward_s + row_s * sum(len(feed.token_ids) for feed in feeds)
        logits = step(self, feeds, *options)
        time.sleep(max(0.0, ends - time.perf_counter()))
        return logits

    Engine.step = slow  # type: ignore[method-assign]
    Engine.can_chain = property(lambda self: False)  # type: ignore[assignment, method-assign]


def main() -> int:
    """Serve until a signal; return the exit status."""
    role, forward_ms, row_ms, *options = sys.argv[1:]
    slow_down(float(forward_ms) / 1e3, float(row_ms) / 1e3)
    settings, worker = _ROLES[role]
    return run("benchmarks.simulated", settings, worker, options)


if __name__ == "__main__":
    sys.exit(main())
