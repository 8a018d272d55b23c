"""Who a public key belongs to: Ed25519 signatures of workers, and proofs that one holds a private key.

A worker's identity is an Ed25519 key that lives longer than a run. With it the worker signs the X25519 key of
the run, together with the session and its own place: a server that swaps keys, or uses those of another run,
is found out by every worker that knows the identities. To come back to a run a worker proves that it holds
the private key it began with, to a server that knows public keys only.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence
from pathlib import Path

from cafcor_jax import secrets
from cafcor_jax.errors import UserError

_LABEL = b"cafcor_jax public key 1"
_PROOF_LABEL = b"cafcor_jax rejoin 1"


def generate() -> bytes:
    """A new private identity: 32 bytes from the system's generator."""
    return os.urandom(secrets.KEY_BYTES)


def public_identity(private: bytes) -> bytes:
    """The 32 bytes by which others know an identity."""
    from cryptography.hazmat.primitives.asymmetric import ed25519

    return ed25519.Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def sign(private: bytes, *, session: bytes, worker: int, num_workers: int, public_key: bytes) -> bytes:
    """The signature, 64 bytes, of a worker's key for a session."""
    from cryptography.hazmat.primitives.asymmetric import ed25519

    signer = ed25519.Ed25519PrivateKey.from_private_bytes(private)
    return signer.sign(_statement(session, worker, num_workers, public_key))


def check_signatures(
    identities: Sequence[bytes], signatures: Sequence[bytes], public_keys: Sequence[bytes], *, session: bytes
) -> None:
    """Raises a UserError unless every public key is signed by the identity at its place.

    Args:
      identities: n public identities, from a source that the server cannot change.
      signatures: n.
      public_keys: n.
      session: of the run.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ed25519

    n = len(public_keys)
    for name, what in (("identities", identities), ("signatures", signatures)):
        if len(what) != n:
            raise UserError(f"There are {len(what)} {name} for {n} public keys: there must be one each.")
    for worker, (known, signature, key) in enumerate(zip(identities, signatures, public_keys, strict=True)):
        try:
            verifier = ed25519.Ed25519PublicKey.from_public_bytes(known)
            verifier.verify(signature, _statement(session, worker, n, key))
        except (InvalidSignature, ValueError, TypeError):
            raise UserError(
                f"The public key {key.hex()} of worker {worker} is not signed by its identity "
                f"{known.hex()} for this session: it was swapped, or the identity is not the worker's."
            ) from None


def prove(private: bytes, challenge: bytes, *, session: bytes, worker: int) -> bytes:
    """Shows whoever made the X25519 key `challenge` that one holds `private`; 32 bytes."""
    return _proof(secrets.shared_secret(private, challenge), challenge, session, worker)


def proves(proof: bytes, challenge_private: bytes, public_key: bytes, *, session: bytes, worker: int) -> bool:
    """Whether a proof is by the holder of a public key's private part."""
    challenge = secrets.public_key(challenge_private)
    expected = _proof(secrets.shared_secret(challenge_private, public_key), challenge, session, worker)
    return isinstance(proof, bytes) and hmac.compare_digest(proof, expected)


def read_private(path: str | os.PathLike[str]) -> bytes:
    """A private identity from a file with its 64 hexadecimal digits."""
    keys = _read_keys(path)
    if len(keys) != 1:
        raise UserError(f"{path} holds {len(keys)} keys; the file of a private identity holds 1.")
    return keys[0]


def read_public(path: str | os.PathLike[str], num_workers: int) -> list[bytes]:
    """The workers' public identities from a file with one in each line, worker 0's first."""
    keys = _read_keys(path)
    if len(keys) != num_workers:
        raise UserError(f"{path} holds {len(keys)} identities; num_workers={num_workers} of them are needed.")
    return keys


def _read_keys(path: str | os.PathLike[str]) -> list[bytes]:
    try:
        lines = Path(path).read_text("ascii").split()
        keys = [bytes.fromhex(line) for line in lines]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError:
        keys = [b""]
    if any(len(key) != secrets.KEY_BYTES for key in keys):
        raise UserError(
            f"{path} holds no keys: each line must be {2 * secrets.KEY_BYTES} hexadecimal digits."
        )
    return keys


def _statement(session: bytes, worker: int, num_workers: int, public_key: bytes) -> bytes:
    numbers = b"".join(value.to_bytes(4, "big") for value in (len(session), worker, num_workers))
    return _LABEL + numbers + session + public_key


def _proof(secret: bytes, challenge: bytes, session: bytes, worker: int) -> bytes:
    info = _PROOF_LABEL + worker.to_bytes(4, "big") + challenge + session
    return secrets.hkdf_sha256(secret, salt=b"", info=info, length=32)
