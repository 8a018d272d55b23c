"""TLS for a federation on one machine: an authority that signs one certificate and is forgotten."""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path

_DAYS = 30


def make(folder: str | os.PathLike[str]) -> tuple[Path, Path, Path]:
    """Writes new files for a SuperLink on this machine.

    Nobody has the authority's private key afterwards: it signs nothing else.

    Args:
      folder: made if it is missing.

    Returns:
      The paths of the authority's certificate, of the server's, and of the server's private key.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def name(common: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])

    def certificate(common: str, key: ec.EllipticCurvePrivateKey, *, authority: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
        usage = x509.KeyUsage(
            digital_signature=not authority,
            key_cert_sign=authority,
            crl_sign=authority,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        builder = (
            x509.CertificateBuilder()
            .subject_name(name(common))
            .issuer_name(name("cafcor_jax"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=_DAYS))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(identifier, critical=False)
        )
        if not authority:
            address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
            builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        return builder.sign(signer, hashes.SHA256())

    signer, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    place = Path(folder).resolve()
    place.mkdir(parents=True, exist_ok=True)
    paths = place / "ca.crt", place / "server.pem", place / "server.key"
    contents = (
        certificate("cafcor_jax", signer, authority=True).public_bytes(serialization.Encoding.PEM),
        certificate("127.0.0.1", own, authority=False).public_bytes(serialization.Encoding.PEM),
        own.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )
    for path, content in zip(paths, contents, strict=True):
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_bytes(content)
    return paths
