"""Admission control: bounded queues that are fair between tenants.

A free place goes to the waiting tenant with the fewest running requests; ties go to the tenant served longest
ago, so tenants take turns whatever their numbers of requests. Within a tenant, higher priority goes first,
then earlier arrival. When the queue is full, the lowest-ranked request of the tenant with the most waiting
requests is rejected, so a tenant that floods the queue displaces its own requests.
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

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
FIRST_GUESS_S = 1.0
"""Initial estimate of how long a request holds its place."""

_WEIGHT = 0.1  # weight of the newest sample in the moving average of holding times


@dataclass(order=True)
class _Ticket:
    """A waiting request; sorts in the order of service."""

    rank: tuple[int, int]
    turn: asyncio.Future[None] = field(compare=False)


class _Tenant:
    def __init__(self) -> None:
        self.num_running = 0
        self.last_served = -1
        self.waiting: list[_Ticket] = []  # a heap


class Admission:
    """Limits the numbers of requests that run (`num_running`) and that wait (`num_waiting`).

    At most `capacity` run at once, of one named tenant `tenant_capacity`, None for all: a smaller value keeps
    a tenant whose requests never end from taking every place. At most `max_waiting` wait, over all tenants,
    for `max_wait_s`; with 0 requests that cannot run at once are rejected.
    """

    def __init__(
        self, capacity: int, max_waiting: int, max_wait_s: float, tenant_capacity: int | None = None
    ) -> None:
        self._capacity, self._max_waiting, self._max_wait_s = capacity, max_waiting, max_wait_s
        self._tenant_capacity = tenant_capacity or capacity
        self._tenants: dict[str, _Tenant] = {}
        self._numbers = itertools.count()
        self.num_running = self.num_waiting = 0
        self._held_s = FIRST_GUESS_S

    @property
    def num_tenants(self) -> int:
        """Tenants with a running or waiting request, the unnamed tenant included."""
        return len(self._tenants)

    @property
    def retry_after_s(self) -> float:
        """Estimated seconds until a place is free, from recent holding times."""
        expected = self._held_s * (self.num_waiting + 1) / self._capacity
        return min(MAX_RETRY_S, max(MIN_RETRY_S, expected))

    @asynccontextmanager
    async def place(self, caller: Caller) -> AsyncIterator[None]:
        """Wait for a place, and hold it inside the context.

        ResourceExhaustedError, with a retry delay, if the queue is full or the wait took too long;
        DeadlineExceededError if the caller's own deadline came first.
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
            raise DeadlineExceededError("the deadline had passed when the request arrived")
        tenant = self._tenants.setdefault(caller.tenant, _Tenant())
        if self._may_run(caller.tenant, tenant):  # then no eligible request is waiting
            self._serve(tenant)
            return
        try:
            self._make_room(tenant)
            ticket = _Ticket((-caller.priority, next(self._numbers)), asyncio.Future())
            heapq.heappush(tenant.waiting, ticket)
            self.num_waiting += 1
            await self._wait(ticket, tenant, caller)
        finally:
            self._forget_idle(caller.tenant)

    async def _wait(self, ticket: _Ticket, tenant: _Tenant, caller: Caller) -> None:
        left_s = caller.deadline - time.monotonic()
        try:
            # wait_for, before Python 3.12, swallows a cancellation that arrives together with the result.
            async with asyncio.timeout(min(self._max_wait_s, left_s)):
                await ticket.turn
        except (TimeoutError, asyncio.CancelledError) as error:
            self._drop(ticket, tenant)
            if not ticket.turn.cancelled() and ticket.turn.exception() is None:
                self._leave(caller.tenant)  # the place had already been granted
            if isinstance(error, asyncio.CancelledError):
                raise
            if left_s <= self._max_wait_s:
                raise DeadlineExceededError("the deadline passed while the request waited") from None
            raise self._exhausted(f"not started within {self._max_wait_s:g} s") from None

    def _make_room(self, tenant: _Tenant) -> None:
        """Make room in the queue for a request of `tenant`, if needed by rejecting one of a longer queue."""
        if self.num_waiting < self._max_waiting:
            return
        longest = max(self._tenants.values(), key=lambda other: len(other.waiting))
        if len(longest.waiting) <= len(tenant.waiting) + 1:
            raise self._exhausted("the queue is full")
        victim = max(longest.waiting)
        self._drop(victim, longest)
        if not victim.turn.done():  # else it has just been cancelled
            error = self._exhausted("the queue is full, and other tenants have fewer waiting requests")
            victim.turn.set_exception(error)

    def _exhausted(self, why: str) -> ResourceExhaustedError:
        counts = f"{self.num_running} requests running, {self.num_waiting} waiting"
        return ResourceExhaustedError(f"{why}: {counts}", retry_after_s=self.retry_after_s)

    def _drop(self, ticket: _Ticket, tenant: _Tenant) -> None:
        if ticket in tenant.waiting:
            tenant.waiting.remove(ticket)
            heapq.heapify(tenant.waiting)
            self.num_waiting -= 1

    def _may_run(self, name: str, tenant: _Tenant) -> bool:
        most = self._tenant_capacity if name else self._capacity
        return self.num_running < self._capacity and tenant.num_running < most

    def _serve(self, tenant: _Tenant) -> None:
        tenant.num_running += 1
        tenant.last_served = next(self._numbers)
        self.num_running += 1

    def _leave(self, name: str) -> None:
        """Release a place and grant it to the next request."""
        self._tenants[name].num_running -= 1
        self.num_running -= 1
        waiting = [t for name, t in self._tenants.items() if t.waiting and self._may_run(name, t)]
        for tenant in sorted(waiting, key=lambda other: (other.num_running, other.last_served)):
            while tenant.waiting:
                ticket = heapq.heappop(tenant.waiting)
                self.num_waiting -= 1
                if not ticket.turn.done():  # else it has just been cancelled
                    self._serve(tenant)
                    ticket.turn.set_result(None)
                    self._forget_idle(name)
                    return
        self._forget_idle(name)

    def _forget_idle(self, name: str) -> None:
        """Remove a tenant without requests, since the number of tenant names is unbounded."""
        tenant = self._tenants.get(name)
        if tenant is not None and not tenant.num_running and not tenant.waiting:
            del self._tenants[name]
