"""Redis keys of a cluster, and bounds of the bytes stored per tenant and in total."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gammaray.config import REDIS_PREFIX
from gammaray.errors import GammarayError, InvalidArgumentError, ResourceExhaustedError
from gammaray.security.tenants import tenant_of
from orchestrator.access.caller import TENANT_SHARE
from orchestrator.storage import session_scripts as scripts
from orchestrator.storage.client import Redis, answer

DEFAULT_TOTAL = 2**30
"""Bound of all stored bytes if Redis has no limit of memory."""

READ_PERIOD_S = 30.0
"""Seconds between reads of Redis's memory limit."""


class StoreBounds:
    """Upper bounds of the bytes that are charged for sessions, see `orchestrator.storage.session_scripts`.

    A `total` of 0 is half of Redis's `maxmemory`, or 1 GiB if that is unknown; one tenant may use
    `tenant_share` of it, if API keys name tenants.
    """

    def __init__(self, redis: Redis, total: int = 0, tenant_share: float = TENANT_SHARE) -> None:
        self._redis, self._given, self._tenant_share = redis, total, tenant_share
        self._derived, self._read_at = DEFAULT_TOTAL, 0.0

    async def of(self, session_id: str) -> tuple[int, int]:
        """Return the bounds of a session's tenant and of all tenants, in bytes."""
        total = self._given or await self._derive()
        return round(total * self._tenant_share) if tenant_of(session_id) else total, total

    async def admitted(self, call: Callable[[], Awaitable[Any]], name: str, ttl_ms: int, field: str) -> int:
        """Run a script that may be refused for exceeding a bound; return its result if it is admitted.

        `name` is qualified, and `field` of the request too large if waiting cannot help: then
        InvalidArgumentError, else ResourceExhaustedError with a retry delay up to `ttl_ms`.
        """
        while True:
            code, *refusal = await answer(call())
            if code in (scripts.OVER_TENANT, scripts.OVER_ALL):
                raise await self._refused(name, ttl_ms, field, code, *refusal)
            if code != scripts.AGAIN:
                return int(code)

    async def _refused(
        self, name: str, ttl_ms: int, field: str, code: int, used: int, need: int, wait_ms: int
    ) -> ResourceExhaustedError | InvalidArgumentError:
        bound, total = await self.of(name)
        tenant = tenant_of(name)
        whose = f"of tenant {tenant}"
        if code == scripts.OVER_ALL or not tenant:
            bound, whose = total, "of all tenants"
        if need > bound:  # waiting does not help
            allowed = f"{bound} bytes of stored sessions {whose}"
            return InvalidArgumentError(field, f"a request that may store {need} bytes", allowed)
        retry_s = math.ceil(min(wait_ms, ttl_ms) / 1e3)
        return ResourceExhaustedError(
            f"stored sessions {whose}: {used} of {bound} bytes are in use, this request needs "
            f"{need} more; retry in {retry_s} s, or delete sessions",
            float(retry_s),
        )

    async def _derive(self) -> int:
        if time.monotonic() >= self._read_at:
            self._read_at = time.monotonic() + READ_PERIOD_S
            # Redis is unreachable, so the next call fails, or an ACL forbids INFO.
            with suppress(GammarayError):
                memory = await answer(self._redis.info("memory"))
                self._derived = int(memory.get("maxmemory", 0)) // 2 or DEFAULT_TOTAL
        return self._derived


@dataclass(frozen=True)
class Keys:
    """The keys of one cluster, whose `prefix` has no colon: no key of a cluster is one of another."""

    prefix: str = REDIS_PREFIX

    def of(self, session_id: str) -> list[str]:
        """Return the keys passed to a session's scripts; the first three belong to the session alone."""
        head, stored = f"{self.prefix}:session:{{{session_id}}}", f"{self.prefix}:stored"
        return [
            head,
            f"{head}:tokens",
            f"{head}:cycles",
            self.running,
            self.index(tenant_of(session_id)),
            stored,
            f"{stored}:bytes",
            f"{stored}:used",
            f"{self.prefix}:epoch",
        ]

    def request(self, session_id: str, digest: str) -> list[str]:
        """Return the keys of a session's request: the request, and the set of sessions that use it."""
        key = f"{self.prefix}:request:{tenant_of(session_id)}/{digest}"
        return [key, f"{key}:users"]

    def response(self, name: str) -> list[str]:
        """Return the keys passed to the scripts of a response: its own, then those of `of`."""
        return [f"{self.prefix}:response:{{{name}}}", *self.of(name)[1:]]

    def index(self, tenant: str) -> str:
        """Return the key of the index of a tenant's sessions."""
        return f"{self.prefix}:sessions:{tenant}"

    @property
    def running(self) -> str:
        """The key of the set of sessions that have an owner."""
        return f"{self.prefix}:running"

    @property
    def orchestrators(self) -> str:
        return f"{self.prefix}:orchestrators"

    def orchestrator(self, name: str) -> str:
        return f"{self.prefix}:orchestrator:{name}"

    @property
    def workers(self) -> str:
        """The pattern of the keys of all workers, which `services.process.registry` writes."""
        return f"{self.prefix}:worker:*"

    @staticmethod
    def role(worker: bytes) -> str:
        return worker.split(b":")[2].decode()


DEFAULT_KEYS = Keys()
