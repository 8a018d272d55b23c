import ssl

import pytest

from cafcor_jax.flower import certificates


def handshake(authority, certificate, key):
    """Both sides of TLS, in memory."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    client = ssl.create_default_context(cafile=authority)
    client.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return sides[0].getpeercert()["subjectAltName"]


def test_a_client_that_knows_the_authority_trusts_the_server_and_no_other(tmp_path):
    ours, others = certificates.make(tmp_path / "ours"), certificates.make(tmp_path / "others")
    assert handshake(*ours) == (("IP Address", "127.0.0.1"),)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(others[0], *ours[1:])
    assert ours[2].stat().st_mode & 0o077 == 0
