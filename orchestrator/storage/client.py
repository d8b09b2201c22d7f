"""Redis client of the orchestrator: connections, mapping of errors, and batched scripts."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis as Redis
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    NoScriptError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from gammaray.deploy import redis_connection
from gammaray.deploy.redis_connection import (
    PASSING,
    RefusedError,
    RetryingRedis,
    check_server,
    reply_code,
    without_password,
)
from gammaray.errors import InternalError, ResourceExhaustedError, UnavailableError

T = TypeVar("T")

_log = logging.getLogger(__name__)

NUM_RETRIES = 12
"""Retries of a command, over 5 s including pauses, to cover a failover to another primary."""

CALL_TIMEOUT_S = 3.0
MAX_CONNECTIONS = 32
"""Requests in a burst wait for a free connection: calls take a fraction of a millisecond."""

OOM_RETRY_AFTER_S = 2.0
"""Retry delay for clients after Redis was out of memory: sessions that expire free some. Streams pause as
long."""

WAIT_PERIOD_S = 0.5
CHECK_TIMEOUT_S = 5.0

_UNAVAILABLE = PASSING | {"ASK", "MISCONF", "MOVED", "NOAUTH", "NOPERM", "NOSCRIPT"}
"""Error codes caused by the state of the server and not by the command."""


def connect(redis_url: str) -> RetryingRedis:
    """Return a client that retries through a restart or failover of Redis; it connects on first use."""
    return redis_connection.connect(
        redis_url, timeout_s=CALL_TIMEOUT_S, num_retries=NUM_RETRIES, max_connections=MAX_CONNECTIONS
    )


async def answer(call: Awaitable[T]) -> T:
    """Await a call to Redis and convert its errors.

    UnavailableError if Redis cannot be reached or refuses commands, after the retries;
    ResourceExhaustedError, with a retry delay, if it is out of memory; InternalError if it refused the
    command.
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
    """Wait until Redis answers, and check which server it is; a timeout of 0 tries once.

    InvalidArgumentError if the URL is none of Redis, or the server is not a supported one; UnavailableError
    if it does not answer in time, or the password is wrong. Messages omit the password of the URL.
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
                    raise UnavailableError(f"redis_url: {shown} does not respond{tried}: {error}") from error
                if not is_waiting:
                    _log.warning("waiting up to %g s for %s: %s", timeout_s, shown, error)
                is_waiting = True
            await asyncio.sleep(min(WAIT_PERIOD_S, max(0.0, began + timeout_s - time.monotonic())))
        if is_waiting:
            _log.warning("%s responded after %.1f s", shown, time.monotonic() - began)
        await check_server(redis, redis_url)
    finally:
        await redis.aclose()


def check_redis(redis_url: str) -> None:
    """Check once that Redis answers, before processes that need it are started; see `wait_for_redis`."""
    asyncio.run(wait_for_redis(redis_url, 0.0))


class BatchedScript:
    """A Lua script whose concurrent calls are pipelined: those of one tick or made during a round trip.

    A single call costs the same; of many concurrent calls each costs a fifth. A call may run twice if the
    connection breaks, so the script must be idempotent.
    """

    def __init__(self, redis: RetryingRedis, source: str) -> None:
        self._redis, self._source = redis, source
        self._sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        self._waiting: list[tuple[tuple[Any, ...], asyncio.Future[Any]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def call(self, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run the script once and return its answer."""
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
                        continue  # its caller no longer waits
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
                # Redis was restarted or another server became the primary, which may happen again any time.
                # EVAL with the source always works, and caches the script under its hash.
                results = await self._pipeline(calls, "EVAL", self._source)
        except Exception as error:
            return [error] * len(calls)
        return results

    async def _pipeline(
        self, calls: Sequence[tuple[tuple[Any, ...], object]], command: str, script: str
    ) -> list[Any]:
        async def send() -> list[Any]:
            pool, results = self._redis.connection_pool, list[Any]()
            connection = await pool.get_connection()  # type: ignore[no-untyped-call]
            try:  # what fails or is cancelled here closes the connection
                packed = connection.pack_commands([(command, script, *arguments) for arguments, _ in calls])
                await connection.send_packed_command(packed)
                for _ in calls:
                    try:
                        results.append(await connection.read_response())
                    except ResponseError as error:
                        results.append(error)
            finally:
                await pool.release(connection)
            for result in results:
                if isinstance(result, RedisError) and reply_code(result) in PASSING:
                    raise result
            return results

        return await self._redis.repeated(send)
