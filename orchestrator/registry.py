"""The workers that announced themselves in Redis."""

from __future__ import annotations

import json
import logging
from typing import Any

from redis.asyncio import Redis

from orchestrator.redis_calls import answer

__all__ = ["RedisRegistry"]

_log = logging.getLogger(__name__)

_ORCHESTRATORS = "gammaray:orchestrator:"


class RedisRegistry:
    """Reads `gammaray:worker:<role>:<worker id>`, which each worker keeps alive while it serves.

    Args:
        redis: A connected client.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def addresses(self, role: str) -> set[str]:
        """Return the addresses of the announced workers of a role; entries that make no sense are skipped.

        Raises:
            UnavailableError: Redis cannot be reached.
        """
        keys = await answer(self._keys(f"gammaray:worker:{role}:*"))
        if not keys:
            return set()
        found = set()
        for key, value in zip(keys, await answer(self._redis.mget(keys)), strict=True):
            if value is None:  # it expired in between
                continue
            try:
                found.add(str(json.loads(value)["address"]))
            except (ValueError, KeyError, TypeError):
                _log.warning("registry entry %r is no worker", key)
        return found

    async def announce(self, name: str, state: bytes, ttl_s: float) -> None:
        """Store an orchestrator's state for a while.

        Raises:
            UnavailableError: Redis cannot be reached.
        """
        await answer(self._redis.set(f"{_ORCHESTRATORS}{name}", state, px=round(ttl_s * 1e3)))

    async def withdraw(self, name: str) -> None:
        """Delete an orchestrator's state.

        Raises:
            UnavailableError: Redis cannot be reached.
        """
        await answer(self._redis.delete(f"{_ORCHESTRATORS}{name}"))

    async def orchestrators(self) -> dict[str, bytes]:
        """Return the state of each orchestrator.

        Raises:
            UnavailableError: Redis cannot be reached.
        """
        keys = await answer(self._keys(f"{_ORCHESTRATORS}*"))
        if not keys:
            return {}
        values: list[Any] = await answer(self._redis.mget(keys))
        names = [key.decode().removeprefix(_ORCHESTRATORS) for key in keys]
        return {name: value for name, value in zip(names, values, strict=True) if value is not None}

    async def _keys(self, pattern: str) -> list[bytes]:
        return [key async for key in self._redis.scan_iter(match=pattern, count=1000)]
