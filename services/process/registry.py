"""Announces a worker in Redis, where orchestrators discover workers.

An entry expires after five seconds and is renewed every second, so that a crashed worker soon disappears.
A Redis outage does not stop a worker; orchestrators that know its address continue to use it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Awaitable
from typing import Any

from gammaray.aio import end_tasks
from gammaray.config import REDIS_PREFIX
from gammaray.deploy.redis_connection import check_server, connect

ENTRY_MS = 5000
REFRESH_S = 1.0
CALL_TIMEOUT_S = 0.5

_log = logging.getLogger(__name__)


class Announcer:
    """Keeps one worker's registry entry alive; orchestrators reach it at `address` (host:port)."""

    def __init__(self, redis_url: str, role: str, address: str, prefix: str = REDIS_PREFIX) -> None:
        self.key = f"{prefix}:worker:{role}:{uuid.uuid4().hex[:12]}"
        self._value = json.dumps({"address": address})
        # The next refresh is the retry: a longer timeout would only delay it.
        self._url, self._redis = redis_url, connect(redis_url, timeout_s=CALL_TIMEOUT_S, num_retries=1)
        self._task: asyncio.Task[None] | None = None
        self._is_reachable = True

    async def start(self) -> None:
        """Announce the worker from now on; InvalidArgumentError for a Redis that is not supported."""
        await self._refresh()
        if self._is_reachable:
            await check_server(self._redis, self._url)
        self._task = asyncio.create_task(self._keep_alive(), name="worker's registry entry")

    async def withdraw(self) -> None:
        """Delete the entry and stop announcing."""
        if self._task is not None:
            await end_tasks(self._task)
        await self._call(self._redis.delete(self.key))
        await self._redis.aclose()

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            await self._refresh()

    async def _refresh(self) -> None:
        await self._call(self._redis.set(self.key, self._value, px=ENTRY_MS))

    async def _call(self, command: Awaitable[Any]) -> None:
        try:
            await asyncio.wait_for(command, 2 * CALL_TIMEOUT_S)
        except Exception as error:  # on any error the worker continues to serve and announces itself again
            if self._is_reachable:
                _log.warning("the registry does not respond, still serving: %s", str(error) or repr(error))
            self._is_reachable = False
        else:
            if not self._is_reachable:
                _log.warning("the registry responds again")
            self._is_reachable = True
