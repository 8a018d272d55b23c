"""CAF, the covariance-bound-agnostic filter: Algorithm 2 of the paper, in Gram space."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from cafcor_jax.aggregators.linear import LinearRule, check_num_byzantine, valid_workers
from cafcor_jax.float64 import argmax, dot, float64_inside
from cafcor_jax.gram import recentred
from cafcor_jax.types import Array

# Squarings of the covariance before the power iteration gives up on a gap: 2^44 powers tell eigenvalues
# apart that differ by a part in 10^12.
_MAX_SQUARINGS = 44
# The plain steps end when a step moves the unit vector by less than this, or after so many of them.
_STILL, _MAX_STEPS = 1e-14, 40


class Filtered(NamedTuple):
    """What the filter found."""

    weights: Array
    """[n], non-negative, of sum 1 (0 if no message was finite)."""
    variance: Array
    """The top eigenvalue of the covariance under these weights: the smallest met on the way."""
    steps: Array
    """The number of filter steps taken, at most 2f + 1."""


def caf(num_byzantine: int, *, eigenvector: str = "power") -> LinearRule:
    r"""Builds CAF, which needs no bound on the covariance of the honest messages.

    With weights c = 1, repeat while sum(c) >= n - 2f:  take the mean mu_c and covariance Sigma_c under c and
    its top eigenpair (sigma^2, v); remember mu_c if sigma is the smallest so far; then
    c_i <- c_i (1 - tau_i / max_j tau_j) with tau_i = <v, x_i - mu_c>^2. Returns the remembered mean.

    For every set S of n - f messages, ||CAF(x) - mean_S||^2 <= kappa lambda_max(cov_S) with
    kappa = 6f/(n-f) (1 + f/(n-2f))^2. The cost is two passes over d; the loop is on n x n matrices.

    The maximum is over messages that still have weight (the paper's is over all, and may then never reach a
    new one). A message that is not finite has weight 0 from the start and uses up one of the f.

    Args:
      num_byzantine: f, with 2f < n.
      eigenvector: "power" for power iteration, which doubles the power in every step, or "eigh" for a full
        eigendecomposition.

    Returns:
      A linear rule.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [100.0, -100.0]])
      >>> print(caf(num_byzantine=1)(x).round(2))
      [0.5 0.5]

    References:
      Allouah et al., Towards Trustworthy Federated Learning with Untrusted Participants, ICML 2025.
    """
    check_num_byzantine(num_byzantine)
    if eigenvector not in _EIGENVECTORS:
        raise ValueError(f"eigenvector is {eigenvector!r}; it must be one of {sorted(_EIGENVECTORS)}.")
    return LinearRule(
        lambda gram: spectral_filter(gram, num_byzantine, eigenvector=eigenvector).weights, num_byzantine
    )


@float64_inside
def spectral_filter(
    gram: Array,
    num_byzantine: int,
    *,
    eigenvector: str = "power",
    start: Array | None = None,
    enough: Array | float = 0.0,
) -> Filtered:
    """Runs the filter of CAF on a Gram matrix [n, n]: the weights, and what a log wants to know.

    Args:
      gram: about any centre.
      num_byzantine: f.
      eigenvector: see `caf`.
      start: c to begin with, [n] in [0, 1]; 1 for everyone unless given. What is missing counts as removed.
      enough: the filter stops when the top eigenvalue is at most this times the largest weight.
    """
    find_eigenvector = _EIGENVECTORS[eigenvector]
    n = gram.shape[0]
    valid = valid_workers(gram)
    gram = jnp.where(valid[:, None] & valid[None, :], gram, 0)
    num_valid = jnp.sum(valid)
    still_byzantine = jnp.maximum(num_byzantine - (n - num_valid), 0)
    budget = 2 * still_byzantine
    dtype = gram.dtype

    class Loop(NamedTuple):
        kept: Array  # c, [n]
        removed: Array  # 1 - c, [n]: kept apart, since 1 - (1 - x) loses a small x
        best: Filtered
        done: Array

    def removal_within_budget(loop: Loop) -> Array:
        # sum(c) >= n - 2f, with the whole rows counted exactly and the parts summed apart.
        gone = valid & (loop.kept <= 0)
        parts = jnp.sum(jnp.where(gone, 0, loop.removed))
        return parts <= (budget - jnp.sum(gone)).astype(dtype)

    def step(loop: Loop) -> Loop:
        weights = loop.kept / jnp.sum(loop.kept)
        about_mean = recentred(gram, weights)
        variance, scores = _top_scores(about_mean, weights, find_eigenvector)
        best = loop.best
        better = variance <= best.variance
        best = Filtered(
            jnp.where(better, weights, best.weights),
            jnp.where(better, variance, best.variance),
            best.steps + 1,
        )
        scores = jnp.where(loop.kept > 0, scores, 0)
        top = argmax(scores)
        highest = scores[top]
        # The top message goes as a whole. Its quotient alone would not do: XLA multiplies by the rounded
        # reciprocal, which leaves a part in 10^16 of a message that may be 10^30 times too long.
        share = jnp.minimum(scores / jnp.where(highest > 0, highest, 1), 1).at[top].set(1)
        return Loop(
            kept=loop.kept * (1 - share),
            removed=loop.removed + loop.kept * share,
            best=best,
            # No variance left in any direction: nothing can be better.
            done=~(highest > 0) | (variance <= enough * jnp.max(weights)),
        )

    kept = valid.astype(dtype) if start is None else jnp.where(valid, start, 0)
    total = jnp.sum(kept)
    begin = Loop(
        kept=kept,
        removed=jnp.where(valid, 1 - kept, 0),
        best=Filtered(
            kept / jnp.where(total > 0, total, 1), jnp.array(jnp.inf, dtype), jnp.array(0, jnp.int32)
        ),
        done=~(total > 0),
    )
    return lax.while_loop(lambda loop: ~loop.done & removal_within_budget(loop), step, begin).best


def _top_scores(
    about_mean: Array, weights: Array, find_eigenvector: Callable[[Array], Array]
) -> tuple[Array, Array]:
    """The top eigenvalue of the weighted covariance and every message's squared component along it.

    The components are relative to the largest diagonal entry of K below, so that they stay in range.

    The covariance X^T W X (d x d) and K = W^(1/2) X X^T W^(1/2) (n x n) share their eigenvalues; if
    K u = s u, the eigenvector is v = X^T W^(1/2) u / sqrt(s), so <v, x_i> = (G W^(1/2) u)_i / sqrt(s).
    """
    root = jnp.sqrt(weights)
    kernel = about_mean * root[:, None] * root[None, :]
    scale = jnp.max(jnp.diagonal(kernel))
    kernel = kernel / jnp.where(scale > 0, scale, 1)
    vector = find_eigenvector(kernel)
    value = jnp.maximum(dot(vector, dot(kernel, vector)), 0)
    along = dot(about_mean / jnp.where(scale > 0, scale, 1), root * vector)
    scores = jnp.where(value > 0, along**2 / jnp.where(value > 0, value, 1), 0)
    return value * scale, scores


@float64_inside
def top_eigenvector(matrix: Array) -> Array:
    """A unit top eigenvector of a positive semi-definite matrix, by power iteration that doubles the power.

    Squaring S <- S^2 / tr(S^2) raises the matrix to the power 2^k in k products. S tends to u u^T (or to the
    projector on the top eigenspace), and tr(S^2) tells how near it is: at 1 - 1/(2n), what is not along u has
    a trace below 1/(2n). The largest diagonal entry is at least 1/n, so u^2 is at least 1/(2n) there, and
    that column cannot be orthogonal to u, whatever the input: no start vector has to be chosen, and the
    result is deterministic. From there on it is cheaper to apply S to the vector, each time 2^k steps of
    power iteration, until it stands still.
    """
    purity_to_reach = 1 - 1 / (2 * max(matrix.shape[0], 5))

    def square(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        power, _, count = state
        power = dot(power, power)
        power = (power + power.T) / 2
        trace = jnp.trace(power)
        power = power / jnp.where(trace > 0, trace, 1)
        return power, jnp.sum(power**2), count + 1

    def spread_out(state: tuple[Array, Array, Array]) -> Array:
        _, purity, count = state
        return (purity < purity_to_reach) & (count < _MAX_SQUARINGS)

    def apply(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        vector, _, count = state
        after = _unit(dot(power, vector))
        return after, jnp.max(jnp.abs(after - vector)), count + 1

    def moving(state: tuple[Array, Array, Array]) -> Array:
        _, moved, count = state
        return (moved > _STILL) & (count < _MAX_STEPS)

    trace = jnp.trace(matrix)
    start = matrix / jnp.where(trace > 0, trace, 1)
    power, _, _ = lax.while_loop(spread_out, square, (start, jnp.sum(start**2), jnp.int32(0)))
    vector = _unit(jnp.take(power, argmax(jnp.diagonal(power)), axis=1))
    vector, _, _ = lax.while_loop(moving, apply, (vector, jnp.ones((), matrix.dtype), jnp.int32(0)))
    # Two plain steps with the matrix itself wash out the rounding of the products.
    for _ in range(2):
        vector = _unit(dot(start, vector))
    return vector


def _unit(vector: Array) -> Array:
    return vector / jnp.maximum(jnp.linalg.norm(vector), jnp.finfo(vector.dtype).tiny)


def _top_eigenvector_by_eigh(matrix: Array) -> Array:
    return jnp.linalg.eigh(matrix)[1][:, -1]


_EIGENVECTORS: dict[str, Callable[[Array], Array]] = {
    "power": top_eigenvector,
    "eigh": _top_eigenvector_by_eigh,
}
