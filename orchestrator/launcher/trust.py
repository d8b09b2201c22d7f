"""Access control of a cluster on one machine: who may call it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gammaray.checks import is_address, is_loopback, is_wildcard
from gammaray.config import ClusterSettings
from gammaray.errors import InvalidArgumentError
from gammaray.receipts.keys import read_receipt_keys
from gammaray.security.keys import hash_key, make_secret, read_keys


@dataclass(frozen=True)
class Trust:
    """Security settings that the launcher passes to the processes it starts."""

    orchestrator: Mapping[str, Any]  # fields of OrchestratorSettings
    api_key: str | None  # the launcher's own; None if no keys are required
    local_only: bool = False  # orchestrators reject gRPC calls from other machines

    @property
    def probe_key_sha256(self) -> str:
        """SHA-256 of the launcher's own key; empty if no keys are required."""
        return hash_key(self.api_key) if self.api_key is not None else ""


def check_access(settings: ClusterSettings) -> None:
    """Check, before anything starts, that open access from other machines is intended.

    InvalidArgumentError if other machines can reach the APIs without a key, and `api_keys_file` does not say
    so; or if a key file cannot be read, or has no keys.
    """
    if settings.receipt_keys_file:
        read_receipt_keys(Path(settings.receipt_keys_file))
    if settings.key_file is not None:
        if not read_keys(settings.key_file):
            raise InvalidArgumentError(
                "api_keys_file", f"{settings.key_file} without keys", "a file with a key"
            )
    elif not is_loopback(settings.host) and not settings.api_keys_file:
        raise InvalidArgumentError(
            "host",
            f"{settings.host}, which other machines can reach, without api_keys_file",
            "a loopback address; or create keys with `gammaray keys create`; or use --api-keys-file none",
        )


def arrange_trust(settings: ClusterSettings) -> Trust:
    """Return who may call a cluster, and the launcher's own key."""
    orchestrator: dict[str, Any] = {"cors_origins": settings.cors_origins}
    api_key = None
    if settings.receipt_keys_file:
        orchestrator["receipt_keys_file"] = str(Path(settings.receipt_keys_file).absolute())
    if settings.key_file is not None:
        api_key = make_secret()
        orchestrator["api_keys_file"] = str(settings.key_file.absolute())
    else:
        orchestrator["allowed_hosts"] = _own_names(settings)
    return Trust(orchestrator, api_key, api_key is None and is_loopback(settings.host))


def _own_names(settings: ClusterSettings) -> str:
    """Return the allowed host names of a cluster without keys, separated by commas."""
    names = [settings.allowed_hosts] if settings.allowed_hosts else []
    if not is_loopback(settings.host):
        names += [name for name in (settings.host, socket.gethostname()) if not is_address(name)]
    return ",".join(names)


def reachable(host: str) -> str:
    """Return the address at which this machine reaches a server bound to `host`."""
    return "127.0.0.1" if is_wildcard(host) else host
