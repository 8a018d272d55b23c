"""Messages as rows, and loops over blocks of their columns.

A block of columns of all n workers fits into the processor's cache (on a CPU) or is large enough to fill an
accelerator, so whatever is done to a block costs one pass over the memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from cafcor_jax import spread
from cafcor_jax.types import Aggregate, Array, Updates

# Columns handled at once on an accelerator: large products, and temporaries that stay small beside the input.
ACCELERATOR_BLOCK = 2**20
# Numbers in a block on a CPU: a quarter of a megabyte of float32, with room beside it in the cache.
_CPU_NUMBERS = 2**16
_SMALLEST, _LARGEST = 2**10, 2**13


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


def num_coordinates(updates: Updates) -> int:
    """Returns d, the numbers in one worker's message (on all devices that it is spread over)."""
    return spread.num_coordinates(sum(leaf.size // leaf.shape[0] for leaf in jax.tree.leaves(updates)))


def as_rows(leaf: Array) -> Array:
    """Views a leaf [n, ...] as [n, size]."""
    return leaf.reshape(leaf.shape[0], -1)


def row_groups(updates: Updates) -> list[Array]:
    """The leaves as rows [n, size], the small ones joined: a model's biases cost one loop, not ten."""
    groups: list[Array] = []
    small: dict[jnp.dtype, list[Array]] = {}
    for rows in map(as_rows, jax.tree.leaves(updates)):
        if rows.shape[1] < _LARGEST:
            small.setdefault(rows.dtype, []).append(rows)
        else:
            groups.append(rows)
    return groups + [jnp.concatenate(rows, axis=1) for rows in small.values()]


def accumulator_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype sums are kept in: float32, or float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def common_dtype(updates: Updates) -> jnp.dtype:
    """The dtype of what all leaves have a part in, as the workers' weights."""
    dtypes = [accumulator_dtype(leaf.dtype) for leaf in jax.tree.leaves(updates)]
    return functools.reduce(jnp.promote_types, dtypes)


def cpu_block(n: int) -> int:
    """The number of columns of n rows that are handled at once on a CPU: a power of two."""
    return min(max(2 ** ((_CPU_NUMBERS // n).bit_length() - 1), _SMALLEST), _LARGEST)


def _per_platform(run: Callable[[Array, int], Array], rows: Array) -> Array:
    """Calls `run(rows, columns in a block)` with the block of the platform the code is compiled for."""
    return per_platform(
        lambda rows: run(rows, cpu_block(rows.shape[0])), lambda rows: run(rows, ACCELERATOR_BLOCK), rows
    )


def per_platform(
    on_cpu: Callable[[Array], Array], on_accelerator: Callable[[Array], Array], rows: Array
) -> Array:
    """Calls the function for the platform the code is compiled for, which need not be the one at hand."""
    return lax.platform_dependent(rows, cpu=on_cpu, default=on_accelerator)


def fold_blocks(body: Callable[[Array, Array], Array], rows: Array, init: Array, size: int) -> Array:
    """Folds `body(accumulator, block [n, b])` over blocks of `size` columns; the last may be narrower."""
    full = rows.shape[1] // size

    def step(index: Array, accumulator: Array) -> Array:
        return body(accumulator, lax.dynamic_slice_in_dim(rows, index * size, size, axis=1))

    result = lax.fori_loop(0, full, step, init) if full else init
    return body(result, rows[:, full * size :]) if rows.shape[1] % size else result


def fold_columns(body: Callable[[Array, Array], Array], rows: Array, init: Array) -> Array:
    """Folds `body(accumulator, block [n, b])` over blocks of the columns of `rows`."""
    return _per_platform(lambda rows, size: fold_blocks(body, rows, init, size), rows)


def map_columns(body: Callable[[Array], Array], rows: Array) -> Array:
    """Applies `body(block [n, b]) -> [b]` to blocks of the columns of `rows`; the result is [columns]."""

    def run(rows: Array, size: int) -> Array:
        columns = rows.shape[1]
        if columns <= size:
            return body(rows)
        dtype = jax.eval_shape(body, rows[:, :size]).dtype

        def step(index: Array, result: Array) -> Array:
            # The last block ends with the columns: it may overlap the one before.
            start = jnp.minimum(index * size, columns - size)
            block = body(lax.dynamic_slice_in_dim(rows, start, size, axis=1))
            return lax.dynamic_update_slice_in_dim(result, block, start, axis=0)

        return lax.fori_loop(0, -(-columns // size), step, jnp.zeros(columns, dtype))

    return _per_platform(run, rows)


def map_leaves(body: Callable[[Array], Array], updates: Updates) -> Aggregate:
    """Applies `body(block [n, b]) -> [b]` to the columns of every leaf: leaves [n, ...] to [...].

    The result of a leaf has the leaf's dtype.
    """

    def of_leaf(leaf: Array) -> Array:
        return map_columns(body, as_rows(leaf)).reshape(leaf.shape[1:]).astype(leaf.dtype)

    return jax.tree.map(of_leaf, updates)


def finite_rows(groups: list[Array]) -> Array:
    """Which workers have finite numbers only in all groups of rows [n, size] at hand, [n] booleans."""
    return jnp.stack([jnp.isfinite(group).all(axis=1) for group in groups]).all(axis=0)


def finite_workers(updates: Updates) -> Array:
    """Which workers sent finite messages, [n] booleans, in one pass."""
    num_workers(updates)

    def row_sums(rows: Array) -> Array:
        dtype = accumulator_dtype(rows.dtype)
        return jnp.matmul(rows.astype(dtype), jnp.ones(rows.shape[1], dtype), precision=lax.Precision.HIGHEST)

    # A sum that is finite has finite terms; one that is not may have overflowed, and then each term is looked
    # at. On a CPU, products with a vector of ones are many times faster than a reduction.
    groups = row_groups(updates)
    likely = jnp.stack([jnp.isfinite(row_sums(group)) for group in groups]).all(axis=0)
    return spread.everywhere(lax.cond(likely.all(), lambda _: likely, finite_rows, groups))
