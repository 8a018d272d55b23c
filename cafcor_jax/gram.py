"""Gram space: the only two passes over the model's dimension.

The number of workers n is small and the dimension d is huge. A *linear* rule returns sum_i w_i x_i with
weights that depend on the messages through inner products only, so it is a function from the n x n Gram
matrix to n weights: `gram` reads the messages once, `mix` reads them once more, and nothing between the two
knows d.

What is n x n is in float64, whatever the messages are in: it costs nothing beside the passes, and rules
decide by differences of inner products (who is nearest, which direction varies most), where float32 would
decide wrongly between near equals.

A message that is not finite cannot come from an honest worker. Its row and column of the Gram matrix are NaN:
that is how a rule knows whom to leave out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cafcor_jax import spread
from cafcor_jax.columns import (
    accumulator_dtype,
    as_rows,
    finite_rows,
    finite_workers,
    fold_columns,
    map_leaves,
    num_workers,
    row_groups,
)
from cafcor_jax.float64 import dot, in_float64, matmul
from cafcor_jax.products import products_of_wide_rows
from cafcor_jax.sorting import median_of_rows
from cafcor_jax.types import Aggregate, Array, Updates

# Groups with fewer columns than this are multiplied in float64. In larger ones the blocks' products are in
# float32 and only their sum is in float64: twice as fast, and the roundings of many blocks average out.
_SMALL_GROUP = 2**16
# The workers' squared distances must not be smaller than this part of their squared lengths: products in
# float32 (float64) then leave six (twelve) digits of a distance.
_SPREAD_FLOAT32, _SPREAD_FLOAT64 = 0.05, 1e-4
# A smaller weight, and the messages it is given to, are brought nearer to 1 before they are multiplied.
_TINY_WEIGHT, _SHIFT = 2.0**-70, 2.0**-64
# Squared lengths under this have parts that are too small for float32.
_TINY = 1e-25


def _summed_products(groups: list[Array], centre: Callable[[Array], Array]) -> Array:
    """The sum over blocks of y y^T, with y = centre(block), in float64 throughout."""
    n = groups[0].shape[0]
    # Products of a multiple of eight rows are faster on a CPU.
    padded = n + -n % 8

    def add(total: Array, block: Array) -> Array:
        rows = jnp.pad(centre(block.astype(np.float64)), ((0, padded - n), (0, 0)))
        return total + dot(rows, rows.T)

    total = jnp.zeros((padded, padded), np.float64)
    for group in groups:
        total = fold_columns(add, group, total)
    total = total[:n, :n]
    return (total + total.T) / 2


def _plain_gram(groups: list[Array]) -> tuple[Array, Array]:
    """The Gram matrix about the origin in one pass, and whether it can be trusted."""
    wide = [group for group in groups if group.shape[1] >= _SMALL_GROUP]
    narrow = [group for group in groups if group.shape[1] < _SMALL_GROUP]
    products = [_summed_products(narrow, lambda block: block)] if narrow else []
    gram = spread.total(
        functools.reduce(jnp.add, products + [products_of_wide_rows(group) for group in wide])
    )
    norms = jnp.diagonal(gram)
    n = gram.shape[0]
    # An honest row has n // 2 other honest ones at least, so the honest majority decides this.
    apart = jnp.median(jnp.sort(squared_distances(gram), axis=1)[:, n // 2])
    typical = jnp.median(norms)
    in_float32 = any(accumulator_dtype(group.dtype) == np.float32 for group in wide)
    least = _SPREAD_FLOAT32 if in_float32 else _SPREAD_FLOAT64
    # A NaN makes every comparison false, as it should.
    trusted = jnp.isfinite(gram).all() & (apart >= least * typical) & (typical > _TINY)
    return gram, trusted


def _careful_gram(groups: list[Array], *, about_origin: bool) -> Array:
    """The Gram matrix in float64, for messages that are not finite, very long, or drown one another.

    About the coordinate-wise median, unless it is to be about the origin.
    """
    finite = spread.everywhere(finite_rows(groups))

    def centre(block: Array) -> Array:
        block = jnp.where(finite[:, None], block, 0)
        return block if about_origin else block - median_of_rows(block, finite)[None, :]

    gram = spread.total(_summed_products(groups, centre))
    # A length whose square is beyond float64 is as good as infinite.
    finite = finite & jnp.isfinite(jnp.diagonal(gram))
    return jnp.where(finite[:, None] & finite[None, :], gram, jnp.nan)


@in_float64
def gram(updates: Updates, *, about_origin: bool = False) -> Array:
    """Returns the Gram matrix of the workers' messages, [n, n] in float64.

    G[i, j] = <x_i - c, x_j - c>, summed over leaves. The centre c is free, since rules use what does not
    depend on it (distances, covariances), and is chosen for accuracy: 0 in ordinary cases, in one pass. If
    a message is not finite, or the messages are close together and far from 0, a second and slower pass takes
    c to be their coordinate-wise median. Rows and columns of messages that are not finite are NaN.

    Args:
      updates: leaves [n, ...].
      about_origin: take c = 0 in any case, for rules that use the lengths of the messages.

    Returns:
      An array [n, n] of float64, also where JAX is not set to have any: use it inside `in_float64`.

    Example:
      >>> import jax.numpy as jnp
      >>> gram(jnp.array([[3.0, 4.0], [0.0, 2.0]])).tolist()
      [[25.0, 8.0], [8.0, 4.0]]
    """
    num_workers(updates)
    groups = row_groups(updates)
    plain, trusted = _plain_gram(groups)
    careful = functools.partial(_careful_gram, about_origin=about_origin)
    return lax.cond(trusted, lambda _: plain, careful, groups)


def squared_distances(gram: Array) -> Array:
    """||x_i - x_j||^2 from a Gram matrix about any centre, [n, n]."""
    norms = jnp.diagonal(gram)
    return jnp.maximum(norms[:, None] + norms[None, :] - 2 * gram, 0)


def recentred(gram: Array, weights: Array) -> Array:
    """The Gram matrix about z = sum_i w_i x_i; if the weights sum to 1, from one about any centre."""
    product = dot(gram, weights)
    return gram - product[:, None] - product[None, :] + dot(weights, product)


def mix(weights: Array, updates: Updates, *, all_finite: Array | bool | None = None) -> Aggregate:
    """Returns sum_i w_i x_i for every leaf: the second pass.

    A message of weight 0 has no influence, be it Inf or NaN.

    Args:
      weights: [n].
      updates: leaves [n, ...].
      all_finite: whether all messages are finite, where that is known; otherwise it is found out, by a look
        at every message.

    Returns:
      A pytree with leaves [...].
    """

    def plain(updates: Updates) -> Aggregate:
        def of_leaf(leaf: Array) -> Array:
            dtype = accumulator_dtype(leaf.dtype)
            total = matmul(weights.astype(dtype)[None, :], as_rows(leaf).astype(dtype))[0]
            return total.reshape(leaf.shape[1:]).astype(leaf.dtype)

        return jax.tree.map(of_leaf, updates)

    def careful(updates: Updates) -> Aggregate:
        return map_leaves(lambda block: _careful_product(weights[None, :], block)[0], updates)

    if all_finite is None:
        all_finite = finite_workers(updates).all()
    # 0 * Inf is NaN, and a tiny weight of a huge message is 0 in float32.
    tiny = (weights != 0) & (jnp.abs(weights) < _TINY_WEIGHT)
    return lax.cond(all_finite & ~tiny.any(), plain, careful, updates)


def mixtures(matrix: Array, updates: Updates) -> Updates:
    """Returns sum_j M_ij x_j for every leaf and every row of a matrix [m, n]: leaves [m, ...].

    As in `mix`, a message with a column of 0 has no influence. A row of M that is NaN gives a NaN mixture.
    """

    def of_leaf(leaf: Array) -> Array:
        rows = _careful_product(matrix, as_rows(leaf))
        return rows.reshape(matrix.shape[0], *leaf.shape[1:]).astype(leaf.dtype)

    return jax.tree.map(of_leaf, updates)


def _careful_product(matrix: Array, rows: Array) -> Array:
    """M x, where a coefficient of 0 wins over Inf and NaN, and small coefficients of huge rows count."""
    dtype = accumulator_dtype(rows.dtype)
    left_out = jnp.isnan(matrix).any(axis=1)
    matrix = jnp.where(left_out[:, None], 0, matrix)
    largest = jnp.max(jnp.abs(matrix), axis=0)
    shift = jnp.where((largest > 0) & (largest < _TINY_WEIGHT), _SHIFT, 1).astype(matrix.dtype)
    rows = jnp.where(largest[:, None] > 0, rows, 0).astype(dtype) * shift.astype(dtype)[:, None]
    product = matmul((matrix / shift[None, :]).astype(dtype), rows)
    return jnp.where(left_out[:, None], jnp.nan, product)
