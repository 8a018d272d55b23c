"""Linear rules: the aggregate is sum_i w_i x_i, with weights from the Gram matrix alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from cafcor_jax.gram import gram, mix, num_workers
from cafcor_jax.types import Aggregate, Array, Updates


@dataclasses.dataclass(frozen=True)
class LinearRule:
    """A rule given by `weigh: G [n, n] -> w [n]`; it is an `Aggregator` itself.

    `weigh` must give weight 0 to workers whose row of G is NaN (`valid_workers`).
    """

    weigh: Callable[[Array], Array]
    num_byzantine: int

    def weights(self, updates: Updates) -> Array:
        """The weight of every worker, [n]."""
        check_tolerance(num_workers(updates), self.num_byzantine)
        return self.weigh(gram(updates))

    def mix(self, weights: Array, updates: Updates) -> Aggregate:
        """The aggregate of given weights: sum_i w_i x_i."""
        return mix(weights, updates)

    def __call__(self, updates: Updates) -> Aggregate:
        """Aggregates leaves [n, ...] to [...]."""
        return self.mix(self.weights(updates), updates)


def check_num_byzantine(num_byzantine: int) -> None:
    """Raises unless f is a whole number of at least 0."""
    if not isinstance(num_byzantine, int) or isinstance(num_byzantine, bool) or num_byzantine < 0:
        raise ValueError(f"num_byzantine is {num_byzantine!r}; it must be a whole number of at least 0.")


def check_tolerance(n: int, num_byzantine: int) -> None:
    """Raises unless the honest workers are a majority."""
    if 2 * num_byzantine >= n:
        raise ValueError(
            f"num_byzantine = {num_byzantine} of n = {n} workers: "
            "fewer than half of the workers may be malicious."
        )


def valid_workers(gram: Array) -> Array:
    """Which workers sent finite messages, [n] booleans."""
    return jnp.isfinite(jnp.diagonal(gram))


def mean(num_byzantine: int = 0) -> LinearRule:
    """The plain average of all finite messages: no defence, the baseline.

    w_i = 1/n.

    Args:
      num_byzantine: f; the average does not use it.

    Returns:
      A linear rule.

    Example:
      >>> import jax.numpy as jnp
      >>> mean()(jnp.array([[1.0, 2.0], [3.0, 6.0]])).tolist()
      [2.0, 4.0]
    """
    check_num_byzantine(num_byzantine)

    def weigh(gram: Array) -> Array:
        valid = valid_workers(gram).astype(gram.dtype)
        return valid / jnp.maximum(valid.sum(), 1)

    return LinearRule(weigh, num_byzantine)
