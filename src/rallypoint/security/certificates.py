"""`rallypoint tls new`: create a certificate authority, and certificates signed by it for servers and clients.

For trials and small sites. The key of the CA stays in the directory: whoever has it can make certificates that every
client of the site trusts, so keep it apart from the nodes. A site with a CA of its own should use that instead.

Rejected: self-signed certificates. Every client would need the certificate of every new node.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

__all__ = ["make_certificates"]

CA_NAME = "rallypoint CA"
CLOCK_SKEW = datetime.timedelta(hours=1)
"""How far the clock of another machine may be behind."""

_HOST = re.compile(r"(\*\.)?[\w-]+(\.[\w-]+)*\.?", re.ASCII)


class _Authority(NamedTuple):
    certificate: x509.Certificate
    key: EllipticCurvePrivateKey


def make_certificates(directory: Path, hosts: Sequence[str], days: int) -> dict[str, Path]:
    """Write ca.pem, ca.key, node.pem and node.key into a directory, and return them by name.

    An existing CA is reused: copy its two files into another directory to make certificates for more hosts.
    The certificate is valid for the hosts, for servers and for clients. Raises ValueError if a file exists already,
    a host is invalid, the CA is unusable, or the package `cryptography` is missing; and OSError.
    """
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise ValueError("certificates need the package cryptography: pip install 'rallypoint[tls]'") from None
    if not hosts:
        raise ValueError("a certificate needs at least one host")
    names = [_san(host) for host in hosts]
    files = {name: directory / name for name in ("ca.pem", "ca.key", "node.pem", "node.key")}
    exists = {name for name, path in files.items() if os.path.lexists(path)}
    if taken := exists & {"node.pem", "node.key"}:
        raise ValueError(f"{files[min(taken)]} exists already; choose another directory, or remove it")
    if len(exists) == 1:
        raise ValueError(f"{files[min(exists)]} exists alone; a CA has ca.pem and ca.key: choose another directory")
    ca = _read_authority(files) if exists else _new_authority(10 * days)
    key = _key()
    certificate = _certificate(hosts[0], key, ca, days, names)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = {"node.key": _key_pem(key), "node.pem": _pem(certificate)}
    if not exists:
        new |= {"ca.key": _key_pem(ca.key), "ca.pem": _pem(ca.certificate)}
    for name, data in new.items():
        _write(files[name], data, 0o600 if name.endswith(".key") else 0o644)
    return files


def _read_authority(files: dict[str, Path]) -> _Authority:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key: Any = load_pem_private_key(files["ca.key"].read_bytes(), None)
        certificate = x509.load_pem_x509_certificate(files["ca.pem"].read_bytes())
    except (OSError, ValueError, TypeError) as error:  # TypeError: it has a passphrase
        raise ValueError(f"cannot use the CA in {files['ca.pem'].parent}: {error}") from None
    if certificate.public_key() != key.public_key():
        raise ValueError(f"{files['ca.key']} is not the key of {files['ca.pem']}")
    if certificate.not_valid_after_utc <= datetime.datetime.now(datetime.timezone.utc):
        raise ValueError(f"the CA {files['ca.pem']} expired on {certificate.not_valid_after_utc:%Y-%m-%d}")
    return _Authority(certificate, key)


def _new_authority(days: int) -> _Authority:
    key = _key()
    return _Authority(_certificate(CA_NAME, key, None, days, ()), key)


def _certificate(
    name: str, key: EllipticCurvePrivateKey, ca: _Authority | None, days: int, hosts: Sequence[x509.GeneralName]
) -> x509.Certificate:
    """Return a certificate for hosts, signed by `ca`; if that is None, the self-signed certificate of a new CA."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.timezone.utc)
    ends = now + datetime.timedelta(days=days)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    issuer_key = ca.key if ca else key
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(ca.certificate.subject if ca else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(min(ends, ca.certificate.not_valid_after_utc) if ca else ends)
        .add_extension(x509.BasicConstraints(ca=not ca, path_length=None if ca else 0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .add_extension(_usage(is_ca=not ca), critical=True)
    )
    if ca:
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _usage(is_ca: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _san(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host) or len(host) > 253:
            raise ValueError(f"{host!r} is neither a host name nor an IP address") from None
        return x509.DNSName(host.rstrip("."))


def _key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _key_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _write(path: Path, data: bytes, mode: int) -> None:
    """Create a file with its final mode, so that its data is never more widely readable."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
