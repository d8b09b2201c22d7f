"""Mutual TLS between orchestrators and workers: each must present a certificate of the same authority.

Addresses of workers change, so certificates name a role instead of a machine: clients of workers check for
`WORKER_NAME`, and a worker only serves peers with `ORCHESTRATOR_NAME`. A stolen worker key can therefore not
be used against other workers.

Files are read again for every new connection, so that certificates can be replaced without a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from gammaray.config import ServingSettings
from gammaray.errors import InvalidArgumentError, UnauthenticatedError

_log = logging.getLogger(__name__)

ORCHESTRATOR_NAME = "gammaray-orchestrator"
"""DNS name in the certificates of orchestrators."""

WORKER_NAME = "gammaray-worker"
"""DNS name in the certificates of workers."""


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of one process."""

    ca: Path  # the trusted authority (or several) of peer certificates
    cert: Path  # the process's certificate, with the chain up to the authority
    key: Path  # its private key

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return the contents of authority, certificate and key; InvalidArgumentError if one is no PEM."""
        return _pem(self.ca), _pem(self.cert), _pem(self.key)


def tls_files(settings: ServingSettings) -> TlsFiles | None:
    """Return the files in the folder that the settings name, all of which exist; None for plain text."""
    if not settings.tls_dir:
        return None
    files = TlsFiles(*(Path(settings.tls_dir, name) for name in ("ca.crt", "tls.crt", "tls.key")))
    files.read()
    return files


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return credentials of a server that rejects peers without a certificate of its authority."""
    served = files.read()

    def fetch() -> Any:
        nonlocal served
        try:
            fresh = files.read()
        except InvalidArgumentError as error:
            _log.error("failed to reload the certificates, keeping the current ones: %s", error)
            return None
        if fresh == served:
            return None
        _log.warning("reloaded the certificate from %s", files.cert)
        served = fresh
        return _configuration(fresh)

    return grpc.dynamic_ssl_server_credentials(_configuration(served), fetch, True)


def dial(address: str, files: TlsFiles | None, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
    """Return a channel to a worker, in plain text without `files`."""
    options = (*options, ("grpc.enable_http_proxy", 0))  # a proxy leads out of the cluster's network
    if files is None:
        return grpc.aio.insecure_channel(address, options=options)
    ca, cert, key = files.read()
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    named = (*options, ("grpc.ssl_target_name_override", WORKER_NAME))
    return grpc.aio.secure_channel(address, credentials, options=named)


def check_peer(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Raise UnauthenticatedError for a call on a TLS port whose certificate is not an orchestrator's."""
    peer = context.auth_context()
    if b"ssl" not in peer.get("transport_security_type", []):
        return
    names = list(peer.get("x509_subject_alternative_name", []))
    if ORCHESTRATOR_NAME.encode() not in names:
        shown = ", ".join(name.decode(errors="replace") for name in names) or "no name"
        raise UnauthenticatedError(f"the certificate shows {shown}, allowed: {ORCHESTRATOR_NAME}")


def _configuration(contents: tuple[bytes, bytes, bytes]) -> Any:
    ca, cert, key = contents
    return grpc.ssl_server_certificate_configuration([(key, cert)], ca)


def _pem(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError("tls_dir", f"{path} ({error.strerror})", "a PEM file") from None
    if b"-----BEGIN " not in content:
        raise InvalidArgumentError("tls_dir", f"{path}, which is none", "a PEM file")
    return content
