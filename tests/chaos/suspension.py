"""Suspends an orchestrator that owns sessions, and resumes it after they have ended elsewhere."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import psutil

from gammaray import AsyncClient, Chunk, RetryPolicy
from gammaray.errors import FailedPreconditionError, GammarayError

T = TypeVar("T")

NUM_PROBES = 4
PROMPT, NEXT_PROMPT = "def first(items):\n", "class Queue:\n    def "
OPTIONS = {"temperature": 0.0, "max_tokens": 120, "ignore_eos": True}
BEGIN_S, STALL_S = 0.4, 1.0
TRY_S, TRIES = 5.0, 12
WAKE_S = 10.0
NO_RETRY = RetryPolicy(max_attempts=1)


@dataclass
class Probe:
    """One session, and the chunks of the client that began it."""

    name: str = field(default_factory=lambda: f"probe-{uuid.uuid4().hex[:8]}")
    got: list[int] = field(default_factory=list)


async def suspend_owner(address: str, victim: psutil.Process) -> list[str]:
    """Suspend an orchestrator, replace its sessions at another one under the same names, and resume it.

    Returns what went wrong.
    """
    async with AsyncClient(address) as client:
        first, second = [await _tokens(client.generate(p, **OPTIONS)) for p in (PROMPT, NEXT_PROMPT)]
    probes = [Probe() for _ in range(NUM_PROBES)]
    tasks = [asyncio.create_task(_stream(address, probe)) for probe in probes]
    await asyncio.sleep(BEGIN_S)
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.suspend()
    wrong: list[str] = []
    try:
        before = [len(probe.got) for probe in probes]
        await asyncio.sleep(STALL_S)
        stalled = [
            probe
            for probe, count, task in zip(probes, before, tasks, strict=True)
            if probe.got and len(probe.got) == count and not task.done()
        ]
        wrong += [line for probe in stalled for line in await _replace(address, probe, first, second)]
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # Serve may have given it up
            victim.resume()
        await asyncio.wait(tasks, timeout=WAKE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for probe in probes:
        if probe.got != first[: len(probe.got)]:
            wrong.append(f"{probe.name}: its first client got other tokens")
    for probe in stalled:
        stored = await _try(address, lambda client, name=probe.name: _stored(client, name))
        if stored != second:
            wrong.append(f"{probe.name}: the woken owner changed the new session of its name")
    return wrong


async def _replace(address: str, probe: Probe, first: list[int], second: list[int]) -> list[str]:
    """End a session at another orchestrator, and begin one with its name there."""
    offset, wrong = len(probe.got), []
    rest = await _try(address, lambda client: _tokens(client.resume(probe.name, offset=offset)))
    if probe.got[:offset] + rest != first:
        wrong.append(f"{probe.name}: resumed elsewhere, it went on with other tokens")
    await _try(address, lambda client: client.delete_session(probe.name))

    async def begin(client: AsyncClient) -> list[int]:
        try:
            return await _tokens(client.generate(NEXT_PROMPT, session_id=probe.name, **OPTIONS))
        except FailedPreconditionError:  # an attempt that was given up began it
            return await _tokens(client.resume(probe.name))

    if await _try(address, begin) != second:
        wrong.append(f"{probe.name}: a new session of its name got other tokens")
    return wrong


async def _stream(address: str, probe: Probe) -> None:
    with contextlib.suppress(GammarayError):  # its session ends under it
        async with AsyncClient(address, retry=NO_RETRY) as client:
            async for chunk in client.generate(PROMPT, session_id=probe.name, **OPTIONS):
                probe.got += (token.token_id for token in chunk.tokens)


async def _tokens(chunks: AsyncIterator[Chunk]) -> list[int]:
    return [token.token_id async for chunk in chunks for token in chunk.tokens]


async def _stored(client: AsyncClient, name: str) -> list[int]:
    _, tokens = await client.get_session(name)
    return [token.token_id for token in tokens]


async def _try(address: str, work: Callable[[AsyncClient], Awaitable[T]]) -> T:
    """Return the result of the work; each attempt uses a new connection, which may reach another replica."""
    last: BaseException | None = None
    for _ in range(TRIES):
        try:
            async with AsyncClient(address, retry=NO_RETRY) as client:
                return await asyncio.wait_for(work(client), TRY_S)
        except (GammarayError, asyncio.TimeoutError) as error:
            last = error
            await asyncio.sleep(0.1)
    raise AssertionError(f"nothing answers while one orchestrator is suspended: {last!r}")
