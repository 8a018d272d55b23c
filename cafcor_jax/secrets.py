"""Pairwise secrets: every pair of workers shares one key, from which all its correlated noise is drawn.

A worker's secrets are its own row of the key matrix. There are two ways to come by it:

* `key_matrix`: in a simulation, all pairs' keys are derived from one key.
* `derive_row`: between real workers, by X25519 and HKDF-SHA256. A worker draws 32 private bytes
  (`generate_private_key`), publishes 32 bytes (`public_key`), gets the list of what all published, and
  derives its own row and nobody else's. `agreed_key_matrix` is a simulation with such keys.

The agreement keeps the keys from whoever only reads the public keys. It does not say whose they are: the list
must reach every worker unchanged (signed, or compared by its hash), else whoever changes it knows the keys.

Key agreement needs the package `cryptography`, which comes with the extra `cafcor_jax[secrets]`.

References:
  Langley, Hamburg and Turner, Elliptic Curves for Security, RFC 7748, 2016.
  Krawczyk and Eronen, HMAC-based Extract-and-Expand Key Derivation Function (HKDF), RFC 5869, 2010.
"""

from __future__ import annotations

import os
import types
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cafcor_jax import chacha
from cafcor_jax.errors import UserError
from cafcor_jax.threefry import over_keys
from cafcor_jax.types import Array

#: The length of private and public keys in bytes.
KEY_BYTES = 32

_LABEL = b"cafcor_jax pair key 1"
# The field of Curve25519.
_PRIME = 2**255 - 19


def pair_key(key: Array, i: Array | int, j: Array | int) -> Array:
    """The key shared by workers i and j of a simulation, the same from both ends."""
    return jax.random.fold_in(jax.random.fold_in(key, jnp.minimum(i, j)), jnp.maximum(i, j))


def key_matrix(key: Array, num_workers: int) -> Array:
    """The symmetric matrix of all pair keys of a simulated federation, [n, n].

    The diagonal belongs to no pair and is never used for pairwise noise.

    Args:
      key: a typed PRNG key (`jax.random.key`), of any implementation.
      num_workers: n.

    Returns:
      An array [n, n] of typed keys with keys[i, j] == keys[j, i].
    """
    index = jnp.arange(num_workers)
    return over_keys(lambda i: over_keys(lambda j: pair_key(key, i, j), key)(index), key)(index)


def generate_private_key() -> bytes:
    """A new private key: 32 bytes from the system's generator."""
    return os.urandom(KEY_BYTES)


def public_key(private: bytes) -> bytes:
    """The 32 bytes to publish: X25519(private, 9)."""
    _check_key(private, "The private key")
    x25519 = _cryptography().x25519
    return x25519.X25519PrivateKey.from_private_bytes(bytes(private)).public_key().public_bytes_raw()


def shared_secret(private: bytes, public: bytes) -> bytes:
    """X25519(private, public), the same from both ends.

    Args:
      private: one's own private key.
      public: the other's public key.

    Returns:
      32 bytes. They are not uniform: a key is derived from them (`hkdf_sha256`).
    """
    _check_key(private, "The private key")
    _check_key(public, "The public key")
    x25519 = _cryptography().x25519
    ours = x25519.X25519PrivateKey.from_private_bytes(bytes(private))
    try:
        secret = ours.exchange(x25519.X25519PublicKey.from_public_bytes(bytes(public)))
    except ValueError:  # what the package raises when the secret is zero
        secret = bytes(KEY_BYTES)
    if not any(secret):
        raise UserError(
            f"The public key {bytes(public).hex()} is a point of low order, with which everybody has the "
            "same secret; it must be one that public_key gives."
        )
    return secret


def hkdf_sha256(material: bytes, *, salt: bytes, info: bytes, length: int) -> bytes:
    """HKDF with SHA-256: `length` bytes from secret material, different for every `info`.

    Args:
      material: what is secret; need not be uniform.
      salt: may be empty.
      info: what the bytes are for.
      length: at most 255 * 32.

    Returns:
      The derived bytes.
    """
    if not 1 <= length <= 255 * 32:
        raise UserError(f"length is {length}; it must be between 1 and {255 * 32}.")
    package = _cryptography()
    return package.HKDF(algorithm=package.SHA256(), length=length, salt=salt, info=info).derive(material)


def derive_row(
    private: bytes,
    public_keys: Sequence[bytes],
    worker: int,
    *,
    session: bytes,
    impl: str | Hashable = chacha.IMPL,
) -> Array:
    """One worker's row of the key matrix, from its private key and the public keys of all.

    The key of the pair i < j is HKDF(X25519(private, public)) with an empty salt and an info made of a label,
    the session, the implementation, n, i, j and the public keys of i and of j: both ends derive the same, and
    another session, place or federation gives an unrelated key.

    Args:
      private: the worker's private key, 32 bytes.
      public_keys: n public keys, worker i's at place i, the same list at every worker.
      worker: its own place in the list.
      session: names the run, the same at all workers. Never the same twice with the same keys: the noise
        would be that of the run before.
      impl: implementation of the typed keys; as many bytes are derived as it takes. ChaCha20 takes 32, JAX's
        default `"threefry2x32"` only 8, few enough to be searched.

    Returns:
      [n] typed keys for `noise.pairwise_row`. The worker's own entry is a placeholder, zero, and never used.

    Example:
      >>> alice, bob = bytes(range(32)), bytes(range(32, 64))
      >>> published = [public_key(alice), public_key(bob)]
      >>> ours = derive_row(alice, published, 0, session=b"run 1")
      >>> theirs = derive_row(bob, published, 1, session=b"run 1")
      >>> bool(ours[1] == theirs[0])
      True

    References:
      RFC 7748, section 6.1; RFC 5869.
    """
    return jax.random.wrap_key_data(jnp.asarray(_row(private, public_keys, worker, session, impl)), impl=impl)


def agreed_key_matrix(
    private_keys: Sequence[bytes], *, session: bytes, impl: str | Hashable = chacha.IMPL
) -> Array:
    """The key matrix of a simulation whose workers agree on their keys: row i is worker i's `derive_row`.

    Args:
      private_keys: n private keys.
      session: as in `derive_row`.
      impl: as in `derive_row`.

    Returns:
      An array [n, n] of typed keys with keys[i, j] == keys[j, i] and zeros on the diagonal; n (n - 1) key
      agreements.
    """
    published = [public_key(private) for private in private_keys]
    check_public_keys(published)
    rows = [_row(private, published, i, session, impl) for i, private in enumerate(private_keys)]
    return jax.random.wrap_key_data(jnp.asarray(np.stack(rows)), impl=impl)


def _row(
    private: bytes, public_keys: Sequence[bytes], worker: int, session: bytes, impl: str | Hashable
) -> np.ndarray:
    """The key data of a worker's row, uint32 [n, words]."""
    check_public_keys(public_keys)
    n = len(public_keys)
    if isinstance(worker, bool) or not isinstance(worker, (int, np.integer)) or not 0 <= worker < n:
        raise UserError(
            f"worker is {worker!r}; with {n} public keys it must be an integer from 0 to {n - 1}."
        )
    if not isinstance(session, bytes) or not session:
        raise UserError(f"session is {session!r}; it must be bytes that name the run, at least one.")
    if public_key(private) != bytes(public_keys[worker]):
        raise UserError(
            f"The public key at place {worker} is {bytes(public_keys[worker]).hex()}; it must be that of the "
            f"worker's own private key, {public_key(private).hex()}."
        )
    dtype: Any = jax.random.key_dtype(impl)
    length, name = dtype.itemsize, _name(impl)
    row = [bytes(length)] * n
    for other in range(n):
        if other != worker:
            low, high = sorted((int(worker), other))
            info = _info(session, name, n, low, high, public_keys[low], public_keys[high])
            secret = shared_secret(private, public_keys[other])
            row[other] = hkdf_sha256(secret, salt=b"", info=info, length=length)
    return np.frombuffer(b"".join(row), "<u4").astype(np.uint32).reshape(n, -1)


def _info(session: bytes, name: bytes, n: int, low: int, high: int, first: bytes, second: bytes) -> bytes:
    """What a pair's key is bound to. Lengths go before what has no fixed one, so no two infos are alike."""

    def number(value: int) -> bytes:
        return value.to_bytes(4, "big")

    parts = [_LABEL, number(len(session)), session, number(len(name)), name]
    return b"".join([*parts, number(n), number(low), number(high), bytes(first), bytes(second)])


def _name(impl: str | Hashable) -> bytes:
    dtype: Any = jax.random.key_dtype(impl)
    empty = jax.random.wrap_key_data(jnp.zeros(dtype.itemsize // 4, jnp.uint32), impl=impl)
    return str(jax.random.key_impl(empty)).encode()


def _check_key(key: bytes, what: str) -> None:
    if not isinstance(key, (bytes, bytearray)):
        raise UserError(f"{what} is of type {type(key).__name__}; it must be {KEY_BYTES} bytes.")
    if len(key) != KEY_BYTES:
        raise UserError(f"{what} has {len(key)} bytes; it must have {KEY_BYTES}.")


def check_public_keys(public_keys: Sequence[bytes]) -> None:
    """Raises a UserError unless these are the keys of at least two workers, all different."""
    if len(public_keys) < 2:
        raise UserError(f"There are {len(public_keys)} public keys; a pair takes at least 2.")
    places: dict[int, int] = {}
    for place, key in enumerate(public_keys):
        _check_key(key, f"The public key at place {place}")
        # X25519 ignores the highest bit and reduces the rest: different bytes may be one key.
        point = (int.from_bytes(key, "little") % 2**255) % _PRIME
        if point in places:
            raise UserError(
                f"The public keys at places {places[point]} and {place} are the same, {bytes(key).hex()}; "
                "every worker must have its own."
            )
        places[point] = place


def _cryptography() -> types.SimpleNamespace:
    """What is used of the package `cryptography`, which is installed for key agreement only."""
    try:
        from cryptography.hazmat.primitives.asymmetric import x25519
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise UserError(
            "Key agreement needs the package cryptography; install it with: "
            'pip install "cafcor_jax[secrets]".'
        ) from error
    return types.SimpleNamespace(x25519=x25519, SHA256=SHA256, HKDF=HKDF)
