"""Rules that move a centre until it is balanced: the geometric median and centered clipping.

The centre is z = sum_i a_i x_i throughout, so its distances to the messages follow from the Gram matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from cafcor_jax.aggregators.linear import (
    LinearRule,
    check_num_byzantine,
    check_positive,
    gram_about_origin,
    uniform,
    valid_workers,
    without_invalid,
)
from cafcor_jax.gram import dot, squared_distances
from cafcor_jax.types import Array

# The smoothing that keeps Weiszfeld's iteration from dividing by 0, relative to a typical distance.
_SMOOTHING = 1e-7
# The iteration ends when a step is this part of a typical distance, or after so many steps.
_TOLERANCE, _MAX_STEPS = 1e-12, 20_000


def geometric_median(
    num_byzantine: int = 0, *, iterations: int | None = None, smoothing: float = 0.1
) -> LinearRule:
    """Builds the geometric median: the point with the least sum of distances to all messages.

    argmin_z sum_i ||x_i - z||, by Weiszfeld's iteration z <- (sum_i x_i / r_i) / (sum_i 1 / r_i) with
    r_i = (||x_i - z||^2 + nu^2)^(1/2) and nu a ten-millionth of a typical distance, run until z stands still.

    Args:
      num_byzantine: f, with 2f < n; the rule itself does not use it.
      iterations: instead of running to convergence, take so many steps from z = 0, as RFA does, with
        r_i = max(||x_i - z||, smoothing).
      smoothing: the smallest distance in those steps.

    Returns:
      A linear rule.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [90.0, 90.0]])
      >>> [round(float(value), 3) for value in geometric_median(num_byzantine=1)(x)]
      [0.789, 0.789]

    References:
      Pillutla et al., Robust Aggregation for Federated Learning, IEEE TSP 2022.
    """
    check_num_byzantine(num_byzantine)
    if iterations is None:
        return LinearRule(_geometric_median, num_byzantine)
    _check_iterations(iterations)
    check_positive("smoothing", smoothing)

    def weigh(gram: Array) -> Array:
        valid = valid_workers(gram)
        gram = without_invalid(gram)

        def step(_: int, at: Array) -> Array:
            distance = jnp.sqrt(squared_distances_to(gram, at))
            return _normalised(jnp.where(valid, 1 / jnp.maximum(distance, smoothing), 0))

        return lax.fori_loop(0, iterations, step, jnp.zeros(gram.shape[0], gram.dtype))

    return LinearRule(weigh, num_byzantine, gram_about_origin)


def _geometric_median(gram: Array) -> Array:
    valid = valid_workers(gram)
    both = valid[:, None] & valid[None, :]
    between = jnp.where(both, jnp.sqrt(squared_distances(gram)), jnp.nan)
    gram = without_invalid(gram)
    # Every worker's middle distance to the others: the start is far from nobody in the majority.
    middle = jnp.nan_to_num(jnp.nanmedian(between, axis=1))
    typical = jnp.nan_to_num(jnp.nanmedian(jnp.where(valid, middle, jnp.nan)))
    smoothing = jnp.maximum(_SMOOTHING * typical, np.finfo(np.float64).tiny)

    class Loop(NamedTuple):
        at: Array
        moved: Array
        steps: Array

    def step(loop: Loop) -> Loop:
        radius = jnp.hypot(jnp.sqrt(squared_distances_to(gram, loop.at)), smoothing)
        at = _normalised(jnp.where(valid, smoothing / radius, 0))
        change = at - loop.at
        moved = jnp.sqrt(jnp.maximum(dot(change, dot(gram, change)), 0))
        return Loop(at, moved, loop.steps + 1)

    start = _normalised(jnp.where(valid, 1 / jnp.maximum(middle, smoothing), 0))
    loop = Loop(start, jnp.array(jnp.inf, gram.dtype), jnp.int32(0))
    return lax.while_loop(
        lambda loop: (loop.moved > _TOLERANCE * typical) & (loop.steps < _MAX_STEPS), step, loop
    ).at


def centered_clipping(num_byzantine: int = 0, *, radius: float = 100.0, iterations: int = 1) -> LinearRule:
    """Builds centered clipping: the centre moves by the mean of the clipped differences to it.

    v <- v + (1/n) sum_i (x_i - v) min(1, radius / ||x_i - v||), a number of times from v = 0.

    Args:
      num_byzantine: f, with 2f < n; the rule itself does not use it.
      radius: the longest difference that is taken in full, in units of the messages.
      iterations: the number of steps.

    Returns:
      A linear rule.

    Example:
      >>> import jax.numpy as jnp
      >>> centered_clipping(num_byzantine=1, radius=3.0)(jnp.array([[1.0], [2.0], [90.0]])).tolist()
      [2.0]

    References:
      Karimireddy et al., Learning from History for Byzantine Robust Optimization, ICML 2021.
    """
    check_num_byzantine(num_byzantine)
    check_positive("radius", radius)
    _check_iterations(iterations)

    def weigh(gram: Array) -> Array:
        n = gram.shape[0]
        valid = valid_workers(gram)
        gram = without_invalid(gram)

        def step(_: int, at: Array) -> Array:
            distance = jnp.sqrt(squared_distances_to(gram, at))
            share = uniform(valid) * (radius / jnp.maximum(distance, radius))
            return at * (1 - jnp.sum(share)) + share

        return lax.fori_loop(0, iterations, step, jnp.zeros(n, gram.dtype))

    return LinearRule(weigh, num_byzantine, gram_about_origin)


def squared_distances_to(gram: Array, at: Array) -> Array:
    """||x_i - z||^2 for z = sum_i at_i x_i, [n]. The centre of G is free only if `at` sums to 1."""
    product = dot(gram, at)
    return jnp.maximum(jnp.diagonal(gram) - 2 * product + dot(at, product), 0)


def _normalised(weights: Array) -> Array:
    total = jnp.sum(weights)
    return weights / jnp.where(total > 0, total, 1)


def _check_iterations(iterations: int) -> None:
    if not isinstance(iterations, int) or isinstance(iterations, bool) or iterations < 1:
        raise ValueError(f"iterations is {iterations!r}; it must be a whole number of at least 1.")
