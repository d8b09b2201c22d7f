"""Leases of sessions: renewal for those that this process owns, cleanup for those whose owner died."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from gammaray.aio import BackgroundTasks, end_tasks
from gammaray.errors import GammarayError, UnavailableError
from orchestrator.cycle.session import Session
from orchestrator.storage.session_store import LEASE_S, RedisStore

_log = logging.getLogger(__name__)


class LeaseManager:
    """Renews the leases of held sessions, and reaps sessions whose lease expired.

    Reaping frees the workers' caches. The session itself is kept until it expires, as its client may resume
    it. An owner that was only slow still owns its session, and sends the workers its tokens again.
    """

    def __init__(self, store: RedisStore, release: Callable[[str, int], None]) -> None:
        self._store, self._release = store, release
        self._held: dict[str, Session] = {}
        self._ending = BackgroundTasks(_log, "failed to end a lease")
        self._loops: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loops = ((self._renew_all, LEASE_S / 3), (self.reap_all, LEASE_S / 2))
        self._loops = [
            asyncio.create_task(repeat(work, period_s), name=f"leases: {work.__name__}")
            for work, period_s in loops
        ]

    async def close(self) -> None:
        """Stop, after background writes have finished."""
        await end_tasks(*self._loops)
        await self._ending.settled()

    async def settled(self) -> None:
        """Wait until every `detach` is written to the store."""
        await self._ending.settled()

    @contextmanager
    def holding(self, session: Session) -> Iterator[None]:
        """Renew the lease of a session inside the `with` block."""
        name = session.session_id
        self._held[name] = session
        try:
            yield
        finally:
            if self._held.get(name) is session:  # else a later owner in this process holds it
                del self._held[name]

    def detach(self, session: Session) -> None:
        """Detach a session whose turn has not ended from its owner in the store; returns at once."""
        self._ending.start(self._store.detach(session), session.session_id)

    async def _renew_all(self) -> None:
        async def renew(session: Session) -> None:
            try:
                await self._store.renew(session)
            except UnavailableError:
                raise
            except GammarayError as error:  # its owner gets the error at its next commit
                _log.info("not renewed: %s", error)

        await asyncio.gather(*map(renew, list(self._held.values())))

    async def reap_all(self) -> None:
        """Free the workers' caches of sessions whose lease expired; called periodically after `start`."""
        for name in await self._store.running():
            if name in self._held:
                continue
            epoch = await self._store.reap(name)
            if epoch is not None:
                _log.info("session %s: the lease expired, freeing its caches", name)
                self._release(name, max(0, epoch))


async def repeat(work: Callable[[], Coroutine[Any, Any, None]], period_s: float) -> None:
    """Run `work` about every `period_s` seconds, until cancelled; a failure is logged."""
    while True:
        await asyncio.sleep(period_s * random.uniform(0.8, 1.2))
        try:
            await work()
        except GammarayError as error:
            _log.warning("%s: %s", work.__name__.strip("_"), error)
        except Exception:  # a bug in one round must not let all leases expire
            _log.exception("%s failed", work.__name__.strip("_"))
