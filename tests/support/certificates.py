"""Certificates for tests of TLS."""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def certificates(folder: Path) -> dict[str, str]:
    """A certificate authority, and certificates for a server and a client."""
    paths: dict[str, str] = {}
    authority: Any = None
    now = datetime.now(UTC)
    for name in ("ca", "server", "client"):
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        issuer, signer = (subject, key) if authority is None else authority
        authority = authority or (subject, key)
        usage = x509.KeyUsage(True, False, False, False, False, name == "ca", name == "ca", False, False)
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=name == "ca", path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority[1].public_key()), critical=False
            )
            .add_extension(usage, critical=True)
            .add_extension(names, critical=False)
            .sign(signer, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        for kind, data in (("cert", certificate.public_bytes(serialization.Encoding.PEM)), ("key", private)):
            path = folder / f"{name}-{kind}.pem"
            path.write_bytes(data)
            paths[f"{name}_{kind}"] = str(path)
    return paths
