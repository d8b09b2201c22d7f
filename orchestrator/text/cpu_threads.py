"""Thread pools for the CPU work of requests, so that it does not block other clients' streams.

Parsing has one thread, since a large body takes up to ten times its size in memory during parsing. Compiling
grammars has as many as their checks have processes, since some take seconds. Everything else (tokenising,
decoding, chat templates) shares `NUM_THREADS`. Work is queued in order of arrival; limits on request size
bound the work per request, and with it the wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

INLINE_BYTES = 2**14
"""Requests up to this size are processed on the event loop, in a few milliseconds at most."""

INLINE_NUMBERS = 4096
"""Up to this many numbers are converted on the event loop, in less than one or two milliseconds."""

NUM_THREADS = 2
NUM_COMPILER_THREADS = 2

P = ParamSpec("P")
T = TypeVar("T")


class _Threads:
    """Some threads: called with work, one of them does it and its result is returned."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=f"gammaray-{name}")

    async def __call__(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *args, **kwargs))


in_thread = _Threads(NUM_THREADS, "cpu")
in_parser_thread = _Threads(1, "parser")  # of large requests
in_compiler_thread = _Threads(NUM_COMPILER_THREADS, "compiler")  # of grammars
