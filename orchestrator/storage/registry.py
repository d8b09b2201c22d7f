"""Registry of workers and orchestrators in Redis."""

from __future__ import annotations

import json
import logging
from typing import Any

from redis.asyncio import Redis

from orchestrator.storage.client import answer

__all__ = ["RedisRegistry"]

_log = logging.getLogger(__name__)

_ORCHESTRATOR, _ORCHESTRATORS = "gammaray:orchestrator:", "gammaray:orchestrators"


class RedisRegistry:
    """Reads `gammaray:worker:<role>:<worker id>`, which each worker renews while it serves.

    Orchestrators renew `gammaray:orchestrator:<name>`; their names are the set `gammaray:orchestrators`.

    Args:
        redis: A connected client.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def addresses(self, role: str) -> set[str]:
        """Return the addresses of the announced workers of a role; malformed entries are skipped.

        Raises:
            GammarayError: Redis cannot be reached, or refuses the command.
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
                _log.warning("registry entry %r is not a worker", key)
        return found

    async def announce(self, name: str, state: bytes, ttl_s: float) -> None:
        """Store an orchestrator's state for `ttl_s` seconds.

        Raises:
            GammarayError: Redis cannot be reached, or refuses the command.
        """
        await answer(self._redis.set(f"{_ORCHESTRATOR}{name}", state, px=round(ttl_s * 1e3)))
        await answer(self._redis.sadd(_ORCHESTRATORS, name))

    async def withdraw(self, name: str) -> None:
        """Delete an orchestrator's state.

        Raises:
            GammarayError: Redis cannot be reached, or refuses the command.
        """
        await answer(self._redis.delete(f"{_ORCHESTRATOR}{name}"))
        await answer(self._redis.srem(_ORCHESTRATORS, name))

    async def orchestrators(self) -> dict[str, bytes]:
        """Return the state of each orchestrator.

        Raises:
            GammarayError: Redis cannot be reached, or refuses the command.
        """
        members: set[Any] = await answer(self._redis.smembers(_ORCHESTRATORS))
        names = sorted(str(member, "utf-8", "replace") for member in members)
        if not names:
            return {}
        values: list[Any] = await answer(self._redis.mget([f"{_ORCHESTRATOR}{name}" for name in names]))
        found = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        gone = [name for name in names if name not in found]
        if gone:  # they died without withdrawing; one that was only slow adds itself again
            await answer(self._redis.srem(_ORCHESTRATORS, *gone))
        return found

    async def _keys(self, pattern: str) -> list[bytes]:
        return [key async for key in self._redis.scan_iter(match=pattern, count=1000)]
