"""Watches a cluster from outside: the serving processes of each role and when they were first seen."""

from __future__ import annotations

import asyncio
import time

from gammaray import AsyncClient
from gammaray.errors import GammarayError

PERIOD_S = 0.25
STATUS_TIMEOUT_S = 2.0


class Watch:
    """Polls the status, each time over a new connection, which may reach another replica.

    Args:
        address: host:port of the gRPC API.

    Attributes:
        seen_at: Time at which a serving process was first seen, by role and process id.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self.seen_at: dict[tuple[str, int], float] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
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
        """Return the ids of the processes of a role that served, including ended ones."""
        return {pid for its, pid in self.seen_at if its == role}

    def back_at(self, role: str, since: float) -> float | None:
        """Return the time at which a new process of a role was first seen after a time, or None."""
        times = (at for (its, _), at in self.seen_at.items() if its == role and at > since)
        return min(times, default=None)
