"""Watches a cluster from outside: the serving processes of each role and when they were first seen."""

from __future__ import annotations

import asyncio
import time

from gammaray import AsyncClient
from gammaray.errors import GammarayError

PERIOD_S = 0.25
STATUS_TIMEOUT_S = 2.0


class Watch:
    """Polls the status, each time over a new connection, which may reach another replica."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.seen_at: dict[tuple[str, int], float] = {}

    async def run(self) -> None:
        while True:
            try:
                async with AsyncClient(self._address) as client:
                    for process in await client.status(timeout_s=STATUS_TIMEOUT_S):
                        if process.healthy:
                            self.seen_at.setdefault((process.role, process.pid), time.monotonic())
            except GammarayError:
                pass
            await asyncio.sleep(PERIOD_S)

    def serving(self, role: str) -> set[int]:
        return {pid for its, pid in self.seen_at if its == role}

    def back_at(self, role: str, since: float) -> float | None:
        times = (at for (its, _), at in self.seen_at.items() if its == role and at > since)
        return min(times, default=None)
