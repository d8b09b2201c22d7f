"""Authentication by API key on both public APIs, and the isolation of tenants' sessions.

Sessions belong to tenants. Inside the orchestrator, on the workers and in Redis a session has a *qualified*
name, which begins with its tenant. Only `Caller.qualify` makes it from the name that a caller gives, so a
caller cannot name another tenant's session: the lookup finds nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gammaray.checks import check_session_id
from gammaray.errors import InvalidArgumentError, UnauthenticatedError
from gammaray.security.keys import ApiKey, hash_key, key_id_of, read_keys
from gammaray.security.tenants import SEPARATOR
from gammaray.wire.metadata import MAX_TIMEOUT_MS, TIMEOUT_HEADER
from orchestrator.access.reloaded import ReloadedKeys

PRIORITY_HEADER = "gammaray-priority"
"""Header or metadata key: priority among a tenant's waiting requests; -10 to 10, default 0."""

MAX_PRIORITY = 10

TENANT_SHARE = 0.9
"""Share of running requests, stored bytes and kept outputs that one tenant may have, where keys name tenants.

It leaves a tenth to others, and little idle where there are none."""

PROBE_TENANT = "gammaray-probe"
"""Tenant that owns the launcher's key."""

# Serve binds the gRPC ports of the replicas that its proxy forwards to on every interface.
_LOCAL_PEERS = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "unix:")


@dataclass(frozen=True)
class Caller:
    """Identity of a request's caller, with the request's metadata."""

    tenant: str = ""  # owner of the sessions; empty if no keys are required
    priority: int = 0  # priority among the tenant's own waiting requests; higher goes first
    deadline: float = math.inf  # `time.monotonic()` after which the caller no longer waits for the answer
    traceparent: str = ""  # W3C trace context of the request, or empty
    tracestate: str = ""  # W3C `tracestate` of the request, or empty

    def qualify(self, session_id: str) -> str:
        """Return the qualified name of a session of this caller; InvalidArgumentError if it is malformed."""
        check_session_id(session_id)
        return f"{self.tenant}{SEPARATOR}{session_id}" if self.tenant else session_id


ANONYMOUS = Caller()


class Authenticator:
    """Authenticates callers by a key file, read again when it changes; None: all are one unnamed tenant.

    `probe_key_sha256` is the hash of the launcher's own key, if there is one. `local_only` rejects gRPC calls
    from other machines, also if the port is bound to all interfaces.
    """

    def __init__(
        self, path: Path | None = None, probe_key_sha256: str = "", local_only: bool = False
    ) -> None:
        self._probe_key_sha256, self._local_only = probe_key_sha256, local_only
        self._keys = None if path is None else ReloadedKeys(path, _read_by_id, "API keys")
        if self._keys is not None and not self._keys.current():
            raise InvalidArgumentError("api_keys_file", f"{path} without keys", "at least one key")

    @property
    def is_open(self) -> bool:
        """Whether callers need no key."""
        return self._keys is None

    def identify(self, headers: Mapping[str, str], peer: str = "") -> Caller:
        """Return the caller of a request by its headers, named in lower case, and gRPC's `peer` address.

        UnauthenticatedError if the required key is missing or wrong, or the call is from another machine.
        """
        if self._local_only and peer and not peer.startswith(_LOCAL_PEERS):
            raise UnauthenticatedError("without API keys this cluster serves its own machine only")
        tenant = self._tenant(headers.get("authorization", ""))
        timeout_ms = _number(headers, TIMEOUT_HEADER, 1, MAX_TIMEOUT_MS)
        return Caller(
            tenant=tenant,
            priority=_number(headers, PRIORITY_HEADER, -MAX_PRIORITY, MAX_PRIORITY) or 0,
            deadline=math.inf if timeout_ms is None else time.monotonic() + timeout_ms / 1000,
            traceparent=headers.get("traceparent", ""),
            tracestate=headers.get("tracestate", ""),
        )

    def _tenant(self, authorization: str) -> str:
        if self._keys is None:
            return ""
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise UnauthenticatedError("an API key is required: `authorization: Bearer <key>`")
        key_id = key_id_of(key.strip())
        if key_id is not None:
            known = self._keys.current().get(key_id)
            if known is not None and known.matches(key.strip()):
                return known.tenant
            if hash_key(key.strip()) == self._probe_key_sha256:
                return PROBE_TENANT
        # Only the id, which is not secret: it tells the owner which key was revoked.
        raise UnauthenticatedError(f"the API key{f' {key_id}' if key_id else ''} is unknown or was revoked")


def _read_by_id(path: Path) -> dict[str, ApiKey]:
    return {key.id: key for key in read_keys(path)}


def _number(headers: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) <= 12 and low <= int(text) <= high:
        return int(text)
    raise InvalidArgumentError(name, text, f"an integer in [{low}, {high}]")
