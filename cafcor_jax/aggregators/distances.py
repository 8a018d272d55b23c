"""Rules that choose workers by the distances between messages: Krum, Multi-Krum, MoNNA."""

from __future__ import annotations

import jax.numpy as jnp

from cafcor_jax.aggregators.linear import LinearRule, check_num_byzantine, uniform, valid_workers
from cafcor_jax.float64 import argmin
from cafcor_jax.gram import squared_distances
from cafcor_jax.types import Array


def krum(num_byzantine: int) -> LinearRule:
    """Builds Krum: the message that is closest to its n - f - 1 nearest others.

    score_i = sum of ||x_i - x_j||^2 over the n - f - 1 nearest j != i; the first message of the least score.
    (Blanchard et al. count n - f - 2 neighbours, which needs n > 2f + 2; later work counts n - f - 1.)

    Args:
      num_byzantine: f, with 2f < n.

    Returns:
      A linear rule.

    Example:
      >>> import jax.numpy as jnp
      >>> krum(num_byzantine=1)(jnp.array([[0.0], [1.0], [1.5], [9.0]])).tolist()
      [1.0]

    References:
      Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017.
    """
    check_num_byzantine(num_byzantine)

    def weigh(gram: Array) -> Array:
        scores, _ = _krum_scores(gram, num_byzantine)
        chosen = jnp.arange(gram.shape[0], dtype=jnp.int32) == argmin(scores)
        return uniform(chosen & valid_workers(gram))

    return LinearRule(weigh, num_byzantine, is_selection=True)


def multi_krum(num_byzantine: int) -> LinearRule:
    """Builds Multi-Krum: the average of the n - f messages of the least Krum score.

    Args:
      num_byzantine: f, with 2f < n.

    Returns:
      A linear rule.

    Example:
      >>> import jax.numpy as jnp
      >>> multi_krum(num_byzantine=1)(jnp.array([[0.0], [1.0], [2.0], [9.0]])).tolist()
      [1.0]

    References:
      Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017.
    """
    check_num_byzantine(num_byzantine)

    def weigh(gram: Array) -> Array:
        scores, keep = _krum_scores(gram, num_byzantine)
        return uniform((ranks(scores) < keep) & valid_workers(gram))

    return LinearRule(weigh, num_byzantine, is_selection=True)


def monna(num_byzantine: int, *, trusted: int = 0) -> LinearRule:
    """Builds MoNNA's rule: the average of the n - f messages nearest to that of a trusted worker.

    It is the rule of a worker that aggregates for itself, and so knows one honest message: its own.

    Args:
      num_byzantine: f, with 2f < n.
      trusted: the index of the trusted worker. If its message is not finite, all finite ones are averaged.

    Returns:
      A linear rule.

    Example:
      >>> import jax.numpy as jnp
      >>> monna(num_byzantine=1, trusted=2)(jnp.array([[0.0], [1.0], [2.0], [9.0]])).tolist()
      [1.0]

    References:
      Farhadkhani et al., Robust Collaborative Learning with Linear Gradient Overhead, ICML 2023.
    """
    check_num_byzantine(num_byzantine)
    if not isinstance(trusted, int) or isinstance(trusted, bool) or trusted < 0:
        raise ValueError(f"trusted is {trusted!r}; it must be the index of a worker, 0 or more.")

    def weigh(gram: Array) -> Array:
        n = gram.shape[0]
        if trusted >= n:
            raise ValueError(f"trusted = {trusted} of n = {n} workers; it must be at most {n - 1}.")
        valid = valid_workers(gram)
        keep = num_kept(valid, num_byzantine)
        nearest = ranks(squared_distances(gram)[trusted]) < keep
        return uniform(jnp.where(valid[trusted], nearest & valid, valid))

    return LinearRule(weigh, num_byzantine, is_selection=True)


def num_kept(valid: Array, num_byzantine: int) -> Array:
    """How many to keep: n - f, since invalid workers use up the f; all valid ones if there are fewer."""
    return jnp.minimum(valid.shape[0] - num_byzantine, jnp.sum(valid))


def ranks(values: Array) -> Array:
    """The place of each of `values` [..., n] in ascending order along the last axis; NaN comes last.

    Equal values are ranked as they stand.
    """
    return jnp.argsort(jnp.argsort(values, axis=-1, stable=True), axis=-1, stable=True)


def _krum_scores(gram: Array, num_byzantine: int) -> tuple[Array, Array]:
    """Every worker's score, infinite for invalid ones, and how many Multi-Krum keeps."""
    valid = valid_workers(gram)
    keep = num_kept(valid, num_byzantine)
    # NaN is sorted to the end; the first one is the distance to itself.
    ascending = jnp.sort(squared_distances(gram), axis=1)
    near = jnp.arange(gram.shape[0], dtype=keep.dtype) < keep
    scores = jnp.sum(jnp.where(near[None, :], ascending, 0), axis=1)
    return jnp.where(valid, scores, jnp.inf), keep
