"""Who runs, who waits, who is turned away: bounded queues that are fair between tenants.

A free place goes to the waiting tenant that holds the fewest, and among those to the one that was served
longest ago: tenants take turns, however many requests each has thrown in. Within a tenant the higher priority
goes first, then the earlier. When the queue is full, the newest request of the longest queue goes: a flood
turns away itself.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gammaray.errors import DeadlineExceededError, ResourceExhaustedError
from orchestrator.access.caller import Caller

__all__ = ["Admission"]

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
FIRST_GUESS_S = 1.0
"""How long a request holds its place, until some were seen."""

_WEIGHT = 0.1  # of the newest request in the mean of how long places are held


@dataclass(order=True)
class _Ticket:
    """A waiting request; sorts by who goes first."""

    rank: tuple[int, int]
    turn: asyncio.Future[None] = field(compare=False)


class _Tenant:
    """What one tenant holds and waits for."""

    def __init__(self) -> None:
        self.num_running = 0
        self.last_served = -1
        self.waiting: list[_Ticket] = []  # a heap


class Admission:
    """Lets a bounded number of requests run and a bounded number wait.

    Args:
        capacity: Requests that run at once.
        max_waiting: Requests that wait, over all tenants; 0 turns away what cannot run at once.
        max_wait_s: How long a request waits.
        tenant_capacity: Requests of one named tenant that run at once; None for `capacity`. Below that, a
            tenant that never ends its requests cannot take every place.
    """

    def __init__(
        self, capacity: int, max_waiting: int, max_wait_s: float, tenant_capacity: int | None = None
    ) -> None:
        self._capacity, self._max_waiting, self._max_wait_s = capacity, max_waiting, max_wait_s
        self._tenant_capacity = tenant_capacity or capacity
        self._tenants: dict[str, _Tenant] = {}
        self._numbers = itertools.count()
        self._num_running = self._num_waiting = 0
        self._held_s = FIRST_GUESS_S

    @property
    def num_running(self) -> int:
        """Requests that hold a place."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return self._num_waiting

    @property
    def num_tenants(self) -> int:
        """Tenants with a running or waiting request, the unnamed tenant included."""
        return len(self._tenants)

    @property
    def retry_after_s(self) -> float:
        """When a place may be free again, in seconds: by how long places were held lately."""
        expected = self._held_s * (self._num_waiting + 1) / self._capacity
        return min(MAX_RETRY_S, max(MIN_RETRY_S, expected))

    @asynccontextmanager
    async def place(self, caller: Caller) -> AsyncIterator[None]:
        """Wait for a place, and hold it inside the context.

        Raises:
            ResourceExhaustedError: The queue is full, or the wait took too long; says when to come back.
            DeadlineExceededError: The caller's own deadline came first.
        """
        await self._enter(caller)
        since = time.monotonic()
        try:
            yield
        finally:
            self._held_s += _WEIGHT * (time.monotonic() - since - self._held_s)
            self._leave(caller.tenant)

    async def _enter(self, caller: Caller) -> None:
        if time.monotonic() >= caller.deadline:
            raise DeadlineExceededError("the caller's deadline was over when the request came")
        tenant = self._tenants.setdefault(caller.tenant, _Tenant())
        if self._may_run(caller.tenant, tenant):  # then nobody waits who might run
            self._serve(tenant)
            return
        try:
            self._make_room(tenant)
            ticket = _Ticket((-caller.priority, next(self._numbers)), asyncio.Future())
            heapq.heappush(tenant.waiting, ticket)
            self._num_waiting += 1
            await self._wait(ticket, tenant, caller)
        finally:
            self._forget_idle(caller.tenant)

    async def _wait(self, ticket: _Ticket, tenant: _Tenant, caller: Caller) -> None:
        left_s = caller.deadline - time.monotonic()

        def expire() -> None:
            if not ticket.turn.done():
                self._drop(ticket, tenant)
                ticket.turn.set_exception(
                    DeadlineExceededError("the caller's deadline came while the request waited")
                    if left_s <= self._max_wait_s
                    else self._exhausted(f"no place within {self._max_wait_s:g} s")
                )

        # Not wait_for: before Python 3.12 it swallows a cancellation that comes together with the turn.
        timer = asyncio.get_running_loop().call_later(min(self._max_wait_s, left_s), expire)
        try:
            await ticket.turn
        except asyncio.CancelledError:
            self._drop(ticket, tenant)
            if not ticket.turn.cancelled() and ticket.turn.exception() is None:
                self._leave(caller.tenant)  # its turn had come
            raise
        finally:
            timer.cancel()

    def _make_room(self, tenant: _Tenant) -> None:
        """Have room in the queue for one more of `tenant`, at the cost of one who has more there.

        Raises:
            ResourceExhaustedError: Nobody has.
        """
        if self._num_waiting < self._max_waiting:
            return
        longest = max(self._tenants.values(), key=lambda other: len(other.waiting))
        if len(longest.waiting) <= len(tenant.waiting) + 1:
            raise self._exhausted("the queue is full")
        victim = max(longest.waiting)
        self._drop(victim, longest)
        if not victim.turn.done():  # else it was cancelled just now
            error = self._exhausted("the queue is full, and others wait who asked for less")
            victim.turn.set_exception(error)

    def _exhausted(self, why: str) -> ResourceExhaustedError:
        counts = f"{self._num_running} requests run, {self._num_waiting} wait"
        return ResourceExhaustedError(f"{why}: {counts}", retry_after_s=self.retry_after_s)

    def _drop(self, ticket: _Ticket, tenant: _Tenant) -> None:
        if ticket in tenant.waiting:
            tenant.waiting.remove(ticket)
            heapq.heapify(tenant.waiting)
            self._num_waiting -= 1

    def _may_run(self, name: str, tenant: _Tenant) -> bool:
        most = self._tenant_capacity if name else self._capacity
        return self._num_running < self._capacity and tenant.num_running < most

    def _serve(self, tenant: _Tenant) -> None:
        tenant.num_running += 1
        tenant.last_served = next(self._numbers)
        self._num_running += 1

    def _leave(self, name: str) -> None:
        """Give a place back, and to the next one at once."""
        self._tenants[name].num_running -= 1
        self._num_running -= 1
        waiting = [t for name, t in self._tenants.items() if t.waiting and self._may_run(name, t)]
        for tenant in sorted(waiting, key=lambda other: (other.num_running, other.last_served)):
            while tenant.waiting:
                ticket = heapq.heappop(tenant.waiting)
                self._num_waiting -= 1
                if not ticket.turn.done():  # else it was cancelled just now
                    self._serve(tenant)
                    ticket.turn.set_result(None)
                    self._forget_idle(name)
                    return
        self._forget_idle(name)

    def _forget_idle(self, name: str) -> None:
        """Keep nothing of tenants that neither run nor wait: names are the callers' and many."""
        tenant = self._tenants.get(name)
        if tenant is not None and not tenant.num_running and not tenant.waiting:
            del self._tenants[name]
