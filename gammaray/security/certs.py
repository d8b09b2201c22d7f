"""A certificate authority for development: `gammaray certs`, and `gammaray up --worker-tls`.

`trustme` would save a third of these lines, but its certificates are valid for signing code, too, and it
leaves no choice of key usages or of the authority's validity.

In production, have your own authority (cert-manager, Vault, ...) issue certificates with the names of
`gammaray.security.tls`. Needs the `cryptography` package, which comes with `gammaray[orchestrator]`.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from gammaray.errors import InvalidArgumentError
from gammaray.security.tls import ORCHESTRATOR_NAME, WORKER_NAME, TlsFiles

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

__all__ = ["ROLES", "make_certificates"]

ROLES: Mapping[str, tuple[str, ...]] = {
    "orchestrator": (ORCHESTRATOR_NAME,),
    "worker": (WORKER_NAME,),
    "server": ("localhost", "127.0.0.1", "::1"),
}
"""Roles that get a certificate, with its DNS names; `server` is for Redis or a reverse proxy."""

CA_DAYS = 3650
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_DNS_NAME = re.compile(rf"(\*\.)?({_LABEL}\.)*{_LABEL}", re.IGNORECASE)
_BACKDATED = timedelta(minutes=5)  # tolerates clock differences


def make_certificates(directory: Path, days: int = 365, hosts: Sequence[str] = ()) -> dict[str, TlsFiles]:
    """Issue one certificate per role, signed by the authority in `directory`, which is created if missing.

    Args:
        directory: Receives `ca.pem`, `ca-key.pem` and for each role `<role>.pem` and `<role>-key.pem`. Files
            of roles are replaced, an existing authority is kept. Keys are readable by their owner only.
        days: Validity of the certificates, in days.
        hosts: Further names and addresses for `server`.

    Raises:
        InvalidArgumentError: The directory cannot be used, or a host is neither a name nor an address.
    """
    for host in hosts:
        _check_host(host)
    if not 1 <= days <= CA_DAYS:
        raise InvalidArgumentError("days", days, f"1 to {CA_DAYS}")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority, authority_key = _authority(directory)
        for role, names in ROLES.items():
            further = tuple(hosts) if role == "server" else ()
            _issue(directory, role, (*names, *further), days, authority, authority_key)
    except OSError as error:
        raise InvalidArgumentError(
            "directory", f"{directory} ({error.strerror})", "a writable directory"
        ) from None
    return {
        role: TlsFiles(directory / "ca.pem", directory / f"{role}.pem", directory / f"{role}-key.pem")
        for role in ROLES
    }


def _authority(directory: Path) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    cert_path, key_path = directory / "ca.pem", directory / "ca-key.pem"
    if cert_path.exists() and key_path.exists():
        try:
            certificate = x509.load_pem_x509_certificate(cert_path.read_bytes())
            key = load_pem_private_key(key_path.read_bytes(), None)
        except ValueError:
            raise InvalidArgumentError(
                "directory", f"{directory}", "readable ca.pem and ca-key.pem"
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or certificate.public_key() != key.public_key():
            raise InvalidArgumentError("directory", f"{directory}", "a ca-key.pem that belongs to ca.pem")
        return certificate, key
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gammaray development CA")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    builder = _builder(name, name, key, CA_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    certificate = _sign(builder, key)
    _write(directory, "ca", certificate, key)
    return certificate, key


def _issue(
    directory: Path,
    role: str,
    names: Sequence[str],
    days: int,
    authority: x509.Certificate,
    authority_key: EllipticCurvePrivateKey,
) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, names[0])])
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    builder = _builder(subject, authority.subject, key, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName([_name(n) for n in names]), critical=False)
    builder = builder.add_extension(both, critical=False)
    _write(directory, role, _sign(builder, authority_key), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.now(timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _sign(builder: x509.CertificateBuilder, issuer_key: EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    return builder.add_extension(issuer, critical=False).sign(issuer_key, hashes.SHA256())


def _check_host(host: str) -> None:
    """Check that a certificate can contain a host.

    Raises:
        InvalidArgumentError: The host is neither a name nor an address.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not _DNS_NAME.fullmatch(host) or len(host) > 253:
            allowed = "a DNS name of a-z 0-9 - and dots (others in their xn-- form), or an address"
            raise InvalidArgumentError("host", host, allowed) from None


def _name(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(directory: Path, role: str, certificate: x509.Certificate, key: EllipticCurvePrivateKey) -> None:
    from cryptography.hazmat.primitives import serialization

    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    # The key first: a process that reads between the two writes gets a mismatched pair, and retries.
    for name, content, mode in (
        (f"{role}-key.pem", private, 0o600),
        (f"{role}.pem", certificate.public_bytes(pem), 0o644),
    ):
        path, temporary = directory / name, directory / f".{name}.new"
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        temporary.replace(path)
