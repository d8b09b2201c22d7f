"""How the orchestrator talks to Redis: one kind of connection, one way of retrying, one way of failing."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,
    NoScriptError,
    OutOfMemoryError,
    RedisError,
    TimeoutError,
)

from gammaray.errors import InternalError, InvalidArgumentError, ResourceExhaustedError, UnavailableError

__all__ = ["BatchedScript", "Redis", "answer", "connect", "without_password"]

T = TypeVar("T")

NUM_RETRIES = 8
BACKOFF_BASE_S, BACKOFF_CAP_S = 0.05, 0.5
CALL_TIMEOUT_S = 5.0
OOM_RETRY_AFTER_S = 5.0
"""When clients may come back after Redis was out of memory: sessions expire, which frees some."""

MAX_CONNECTIONS = 32
"""A burst of requests waits its turn for a connection: calls take a fraction of a millisecond."""


def connect(redis_url: str) -> Redis:
    """Return a client that rides out a restart of Redis; connects when first used.

    Raises:
        InvalidArgumentError: The URL is not one of Redis.
    """
    retryable: list[type[Exception]] = [ConnectionError, TimeoutError, BusyLoadingError]
    try:
        pool = BlockingConnectionPool.from_url(
            redis_url,
            max_connections=MAX_CONNECTIONS,
            timeout=CALL_TIMEOUT_S,
            socket_timeout=CALL_TIMEOUT_S,
            socket_connect_timeout=CALL_TIMEOUT_S,
            retry=Retry(ExponentialBackoff(cap=BACKOFF_CAP_S, base=BACKOFF_BASE_S), NUM_RETRIES),
            retry_on_error=retryable,
        )
        return Redis.from_pool(pool)
    except ValueError as error:
        raise InvalidArgumentError(
            "redis_url", without_password(redis_url), "redis://host:port/db"
        ) from error


def without_password(redis_url: str) -> str:
    """Return what may be shown of a URL."""
    return re.sub(r"//[^/@]*@", "//...@", redis_url)


async def answer(call: Awaitable[T]) -> T:
    """Wait for a call's answer.

    Raises:
        UnavailableError: Redis cannot be reached, after the retries.
        ResourceExhaustedError: Redis is out of memory; says when to come back.
        InternalError: Redis refused the command.
    """
    try:
        return await call
    except (ConnectionError, TimeoutError, OSError) as error:
        raise UnavailableError(f"Redis cannot be reached: {error}") from error
    except RedisError as error:
        if isinstance(error, OutOfMemoryError) or "-OOM" in str(error):  # a script's error quotes it
            raise ResourceExhaustedError(f"Redis is out of memory: {error}", OOM_RETRY_AFTER_S) from error
        raise InternalError(f"Redis: {error}") from error


class BatchedScript:
    """A Lua script whose calls go out together: those that come while others are under way, or in one tick.

    A call alone costs the same; of many at once each costs a fifth. All may be run twice when a connection
    breaks, so the script must be idempotent.

    Args:
        redis: A connected client.
        source: The script.
    """

    def __init__(self, redis: Redis, source: str) -> None:
        self._redis, self._source = redis, source
        self._sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        self._waiting: list[tuple[tuple[Any, ...], asyncio.Future[Any]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def call(self, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run the script once and return its answer.

        Raises:
            RedisError: As of any command.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(((len(keys), *keys, *args), future))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        return await future

    async def _send(self) -> None:
        try:
            while self._waiting:
                calls, self._waiting = self._waiting, []
                for (_, future), result in zip(calls, await self._run(calls), strict=True):
                    if future.done():
                        continue  # its caller gave up
                    if isinstance(result, BaseException):
                        future.set_exception(result)
                    else:
                        future.set_result(result)
        finally:
            self._sending = None

    async def _run(self, calls: Sequence[tuple[tuple[Any, ...], object]]) -> list[Any]:
        try:
            results = await self._pipeline(calls)
            if any(isinstance(result, NoScriptError) for result in results):
                await self._redis.script_load(self._source)  # Redis is new or was restarted
                results = await self._pipeline(calls)
        except Exception as error:
            return [error] * len(calls)
        return results

    async def _pipeline(self, calls: Sequence[tuple[tuple[Any, ...], object]]) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for arguments, _ in calls:
                pipeline.execute_command("EVALSHA", self._sha, *arguments)
            return await pipeline.execute(raise_on_error=False)
