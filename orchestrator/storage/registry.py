"""Registry of workers and orchestrators in Redis."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

from redis.asyncio import Redis

from gammaray.deploy.redis_connection import without_password
from gammaray.errors import InvalidArgumentError
from orchestrator.storage.client import answer, connect
from orchestrator.storage.keys import DEFAULT_KEYS, Keys

_log = logging.getLogger(__name__)

UNUSED_WAIT_S = 8.0
"""Time for the entries of a cluster that was killed to expire, which takes five seconds."""

LOOK_PERIOD_S = 0.5
ROLES = ("target", "draft")


async def check_unused(redis_url: str, keys: Keys) -> None:
    """Raise InvalidArgumentError if orchestrators stay announced with these keys for `UNUSED_WAIT_S`."""
    redis, since = connect(redis_url), time.monotonic()
    try:
        registry = RedisRegistry(redis, keys)
        while found := await registry.orchestrators():
            if time.monotonic() - since > UNUSED_WAIT_S:
                got = f"{without_password(redis_url)} with redis_prefix {keys.prefix}"
                allowed = (
                    f"a database that no other cluster uses ({len(found)} orchestrators of one are announced "
                    "in it), or another GAMMARAY_REDIS_PREFIX for this cluster"
                )
                raise InvalidArgumentError("redis_url", got, allowed)
            await asyncio.sleep(LOOK_PERIOD_S)
    finally:
        await redis.aclose()


class RedisRegistry:
    """Reads `<prefix>:worker:<role>:<worker id>`, which each worker renews while it serves.

    Orchestrators renew `<prefix>:orchestrator:<name>`; their names are the set `<prefix>:orchestrators`.
    Every method raises GammarayError if Redis cannot be reached or refuses the command.
    """

    def __init__(self, redis: Redis, keys: Keys = DEFAULT_KEYS) -> None:
        self._redis, self._keys = redis, keys

    async def workers(self) -> dict[str, set[str]]:
        """Return the addresses of the announced workers by role; malformed entries are skipped."""
        found: dict[str, set[str]] = {role: set() for role in ROLES}
        keys = await answer(self._found(self._keys.workers))
        values: list[Any] = await answer(self._redis.mget(keys)) if keys else []
        for key, value in zip(keys, values, strict=True):
            if value is None:  # it expired in between
                continue
            try:
                found[self._keys.role(key)].add(str(json.loads(value)["address"]))
            except (ValueError, KeyError, TypeError):
                _log.warning("registry entry %r is not a worker", key)
        return found

    async def announce(self, name: str, state: bytes, ttl_s: float) -> None:
        """Store an orchestrator's state for `ttl_s` seconds."""
        await answer(self._redis.set(self._keys.orchestrator(name), state, px=round(ttl_s * 1e3)))
        await answer(self._redis.sadd(self._keys.orchestrators, name))

    async def withdraw(self, name: str) -> None:
        await answer(self._redis.delete(self._keys.orchestrator(name)))
        await answer(self._redis.srem(self._keys.orchestrators, name))

    async def orchestrators(self) -> dict[str, bytes]:
        members: set[Any] = await answer(self._redis.smembers(self._keys.orchestrators))
        names = sorted(str(member, "utf-8", "replace") for member in members)
        if not names:
            return {}
        values: list[Any] = await answer(self._redis.mget([self._keys.orchestrator(name) for name in names]))
        found = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        gone = [name for name in names if name not in found]
        if gone:  # they died without withdrawing; one that was only slow adds itself again
            await answer(self._redis.srem(self._keys.orchestrators, *gone))
        return found

    async def _found(self, pattern: str) -> list[bytes]:
        return [key async for key in self._redis.scan_iter(match=pattern, count=1000)]
