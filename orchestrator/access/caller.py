"""Who calls: API keys on both public APIs, and the one rule of whose session is whose.

Sessions belong to tenants. Inside the orchestrator, on the workers and in Redis a session is known by its
*qualified* name, which begins with its tenant: `Caller.qualify` is the only way from the name that a caller
gives to that one, so what belongs to another tenant cannot even be named. It is not found.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gammaray.checks import check_session_id
from gammaray.config import OrchestratorSettings
from gammaray.errors import InvalidArgumentError, UnauthenticatedError
from gammaray.security.keys import ApiKey, hash_key, key_id_of, read_keys
from gammaray.wire.metadata import MAX_TIMEOUT_MS, TIMEOUT_HEADER

__all__ = ["ANONYMOUS", "PRIORITY_HEADER", "Authenticator", "Caller", "make_authenticator", "tenant_of"]

_log = logging.getLogger(__name__)

PRIORITY_HEADER = "gammaray-priority"
"""Header and metadata: which of a tenant's waiting requests go first; -10 to 10, default 0."""

MAX_PRIORITY = 10
RELOAD_PERIOD_S = 0.5

PROBE_TENANT = "gammaray-probe"
"""Whom the launcher's own key belongs to."""

# Serve binds the gRPC ports of its replicas, behind the proxy, to every interface.
_LOCAL_PEERS = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "unix:")
_SEPARATOR = ":"  # in no tenant's and in no session's name


@dataclass(frozen=True)
class Caller:
    """On whose behalf a request is served.

    Args:
        tenant: Owner of the sessions; empty where no keys are asked for.
        key_id: The key it came with, which may be logged.
        priority: Among the tenant's own waiting requests; higher goes first.
        deadline: `time.monotonic()` past which nobody waits for the answer.
        traceparent: W3C trace context that the request came with, or empty.
        tracestate: What belongs to it.
    """

    tenant: str = ""
    key_id: str = ""
    priority: int = 0
    deadline: float = math.inf
    traceparent: str = ""
    tracestate: str = ""

    @property
    def prefix(self) -> str:
        """What the qualified names of this tenant's sessions begin with, and no other's."""
        return f"{self.tenant}{_SEPARATOR}" if self.tenant else ""

    def qualify(self, session_id: str) -> str:
        """Return the name under which the orchestrator knows a session of this caller.

        Raises:
            InvalidArgumentError: It is no name of a session.
        """
        check_session_id(session_id)
        return self.prefix + session_id

    def public(self, qualified: str) -> str:
        """Return the name that the caller knows a session by."""
        return qualified.removeprefix(self.prefix)


ANONYMOUS = Caller()


def tenant_of(session_id: str) -> str:
    """Return the tenant in a qualified name, the inverse of `Caller.qualify`."""
    tenant, separator, _ = session_id.partition(_SEPARATOR)
    return tenant if separator else ""


class Authenticator:
    """Finds out who calls.

    Args:
        path: The key file; None lets everybody in, as the one nameless tenant. It is read again when it
            changes. One that cannot be read any more leaves the keys as they were.
        extra: Hashes of further keys by tenant, which no file holds.
        local_only: Refuse who calls from another machine.

    Raises:
        InvalidArgumentError: The file cannot be read, or holds no key.
    """

    def __init__(
        self,
        path: Path | None = None,
        extra: Mapping[str, str] | None = None,
        local_only: bool = False,
    ) -> None:
        self._path, self._extra, self._local_only = path, dict(extra or {}), local_only
        self._keys: dict[str, ApiKey] = {}
        self._version: tuple[int, int, int] | None = None
        self._look_at = -math.inf
        if path is not None:
            self._load()
            if not self._keys:
                raise InvalidArgumentError("api_keys_file", f"{path} without keys", "at least one key")

    @property
    def is_open(self) -> bool:
        """Whether callers need no key."""
        return self._path is None

    def identify(self, headers: Mapping[str, str], peer: str = "") -> Caller:
        """Return the caller of a request with these headers or metadata (names in lower case).

        Args:
            headers: By name.
            peer: Where the call comes from, as gRPC tells it; empty when the port is bound to what it should.

        Raises:
            UnauthenticatedError: A key is needed, and there is none or a wrong one; or a call from elsewhere.
            InvalidArgumentError: A header of ours makes no sense.
        """
        if self._local_only and peer and not peer.startswith(_LOCAL_PEERS):
            raise UnauthenticatedError("this cluster serves its own machine only, as it asks for no keys")
        tenant, key_id = self._tenant(headers.get("authorization", ""))
        timeout_ms = _number(headers, TIMEOUT_HEADER, 1, MAX_TIMEOUT_MS)
        return Caller(
            tenant=tenant,
            key_id=key_id,
            priority=_number(headers, PRIORITY_HEADER, -MAX_PRIORITY, MAX_PRIORITY) or 0,
            deadline=math.inf if timeout_ms is None else time.monotonic() + timeout_ms / 1000,
            traceparent=headers.get("traceparent", ""),
            tracestate=headers.get("tracestate", ""),
        )

    def _tenant(self, authorization: str) -> tuple[str, str]:
        if self._path is None:
            return "", ""
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise UnauthenticatedError("an API key is needed: `authorization: Bearer <key>`")
        self._refresh()
        key_id = key_id_of(key.strip())
        known = self._keys.get(key_id) if key_id is not None else None
        if key_id is not None and known is not None and known.matches(key.strip()):
            return known.tenant, key_id
        if key_id is not None and self._extra:
            digest = hash_key(key.strip())
            for tenant, sha256 in self._extra.items():
                if digest == sha256:
                    return tenant, key_id
        # The id alone, which is no secret: it is what the owner of a revoked key needs to know.
        raise UnauthenticatedError(f"the API key{f' {key_id}' if key_id else ''} is unknown or was revoked")

    def _refresh(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + RELOAD_PERIOD_S
        try:
            self._load()
        except InvalidArgumentError as error:
            _log.error("the API keys stay as they were: %s", error)

    def _load(self) -> None:
        assert self._path is not None
        version = _version(self._path)
        if version is not None and version == self._version:
            return
        self._keys = {key.id: key for key in read_keys(self._path)}
        if self._version is not None:
            _log.warning("%d API keys were read again from %s", len(self._keys), self._path)
        self._version = version


def make_authenticator(settings: OrchestratorSettings) -> Authenticator:
    """Return the authenticator that an orchestrator's settings ask for.

    Raises:
        InvalidArgumentError: The key file cannot be read, or holds no key.
    """
    if not settings.api_keys_file:
        return Authenticator(local_only=settings.local_only)
    probe = {PROBE_TENANT: settings.probe_key_sha256} if settings.probe_key_sha256 else {}
    return Authenticator(Path(settings.api_keys_file), probe, settings.local_only)


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _number(headers: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) <= 12 and low <= int(text) <= high:
        return int(text)
    raise InvalidArgumentError(name, text, f"an integer in [{low}, {high}]")
