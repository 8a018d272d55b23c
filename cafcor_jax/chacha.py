"""ChaCha20 as a generator behind JAX's typed keys: keys of 256 bits, a cipher that is trusted with secrets.

JAX's default keys have 64 bits, few enough to be searched. A key here is the key of the cipher, read from 32
bytes as RFC 8439 reads them:

    key = chacha.key_from_bytes(os.urandom(32))
    key = jax.random.key(0, impl=chacha.IMPL)      # for simulations: no more than the entropy of the seed

and `jax.random.fold_in`, `split`, `bits`, `normal` work as with any other key, under jit and vmap.

One block of the cipher maps (key, counter, nonce) to 16 words. The first word of the nonce says what a block
is for, so no block serves two purposes:

    seed(s)          words 0..7 of the block with key (s mod 2^32, s div 2^32, 0, ..., 0),
                     counter 0 and nonce (0, 0, 0)
    bits(key)        the key stream of counters 0, 1, ..., nonce (1, 0, 0), read little-endian at every width
    fold_in(key, m)  words 0..7 of the block with counter m mod 2^32, nonce (2, 0, 0)
    split(key)[i]    words 0..7 of the block with counter i, nonce (3, 0, 0)

Bits of one key in other shapes or widths are the same stream: as ever in JAX, a key is to be used once.

References:
  Nir and Langley, ChaCha20 and Poly1305 for IETF Protocols, RFC 8439, 2018.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import define_prng_impl

from cafcor_jax.errors import UserError
from cafcor_jax.types import Array

NAME = "chacha20"
KEY_BYTES = 32

_WORDS = 16
# "expand 32-byte k"
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
# What a block is for, the first word of its nonce.
_SEED, _BITS, _FOLD_IN, _SPLIT = ((purpose, 0, 0) for purpose in range(4))
_MOST_BLOCKS = 2**32
_DTYPES = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def block(
    key_data: Array, counter: Array | int, nonce: Sequence[Array | int], *, double_rounds: int = 10
) -> tuple[Array, ...]:
    """The block function: 20 rounds, then the first state is added.

    Args:
      key_data: uint32 [..., 8], broadcast against the counters without its last axis.
      counter: uint32, any shape.
      nonce: three words.
      double_rounds: 10 in ChaCha20; fewer only to show that a test would notice.

    Returns:
      The 16 words of every block, each an array uint32 of the common shape.

    Example:
      >>> words = block(jnp.zeros(8, jnp.uint32), 0, (0, 0, 0))
      >>> b"".join(np.asarray(word, "<u4").tobytes() for word in words)[:8].hex()
      '76b8e0ada0f13d90'

    References:
      RFC 8439, section 2.3.
    """
    words = [*_CONSTANTS, *(key_data[..., i] for i in range(8)), counter, *nonce]
    start = tuple(jnp.broadcast_arrays(*(jnp.asarray(word, jnp.uint32) for word in words)))
    # A loop, not written out: XLA would compute long chains anew for each of the 16 words.
    end = lax.fori_loop(0, double_rounds, lambda _, state: _double_round(state), start)
    return tuple(map(jnp.add, start, end))


def key_from_bytes(material: bytes) -> Array:
    """A typed key from 32 secret bytes (`os.urandom(32)`, or what a key agreement derived).

    Args:
      material: 32 bytes, the cipher's key as RFC 8439 reads it.

    Returns:
      A typed key, shape ().

    Example:
      >>> key = key_from_bytes(bytes(range(32)))
      >>> hex(jax.random.key_data(key)[0])
      '0x3020100'
    """
    if not isinstance(material, (bytes, bytearray)) or len(material) != KEY_BYTES:
        what = f"{len(material)} bytes" if isinstance(material, (bytes, bytearray)) else repr(material)
        raise UserError(f"The key material is {what}; a ChaCha20 key is made from {KEY_BYTES} bytes.")
    words = np.frombuffer(material, "<u4").astype(np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl=IMPL)


def is_chacha(keys: Array) -> bool:
    """Whether typed keys are of this implementation."""
    return str(jax.random.key_impl(keys)) == NAME


def _double_round(state: tuple[Array, ...]) -> tuple[Array, ...]:
    """Four quarter rounds on the columns of the state as a 4 x 4 matrix, four on its diagonals."""
    words = list(state)
    for shift in (0, 1):
        for i in range(4):
            at = [4 * row + (i + row * shift) % 4 for row in range(4)]
            for index, word in zip(at, _quarter_round(*(words[index] for index in at)), strict=True):
                words[index] = word
    return tuple(words)


def _quarter_round(a: Array, b: Array, c: Array, d: Array) -> tuple[Array, Array, Array, Array]:
    for first, second in ((16, 12), (8, 7)):
        a = a + b
        d = _rotate(d ^ a, first)
        c = c + d
        b = _rotate(b ^ c, second)
    return a, b, c, d


def _rotate(word: Array, by: int) -> Array:
    return (word << by) | (word >> (32 - by))


def _child(key_data: Array, counter: Array | int, nonce: Sequence[int]) -> Array:
    """A new key [..., 8]: the first half of a block; the second is not used."""
    return jnp.stack(block(key_data, counter, nonce)[:8], axis=-1)


# Compiled as wholes: JAX calls these four as they are, operation by operation, outside of a jit.
@functools.partial(jax.jit, inline=True)
def _seed(seed: Array) -> Array:
    if not jnp.issubdtype(seed.dtype, jnp.integer):
        raise TypeError(f"The seed is of type {seed.dtype}; it must be an integer.")
    high = seed >> 32 if seed.dtype.itemsize == 8 else jnp.uint32(0)
    padding = jnp.zeros(6, jnp.uint32)
    key_data = jnp.concatenate([jnp.stack([seed.astype(jnp.uint32), high.astype(jnp.uint32)]), padding])
    return _child(key_data, 0, _SEED)


@functools.partial(jax.jit, inline=True)
def _fold_in(key_data: Array, data: Array | int) -> Array:
    return _child(key_data, data, _FOLD_IN)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _split(key_data: Array, shape: tuple[int, ...]) -> Array:
    size = _checked(math.prod(shape), "keys", shape)
    return _child(key_data, lax.iota(jnp.uint32, size), _SPLIT).reshape(*shape, 8)


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def _random_bits(key_data: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
    if bit_width not in _DTYPES:
        raise ValueError(f"The bit width is {bit_width}; it must be one of {', '.join(map(str, _DTYPES))}.")
    size = math.prod(shape)
    count = _checked(-(-size * bit_width // (32 * _WORDS)), "blocks", shape)
    words = jnp.stack(block(key_data, lax.iota(jnp.uint32, count), _BITS), axis=-1)
    # A narrower type adds an axis, lowest bits first; the wider one takes an axis of two words away.
    words = words.reshape(-1, 2) if bit_width == 64 else words.reshape(-1)
    return lax.bitcast_convert_type(words, _DTYPES[bit_width]).reshape(-1)[:size].reshape(shape)


def _checked(count: int, what: str, shape: tuple[int, ...]) -> int:
    if count > _MOST_BLOCKS:
        raise ValueError(
            f"The shape {tuple(shape)} asks one key for {count} {what}; it can give at most {_MOST_BLOCKS}."
        )
    return count


def _implementation(name: str) -> Hashable:
    """Tells JAX of the implementation; what is given to `impl=`."""
    try:
        # The module was imported before: keys made then and now are to be of one type.
        return jax.random.key_dtype(name)
    except ValueError:
        pass
    spec: Any = define_prng_impl(
        key_shape=(8,),
        seed=_seed,
        split=_split,
        random_bits=_random_bits,
        fold_in=_fold_in,
        name=name,
        tag=name,
    )
    try:
        # There is no public way to give an implementation a name. Without this one, `impl=IMPL` works all the
        # same and only the string does not.
        from jax._src.random.prng import register_prng

        register_prng(spec._impl)
    except (ImportError, AttributeError):
        return spec
    return jax.random.key_dtype(name)


#: What `jax.random.key` and `jax.random.wrap_key_data` take as `impl`; the name "chacha20" works too.
IMPL = _implementation(NAME)
