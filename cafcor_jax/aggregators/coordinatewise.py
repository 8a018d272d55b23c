"""Coordinate-wise rules: the median, the trimmed mean and Meamed, by sorting networks over the rows.

How many messages there are is known when the code is compiled. Only where some are not finite, and left out,
it is known when the code runs: a second and slower way, with the same definitions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from cafcor_jax.aggregators.linear import check_num_byzantine, check_tolerance
from cafcor_jax.columns import accumulator_dtype, finite_workers, map_leaves, num_workers
from cafcor_jax.sorting import sort_rows, sort_rows_in_stages
from cafcor_jax.types import Aggregate, Array, Updates

#: A number that is known when the code is compiled, or only when it runs.
Count = int | Array
#: Rows in ascending order in every column: a list of [b] that is known row by row, or one array [n, b].
Rows = list[Array] | Array


@dataclasses.dataclass(frozen=True)
class CoordinatewiseRule:
    """A rule given by `combine(rows, count, f)`: from the sorted rows [n, b] to [b]; it is an `Aggregator`.

    The first `count` rows are finite and in ascending order, the rest are infinite; f of them may be
    malicious.
    """

    combine: Callable[[Rows, Count, Count], Array]
    num_byzantine: int

    def __call__(self, updates: Updates) -> Aggregate:
        """Aggregates leaves [n, ...] to [...]."""
        n = num_workers(updates)
        check_tolerance(n, self.num_byzantine)
        finite = finite_workers(updates)
        # The sum of n numbers near the largest float would overflow; a power of two changes no digit.
        shrink = 2.0 ** -math.ceil(math.log2(n))

        def shrunk(block: Array) -> Array:
            return block.astype(accumulator_dtype(block.dtype)) * shrink

        def plain(updates: Updates) -> Aggregate:
            def of_block(block: Array) -> Array:
                return self.combine(sort_rows(shrunk(block)), n, self.num_byzantine) / shrink

            return map_leaves(of_block, updates)

        def without_invalid(updates: Updates) -> Aggregate:
            count = jnp.sum(finite, dtype=jnp.int32)
            f = jnp.maximum(self.num_byzantine - (n - count), 0)

            def of_block(block: Array) -> Array:
                rows = sort_rows_in_stages(jnp.where(finite[:, None], shrunk(block), jnp.inf))
                return jnp.where(count > 0, self.combine(rows, count, f) / shrink, 0)

            return map_leaves(of_block, updates)

        return lax.cond(finite.all(), plain, without_invalid, updates)


def median(num_byzantine: int = 0) -> CoordinatewiseRule:
    """Builds the coordinate-wise median; for an even number of messages, the mean of the middle two.

    Args:
      num_byzantine: f, with 2f < n; the rule itself does not use it.

    Returns:
      An aggregator.

    Example:
      >>> import jax.numpy as jnp
      >>> median()(jnp.array([[0.0, 7.0], [1.0, 8.0], [5.0, -9.0]])).tolist()
      [1.0, 7.0]

    References:
      Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018.
    """
    check_num_byzantine(num_byzantine)
    return CoordinatewiseRule(lambda rows, count, f: _median(rows, count), num_byzantine)


def trimmed_mean(num_byzantine: int) -> CoordinatewiseRule:
    """Builds the coordinate-wise trimmed mean: the mean without the f largest and the f smallest values.

    Args:
      num_byzantine: f, with 2f < n.

    Returns:
      An aggregator.

    Example:
      >>> import jax.numpy as jnp
      >>> trimmed_mean(num_byzantine=1)(jnp.array([[0.0], [1.0], [2.0], [9.0]])).tolist()
      [1.5]

    References:
      Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018.
    """
    check_num_byzantine(num_byzantine)
    return CoordinatewiseRule(
        lambda rows, count, f: _over(_sum(rows, f, count - f), count - 2 * f), num_byzantine
    )


def meamed(num_byzantine: int) -> CoordinatewiseRule:
    """Builds Meamed: in every coordinate, the mean of the n - f values nearest to the median.

    Of two values equally near, the smaller one is taken.

    Args:
      num_byzantine: f, with 2f < n.

    Returns:
      An aggregator.

    Example:
      >>> import jax.numpy as jnp
      >>> meamed(num_byzantine=1)(jnp.array([[0.0], [1.0], [2.0], [9.0]])).tolist()
      [1.0]

    References:
      Xie et al., Generalized Byzantine-tolerant SGD, 2018.
    """
    check_num_byzantine(num_byzantine)
    return CoordinatewiseRule(_meamed, num_byzantine)


def _sum(rows: Rows, low: Count, high: Count) -> Array:
    """The sum of rows low, ..., high - 1."""
    if isinstance(low, int) and isinstance(high, int):
        # Term by term: on a CPU this is a sum of vectors, where a reduction would go column by column.
        total = rows[low]
        for index in range(low + 1, high):
            total = total + rows[index]
        return total
    place = jnp.arange(len(rows), dtype=jnp.int32)[:, None]
    return jnp.sum(jnp.where((place >= low) & (place < high), jnp.asarray(rows), 0), axis=0)


def _over(total: Array, count: Count) -> Array:
    return total / jnp.asarray(count, total.dtype)


def _median(rows: Rows, count: Count) -> Array:
    return (rows[(count - 1) // 2] + rows[count // 2]) / 2


def _meamed(rows: Rows, count: Count, f: Count) -> Array:
    """The nearest k = count - f values are neighbours in the order, so of v_j and v_(j+k) one is among them.

    It is the nearer one, and v_f, ..., v_(k-1) are among them in any case.
    """
    middle = _median(rows, count)
    kept = count - f

    def nearer(low: Array, high: Array) -> Array:
        return jnp.where(middle - low <= high - middle, low, high)

    total = _sum(rows, f, kept)
    if isinstance(f, int):
        for index in range(f):
            total = total + nearer(rows[index], rows[index + kept])
    else:
        for index in range(len(rows) // 2):
            last = len(rows) - 1
            total = total + jnp.where(
                index < f, nearer(rows[index], rows[jnp.minimum(index + kept, last)]), 0
            )
    return _over(total, kept)
