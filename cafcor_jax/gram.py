"""Gram space: the only two passes over the model's dimension.

The number of workers n is small and the dimension d is huge. A *linear* rule returns sum_i w_i x_i with
weights that depend on the messages through inner products only, so it is a function from the n x n Gram
matrix to n weights: `gram` reads the messages once, `mix` reads them once more, and nothing between the two
knows d.

The Gram matrix is taken about a centre, since differences of large inner products cancel: G[i, j] =
<x_i - c, x_j - c>. The rules here only use what does not depend on c (distances, covariances), so c is free
and is chosen for accuracy: the mean of the messages, or, when that would drown the honest workers' spread
(a message of 1e30, say), their coordinate-wise median.

A message that is not finite cannot come from an honest worker. Its row and column of the Gram matrix are NaN:
that is how a rule knows whom to leave out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from cafcor_jax.sorting import median_of_rows
from cafcor_jax.types import Aggregate, Array, Updates

# Columns handled at once on a CPU: n rows of this many floats stay in the cache.
_BLOCK = 8192
# The honest spread must not be smaller than this part of the rows' squared norms: float32 keeps 7 digits, and
# a difference of squares that loses one of them still has six.
_SPREAD = 0.1
# Squared norms outside this range are close to what float32 can hold, and their products are beyond it.
_TINY, _HUGE = 1e-25, 1e25
# A message this many times longer than the next shorter one is filtered first by any rule, whatever its exact
# length; longer ones are shortened to this ratio, so that every inner product fits into float32.
_GAP = 1e6
_LONGEST = 1e18


def num_workers(updates: Updates) -> int:
    """Returns n and checks that the leaves are floating-point arrays [n, ...] with one and the same n."""
    leaves = jax.tree.leaves(updates)
    if not leaves:
        raise ValueError("updates has no arrays; it must be a pytree of arrays [n, ...].")
    for leaf in leaves:
        if jnp.ndim(leaf) < 1:
            raise ValueError("updates has a leaf without a worker axis (a scalar); leaves must be [n, ...].")
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                f"updates has a leaf of dtype {jnp.result_type(leaf)}; it must be floating point."
            )
    counts = sorted({leaf.shape[0] for leaf in leaves})
    if len(counts) > 1:
        raise ValueError(f"the leaves of updates disagree on the number of workers: {counts}.")
    if counts[0] == 0:
        raise ValueError("updates has 0 workers; there must be at least 1.")
    return counts[0]


def as_rows(leaf: Array) -> Array:
    """Views a leaf [n, ...] as [n, size]."""
    return leaf.reshape(leaf.shape[0], -1)


def row_groups(updates: Updates) -> list[Array]:
    """The leaves as rows [n, size], the small ones joined: a model's biases cost one loop, not ten."""
    groups: list[Array] = []
    small: dict[jnp.dtype, list[Array]] = {}
    for rows in map(as_rows, jax.tree.leaves(updates)):
        if rows.shape[1] < _BLOCK:
            small.setdefault(rows.dtype, []).append(rows)
        else:
            groups.append(rows)
    return groups + [jnp.concatenate(rows, axis=1) for rows in small.values()]


def accumulator_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype sums are kept in: float32, or float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def _over_blocks(body: Callable[[Array, Array], Array], rows: Array, init: Array) -> Array:
    """Folds `body(accumulator, block [n, b])` over cache-sized blocks of columns; on a CPU only."""

    def in_blocks(rows: Array, init: Array) -> Array:
        full = rows.shape[1] // _BLOCK

        def step(index: Array, accumulator: Array) -> Array:
            return body(accumulator, lax.dynamic_slice_in_dim(rows, index * _BLOCK, _BLOCK, axis=1))

        result = lax.fori_loop(0, full, step, init) if full else init
        return body(result, rows[:, full * _BLOCK :]) if rows.shape[1] % _BLOCK else result

    return lax.platform_dependent(rows, init, cpu=in_blocks, default=lambda rows, init: body(init, rows))


def dot(a: Array, b: Array) -> Array:
    """The matrix product at full precision."""
    # A TPU's default precision multiplies in bfloat16, which would wreck the Gram matrix.
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _plain_gram(updates: Updates) -> Array:
    """The Gram matrix about the mean of all rows, in one pass."""

    def add(total: Array, block: Array) -> Array:
        block = block.astype(total.dtype)
        mean = dot(jnp.full((1, n), 1 / n, total.dtype), block)
        centred = block - mean
        return total + dot(centred, centred.T)

    leaves = row_groups(updates)
    n = leaves[0].shape[0]
    dtype = functools.reduce(jnp.promote_types, [leaf.dtype for leaf in leaves], jnp.dtype(jnp.float32))
    total = jnp.zeros((n, n), dtype)
    for leaf in leaves:
        total = _over_blocks(add, leaf, total)
    return total


def _is_accurate(gram: Array) -> Array:
    """Whether a Gram matrix about the mean is finite, in range and not drowned by a far-away mean."""
    norms = jnp.diagonal(gram)
    distances = norms[:, None] + norms[None, :] - 2 * gram
    n = gram.shape[0]
    # The n // 2 nearest of an honest row are never all malicious, so the honest majority decides this.
    spread = jnp.median(jnp.sort(distances, axis=1)[:, n // 2])
    typical, largest = jnp.median(norms), jnp.max(norms)
    in_range = (typical > _TINY) & (largest < _HUGE)
    # A NaN makes every comparison false, as it should.
    return in_range & (spread >= _SPREAD * typical)


def _robust_gram(updates: Updates) -> Array:
    """The Gram matrix about the coordinate-wise median, for messages on wildly different scales."""
    leaves = row_groups(updates)
    n = leaves[0].shape[0]
    dtype = functools.reduce(jnp.promote_types, [leaf.dtype for leaf in leaves], jnp.dtype(jnp.float32))
    finite = functools.reduce(jnp.logical_and, [jnp.isfinite(leaf).all(axis=1) for leaf in leaves])

    def centred(block: Array) -> Array:
        block = block.astype(dtype)
        # A quarter keeps the difference of two numbers near the largest float finite; the scale is undone by
        # the normalisation below.
        block = jnp.where(finite[:, None], block, 0) * 0.25
        return block - median_of_rows(block, finite)[None, :]

    def widest(size: Array, block: Array) -> Array:
        return jnp.maximum(size, jnp.max(jnp.abs(centred(block)), axis=1, initial=0))

    size = jnp.zeros(n, dtype)
    for leaf in leaves:
        size = _over_blocks(widest, leaf, size)
    # Rows are brought to unit size before they are multiplied: nothing overflows or underflows.
    inverse = jnp.where(size > 0, 1 / jnp.maximum(size, jnp.finfo(dtype).tiny), 0)

    def add(total: Array, block: Array) -> Array:
        unit = centred(block) * inverse[:, None]
        return total + dot(unit, unit.T)

    total = jnp.zeros((n, n), dtype)
    for leaf in leaves:
        total = _over_blocks(add, leaf, total)

    norm = jnp.sqrt(jnp.diagonal(total))  # of the rows at unit size; 0 for a row at the centre
    factor = 4 * _shortened_sizes(size, norm, finite)
    gram = total * factor[:, None] * factor[None, :]
    return jnp.where(finite[:, None] & finite[None, :], gram, jnp.nan)


def _shortened_sizes(size: Array, norm: Array, valid: Array) -> Array:
    """Row sizes, made smaller where a row's length, size * norm, is more than `_GAP` times the next one's.

    Only gaps above the median length count. Lengths near the ends of the float range are also divided by a
    power of two near the median length. A row that is not shortened keeps its size to the last digit.
    """
    count = size.shape[0]
    positive = (norm > 0) & valid
    log_length = jnp.where(positive, jnp.log(jnp.where(positive, norm, 1)) + jnp.log(size), -jnp.inf)
    order = jnp.argsort(log_length)
    ascending = log_length[order]
    # Invalid and zero rows are at minus infinity, in front.
    middle = jnp.minimum((jnp.sum(~valid) + count) // 2, count - 1)
    base = jnp.where(jnp.isfinite(ascending[middle]), ascending[middle], ascending[-1])
    base = jnp.where(jnp.isfinite(base), base, 0)
    climb = jnp.diff(jnp.maximum(ascending - base, 0), prepend=0)
    # Many messages on as many scales share the range that there is.
    wide = jnp.maximum(jnp.sum(climb > math.log(_GAP)), 1)
    gap = jnp.minimum(math.log(_GAP), math.log(_LONGEST) / wide.astype(size.dtype))
    total = jnp.cumsum(jnp.minimum(climb, gap))
    above = jnp.minimum(total, math.log(_LONGEST))
    is_cut = (jnp.cumsum(climb > gap) > 0) | (total > math.log(_LONGEST))
    in_range = (jnp.abs(base) < 0.5 * math.log(_HUGE)) & (base + above[-1] < math.log(_LONGEST))
    exponent = jnp.where(in_range, 0, -jnp.round(base / math.log(2)))
    shortened = jnp.exp(above + (base + exponent * math.log(2))) / jnp.where(norm > 0, norm, 1)[order]
    kept = jnp.ldexp(size[order], exponent.astype(jnp.int32))
    return jnp.zeros_like(size).at[order].set(jnp.where(is_cut, shortened, kept))


def gram(updates: Updates) -> Array:
    """Returns the centred Gram matrix of the workers' messages, [n, n].

    G[i, j] = <x_i - c, x_j - c>, summed over leaves. One pass over the messages in ordinary cases; three more
    when some message is not finite, or so far away that float32 would lose what the honest ones differ in.
    Then c is the coordinate-wise median, rows of absurd length are shortened (a rule filters them all the
    same), and the rows and columns of messages that are not finite are NaN. If the squared lengths would not
    fit into float32, G is scaled to a typical length of about 1.

    Args:
      updates: leaves [n, ...].

    Returns:
      An array [n, n] of float32, or float64 for float64 inputs.

    Example:
      >>> import jax.numpy as jnp
      >>> gram(jnp.array([[0.0, 1.0], [0.0, 3.0]])).tolist()
      [[1.0, -1.0], [-1.0, 1.0]]
    """
    num_workers(updates)
    plain = _plain_gram(updates)
    return lax.cond(_is_accurate(plain), lambda _: plain, _robust_gram, updates)


def mix(weights: Array, updates: Updates) -> Aggregate:
    """Returns sum_i w_i x_i for every leaf: the second pass.

    A message of weight 0 has no influence, be it Inf or NaN.

    Args:
      weights: [n].
      updates: leaves [n, ...].

    Returns:
      A pytree with leaves [...].
    """

    def mixed(mask: Array | None) -> Aggregate:
        def mix_leaf(leaf: Array) -> Array:
            rows = as_rows(leaf)
            dtype = accumulator_dtype(leaf.dtype)
            if mask is not None:
                rows = jnp.where(mask[:, None], rows, 0)
            total = dot(weights.astype(dtype)[None, :], rows.astype(dtype))[0]
            return total.reshape(leaf.shape[1:]).astype(leaf.dtype)

        return jax.tree.map(mix_leaf, updates)

    plain = mixed(None)
    # 0 * Inf is NaN; only then are the rows of weight 0 masked, which costs a copy.
    finite = jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(plain)]).all()
    return lax.cond(finite, lambda: plain, lambda: mixed(weights != 0))
