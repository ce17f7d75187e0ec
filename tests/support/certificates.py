"""Shell. Certificates of an authority, a server on 127.0.0.1, and a client, as PEM files."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Certificates(NamedTuple):
    """Paths of the files."""

    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def make_certificates(folder: Path, *, client: str) -> Certificates:
    """Write the files; `client`: name of the database's user."""
    found = Certificates(*(folder / f"{name}.pem" for name in Certificates._fields))
    authority, ca = _write(f"authority of {folder.name}", found.ca, folder / "ca_key.pem", None)
    for name, cert, key in (("server", found.server, found.server_key), (client, found.client, found.client_key)):
        _write(name, cert, key, (authority, ca))
    return found


Issuer = tuple[ec.EllipticCurvePrivateKey, x509.Name]


def _write(name: str, cert: Path, key: Path, issuer: Issuer | None) -> Issuer:
    own, subject = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signer, signed_by = issuer or (own, subject)
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signed_by)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(signer, hashes.SHA256())
    )
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key.write_bytes(own.private_bytes(serialization.Encoding.PEM, pkcs8, plain))
    key.chmod(0o600)
    return own, subject
