"""What an orchestrator tells of itself and of the cluster: status, metrics, its presence in the registry."""

from __future__ import annotations

import asyncio
import os

from gammaray.errors import GammarayError
from gammaray.telemetry.export import MetricsExport
from gammaray.types import ProcessStatus
from orchestrator.access.admission import Admission
from orchestrator.presence import Presence
from orchestrator.storage.client import Redis, address_of, answer
from orchestrator.storage.registry import RedisRegistry
from orchestrator.telemetry.metrics import OrchestratorMeter
from orchestrator.workers.fleet import Fleet

__all__ = ["StatusBoard"]

TIMEOUT_S = 1.0


class StatusBoard:
    """The state of an orchestrator and of the cluster as it sees it.

    Args:
        meter: The orchestrator's.
        admission: Knows which requests run and wait.
        fleet: Its workers.
        redis: A connected client.
        model_name: Name under which the target model is served.
    """

    def __init__(
        self, meter: OrchestratorMeter, admission: Admission, fleet: Fleet, redis: Redis, model_name: str
    ) -> None:
        self._meter, self._admission, self._fleet = meter, admission, fleet
        self._redis, self._model_name = redis, model_name
        self._presence = Presence(RedisRegistry(redis), self.own)
        self._export: MetricsExport | None = None
        meter.watch(admission, fleet)

    async def start(self, metrics_listen: str) -> None:
        """Serve metrics, and let the other orchestrators know.

        Raises:
            InvalidArgumentError: The address of the metrics cannot be used; or a bad `OTEL_*` variable.
        """
        self._export = MetricsExport(
            self._meter.meter, role="orchestrator", model=self._model_name, listen=metrics_listen
        )
        await self._presence.start()

    def own(self) -> ProcessStatus:
        """Return the state of this orchestrator."""
        return ProcessStatus(
            "orchestrator",
            os.getpid(),
            "",
            self._model_name,
            True,
            self._admission.num_running,
            metrics_address=self._export.address if self._export is not None else "",
            num_queued=self._admission.num_waiting,
            speculation_totals=self._meter.totals,
            accepted_per_position=self._meter.accepted_per_position,
        )

    async def all(self) -> list[ProcessStatus]:
        """Return the state of this orchestrator, of the others, of its workers and of Redis.

        The others know this state, or a newer one, when it is returned: sums over the orchestrators do not
        fall when another one is asked next.
        """
        own = self.own()
        _, others, redis = await asyncio.gather(
            self._presence.announce(), self._presence.others(), self._redis_status()
        )
        return [own, *others, *self._fleet.status(), redis]

    async def stop(self) -> None:
        """Withdraw, send the last metrics, stop serving them."""
        await self._presence.stop()
        if self._export is not None:
            await self._export.stop()

    async def _redis_status(self) -> ProcessStatus:
        address = address_of(self._redis)
        try:
            info = await asyncio.wait_for(answer(self._redis.info("server")), TIMEOUT_S)
        except (GammarayError, asyncio.TimeoutError):
            return ProcessStatus("redis", 0, address, "", False, 0)
        return ProcessStatus("redis", int(info.get("process_id", 0)), address, "", True, 0)
