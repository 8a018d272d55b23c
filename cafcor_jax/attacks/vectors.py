"""Attacks on the messages: every malicious worker knows what all honest ones send."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from cafcor_jax.columns import accumulator_dtype, num_workers
from cafcor_jax.gram import mix
from cafcor_jax.types import Aggregate, Array, Attack, Updates


def honest_mean(honest: Updates) -> Aggregate:
    """The mean over honest workers, as a matrix product (on a CPU much faster than `mean(0)`)."""
    h = num_workers(honest)
    return mix(jnp.full(h, 1 / h), honest, all_finite=True)


def honest_std(honest: Updates, mean: Aggregate) -> Aggregate:
    """The coordinate-wise standard deviation over honest workers (divisor h - 1; 0 for one worker)."""
    h = num_workers(honest)
    weights = jnp.full(h, 1 / max(h - 1, 1))

    def square(rows: Array, centre: Array) -> Array:
        dtype = accumulator_dtype(rows.dtype)  # a square overflows float16 from 256 on
        return (rows.astype(dtype) - centre.astype(dtype)) ** 2

    variances = mix(weights, jax.tree.map(square, honest, mean), all_finite=True)
    return jax.tree.map(lambda variance, m: jnp.sqrt(variance).astype(m.dtype), variances, mean)


def repeat(update: Aggregate, num_byzantine: int) -> Updates:
    """The same message from every malicious worker."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_byzantine, *leaf.shape)), update)


def _same_for_all(message: Callable[[Updates], Aggregate]) -> Attack:
    def attack(key: Array, honest: Updates, num_byzantine: int) -> Updates:
        del key
        return repeat(message(honest), num_byzantine)

    return attack


def none() -> Attack:
    """Malicious workers that send the honest mean: they do no harm."""
    return _same_for_all(honest_mean)


def sign_flip() -> Attack:
    """Sign flipping (SF): every malicious worker sends minus the honest mean.

    References:
      Allen-Zhu et al., Byzantine-Resilient Non-Convex Stochastic Gradient Descent, ICLR 2021.
    """
    return _same_for_all(lambda honest: jax.tree.map(jnp.negative, honest_mean(honest)))


def alie(factor: float = 1.5) -> Attack:
    """A Little Is Enough (ALIE): mean + factor * std, coordinate by coordinate, over the honest messages.

    Args:
      factor: how many standard deviations. The paper does not give it; 1.5 is the usual choice.

    Returns:
      An attack.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> honest = jnp.array([[1.0], [3.0]])
      >>> print(alie(factor=2.0)(jax.random.key(0), honest, 1).round(3))
      [[4.828]]

    References:
      Baruch et al., A Little Is Enough: Circumventing Defenses for Distributed Learning, NeurIPS 2019.
    """
    if not math.isfinite(factor):
        raise ValueError(f"factor is {factor}; it must be finite.")

    def message(honest: Updates) -> Aggregate:
        mean = honest_mean(honest)
        return jax.tree.map(lambda m, s: m + factor * s, mean, honest_std(honest, mean))

    return _same_for_all(message)
