"""The orchestrators of a cluster know of each other: each announces its state in the registry."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from gammaray.aio import end_tasks
from gammaray.errors import GammarayError
from gammaray.types import ProcessStatus
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.convert import process_from_proto, process_to_proto

__all__ = ["Presence", "PresenceStore"]

_log = logging.getLogger(__name__)

REFRESH_S = 1.0
ENTRY_S = 5.0
"""How long an entry lives that nobody renews: an orchestrator that dies without a word is gone soon after."""

CALL_TIMEOUT_S = 1.0
"""Calls to the registry are given up after this long: neither a status nor the end of a process waits."""


class PresenceStore(Protocol):
    """Where orchestrators announce themselves; `RedisRegistry` is one."""

    async def announce(self, name: str, state: bytes, ttl_s: float) -> None:
        """Store an orchestrator's state for a while.

        Raises:
            GammarayError: The registry cannot be reached, or refuses the command.
        """

    async def withdraw(self, name: str) -> None:
        """Delete an orchestrator's state.

        Raises:
            GammarayError: The registry cannot be reached, or refuses the command.
        """

    async def orchestrators(self) -> dict[str, bytes]:
        """Return the state of each orchestrator.

        Raises:
            GammarayError: The registry cannot be reached, or refuses the command.
        """


class Presence:
    """Announces one orchestrator, and finds the others.

    Args:
        store: Where.
        state: Returns the orchestrator's state.
    """

    def __init__(self, store: PresenceStore, state: Callable[[], ProcessStatus]) -> None:
        self._store, self._state = store, state
        self._name = uuid.uuid4().hex[:12]
        self._task: asyncio.Task[None] | None = None
        self._is_announced = True

    async def start(self) -> None:
        """Announce now and from now on; a dead registry does no harm."""
        await self.announce()
        self._task = asyncio.create_task(self._keep_alive(), name="orchestrator presence")

    async def others(self) -> list[ProcessStatus]:
        """Return the state of the other orchestrators; none while the registry does not answer."""
        try:
            entries = await asyncio.wait_for(self._store.orchestrators(), CALL_TIMEOUT_S)
        except (GammarayError, asyncio.TimeoutError):
            return []
        entries.pop(self._name, None)
        found = (_parse(name, state) for name, state in sorted(entries.items()))
        return [process for process in found if process is not None]

    async def stop(self) -> None:
        """Withdraw the announcement."""
        if self._task is not None:
            await end_tasks(self._task)
            with contextlib.suppress(GammarayError, asyncio.TimeoutError):
                await asyncio.wait_for(self._store.withdraw(self._name), CALL_TIMEOUT_S)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            await self.announce()

    async def announce(self) -> None:
        """Announce the present state; a failure is only logged."""
        try:
            state: Any = process_to_proto(self._state()).SerializeToString()
            await asyncio.wait_for(self._store.announce(self._name, state, ENTRY_S), CALL_TIMEOUT_S)
        except (GammarayError, asyncio.TimeoutError) as error:
            if self._is_announced:
                _log.warning("this orchestrator cannot announce itself, serving goes on: %r", error)
            self._is_announced = False
        except Exception:  # a bug must not end the announcements: the others would take this one for dead
            _log.exception("this orchestrator cannot announce itself, serving goes on")
            self._is_announced = False
        else:
            self._is_announced = True


def _parse(name: str, state: bytes) -> ProcessStatus | None:
    try:
        return process_from_proto(pb.ProcessStatus.FromString(state))
    except (DecodeError, ValueError) as error:  # of another version, or not an orchestrator's
        _log.warning("registry entry of orchestrator %s cannot be read: %s", name, error)
        return None
