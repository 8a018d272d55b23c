"""Pre-aggregation: every message is replaced by a mixture of messages, then a rule aggregates those.

y_i = sum_j M_ij x_j with a matrix M(G) from the Gram matrix. The Gram matrix of the mixtures is M G M^T, so a
linear rule after a mixing is a linear rule with weights M^T w: still two passes over d.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from cafcor_jax.aggregators.distances import num_kept, ranks
from cafcor_jax.aggregators.linear import (
    LinearRule,
    check_num_byzantine,
    check_positive,
    check_tolerance,
    gram_about_origin,
    valid_workers,
    without_invalid,
)
from cafcor_jax.columns import num_workers
from cafcor_jax.float64 import dot, in_float64
from cafcor_jax.gram import gram, mixtures, squared_distances
from cafcor_jax.types import Aggregate, Aggregator, Array, Updates


@dataclasses.dataclass(frozen=True)
class Mixing:
    """A pre-aggregation given by `matrix: G [n, n] -> M [m, n]`; called, it maps leaves [n, ...] to [m, ...].

    `matrix` is called with a float64 matrix, inside `in_float64`. A row of M that is NaN marks a mixture
    that is to be left out; elsewhere the columns of invalid workers must be 0.
    """

    matrix: Callable[[Array], Array]
    inner_products: Callable[[Updates], Array] = gram
    """Makes G from the messages: `gram` if every row of M sums to 1, `gram_about_origin` otherwise."""
    is_selection: bool = False
    """Whether M is constant but for jumps: derivatives then pass by it (see `LinearRule`)."""

    @in_float64
    def __call__(self, updates: Updates) -> Updates:
        """The mixtures, leaves [m, ...]; NaN where a mixture is to be left out."""
        num_workers(updates)
        seen = lax.stop_gradient(updates) if self.is_selection else updates
        return mixtures(self.matrix(self.inner_products(seen)), updates)


def compose(pre: Mixing, rule: Aggregator) -> Aggregator:
    """A rule on the mixtures of a pre-aggregation, such as `compose(nnm(f), caf(f))`.

    With a linear rule the result is a linear rule. With any other the mixtures themselves are computed, which
    takes as much memory as the messages.

    Example:
      >>> import jax.numpy as jnp
      >>> from cafcor_jax.aggregators import krum
      >>> x = jnp.array([[0.0], [1.0], [2.0], [90.0]])
      >>> compose(nnm(num_byzantine=1), krum(num_byzantine=1))(x).tolist()
      [1.0]
    """
    if isinstance(rule, LinearRule) and rule.in_dimension is not None:
        raise ValueError(
            "This rule knows the law of the workers' own messages, which mixtures do not follow: it takes no "
            "pre-aggregation."
        )
    if not isinstance(rule, LinearRule):

        def of_mixtures(updates: Updates) -> Aggregate:
            return rule(pre(updates))

        return of_mixtures

    def weigh(gram: Array) -> Array:
        matrix = pre.matrix(gram)
        check_tolerance(matrix.shape[0], rule.num_byzantine)
        left_out = jnp.isnan(matrix).any(axis=1)
        matrix = jnp.where(left_out[:, None], 0, matrix)
        mixed = dot(dot(matrix, without_invalid(gram)), matrix.T)
        mixed = jnp.where(left_out[:, None] | left_out[None, :], jnp.nan, (mixed + mixed.T) / 2)
        return dot(matrix.T, rule.weigh(mixed))

    about_origin = gram_about_origin in (pre.inner_products, rule.inner_products)
    return dataclasses.replace(
        rule,
        weigh=weigh,
        inner_products=gram_about_origin if about_origin else gram,
        is_selection=pre.is_selection and rule.is_selection,
    )


def nnm(num_byzantine: int) -> Mixing:
    """Builds nearest-neighbour mixing: every message becomes the mean of the n - f nearest to it.

    Its own is among them; of messages equally near, the first ones are taken.

    Args:
      num_byzantine: f.

    Returns:
      A mixing.

    Example:
      >>> import jax.numpy as jnp
      >>> nnm(num_byzantine=1)(jnp.array([[0.0], [1.0], [2.0], [9.0]])).tolist()
      [[1.0], [1.0], [1.0], [4.0]]

    References:
      Allouah et al., Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity, AISTATS 2023.
    """
    check_num_byzantine(num_byzantine)

    def matrix(gram: Array) -> Array:
        n = gram.shape[0]
        _check_some_are_honest(n, num_byzantine)
        valid = valid_workers(gram)
        keep = num_kept(valid, num_byzantine)
        near = (ranks(squared_distances(gram)) < keep) & valid[None, :]
        mixing = near.astype(gram.dtype) / jnp.maximum(keep, 1).astype(gram.dtype)
        return jnp.where(valid[:, None], mixing, jnp.nan)

    return Mixing(matrix, is_selection=True)


def bucketing(num_byzantine: int = 0, *, bucket_size: int = 2, seed: int = 0) -> Mixing:
    """Builds bucketing: the messages are put into ceil(n / s) buckets at random, and each bucket is averaged.

    A message that is not finite is left out of its bucket's average. The malicious messages are in at most f
    buckets, so the rule that follows keeps its f, and needs 2f < ceil(n / s).

    Args:
      num_byzantine: f; bucketing does not use it.
      bucket_size: s; the last bucket may be smaller.
      seed: of the order of the workers, which is the same in every call.

    Returns:
      A mixing.

    Example:
      >>> import jax.numpy as jnp
      >>> bucketing(bucket_size=3)(jnp.array([[1.0], [2.0], [6.0]])).tolist()
      [[3.0]]

    References:
      Karimireddy et al., Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, ICLR 2022.
    """
    check_num_byzantine(num_byzantine)
    if not isinstance(bucket_size, int) or isinstance(bucket_size, bool) or bucket_size < 1:
        raise ValueError(f"bucket_size is {bucket_size!r}; it must be a whole number of at least 1.")

    def matrix(gram: Array) -> Array:
        n = gram.shape[0]
        place = np.random.default_rng(seed).permutation(n) // bucket_size
        member = place[None, :] == np.arange(-(-n // bucket_size))[:, None]
        member = member & valid_workers(gram)[None, :]
        count = jnp.sum(member, axis=1, keepdims=True).astype(gram.dtype)
        return jnp.where(count > 0, member.astype(gram.dtype) / jnp.maximum(count, 1), jnp.nan)

    return Mixing(matrix, is_selection=True)


def clipping(num_byzantine: int = 0, *, radius: float = 2.0) -> Mixing:
    """Builds static clipping: longer messages are shortened to the radius.

    y_i = x_i min(1, radius / ||x_i||).

    Args:
      num_byzantine: f; clipping does not use it.
      radius: the greatest length, in units of the messages.

    Returns:
      A mixing.

    Example:
      >>> import jax.numpy as jnp
      >>> clipping(radius=1.0)(jnp.array([[3.0, 4.0], [0.0, 0.5]])).round(3).tolist()
      [[0.6000000238418579, 0.800000011920929], [0.0, 0.5]]
    """
    check_num_byzantine(num_byzantine)
    check_positive("radius", radius)
    return Mixing(lambda gram: _clipped(gram, jnp.asarray(radius, gram.dtype)), gram_about_origin)


def arc(num_byzantine: int) -> Mixing:
    """Builds adaptive robust clipping: the k longest messages are shortened to the length of the next one.

    k = floor(2 f (n - f) / n).

    Args:
      num_byzantine: f.

    Returns:
      A mixing.

    Example:
      >>> import jax.numpy as jnp
      >>> arc(num_byzantine=1)(jnp.array([[1.0], [2.0], [3.0], [-9.0]])).tolist()
      [[1.0], [2.0], [3.0], [-3.0]]

    References:
      Allouah et al., Adaptive Gradient Clipping for Robust Federated Learning, ICLR 2025.
    """
    check_num_byzantine(num_byzantine)

    def matrix(gram: Array) -> Array:
        n = gram.shape[0]
        _check_some_are_honest(n, num_byzantine)
        count = jnp.sum(valid_workers(gram))
        f = jnp.maximum(num_byzantine - (n - count), 0)
        clipped = 2 * f * (count - f) // jnp.maximum(count, 1)
        ascending = jnp.sort(jnp.sqrt(jnp.diagonal(gram)))  # NaN comes last
        return _clipped(gram, ascending[jnp.maximum(count - clipped - 1, 0)])

    return Mixing(matrix, gram_about_origin)


def _check_some_are_honest(n: int, num_byzantine: int) -> None:
    if num_byzantine >= n:
        raise ValueError(f"num_byzantine = {num_byzantine} of n = {n} workers; it must be less than n.")


def _clipped(gram: Array, radius: Array) -> Array:
    lengths = jnp.sqrt(jnp.diagonal(gram))
    factors = jnp.where(lengths > radius, radius / jnp.where(lengths > radius, lengths, 1), 1)
    matrix = jnp.where(jnp.eye(gram.shape[0], dtype=bool), factors[:, None], 0)
    return jnp.where(valid_workers(gram)[:, None], matrix, jnp.nan)


BY_NAME: dict[str, Callable[..., Mixing]] = {
    "nnm": nnm,
    "bucketing": bucketing,
    "clipping": clipping,
    "arc": arc,
}
