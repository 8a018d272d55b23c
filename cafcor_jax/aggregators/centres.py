"""Rules that move a centre until it is balanced: the geometric median and centered clipping.

The centre is z = sum_i a_i x_i throughout, so its distances to the messages follow from the Gram matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
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
from cafcor_jax.float64 import argmin, dot
from cafcor_jax.gram import recentred, squared_distances
from cafcor_jax.types import Array

# The smoothing that keeps the sum of distances differentiable, relative to a typical distance.
_SMOOTHING = 1e-9
# The iteration ends when a step is this part of a typical distance, or after so many steps.
_TOLERANCE, _MAX_STEPS = 1e-10, 300
# Its square, and its inverse to the power 2.5 in derivatives, are still float64.
_TINIEST = 1e-120


def geometric_median(
    num_byzantine: int = 0, *, iterations: int | None = None, smoothing: float = 0.1
) -> LinearRule:
    """Builds the geometric median: the point with the least sum of distances to all messages.

    argmin_z sum_i r_i with r_i = (||x_i - z||^2 + nu^2)^(1/2) and nu a billionth of a typical distance.
    A message that is the median itself is found at once. Otherwise Weiszfeld's iteration
    z <- (sum_i x_i / r_i) / (sum_i 1 / r_i), or Newton's step where that gets lower, is run until z stands
    still.

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
    check_positive("smoothing", smoothing)
    if iterations is None:
        return LinearRule(_geometric_median, num_byzantine)
    _check_iterations(iterations)

    def weigh(gram: Array) -> Array:
        valid = valid_workers(gram)
        gram = without_invalid(gram)

        def step(_: int, at: Array) -> Array:
            return _normalised(jnp.where(valid, 1 / jnp.maximum(distances_to(gram, at), smoothing), 0))

        return lax.fori_loop(0, iterations, step, jnp.zeros(gram.shape[0], gram.dtype))

    return LinearRule(weigh, num_byzantine, gram_about_origin)


def _geometric_median(gram: Array) -> Array:
    valid = valid_workers(gram)
    both = valid[:, None] & valid[None, :]
    # No derivative of these: where the iteration starts and ends does not change where it leads.
    between = jnp.sqrt(lax.stop_gradient(jnp.where(both, squared_distances(gram), jnp.nan)))
    # Every worker's middle distance to the others: the start is far from nobody in the majority.
    middle = jnp.nan_to_num(jnp.nanmedian(between, axis=1))
    typical = jnp.nan_to_num(jnp.nanmedian(jnp.where(valid, middle, jnp.nan)))
    smoothing = jnp.maximum(_SMOOTHING * typical, _TINIEST)
    gram = without_invalid(gram)
    n = gram.shape[0]

    class Loop(NamedTuple):
        at: Array
        moved: Array  # squared
        steps: Array

    def step(loop: Loop) -> Loop:
        """A step is z <- z + Y^T c, with the differences y_i = x_i - z as the rows of Y.

        Weiszfeld's is c_i = 1 / (r_i S) with S = sum_i 1 / r_i. Newton's is (S I - Y^T D Y)^-1 Y^T (1 / r)
        with D = diag(r^-3), and as (S I - Y^T D Y)^-1 Y^T = Y^T (S I - D Y Y^T)^-1 that is an n x n system.
        Taken is that one of these steps, Newton's also shortened and Weiszfeld's also lengthened, which goes
        lowest.
        """
        about_z = recentred(gram, loop.at)
        squared = jnp.maximum(jnp.diagonal(about_z), 0) + smoothing**2
        radius = jnp.where(valid, jnp.sqrt(squared), 1)
        total = jnp.where(valid.any(), jnp.sum(jnp.where(valid, 1 / radius, 0)), 1)
        weiszfeld = jnp.where(valid, 1 / radius, 0) / total

        # Symmetric: the messages may be on very different scales.
        scale = jnp.where(valid, radius**-1.5, 0)
        system = total * jnp.eye(n, dtype=gram.dtype) - about_z * scale[:, None] * scale[None, :]
        newton = scale * jnp.linalg.solve(system, jnp.where(valid, jnp.sqrt(radius), 0))

        halvings = 2.0 ** -jnp.arange(12, dtype=gram.dtype)[None, :]
        steps = jnp.concatenate([newton[:, None] * halvings, weiszfeld[:, None] / halvings[:, :6]], axis=1)
        # The change of sum_i r_i, not as a difference of sums: one message may outweigh all the others.
        along = dot(about_z, steps)
        more = jnp.sum(steps * along, axis=0, keepdims=True) - 2 * along
        after = jnp.sqrt(jnp.maximum(squared[:, None] + more, 0))
        change_of_sum = jnp.sum(jnp.where(valid[:, None], more / (radius[:, None] + after), 0), axis=0)
        # Near the end rounding hides which is lowest; Newton's whole step, the first, is then the best.
        change_of_sum = (
            jnp.where(jnp.isnan(change_of_sum), jnp.inf, change_of_sum).at[0].add(-1e-12 * typical)
        )
        change = steps[:, argmin(change_of_sum)]
        moved = lax.stop_gradient(dot(change, dot(about_z, change)))
        return Loop(loop.at * (1 - jnp.sum(change)) + change, moved, loop.steps + 1)

    start = lax.stop_gradient(_normalised(jnp.where(valid, 1 / jnp.maximum(middle, smoothing), 0)))
    corner = lax.stop_gradient(_balanced_messages(gram, valid, between, 1e-7 * typical))
    at = jnp.where(corner.any(), uniform(corner), start)
    loop = Loop(at, jnp.where(corner.any(), 0.0, jnp.inf), jnp.int32(0))
    return lax.while_loop(
        lambda loop: (loop.moved > (_TOLERANCE * typical) ** 2) & (loop.steps < _MAX_STEPS), step, loop
    ).at


def _balanced_messages(gram: Array, valid: Array, between: Array, same: Array) -> Array:
    """Which messages are the geometric median themselves, [n] booleans.

    x_i is, if the unit vectors from it to the others add up to no more than the number of messages at x_i.
    """
    apart = valid[:, None] & valid[None, :] & (between > same)
    inverse = jnp.where(apart, 1 / jnp.where(apart, between, 1), 0)
    total = jnp.sum(inverse, axis=1)
    product = dot(inverse, gram)
    pull = (
        jnp.sum(product * inverse, axis=1) - 2 * total * jnp.diagonal(product) + total**2 * jnp.diagonal(gram)
    )
    here = jnp.sum(valid) - jnp.sum(apart, axis=1)
    return valid & (pull <= here.astype(gram.dtype) ** 2)


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
            share = uniform(valid) * (radius / jnp.maximum(distances_to(gram, at), radius))
            return at * (1 - jnp.sum(share)) + share

        return lax.fori_loop(0, iterations, step, jnp.zeros(n, gram.dtype))

    return LinearRule(weigh, num_byzantine, gram_about_origin)


def squared_distances_to(gram: Array, at: Array) -> Array:
    """||x_i - z||^2 for z = sum_i at_i x_i, [n]. The centre of G is free only if `at` sums to 1."""
    product = dot(gram, at)
    return jnp.maximum(jnp.diagonal(gram) - 2 * product + dot(at, product), 0)


def distances_to(gram: Array, at: Array) -> Array:
    """||x_i - z||, [n], with a derivative of 0 where it is 0."""
    squared = squared_distances_to(gram, at)
    return jnp.where(squared > 0, jnp.sqrt(jnp.where(squared > 0, squared, 1)), 0)


def _normalised(weights: Array) -> Array:
    total = jnp.sum(weights)
    return weights / jnp.where(total > 0, total, 1)


def _check_iterations(iterations: int) -> None:
    if not isinstance(iterations, int) or isinstance(iterations, bool) or iterations < 1:
        raise ValueError(f"iterations is {iterations!r}; it must be a whole number of at least 1.")
