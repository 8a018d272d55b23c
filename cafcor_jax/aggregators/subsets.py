"""Rules that look at every set of n - f workers: MDA and SMEA."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from cafcor_jax.aggregators.linear import LinearRule, check_num_byzantine, uniform, valid_workers
from cafcor_jax.float64 import argmin
from cafcor_jax.gram import recentred, squared_distances
from cafcor_jax.types import Array

#: The largest number of subsets that is looked at: C(30, 5) = 142,506 is within it.
MAX_SUBSETS = 200_000
# Subsets handled at once: their n x n matrices take a few megabytes.
_BATCH = 256


def mda(num_byzantine: int) -> LinearRule:
    """Builds minimum-diameter averaging: the mean of the n - f messages that are closest together.

    argmin over |S| = n - f of max over i, j in S of ||x_i - x_j||; the first such S in lexicographic order.

    Args:
      num_byzantine: f, with 2f < n and at most `MAX_SUBSETS` subsets of n - f.

    Returns:
      A linear rule.

    Example:
      >>> import jax.numpy as jnp
      >>> mda(num_byzantine=1)(jnp.array([[0.0], [1.0], [2.0], [9.0]])).tolist()
      [1.0]

    References:
      El Mhamdi et al., Genuinely Distributed Byzantine Machine Learning, PODC 2020.
    """
    check_num_byzantine(num_byzantine)

    def diameter(gram: Array, member: Array) -> Array:
        inside = member[:, None] & member[None, :]
        return jnp.max(jnp.where(inside, squared_distances(gram), 0))

    return LinearRule(
        lambda gram: _best_subset("MDA", gram, num_byzantine, diameter),
        num_byzantine,
        is_selection=True,
        is_slow=True,
    )


def smea(num_byzantine: int) -> LinearRule:
    """Builds SMEA, smallest maximum eigenvalue averaging: the mean of the n - f messages that vary least.

    argmin over |S| = n - f of lambda_max(cov_S); the first such S in lexicographic order. It has CAF's
    guarantee up to constants, at a cost that grows as C(n, f).

    Args:
      num_byzantine: f, with 2f < n and at most `MAX_SUBSETS` subsets of n - f.

    Returns:
      A linear rule.

    Example:
      >>> import jax.numpy as jnp
      >>> smea(num_byzantine=1)(jnp.array([[0.0], [1.0], [2.0], [9.0]])).tolist()
      [1.0]

    References:
      Allouah et al., On the Privacy-Robustness-Utility Trilemma in Distributed Learning, ICML 2023.
    """
    check_num_byzantine(num_byzantine)

    def top_eigenvalue(gram: Array, member: Array) -> Array:
        # Rows and columns of 0 add eigenvalues of 0, and change nothing.
        about_mean = recentred(gram, uniform(member))
        return jnp.linalg.eigvalsh(jnp.where(member[:, None] & member[None, :], about_mean, 0))[-1]

    return LinearRule(
        lambda gram: _best_subset("SMEA", gram, num_byzantine, top_eigenvalue),
        num_byzantine,
        is_selection=True,
        is_slow=True,
    )


@functools.lru_cache(maxsize=8)
def _left_out(n: int, num_byzantine: int) -> np.ndarray:
    """The f workers outside each subset, [subsets, f], subsets in lexicographic order."""
    outside = list(itertools.combinations(range(n), num_byzantine))
    return np.array(outside, np.int32).reshape(len(outside), num_byzantine)[::-1]


def _best_subset(name: str, gram: Array, num_byzantine: int, score: Callable[[Array, Array], Array]) -> Array:
    """Equal weights on the subset of n - f valid workers whose `score(gram, member [n])` is least."""
    n = gram.shape[0]
    count = math.comb(n, num_byzantine)
    if count > MAX_SUBSETS:
        raise ValueError(
            f"num_byzantine = {num_byzantine} of n = {n} workers gives {count:,} subsets; "
            f"{name} looks at each of them and takes at most {MAX_SUBSETS:,}."
        )
    valid = valid_workers(gram)
    gram = jnp.where(valid[:, None] & valid[None, :], gram, 0)
    left_out = jnp.asarray(_left_out(n, num_byzantine))
    workers = jnp.arange(n, dtype=jnp.int32)

    def members(outside: Array) -> Array:
        return ~(workers[:, None] == outside[None, :]).any(axis=1)

    def score_of(outside: Array) -> Array:
        member = members(outside)
        return jnp.where((member & ~valid).any(), jnp.inf, score(gram, member))

    scores = lax.map(score_of, left_out, batch_size=min(_BATCH, count))
    best = argmin(scores)
    # More than f invalid workers: there is no such subset, and all valid ones are averaged.
    return uniform(jnp.where(jnp.isfinite(scores[best]), members(left_out[best]), valid))
