"""TLS of a client: trusted authorities, client certificate, and diagnosis of failed handshakes.

gRPC reports at most one line of its TLS library for a failed handshake, without the cause. `explain` performs
a separate handshake with the same files, and returns the cause and the option that fixes it.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socket import create_connection

import grpc

from gammaray.errors import InvalidArgumentError, TlsError

_READ_S = 0.5
"""Wait for a server to reject a client certificate, in seconds; in TLS 1.3 this follows the handshake."""

_PEM = "a PEM file"
_PLAIN = "the server uses TLS and was called in plain text", "use TLS: --tls, or tls=True"
_USE_CERT = "provide one: --cert-file and --key-file, or cert_file= and key_file="
_CERT_REQUIRED = ("CERTIFICATE_REQUIRED", "HANDSHAKE_FAILURE", "CERTIFICATE_UNKNOWN", "NO_CERTIFICATE")
_CLIENT_CERT = (
    "UNKNOWN_CA",
    "BAD_CERTIFICATE",
    "CERTIFICATE_EXPIRED",
    "CERTIFICATE_REVOKED",
    "UNSUPPORTED_CERTIFICATE",
    "ACCESS_DENIED",
    "DECRYPT_ERROR",
)
# Error codes of OpenSSL's X509_verify_cert.
_EXPIRED, _NOT_YET_VALID, _HOST_MISMATCH, _ADDRESS_MISMATCH = 10, 9, 62, 64


@dataclass(frozen=True)
class ClientTls:
    """TLS options of a connection.

    Args:
        ca_file: PEM file of the trusted authorities; None: those of the system.
        cert_file: PEM file of the client certificate, with its chain, for servers that require one.
        key_file: PEM file of its private key; None: it is in `cert_file`.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

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
                context.load_cert_chain(self.cert_file, self.key_file, password=_no_password)
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

    Args:
        tls: Whether to use TLS; None: only if a file, or the address by https:// or grpcs://, implies it.

    Raises:
        InvalidArgumentError: Files are given with `tls` disabled, a key without a certificate, or a file that
            cannot be used.
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


def explain(
    host: str, port: int, options: ClientTls | None, timeout_s: float, *, needs_http2: bool
) -> TlsError | None:
    """Return why calls to an address fail if TLS is the cause, else None.

    Connects to the address and performs a handshake; blocks for at most about `timeout_s` seconds.

    Args:
        options: TLS options of the failed calls; None: plain text.
        needs_http2: Whether the calls are gRPC calls.
    """
    where = f"{host}:{port}"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if options is None else options.context()
    if options is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"] if needs_http2 else ["http/1.1"])
    try:
        with create_connection((host, port), timeout_s) as plain:
            with context.wrap_socket(plain, server_hostname=host) as secured:
                if options is None:
                    return TlsError(where, *_PLAIN)
                is_closed = _closes(secured, min(_READ_S, timeout_s))
                if needs_http2 and secured.selected_alpn_protocol() != "h2":
                    cause = "the server does not offer HTTP/2 (ALPN protocol h2), which gRPC needs"
                    return TlsError(where, cause, "use the gRPC port: --address, or address=")
                if is_closed:
                    # In TLS 1.3 a client certificate is checked last, and not every server sends an alert.
                    verb = "refuses the" if options.cert_file else "requires a"
                    cause = f"the server ends the connection, and likely {verb} client certificate"
                    return TlsError(where, cause, _USE_CERT)
    except ssl.SSLError as error:
        if options is None:
            # A server that requires a client certificate also uses TLS; a plain-text server sends no alert.
            return TlsError(where, *_PLAIN) if "ALERT" in (error.reason or "") else None
        return tls_error(where, error, has_certificate=options.cert_file is not None)
    except OSError:
        return None  # the port is closed, or the server closed the connection: not a TLS failure
    return None


def _closes(secured: ssl.SSLSocket, timeout_s: float) -> bool:
    """Whether a server closes the connection without an alert; an alert raises ssl.SSLError."""
    secured.settimeout(timeout_s)
    try:
        return not secured.recv(1)
    except (ssl.SSLEOFError, ConnectionError):
        return True
    except TimeoutError:
        return False


def tls_error(where: str, error: ssl.SSLError, *, has_certificate: bool) -> TlsError:
    """Return the error of a failed handshake with a server, host:port or a URL."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsError(where, *_verification(error))
    if isinstance(error, ssl.SSLEOFError):
        cause = "the server closed the connection during the handshake"
        return TlsError(where, cause, "check that the port uses TLS, and whether it requires a certificate")
    reason = _reason(error)
    upper = reason.upper().replace(" ", "_")
    if not has_certificate and any(part in upper for part in _CERT_REQUIRED):
        return TlsError(where, "the server requires a client certificate", _USE_CERT)
    if "ALERT" in upper and any(part in upper for part in (*_CLIENT_CERT, *_CERT_REQUIRED)):
        return TlsError(where, f"the server refuses the client certificate ({reason})", _USE_CERT)
    if any(part in upper for part in ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "HTTP_REQUEST")):
        return TlsError(where, "the server does not use TLS", "omit the TLS options, or use its TLS port")
    return TlsError(where, f"the handshake failed ({reason})", "check the TLS options and the server's log")


def _verification(error: ssl.SSLCertVerificationError) -> tuple[str, str]:
    """Return cause and remedy if a server's certificate is not accepted."""
    code, message = error.verify_code, error.verify_message.rstrip(".")
    if code == _EXPIRED:
        return "the server's certificate has expired", "renew it; no option disables this check"
    if code == _NOT_YET_VALID:
        return "the server's certificate is not valid yet", "check the clocks of both machines"
    if code in (_HOST_MISMATCH, _ADDRESS_MISMATCH) or "match" in message.lower():
        remedy = "use a host name in the certificate: --address (--url of chat), or address="
        return f"the server's certificate is for another host ({message})", remedy
    remedy = "provide the file of its CA: --ca-file, or ca_file="
    return f"the server's certificate is not signed by a trusted CA ({message})", remedy


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


def _no_password() -> str:
    return ""  # otherwise OpenSSL prompts for one on the terminal


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
