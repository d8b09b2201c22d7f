"""The workers that announced themselves in Redis."""

from __future__ import annotations

import json
import logging

from redis.asyncio import Redis

from orchestrator.redis_calls import answer

__all__ = ["RedisRegistry"]

_log = logging.getLogger(__name__)


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

    async def _keys(self, pattern: str) -> list[bytes]:
        return [key async for key in self._redis.scan_iter(match=pattern, count=1000)]
