"""Gaussian noise of the workers: independent, and correlated so that it cancels between pairs.

Every pair (i, j) shares a key. In round t both ends draw the same normal vector from it; the smaller index
adds it and the larger subtracts it. Over all workers the noise cancels.

Two choices make that exact and fast:

* Unit normals are rounded to a fixed grid and summed as int32. Integer sums do not depend on their order, so
  a worker that knows only its own row of keys computes bitwise the row that the simulation computes, and over
  all workers the integers cancel to zero (their float32 images, rounded once, to about 1e-7 of a row). The
  grid, 2^-21 at n = 100, is about as fine as float32 itself.
* Coordinates are drawn in blocks that stay in the cache. The block is part of the definition: the key of a
  block is fold_in(fold_in(pair key, round), block).

All functions return float32 arrays [rows, size]; `size` is the total number of model parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cafcor_jax.float64 import matmul
from cafcor_jax.privacy.graphs import SecretGraph, matchings
from cafcor_jax.threefry import is_threefry, over_keys, threefry
from cafcor_jax.types import Array, PyTree

MODES = ("pairwise", "projected", "independent")

# Coordinates drawn at once from one key: n rows of this many floats stay in the cache.
BLOCK = 8192
# erf_inv of a 23-bit uniform is below 5.6 in absolute value.
_LARGEST_NORMAL = 8
# The smallest float32 above -1: erf_inv(-1) would be infinite.
_LOWEST = np.nextafter(np.float32(-1), np.float32(0))


def independent(
    keys: Array, round_index: Array | int, size: int, sigma: Array | float, *, first: Array | int = 0
) -> Array:
    """Independent noise: row i is N(0, sigma^2 I), drawn from worker i's own key.

    Args:
      keys: [rows] typed keys, one a worker.
      round_index: t.
      size: d.
      sigma: standard deviation.
      first: the first coordinate that is drawn, of `size`: for a part of longer rows.

    Returns:
      [rows, d].
    """
    round_keys = fold_in_keys(keys, round_index)

    def block(index: Array) -> Array:
        low, high = _normals(fold_in_keys(round_keys, index))
        return jnp.asarray(sigma, jnp.float32) * jnp.concatenate([low, high], axis=-1)

    return by_blocks(block, keys.shape[0], size, first=first)


def projected(
    key: Array,
    num_workers: int,
    round_index: Array | int,
    size: int,
    sigma: Array | float,
    graph: SecretGraph | None = None,
    *,
    first: Array | int = 0,
) -> Array:
    """Noise with the joint law of `pairwise` from O(nd) draws, not O(n^2 d): sigma sqrt(n) (z_i - mean of z).

    Its covariance between workers, sigma^2 (n I - 1 1^T), is that of pairwise-cancelling noise. On another
    secret graph it is sigma^2 L, and the noise sigma L^(1/2) z. It is for simulations only: no party could
    draw its row alone.

    Args:
      key: one typed key.
      num_workers: n, all workers.
      round_index: t.
      size: d.
      sigma: sigma_cor, the standard deviation of one pair's noise.
      graph: who shares a secret with whom; None for everyone with everyone.
      first: the first coordinate that is drawn, as for `independent`.

    Returns:
      [n, d].
    """
    keys = jax.random.split(jax.random.fold_in(key, round_index), num_workers)
    average = jnp.full((1, num_workers), 1 / num_workers, jnp.float32)
    root = None if graph is None else jnp.asarray(_laplacian_root(graph), jnp.float32)

    def block(index: Array) -> Array:
        normals = jnp.concatenate(_normals(fold_in_keys(keys, index)), axis=-1)
        if root is not None:
            return jnp.asarray(sigma, jnp.float32) * matmul(root, normals)
        centred = normals - matmul(average, normals)
        return jnp.asarray(sigma * math.sqrt(num_workers), jnp.float32) * centred

    return by_blocks(block, num_workers, size, first=first)


def pairwise(
    pair_keys: Array,
    round_index: Array | int,
    size: int,
    sigma: Array | float,
    graph: SecretGraph | None = None,
    *,
    first: Array | int = 0,
) -> Array:
    """Pairwise-cancelling noise of all workers: row i is sum_{j != i} v_ij, v_ij = -v_ji ~ N(0, sigma^2 I).

    Args:
      pair_keys: [n, n] typed keys, symmetric (`secrets.key_matrix`).
      round_index: t.
      size: d.
      sigma: sigma_cor, the standard deviation of one pair's noise.
      graph: who shares a secret with whom, the sum being over j with which i does; None for everyone.
      first: the first coordinate that is drawn, as for `independent`.

    Returns:
      [n, d]; the memory is that of the result, never n x n x d.
    """
    n = pair_keys.shape[0]
    if n == 1 or (graph is not None and not graph.edges):
        return jnp.zeros((n, size), jnp.float32)
    totals = pair_totals(pair_keys, round_index, _draw_integers(n), graph)
    return by_blocks(lambda index: _from_grid(totals(index), n, sigma), n, size, first=first)


def pair_totals(
    pair_keys: Array,
    round_index: Array | int,
    draw: Callable[[Array], Sequence[Array]],
    graph: SecretGraph | None = None,
) -> Callable[[Array], Array]:
    """What every worker adds over its pairs, in integers: from a block's index to int32 [n, BLOCK].

    Args:
      pair_keys: [n, n] typed keys, symmetric; n at least 2.
      round_index: t.
      draw: from keys [rows] to two halves int32 [rows, BLOCK / 2] of a block each.
      graph: who shares a secret with whom, at least one pair; None for everyone with everyone.
    """
    n = pair_keys.shape[0]
    keys, add = (_circle(n) if graph is None else _groups(graph))(pair_keys)
    round_keys = fold_in_keys(keys, round_index)

    def block(index: Array) -> Array:
        def drawn_in(step: Array | int) -> tuple[Array, ...]:
            return tuple(draw(fold_in_keys(round_keys[step], index)))

        # What a step draws is added by the next one. Going through the loop's carry it is stored once; used
        # at once, XLA would compute it anew for both rows it belongs to.
        def step(s: Array, carry: tuple) -> tuple:
            totals, drawn = carry
            return tuple(add(*pair, s - 1) for pair in zip(totals, drawn, strict=True)), drawn_in(s)

        zero = jnp.zeros((n, BLOCK // 2), jnp.int32)
        totals, drawn = lax.fori_loop(1, round_keys.shape[0], step, ((zero, zero), drawn_in(0)))
        last = round_keys.shape[0] - 1
        return jnp.concatenate([add(*pair, last) for pair in zip(totals, drawn, strict=True)], axis=-1)

    return block


# (total [n, b], what a step drew [rows, b], the step) -> total.
_Add = Callable[[Array, Array, Array | int], Array]


def _circle(n: int) -> Callable[[Array], tuple[Array, _Add]]:
    """All pairs, by their distance on a circle: row i of step s belongs to the pair {i, i + s + 1 mod n}.

    All n rows of a step are drawn at once, added to row i and subtracted from row i + s + 1 (the other way
    round where that passes n), so every pair comes once for distances below n / 2. At n / 2 every pair comes
    twice; its second draw is not used.
    """

    def steps(pair_keys: Array) -> tuple[Array, _Add]:
        index = jnp.arange(n)
        distances = jnp.arange(1, n // 2 + 1)
        keys = pair_keys[index[None, :], (index[None, :] + distances[:, None]) % n]
        return keys, lambda total, drawn, s: _add_pairs(total, drawn, s + 1)

    return steps


def _groups(graph: SecretGraph) -> Callable[[Array], tuple[Array, _Add]]:
    """The edges of a graph, by matchings: a step draws the edges of one, in which no worker comes twice."""

    def steps(pair_keys: Array) -> tuple[Array, _Add]:
        groups = matchings(graph)
        # Matchings are filled up with a pair that has no sign.
        ends = np.zeros((len(groups), max(map(len, groups)), 2), np.int32)
        edge_of, sign = np.zeros((2, len(groups), graph.num_workers), np.int32)
        for step, group in enumerate(groups):
            for edge, (i, j) in enumerate(group):
                ends[step, edge] = i, j
                edge_of[step, [i, j]] = edge
                sign[step, [i, j]] = 1, -1
        edges, signs = jnp.asarray(edge_of), jnp.asarray(sign)
        keys = pair_keys[ends[..., 0], ends[..., 1]]
        return keys, lambda total, drawn, s: total + signs[s][:, None] * drawn[edges[s]]

    return steps


def _laplacian_root(graph: SecretGraph) -> np.ndarray:
    """The symmetric root of the graph's Laplacian, [n, n]."""
    values, vectors = np.linalg.eigh(np.diag(graph.degrees) - graph.adjacency.astype(np.float64))
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


def pairwise_row(
    own_pair_keys: Array,
    worker: Array | int,
    round_index: Array | int,
    size: int,
    sigma: Array | float,
    graph: SecretGraph | None = None,
) -> Array:
    """One worker's row of `pairwise`, bitwise the same, from its own keys alone.

    Args:
      own_pair_keys: [n] typed keys: the worker's row of the key matrix (its own entry is not used).
      worker: i.
      round_index: t.
      size: d.
      sigma: sigma_cor.
      graph: who shares a secret with whom; None for everyone with everyone.

    Returns:
      [d].
    """
    n = own_pair_keys.shape[0]
    totals = row_totals(own_pair_keys, worker, round_index, _draw_integers(n), graph)
    return by_blocks(lambda index: _from_grid(totals(index), n, sigma), 1, size)[0]


def row_totals(
    own_pair_keys: Array,
    worker: Array | int,
    round_index: Array | int,
    draw: Callable[[Array], Sequence[Array]],
    graph: SecretGraph | None = None,
) -> Callable[[Array], Array]:
    """One worker's row of `pair_totals` by its own keys alone: from a block's index to int32 [1, BLOCK]."""
    sign = jnp.sign(jnp.arange(own_pair_keys.shape[0]) - worker).astype(jnp.int32)[:, None]
    if graph is not None:
        sign = sign * jnp.asarray(graph.adjacency)[worker][:, None]
    round_keys = fold_in_keys(own_pair_keys, round_index)

    def block(index: Array) -> Array:
        halves = draw(fold_in_keys(round_keys, index))
        return jnp.concatenate([jnp.sum(sign * half, axis=0, dtype=jnp.int32) for half in halves])[None]

    return block


def pair_noise(
    key: Array,
    worker: Array | int,
    other: Array | int,
    num_workers: int,
    round_index: Array | int,
    size: int,
    sigma: Array | float,
) -> Array:
    """v_ij: what worker i adds for its pair with j, [d]; bitwise -v_ji."""
    round_key = fold_in_keys(key[None], round_index)
    sign = jnp.sign(jnp.asarray(other) - worker)

    def block(block_index: Array) -> Array:
        halves = [
            _to_grid(sign * half, num_workers) for half in _normals(fold_in_keys(round_key, block_index))
        ]
        return _from_grid(jnp.concatenate(halves, axis=-1), num_workers, sigma)

    return by_blocks(block, 1, size)[0]


def like(template: PyTree, flat: Array) -> PyTree:
    """Cuts rows [n, d] into a pytree with leaves [n, ...] shaped as the template's."""
    leaves, structure = jax.tree.flatten(template)
    ends = [0]
    for leaf in leaves:
        ends.append(ends[-1] + leaf.size)
    parts = [
        flat[:, start:end].reshape(flat.shape[0], *leaf.shape).astype(leaf.dtype)
        for leaf, start, end in zip(leaves, ends, ends[1:], strict=False)
    ]
    return jax.tree.unflatten(structure, parts)


def fold_in_keys(keys: Array, data: Array | int) -> Array:
    """`jax.random.fold_in` for keys of any shape."""
    flat = over_keys(lambda key: jax.random.fold_in(key, data), keys)(keys.reshape(-1))
    # Without the barrier XLA may derive the key anew for every single normal drawn from it.
    return lax.optimization_barrier(flat.reshape(keys.shape))


def by_blocks(
    block: Callable[[Array], Array],
    num_rows: int,
    size: int,
    dtype: Any = jnp.float32,
    *,
    first: Array | int = 0,
) -> Array:
    """Fills [rows, size] block by block, from the coordinate `first` on.

    The blocks at the ends are drawn whole and cut.
    """
    begin, end = first // BLOCK, (first + size + BLOCK - 1) // BLOCK
    # Where it is not known before the code runs, in the worst case.
    count = end - begin if isinstance(end - begin, int) else 1 + -(-(size - 1) // BLOCK)

    def fill(index: Array, out: Array) -> Array:
        return lax.dynamic_update_slice(out, block(index), (0, (index - begin) * BLOCK))

    filled = lax.fori_loop(begin, end, fill, jnp.zeros((num_rows, count * BLOCK), dtype))
    return lax.dynamic_slice_in_dim(filled, first - begin * BLOCK, size, axis=1)


def _normals(keys: Array) -> tuple[Array, Array]:
    """A block of unit normals for every key, as two halves [rows, BLOCK / 2]."""
    shape = (*keys.shape, BLOCK // 2)
    if is_threefry(keys):
        # One call of the cipher gives two words; jax.random.bits would throw one away.
        counter = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
        low, high = threefry(
            jax.random.key_data(keys)[..., None, :], counter, counter + jnp.uint32(BLOCK // 2)
        )
    else:
        bits = over_keys(lambda key: jax.random.bits(key, (2, BLOCK // 2), jnp.uint32), keys)(
            keys.reshape(-1)
        )
        low, high = bits[:, 0].reshape(shape), bits[:, 1].reshape(shape)
    return _normal_from_bits(low), _normal_from_bits(high)


def _normal_from_bits(bits: Array) -> Array:
    """Unit normals by inversion: sqrt(2) erf_inv(u), u uniform in (-1, 1)."""
    mantissa = (bits >> 9) | jnp.uint32(0x3F800000)
    unit = lax.bitcast_convert_type(mantissa, jnp.float32) - 1  # [0, 1)
    uniform = jnp.maximum(_LOWEST, unit * (1 - _LOWEST) + _LOWEST)
    return np.float32(math.sqrt(2)) * lax.erf_inv(uniform)


def _grid_bits(num_workers: int) -> int:
    """The finest grid 2^-bits on which a sum of n normals cannot overflow 32 bits."""
    return 31 - math.ceil(math.log2(_LARGEST_NORMAL * max(num_workers, 2)))


def _to_grid(normals: Array, num_workers: int) -> Array:
    scaled = normals * 2.0 ** _grid_bits(num_workers)
    return lax.round(scaled, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int32)


def _draw_integers(num_workers: int) -> Callable[[Array], Sequence[Array]]:
    """A block of unit normals for every key, rounded to the grid of n workers, as two halves."""
    return lambda keys: [_to_grid(half, num_workers) for half in _normals(keys)]


def _from_grid(total: Array, num_workers: int, sigma: Array | float) -> Array:
    return total.astype(jnp.float32) * jnp.asarray(2.0 ** -_grid_bits(num_workers) * sigma, jnp.float32)


def _add_pairs(total: Array, drawn: Array, distance: Array | int) -> Array:
    """Adds row i of what was drawn to row i and subtracts it from row i + distance; past n the other way."""
    n = drawn.shape[0]
    # Where distance = n / 2, the rows past n are the same pairs again.
    swapped = jnp.where(jnp.equal(2 * distance, n), 0, -drawn)
    before_end = lax.broadcasted_iota(jnp.int32, drawn.shape, 0) < n - distance
    moved = lax.dynamic_slice_in_dim(jnp.concatenate([swapped, drawn]), n - distance, n)
    return total + jnp.where(before_end, drawn, swapped) - moved
