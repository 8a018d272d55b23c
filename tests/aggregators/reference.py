"""The rules in float64 NumPy, straight from their definitions: the tests compare with these.

Plain and slow on purpose, and written from the paper, not from the package: no Gram matrix, no blocks.
"""

from __future__ import annotations

import dataclasses

import numpy as np


def mean(x: np.ndarray) -> np.ndarray:
    """The average of the rows of x [n, d]."""
    return np.asarray(x, np.float64).mean(axis=0)


@dataclasses.dataclass
class Caf:
    """The output of Algorithm 2, and how close its decisions were."""

    mean: np.ndarray
    weights: np.ndarray
    """[n], of sum 1: mean = weights @ x."""
    steps: int
    gap: float
    """The smallest relative distance between the two top eigenvalues over the steps: at 0 the eigenvector,
    and so the result, is not unique."""
    stop_margin: float
    """The smallest |sum(c) - (n - 2f)|: at 0, rounding decides whether the loop goes on."""
    best_margin: float
    """The smallest relative distance of a step's top eigenvalue to the best one before it: at 0, rounding
    decides which mean is returned."""
    min_value: float
    """The smallest top eigenvalue over the steps."""


def caf(x: np.ndarray, f: int, *, maximum_over_all: bool = False, max_steps: int = 100_000) -> Caf:
    """Algorithm 2 of the paper, line by line, on x [n, d].

    Args:
      x: messages.
      f: the number of malicious ones.
      maximum_over_all: divide by the maximum of tau over all rows, as printed in the paper, instead of over
        those of positive weight.
      max_steps: raises after so many.
    """
    x = np.asarray(x, np.float64)
    n = len(x)
    c = np.ones(n)
    best_mean, best_weights, best_value = x.mean(axis=0), np.full(n, 1 / n), np.inf
    steps, gap, stop_margin, best_margin, min_value = 0, np.inf, np.inf, np.inf, np.inf
    while c.sum() >= n - 2 * f:
        if steps:
            stop_margin = min(stop_margin, abs(c.sum() - (n - 2 * f)))
        if steps == max_steps:
            raise RuntimeError(f"CAF has not stopped after {max_steps} steps.")
        steps += 1
        weights = c / c.sum()
        mu = weights @ x
        # The covariance is A^T A with A = sqrt(w) (x - mu): its eigenpairs are A's right singular pairs.
        _, singular, right = np.linalg.svd(np.sqrt(weights)[:, None] * (x - mu), full_matrices=False)
        value, v = singular[0] ** 2, right[0]
        min_value = min(min_value, value)
        if value == 0:
            return Caf(mu, weights, steps, gap, stop_margin, best_margin, min_value)
        if len(singular) > 1:
            gap = min(gap, 1 - (singular[1] / singular[0]) ** 2)
        if np.isfinite(best_value):
            best_margin = min(best_margin, abs(value - best_value) / best_value)
        if value <= best_value:
            best_mean, best_weights, best_value = mu, weights, value
        tau = ((x - mu) @ v) ** 2
        highest = tau.max() if maximum_over_all else tau[c > 0].max()
        c = np.where(c > 0, c * np.maximum(1 - tau / highest, 0), 0)
        if c.sum() == 0:
            break
    stop_margin = min(stop_margin, abs(c.sum() - (n - 2 * f)))
    return Caf(best_mean, best_weights, steps, gap, stop_margin, best_margin, min_value)
