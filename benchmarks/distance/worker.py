"""A worker whose forwards take as long as another device's would: it sleeps for the rest of that time.

    python -m benchmarks.distance.worker draft|target FORWARD_MS ROW_MS OPTIONS...

The options are those of `python -m services.draft_worker` or `services.target_worker`. All but the time of
forwards is the product's. What sleeps leaves the processor to the others, as a GPU does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from gammaray.config import DraftSettings, TargetSettings
from services.engine.core.batch import SequenceInput
from services.engine.engine import Engine
from services.process.main import run

_ROLES = {
    "draft": (DraftSettings, "services.draft_worker.worker:DraftWorker"),
    "target": (TargetSettings, "services.target_worker.worker:TargetWorker"),
}


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
    return run("benchmarks.distance.worker", settings, worker, options)


if __name__ == "__main__":
    sys.exit(main())
