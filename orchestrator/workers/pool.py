"""The workers of one role: which are connected, which are refused, and which takes a new session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Generic

from gammaray.aio import BackgroundTasks
from gammaray.errors import GammarayError, UnavailableError
from gammaray.security.tls import TlsFiles
from gammaray.types import ProcessStatus, WorkerTotals
from gammaray.wire.convert import values_of
from orchestrator.workers.connection import WorkerConnection
from orchestrator.workers.protocol import BlockT, ResultT, WorkerInfo, WorkerProtocol

_log = logging.getLogger(__name__)

REGISTRY_MISSES = 3
"""A worker missing from the registry this many times in a row is dropped if its link is down."""

CROWDED = 1.5
"""A worker with more sessions than this times the fewest, plus two, is not chosen for its cached prefixes."""


Keys = Callable[[], Sequence[int]]
"""Returns the prefix keys of a text, see `orchestrator.workers.prefix_affinity`; called only if several
workers are eligible."""


Suits = Callable[[WorkerConnection[BlockT, ResultT]], bool]
"""Whether a worker may be chosen."""


class WorkerPool(Generic[BlockT, ResultT]):
    """The workers of one role, except those for which `check` raises GammarayError."""

    def __init__(
        self,
        protocol: WorkerProtocol[BlockT, ResultT],
        check: Callable[[WorkerInfo], None],
        tls: TlsFiles | None = None,
    ) -> None:
        self.role = protocol.role
        self.links: dict[str, WorkerConnection[BlockT, ResultT]] = {}
        self._protocol, self._check, self._tls = protocol, check, tls
        self._misses: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._closing = BackgroundTasks(_log, "failed to close a link")
        self._is_closed = False

    def announce(self, addresses: set[str]) -> None:
        """Connect to new workers; drop those that are no longer announced and whose link is down."""
        for address in sorted(addresses):
            self._misses[address] = 0
            if address not in self.links:
                link = WorkerConnection(
                    self._protocol, address, check=self._check, on_change=self._changed.set, tls=self._tls
                )
                self.links[address] = link
                link.start()
        for address in self.links.keys() - addresses:
            self._misses[address] += 1
            if self._misses[address] >= REGISTRY_MISSES and not self.links[address].is_up:
                self._closing.start(self.links.pop(address).close(), address)

    def pick(
        self, suits: Suits[BlockT, ResultT] = lambda _: True, keys: Keys = tuple
    ) -> WorkerConnection[BlockT, ResultT] | None:
        """Return a usable and suitable worker for a text with these prefix keys; None if there is none.

        The worker that has processed most of the text, at least half, is chosen unless it has many more
        sessions than others; otherwise the worker with the fewest sessions.
        """
        return _best([link for link in self.links.values() if link.is_usable and suits(link)], keys)

    def pick_any(
        self, suits: Suits[BlockT, ResultT] = lambda _: True, keys: Keys = tuple
    ) -> WorkerConnection[BlockT, ResultT] | None:
        """Return the worker of `pick`, else a connected one that is paused after being late, or None."""
        late = [link for link in self.links.values() if link.is_up and not link.is_draining and suits(link)]
        return self.pick(suits, keys) or _best(late, keys)

    async def wait(
        self, timeout_s: float, suits: Suits[BlockT, ResultT] = lambda _: True, keys: Keys = tuple
    ) -> WorkerConnection[BlockT, ResultT]:
        """Wait for a suitable worker and return it, chosen as by `pick_any`; else UnavailableError."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while (link := self.pick_any(suits, keys)) is None:
            if self._is_closed:
                raise UnavailableError("the orchestrator is shutting down")
            if not await self._has_changed(deadline):
                raise UnavailableError(self._why_none(timeout_s))
        return link

    async def wait_until_connected(self, timeout_s: float) -> None:
        """Wait until every worker is connected or refused, or `timeout_s` has passed."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not all(link.is_up or link.refusal for link in self.links.values()):
            if not await self._has_changed(deadline):
                return

    async def _has_changed(self, deadline: float) -> bool:
        """Wait until a link came up, went down or was refused; return False if the deadline came first."""
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), deadline - asyncio.get_running_loop().time())
        except asyncio.TimeoutError:
            return False
        return True

    def refusals(self) -> list[GammarayError]:
        return [link.refusal for link in self.links.values() if link.refusal is not None]

    def unusable(self) -> list[str]:
        """Return each worker that is refused or not connected, with its address and the reason."""
        return [
            f"{self.role} {link.address}: {f'refused: {link.refusal}' if link.refusal else link.trouble}"
            for link in self.links.values()
            if link.refusal or link.trouble
        ]

    def status(self) -> list[ProcessStatus]:
        return [self._status(link) for link in self.links.values()]

    def num_up(self) -> int:
        """Return the number of connected workers; thread-safe."""
        return sum(link.is_up for link in tuple(self.links.values()))

    def _status(self, link: WorkerConnection[BlockT, ResultT]) -> ProcessStatus:
        info = link.info
        if info is None:
            return ProcessStatus(self.role, 0, link.address, "", link.is_up, 0)
        return ProcessStatus(
            role=self.role,
            address=link.address,
            healthy=link.is_up,
            sessions=info.num_sessions,
            worker_totals=WorkerTotals(**values_of(info.totals, WorkerTotals)),
            clock_offset_s=link.clock_offset_s,
            **values_of(info, ProcessStatus),
        )

    async def close(self) -> None:
        """Close all links; pending `wait` calls fail."""
        self._is_closed = True
        self._changed.set()
        await asyncio.gather(*(link.close() for link in self.links.values()), self._closing.settled())

    def _why_none(self, timeout_s: float) -> str:
        known = "; ".join(self.unusable()) or f"{len(self.links)} known"
        return f"no {self.role} worker within {timeout_s:g} s ({known})"


def _best(
    links: Sequence[WorkerConnection[BlockT, ResultT]], keys: Keys
) -> WorkerConnection[BlockT, ResultT] | None:
    fewest = min((len(link.sessions) for link in links), default=0)
    calm = [link for link in links if len(link.sessions) <= CROWDED * fewest + 2]
    if len(calm) < 2:
        return next(iter(calm), None)
    text = keys()
    return max(calm, key=lambda link: (link.prefixes.count(text), -len(link.sessions)))
