"""Linear rules: the aggregate is sum_i w_i x_i, with weights from the Gram matrix alone."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cafcor_jax.columns import common_dtype, finite_workers, num_coordinates, num_workers
from cafcor_jax.float64 import batched_in_float64, differentiated_in_float64, in_float64
from cafcor_jax.gram import gram, mix
from cafcor_jax.types import Aggregate, Array, Updates


@dataclasses.dataclass(frozen=True)
class LinearRule:
    """A rule given by `weigh: G [n, n] -> w [n]`; it is an `Aggregator` itself.

    `weigh` is called with a float64 matrix, inside `in_float64`. It must give weight 0 to workers whose
    row of G is NaN (`valid_workers`).
    """

    weigh: Callable[[Array], Array]
    num_byzantine: int
    inner_products: Callable[[Updates], Array] = gram
    """Makes G from the messages: `gram`, or `gram_about_origin` for a rule that uses their lengths."""
    is_selection: bool = False
    """Whether the weights are constant but for jumps, as those of a choice among workers are: derivatives
    then pass by them, and the rule can be differentiated in reverse too."""
    is_slow: bool = False
    """Whether `weigh` takes long, as that of a rule over all subsets does: who calls it many times for one
    aggregation (an adaptive attack) should then do with fewer."""
    in_dimension: Callable[[int], LinearRule] | None = None
    """For a rule that depends on the number of coordinates d: from d to the rule. It has no `weigh` then."""

    def for_messages(self, updates: Updates) -> LinearRule:
        """The rule for messages like these: itself, unless it depends on the number of coordinates."""
        if self.in_dimension is None:
            return self
        return self.in_dimension(num_coordinates(updates))

    def weights(self, updates: Updates) -> Array:
        """The weight of every worker, [n]."""
        return self.with_weights(updates)[1]

    def __call__(self, updates: Updates) -> Aggregate:
        """Aggregates leaves [n, ...] to [...]."""
        return self.with_weights(updates)[0]

    def with_weights(self, updates: Updates) -> tuple[Aggregate, Array]:
        """The aggregate and the weight of every worker in it."""
        check_tolerance(num_workers(updates), self.num_byzantine)
        updates = jax.tree.map(jnp.asarray, updates)
        if self.in_dimension is not None:
            return self.for_messages(updates).with_weights(updates)
        dtype = common_dtype(updates)

        def weigh(updates: Updates) -> tuple[Array, Array]:
            products = self.inner_products(updates)
            return self.weigh(products), valid_workers(products).all()

        def weigh_and_mix(updates: Updates) -> tuple[Aggregate, Array]:
            weights, all_finite = weigh(updates)
            return mix(weights, updates, all_finite=all_finite), weights.astype(dtype)

        if not self.is_selection:
            return differentiated_in_float64(weigh_and_mix)(updates)
        # The weights have no derivative, so what is differentiated, in either mode, is only the mixing.
        weights, all_finite = batched_in_float64(weigh)(lax.stop_gradient(updates))
        with jax.enable_x64(True):
            return mix(weights, updates, all_finite=all_finite), weights.astype(dtype)


gram_about_origin = functools.partial(gram, about_origin=True)


@in_float64
def only_validity(updates: Updates) -> Array:
    """A stand-in for the Gram matrix, for rules that need to know no more than who is finite: 0, or NaN."""
    finite = finite_workers(updates)
    return jnp.where(finite[:, None] & finite[None, :], 0.0, jnp.nan)


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


def without_invalid(gram: Array) -> Array:
    """The Gram matrix with 0 in the rows and columns of invalid workers."""
    return jnp.where(jnp.isnan(gram), 0, gram)


def check_positive(name: str, value: float) -> None:
    """Raises unless a rule's option is a finite number above 0."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a finite number above 0.")


def uniform(chosen: Array) -> Array:
    """Equal weights for the chosen workers [n], 0 for the others; all 0 if nobody is chosen."""
    return chosen.astype(np.float64) / jnp.maximum(jnp.sum(chosen), 1).astype(np.float64)


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
    return LinearRule(
        lambda gram: uniform(valid_workers(gram)), num_byzantine, only_validity, is_selection=True
    )
