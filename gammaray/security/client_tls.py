"""TLS of a client: trusted authorities and client certificate."""

from __future__ import annotations

import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from gammaray.errors import InvalidArgumentError

_PEM = "a PEM file"


@dataclass(frozen=True)
class ClientTls:
    """TLS options of a connection; all files are PEM."""

    ca_file: Path | None = None  # the trusted authorities; None: those of the system
    cert_file: Path | None = None  # the client certificate, with its chain, for servers that require one
    key_file: Path | None = None  # its private key; None: it is in `cert_file`

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a gRPC channel; raises what `context` does."""
        self.context()  # validates the files; gRPC accepts any bytes, and fails at the first call
        certificate = None if self.cert_file is None else self.cert_file.read_bytes()
        key = certificate if self.key_file is None else self.key_file.read_bytes()
        roots = _system_roots() if self.ca_file is None else self.ca_file.read_bytes()
        return grpc.ssl_channel_credentials(roots, key, certificate)

    def context(self) -> ssl.SSLContext:
        """Return the context of an HTTPS connection; InvalidArgumentError names a file that is unusable."""
        context = ssl.create_default_context()
        if self.ca_file is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            _check_readable("ca_file", self.ca_file)
            try:
                context.load_verify_locations(self.ca_file)
            except ssl.SSLError as error:
                allowed = f"{_PEM} of certificates ({_reason(error)})"
                raise InvalidArgumentError("ca_file", str(self.ca_file), allowed) from None
        if self.cert_file is not None:
            _check_readable("cert_file", self.cert_file)
            if self.key_file is not None:
                _check_readable("key_file", self.key_file)
            try:
                context.load_cert_chain(self.cert_file, self.key_file, password=lambda: "")  # no prompt
            except ssl.SSLError as error:
                key = "key_file" if self.key_file is not None else "the same file"
                allowed = f"{_PEM} of a certificate whose key, unencrypted, is in {key} ({_reason(error)})"
                raise InvalidArgumentError("cert_file", str(self.cert_file), allowed) from None
        return context


def client_tls(
    tls: bool | None,
    ca_file: str | Path | None,
    cert_file: str | Path | None,
    key_file: str | Path | None,
    address: str = "",
) -> ClientTls | None:
    """Return the TLS options of a connection; None for plain text.

    Without a `tls` they are implied by a file, or by an address with https:// or grpcs://.
    InvalidArgumentError for files with `tls` disabled, a key without a certificate, or an unusable file.
    """
    files = {"ca_file": ca_file, "cert_file": cert_file, "key_file": key_file}
    named = [name for name, file in files.items() if file]
    named += [address] if address.lower().startswith(("https://", "grpcs://")) else []
    if tls is False and named:
        raise InvalidArgumentError("tls", "false", f"true with {named[0]}")
    if key_file and not cert_file:
        raise InvalidArgumentError("key_file", f"{key_file} without cert_file", "cert_file too")
    if not tls and not named:
        return None
    options = ClientTls(*(Path(file) if file else None for file in files.values()))
    options.context()
    return options


def _system_roots() -> bytes | None:
    """Return the authorities that the system trusts, as PEM; None: use gRPC's own list."""
    paths = ssl.get_default_verify_paths()
    if paths.cafile:
        return Path(paths.cafile).read_bytes()
    context = ssl.create_default_context()
    # Systems without a bundle have a directory with one file per certificate, or a certificate store.
    found = [ssl.DER_cert_to_PEM_cert(der).encode() for der in context.get_ca_certs(binary_form=True)]
    if paths.capath:
        for path in sorted(Path(paths.capath).glob("*.[0-9]")):
            with suppress(OSError):
                found.append(path.read_bytes())
    return b"\n".join(found) or None


def _check_readable(field: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(field, str(path), f"{_PEM} ({error.strerror})") from None


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
