"""How the orchestrator talks to Redis: its connections, the errors of its calls, and scripts in batches."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from redis.exceptions import AuthenticationError, ConnectionError, NoScriptError, RedisError, TimeoutError

from gammaray.deploy import redis_connection
from gammaray.deploy.redis_connection import (
    Redis,
    RefusedError,
    address_of,
    reply_code,
    without_password,
)
from gammaray.errors import (
    GammarayError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)

__all__ = ["BatchedScript", "Redis", "address_of", "answer", "check_redis", "connect", "wait_for_redis"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

NUM_RETRIES = 12
"""Over 5 s with the pauses between them: commands are sent again while another server becomes the primary."""

CALL_TIMEOUT_S = 3.0
MAX_CONNECTIONS = 32
"""A burst of requests waits its turn for a connection: calls take a fraction of a millisecond."""

OOM_RETRY_AFTER_S = 5.0
"""When clients may come back after Redis was out of memory: sessions expire, which frees some."""

WAIT_PERIOD_S = 0.5
CHECK_TIMEOUT_S = 5.0

_UNAVAILABLE = redis_connection.PASSING | {"ASK", "MISCONF", "MOVED", "NOAUTH", "NOPERM", "NOSCRIPT"}
"""Codes of replies that the state of the server explains, and not the command."""


def connect(redis_url: str) -> Redis:
    """Return a client that rides out a restart or a failover of Redis; connects when first used.

    Raises:
        InvalidArgumentError: The URL is not one of Redis.
    """
    return redis_connection.connect(
        redis_url, timeout_s=CALL_TIMEOUT_S, num_retries=NUM_RETRIES, max_connections=MAX_CONNECTIONS
    )


async def answer(call: Awaitable[T]) -> T:
    """Wait for a call's answer.

    Raises:
        UnavailableError: Redis cannot be reached or refuses commands at present, after the retries.
        ResourceExhaustedError: Redis is out of memory; says when to come back.
        InternalError: Redis refused the command.
    """
    try:
        return await call
    except RefusedError as error:
        raise UnavailableError(f"Redis refuses commands: {error}") from error
    except (ConnectionError, TimeoutError, OSError) as error:
        raise UnavailableError(f"Redis cannot be reached: {error}") from error
    except RedisError as error:
        code = reply_code(error)
        if code == "OOM":
            raise ResourceExhaustedError(f"Redis is out of memory: {error}", OOM_RETRY_AFTER_S) from error
        if code in _UNAVAILABLE:
            raise UnavailableError(f"Redis refuses commands: {code}: {error}") from error
        raise InternalError(f"Redis: {error}") from error


async def wait_for_redis(redis_url: str, timeout_s: float) -> None:
    """Wait until Redis answers, and check that it is one that gammaray can use.

    Args:
        redis_url: Where it is; messages leave the password out.
        timeout_s: Upper bound of the wait, in seconds; 0 tries once.

    Raises:
        InvalidArgumentError: The URL is not one of Redis, or leads to a node of a Redis Cluster.
        UnavailableError: Nothing answers there in time, or the password is wrong.
    """
    began, shown, is_waiting = time.monotonic(), without_password(redis_url), False
    redis = redis_connection.connect(redis_url, timeout_s=CHECK_TIMEOUT_S, num_retries=0)
    try:
        while True:
            try:
                await answer(redis.ping())
                break
            except UnavailableError as error:
                waited_s = time.monotonic() - began
                if isinstance(error.__cause__, AuthenticationError) or waited_s >= timeout_s:
                    tried = f" (tried for {waited_s:.0f} s)" if timeout_s else ""
                    raise UnavailableError(f"redis_url: {shown} does not answer{tried}: {error}") from error
                if not is_waiting:
                    _log.warning("waiting up to %g s for %s: %s", timeout_s, shown, error)
                is_waiting = True
            await asyncio.sleep(min(WAIT_PERIOD_S, max(0.0, began + timeout_s - time.monotonic())))
        if is_waiting:
            _log.warning("%s answers after %.1f s", shown, time.monotonic() - began)
        await _check_kind(redis, shown)
    finally:
        await redis.aclose()


async def _check_kind(redis: Redis, shown: str) -> None:
    try:
        info = await answer(redis.info("cluster"))
    except GammarayError as error:  # an ACL may forbid INFO, or the server not know it
        _log.warning("cannot tell whether %s is a Redis Cluster: %s", shown, error)
        return
    if int(info.get("cluster_enabled", 0)):
        raise InvalidArgumentError(
            "redis_url",
            f"{shown}, a node of a Redis Cluster",
            "a server without cluster mode, with replicas or not: sessions and their indexes are on one node",
        )


def check_redis(redis_url: str) -> None:
    """Check that a Redis answers, before anything that needs it is started; blocks.

    Raises:
        InvalidArgumentError: The URL is not one of Redis, or leads to a node of a Redis Cluster.
        UnavailableError: Nothing answers there.
    """
    asyncio.run(wait_for_redis(redis_url, 0.0))


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
            results = await self._pipeline(calls, "EVALSHA", self._sha)
            if any(isinstance(result, NoScriptError) for result in results):
                # Redis was restarted, or another server is the primary now, as may happen again at any time:
                # the source itself always works, and is known by its hash from then on.
                results = await self._pipeline(calls, "EVAL", self._source)
        except Exception as error:
            return [error] * len(calls)
        return results

    async def _pipeline(
        self, calls: Sequence[tuple[tuple[Any, ...], object]], command: str, script: str
    ) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for arguments, _ in calls:
                pipeline.execute_command(command, script, *arguments)
            return await pipeline.execute(raise_on_error=False)
