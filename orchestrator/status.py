"""Status of an orchestrator and of its cluster: its metrics, and its entry in the registry."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from gammaray import __version__
from gammaray.aio import end_tasks
from gammaray.deploy.redis_connection import address_of
from gammaray.errors import GammarayError
from gammaray.telemetry.prometheus import MetricsExport
from gammaray.types import ProcessStatus
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.convert import process_from_proto, process_to_proto
from orchestrator.access.admission import Admission
from orchestrator.storage.client import Redis, answer
from orchestrator.storage.keys import Keys
from orchestrator.storage.registry import RedisRegistry
from orchestrator.telemetry.metrics import OrchestratorMeter
from orchestrator.workers.fleet import Fleet

_log = logging.getLogger(__name__)

REFRESH_S = 1.0
ENTRY_S = 5.0
"""TTL of a registry entry that is not renewed: the entry of a crashed orchestrator expires after this."""

CALL_TIMEOUT_S = 1.0
"""Timeout of calls to Redis, so that they delay neither a status call nor a shutdown."""


class Presence:
    """Announces one orchestrator, and finds the others."""

    def __init__(self, store: RedisRegistry, state: Callable[[], ProcessStatus]) -> None:
        self._store, self._state = store, state
        self._name = uuid.uuid4().hex[:12]
        self._task: asyncio.Task[None] | None = None
        self._is_announced = True

    async def start(self) -> None:
        """Announce now and then periodically; an unavailable registry is tolerated."""
        await self.announce()
        self._task = asyncio.create_task(self._keep_alive(), name="orchestrator presence")

    async def others(self) -> list[ProcessStatus]:
        """Return the state of the other orchestrators; none if the registry does not answer."""
        try:
            entries = await asyncio.wait_for(self._store.orchestrators(), CALL_TIMEOUT_S)
        except (GammarayError, asyncio.TimeoutError):
            return []
        entries.pop(self._name, None)
        found = (_parse(name, state) for name, state in sorted(entries.items()))
        return [process for process in found if process is not None]

    async def stop(self) -> None:
        if self._task is not None:
            await end_tasks(self._task)
            with contextlib.suppress(GammarayError, asyncio.TimeoutError):
                await asyncio.wait_for(self._store.withdraw(self._name), CALL_TIMEOUT_S)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            await self.announce()

    async def announce(self) -> None:
        """Announce the current state; failures are only logged."""
        try:
            state: Any = process_to_proto(self._state()).SerializeToString()
            await asyncio.wait_for(self._store.announce(self._name, state, ENTRY_S), CALL_TIMEOUT_S)
        except (GammarayError, asyncio.TimeoutError) as error:
            if self._is_announced:
                _log.warning("failed to announce this orchestrator, still serving: %r", error)
            self._is_announced = False
        except Exception:  # a bug must not end the announcements: others would take this one for dead
            _log.exception("failed to announce this orchestrator, still serving")
            self._is_announced = False
        else:
            self._is_announced = True


def _parse(name: str, state: bytes) -> ProcessStatus | None:
    try:
        return process_from_proto(pb.ProcessStatus.FromString(state))
    except (DecodeError, ValueError) as error:  # written by another version, or not an orchestrator's
        _log.warning("failed to parse the registry entry of orchestrator %s: %s", name, error)
        return None


class StatusBoard:
    """Status of an orchestrator and of the cluster as seen from it."""

    def __init__(
        self,
        meter: OrchestratorMeter,
        admission: Admission,
        fleet: Fleet,
        redis: Redis,
        keys: Keys,
        model_name: str,
    ) -> None:
        self._meter, self._admission, self._fleet = meter, admission, fleet
        self._redis, self._model_name = redis, model_name
        self._presence = Presence(RedisRegistry(redis, keys), self.own)
        self._export: MetricsExport | None = None
        meter.watch(admission, fleet)

    async def start(self, metrics_listen: str) -> None:
        """Serve metrics, and announce this orchestrator; InvalidArgumentError for a bad setting of these."""
        self._export = MetricsExport(
            self._meter.meter, role="orchestrator", model=self._model_name, listen=metrics_listen
        )
        await self._presence.start()

    def own(self) -> ProcessStatus:
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
            version=__version__,
            unusable=tuple(self._fleet.unusable()),
        )

    async def all(self) -> list[ProcessStatus]:
        """Return the state of this orchestrator, of the others, of its workers and of Redis.

        This state, or a newer one, is announced before it is returned: sums over the orchestrators do not
        decrease if the next call goes to another orchestrator.
        """
        own = self.own()
        _, others, redis = await asyncio.gather(
            self._presence.announce(), self._presence.others(), self._redis_status()
        )
        return [own, *others, *self._fleet.status(), redis]

    async def stop(self) -> None:
        """Withdraw the announcement, send the last metrics and stop serving them."""
        await self._presence.stop()
        if self._export is not None:
            await self._export.stop()

    async def _redis_status(self) -> ProcessStatus:
        address = address_of(self._redis)
        try:
            info = await asyncio.wait_for(answer(self._redis.info("server")), CALL_TIMEOUT_S)
            now_us = int(info.get("server_time_usec", 0))
        except (GammarayError, asyncio.TimeoutError):
            return ProcessStatus("redis", 0, address, "", False, 0)
        return ProcessStatus(
            "redis",
            int(info.get("process_id", 0)),
            address,
            "",
            True,
            0,
            version=str(info.get("redis_version", "")),
            clock_offset_s=now_us / 1e6 - time.time() if now_us else None,
        )
