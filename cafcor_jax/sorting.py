"""Sorting networks over the rows of [n, d] arrays.

A sort of every column is a fixed list of compare-exchange steps between whole rows, so it runs as `minimum`
and `maximum` on contiguous vectors.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from cafcor_jax.types import Array

_MOST_UNROLLED = 64


@functools.cache
def comparators(n: int) -> tuple[tuple[int, int], ...]:
    """Batcher's odd-even merge sort for n wires: pairs (low, high), in order."""
    pairs = []
    p = 1
    while p < n:
        k = p
        while k >= 1:
            for j in range(k % p, n - k, 2 * k):
                for i in range(min(k, n - j - k)):
                    if (i + j) // (2 * p) == (i + j + k) // (2 * p):
                        pairs.append((i + j, i + j + k))
            k //= 2
        p *= 2
    return tuple(pairs)


@functools.cache
def _stages(n: int) -> tuple[np.ndarray, np.ndarray]:
    """The same network as rounds of disjoint comparators: partner [stages, n] and is_low [stages, n]."""
    partners: list[np.ndarray] = []
    for low, high in comparators(n):
        if not partners or partners[-1][low] != low or partners[-1][high] != high:
            partners.append(np.arange(n, dtype=np.int32))
        partners[-1][low], partners[-1][high] = high, low
    partner = np.stack(partners) if partners else np.zeros((0, n), np.int32)
    return partner, partner >= np.arange(n)


def sort_rows(block: Array) -> list[Array] | Array:
    """Sorts every column of a block [n, b] in ascending order.

    Up to `_MOST_UNROLLED` rows, row by row: a list of n arrays [b], of which the compiler computes only those
    that are used. Beyond, where that would compile for minutes, as one array [n, b].

    Args:
      block: [n, b], without NaN.
    """
    n = block.shape[0]
    if n > _MOST_UNROLLED:
        return sort_rows_in_stages(block)
    rows = list(block)
    for low, high in comparators(n):
        a, b = rows[low], rows[high]
        # One comparison and two selections; `minimum` and `maximum` would look for NaN.
        in_order = a < b
        rows[low], rows[high] = jnp.where(in_order, a, b), jnp.where(in_order, b, a)
    return rows


def sort_rows_in_stages(rows: Array) -> Array:
    """The network as a loop over its stages: a few dozen steps at any n, so that it compiles in no time."""

    def stage(rows: Array, network: tuple[Array, Array]) -> tuple[Array, None]:
        partner, is_low = network
        other = rows[partner]
        return jnp.where(is_low[:, None], jnp.minimum(rows, other), jnp.maximum(rows, other)), None

    partner, is_low = _stages(rows.shape[0])
    rows, _ = lax.scan(stage, rows, (jnp.asarray(partner), jnp.asarray(is_low)))
    return rows


def median_of_rows(block: Array, valid: Array) -> Array:
    """The lower median of the valid rows in every column.

    Args:
      block: [n, b], finite.
      valid: [n] booleans; invalid rows go half to plus and half to minus infinity, so that they cancel.

    Returns:
      [b]; 0 where no row is valid.
    """
    n = block.shape[0]
    filler = jnp.where(jnp.cumsum(~valid) % 2 == 1, jnp.inf, -jnp.inf).astype(block.dtype)
    rows = jnp.where(valid[:, None], block, filler[:, None])
    middle = sort_rows_in_stages(rows)[(n - 1) // 2]
    return jnp.where(jnp.isfinite(middle), middle, 0)
