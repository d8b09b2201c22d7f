"""Which tenants agreed that workers learn from their streams, and which workers have applied it."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from gammaray.learning.private import make_folder, open_file
from gammaray.program.files import try_lock
from gammaray.security.keys import locked

OPEN, SHARED, TENANT = "open", "shared", "tenant-"
"""Drafters: without API keys; of the tenants that share one; of one tenant, whose name follows."""

Consent = Literal["own", "shared"]
"""Which drafter a tenant's streams train: one of its own, or the shared one."""


class Consents(BaseModel):
    """The tenants that agreed. Streams and versions carry the numbers of the consents that allow them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tenants: dict[str, Consent] = {}  # drafter that the streams train; "" (no API keys) always agrees
    numbers: dict[str, int] = {}  # generation of each tenant's last withdrawal: number of its next consent
    generation: int = 0  # number of withdrawals so far
    pending: tuple[str, ...] = ()  # tenants that withdrew and whose data are not all deleted yet

    def drafter_of(self, tenant: str) -> str | None:
        """Return the drafter that serves a tenant and learns from it; None: that of the start."""
        if self.number_of(tenant) is None:
            return None
        return OPEN if not tenant else SHARED if self.tenants[tenant] == "shared" else TENANT + tenant

    def drafters(self) -> dict[str, list[str]]:
        """Return the drafters that serve tenants, and these."""
        found: dict[str, list[str]] = {}
        for tenant in ("", *self.tenants):
            if (name := self.drafter_of(tenant)) is not None:
                found.setdefault(name, []).append(tenant)
        return found

    def number_of(self, tenant: str) -> int | None:
        """Return the number of a tenant's consent; None without one."""
        if tenant in self.pending or (tenant and tenant not in self.tenants):
            return None
        return self.numbers.get(tenant, 0)

    def covers(self, noted: Mapping[str, int]) -> bool:
        """Whether the consents of these numbers are still those of these tenants."""
        return all(self.number_of(tenant) == number for tenant, number in noted.items())

    def with_tenant(self, tenant: str, to: Consent) -> Consents:
        return self.model_copy(update={"tenants": {**self.tenants, tenant: to}})

    def without(self, tenant: str) -> Consents:
        """Return the consents without a tenant's, whose deletions are pending; that of "" begins anew."""
        return Consents(
            tenants={name: to for name, to in self.tenants.items() if name != tenant},
            numbers={**self.numbers, tenant: self.generation + 1},
            generation=self.generation + 1,
            pending=tuple(sorted({*self.pending, tenant})),
        )


class Confirmation:
    """The generation of consents that a worker has applied, in a file that it locks while it lives."""

    def __init__(self, folder: Path) -> None:
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._path = make_folder(folder / "workers") / name
        with locked(folder / "workers", "learn"):
            self._file = open_file(self._path)
            try_lock(self._file)

    def confirm(self, generation: int) -> None:
        """Note that what was written and what drafts agrees with the consents of a generation."""
        os.pwrite(self._file.fileno(), f"{generation:020d}".encode(), 0)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()


def confirmed(folder: Path) -> dict[str, int]:
    """Return the generation that each worker at work has applied, -1 for none yet; forget dead workers."""
    found: dict[str, int] = {}
    if not (folder / "workers").is_dir():
        return found
    with locked(folder / "workers", "learn"):
        for path in (folder / "workers").glob("*"):
            with open_file(path) as file:
                if try_lock(file, is_shared=True):
                    path.unlink()
                else:
                    found[path.name] = int(file.read() or b"-1")
    return found
