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

_parser = ThreadPoolExecutor(1, thread_name_prefix="gammaray-parser")
_compiler = ThreadPoolExecutor(NUM_COMPILER_THREADS, thread_name_prefix="gammaray-compiler")
_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="gammaray-cpu")


async def in_parser_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in the single thread that parses large requests; return its result."""
    return await asyncio.get_running_loop().run_in_executor(_parser, partial(work, *args, **kwargs))


async def in_compiler_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in one of `NUM_COMPILER_THREADS` threads that compile grammars; return its result."""
    return await asyncio.get_running_loop().run_in_executor(_compiler, partial(work, *args, **kwargs))


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in one of `NUM_THREADS` threads; return its result."""
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(work, *args, **kwargs))
