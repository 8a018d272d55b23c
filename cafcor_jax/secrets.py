"""Pairwise secrets: every pair of workers shares one key, from which all its correlated noise is drawn.

Here the keys of a simulation, derived from one seed. A worker's secrets are its own row of the key matrix.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cafcor_jax.threefry import over_keys
from cafcor_jax.types import Array


def pair_key(key: Array, i: Array | int, j: Array | int) -> Array:
    """The key shared by workers i and j, the same from both ends."""
    return jax.random.fold_in(jax.random.fold_in(key, jnp.minimum(i, j)), jnp.maximum(i, j))


def key_matrix(key: Array, num_workers: int) -> Array:
    """The symmetric matrix of all pair keys of a simulated federation, [n, n].

    The diagonal belongs to no pair and is never used for pairwise noise.

    Args:
      key: a typed PRNG key (`jax.random.key`).
      num_workers: n.

    Returns:
      An array [n, n] of typed keys with keys[i, j] == keys[j, i].
    """
    index = jnp.arange(num_workers)
    return over_keys(lambda i: over_keys(lambda j: pair_key(key, i, j), key)(index), key)(index)
