"""CPU work of requests, off the event loop: a few threads, so that the streams of other clients go on.

Parsing has one thread, since a large body takes up to ten times its size in memory meanwhile. Everything else
(tokenising, decoding, chat templates) shares `NUM_THREADS`. What has no thread yet waits in order of arrival;
the work of one request is bounded by the bounds of its size, which bounds the wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

__all__ = ["INLINE_BYTES", "INLINE_NUMBERS", "NUM_THREADS", "in_parser_thread", "in_thread"]

INLINE_BYTES = 2**14
"""Size of a request up to which its work takes a few milliseconds at most, on the event loop."""

INLINE_NUMBERS = 4096
"""Numbers that are converted on the event loop, in less than a millisecond or two."""

NUM_THREADS = 2

P = ParamSpec("P")
T = TypeVar("T")

_parser = ThreadPoolExecutor(1, thread_name_prefix="gammaray-parser")
_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="gammaray-cpu")


async def in_parser_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in the thread that parses large requests, one after the other; return its result."""
    return await asyncio.get_running_loop().run_in_executor(_parser, partial(work, *args, **kwargs))


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in one of `NUM_THREADS` threads; return its result."""
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(work, *args, **kwargs))
