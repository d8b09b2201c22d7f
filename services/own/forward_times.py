"""How long an engine's forwards take, by their number of tokens."""

from __future__ import annotations

import time
from contextlib import suppress

from services.engine.core.batch import SequenceInput
from services.engine.core.errors import CacheFullError
from services.engine.engine import Engine

SIZES = 1, 2, 4, 8, 16
"""Of the forwards that a target worker times: up to where rows cost their arithmetic on every CPU."""

_TRIALS = 3
_TRIAL_SESSION = "rows"


def time_forward(engine: Engine, size: int, *, is_run: bool = False) -> float:
    """Return the least seconds of a few forwards over so many tokens, or runs along one chain.

    Raises:
        CacheFullError: The cache cannot hold as many.
    """
    count = min(size, engine.max_context)
    feed = SequenceInput(_TRIAL_SESSION, 0, [0] * count, count)
    times = []
    for _ in range(_TRIALS):
        start = time.perf_counter()
        logits = engine.chain(feed)[1] if is_run else engine.step([feed])[0]
        logits[0, 0].item()  # waits for the device
        times.append(time.perf_counter() - start)
        engine.release(_TRIAL_SESSION)
    return min(times)


def forward_times(engine: Engine) -> tuple[float, ...]:
    """Return the seconds of forwards over `SIZES` tokens, as many as the cache and the context can hold."""
    times: list[float] = []
    with suppress(CacheFullError):
        times.extend(time_forward(engine, size) for size in SIZES if size <= engine.max_context)
    return tuple(times)
