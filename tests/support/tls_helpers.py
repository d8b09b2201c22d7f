"""Certificates in the shape in which cert-manager issues those of the chart's ingress.

`helm/gammaray/templates/certificate-public.yaml` names DNS names, no address and no common name; cert-manager
makes an RSA key of 2048 bits, an empty subject, and puts the names into the subject's alternative name, which
is critical then.
"""

import ipaddress
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gammaray.security.client_tls import ClientTls
from gammaray.security.tls import ORCHESTRATOR_NAME, WORKER_NAME, TlsFiles

NOW = datetime.now(timezone.utc)
YEAR = timedelta(days=365)


class Authority:
    """A certificate authority, such as a cert-manager Issuer uses; `file` is its certificate."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            _builder(self._name, self._name, self._key, YEAR)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_usage(is_authority=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(certificate.public_bytes(Encoding.PEM))

    def issue(self, name: str, *hosts: str, expires_in: timedelta = YEAR) -> ClientTls:
        """Return a certificate and its key for DNS names and addresses; trusts this authority."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        names = x509.SubjectAlternativeName([_name(host) for host in hosts])
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            _builder(x509.Name([]), self._name, key, expires_in)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(is_authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(both), critical=False)
            .add_extension(authority_key, critical=False)
            .add_extension(names, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        cert_file, key_file = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        cert_file.write_bytes(certificate.public_bytes(Encoding.PEM))
        pkcs1 = PrivateFormat.TraditionalOpenSSL  # cert-manager's default encoding
        key_file.write_bytes(key.private_bytes(Encoding.PEM, pkcs1, NoEncryption()))
        return ClientTls(self.file, cert_file, key_file)


def role_certificates(authority: Authority, expires_in: timedelta = YEAR) -> Mapping[str, TlsFiles]:
    """Return certificates of a worker, an orchestrator and a server on this machine, each in its folder."""
    names = {
        "worker": (WORKER_NAME,),
        "orchestrator": (ORCHESTRATOR_NAME,),
        "both": (WORKER_NAME, ORCHESTRATOR_NAME),
        "server": ("localhost", "127.0.0.1"),
    }
    found = {}
    for role, hosts in names.items():
        made = authority.issue(role, *hosts, expires_in=expires_in)
        assert made.cert_file is not None
        assert made.key_file is not None
        folder = authority.file.parent / f"{authority.file.stem}-{role}"
        folder.mkdir(exist_ok=True)
        found[role] = files = TlsFiles(folder / "ca.crt", folder / "tls.crt", folder / "tls.key")
        for source, path in (
            (authority.file, files.ca),
            (made.cert_file, files.cert),
            (made.key_file, files.key),
        ):
            path.write_bytes(source.read_bytes())
    return found


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: rsa.RSAPrivateKey, expires_in: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - YEAR)
        .not_valid_after(NOW + expires_in)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    never = ("content_commitment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only")
    signs = {"digital_signature": True, "key_cert_sign": is_authority, "crl_sign": is_authority}
    return x509.KeyUsage(key_encipherment=not is_authority, **signs, **dict.fromkeys(never, False))
