"""The Threefry-2x32 cipher, 20 rounds, written out.

Bitwise the cipher behind JAX's default keys. JAX's own version on a CPU is a loop over whole arrays; written
out, XLA fuses it with what consumes the bits and it runs about three times as fast.

References:
  Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cafcor_jax.types import Array

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
# Implementations whose draws under vmap are those of each key alone.
_BATCHED = ("threefry2x32", "chacha20")


def threefry(key_data: Array, first: Array, second: Array) -> tuple[Array, Array]:
    """Encrypts pairs of counters.

    Args:
      key_data: uint32 [..., 2], broadcast against the counters (`jax.random.key_data`).
      first: uint32, the first word of every counter.
      second: uint32, the second word.

    Returns:
      Two arrays of random bits, uint32.
    """
    words = key_data[..., 0], key_data[..., 1], key_data[..., 0] ^ key_data[..., 1] ^ jnp.uint32(_PARITY)
    x, y = first + words[0], second + words[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << rotation) | (y >> (32 - rotation)))
        x = x + words[(group + 1) % 3]
        y = y + words[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def is_threefry(keys: Array) -> bool:
    """Whether typed keys are of JAX's default implementation."""
    return str(jax.random.key_impl(keys)) == "threefry2x32"


def over_keys(function: Callable[[Any], Any], keys: Array) -> Callable[[Any], Any]:
    """`jax.vmap(function)`, such that each of the keys in use gives what it gives alone.

    Threefry and ChaCha20 do so under `vmap`. Others may draw a whole batch from its first key (rbg does);
    with such keys the function is applied to one after the other.
    """
    batched = str(jax.random.key_impl(keys)) in _BATCHED
    return jax.vmap(function) if batched else functools.partial(lax.map, function)
