"""How the orchestrator talks to Redis: one kind of connection, one way of retrying, one way of failing."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, RedisError, TimeoutError

from gammaray.errors import InternalError, InvalidArgumentError, UnavailableError

__all__ = ["Redis", "answer", "connect"]

T = TypeVar("T")

NUM_RETRIES = 8
BACKOFF_BASE_S, BACKOFF_CAP_S = 0.05, 0.5
CALL_TIMEOUT_S = 5.0


def connect(redis_url: str) -> Redis:
    """Return a client that rides out a restart of Redis; connects when first used.

    Raises:
        InvalidArgumentError: The URL is not one of Redis.
    """
    retryable: list[type[Exception]] = [ConnectionError, TimeoutError, BusyLoadingError]
    try:
        return Redis.from_url(
            redis_url,
            socket_timeout=CALL_TIMEOUT_S,
            socket_connect_timeout=CALL_TIMEOUT_S,
            retry=Retry(ExponentialBackoff(cap=BACKOFF_CAP_S, base=BACKOFF_BASE_S), NUM_RETRIES),
            retry_on_error=retryable,
        )
    except ValueError as error:
        raise InvalidArgumentError("redis_url", redis_url, "redis://host:port/db") from error


async def answer(call: Awaitable[T]) -> T:
    """Wait for a call's answer.

    Raises:
        UnavailableError: Redis cannot be reached, after the retries.
        InternalError: Redis refused the command.
    """
    try:
        return await call
    except (ConnectionError, TimeoutError, OSError) as error:
        raise UnavailableError(f"Redis cannot be reached: {error}") from error
    except RedisError as error:
        raise InternalError(f"Redis: {error}") from error
