"""The rules in float64 NumPy, straight from their definitions: the tests compare with these.

Plain and slow on purpose, and written from the paper, not from the package: no Gram matrix, no blocks.
"""

from __future__ import annotations

import dataclasses
import itertools

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


def _distances(x: np.ndarray) -> np.ndarray:
    """||x_i - x_j||, [n, n]."""
    return np.linalg.norm(x[:, None] - x[None], axis=2)


def krum_scores(x: np.ndarray, f: int) -> np.ndarray:
    """The sum of squared distances to the n - f - 1 nearest others."""
    squared = _distances(np.asarray(x, np.float64)) ** 2
    n = len(x)
    return np.array([np.sort(np.delete(squared[i], i))[: n - f - 1].sum() for i in range(n)])


def krum(x: np.ndarray, f: int) -> np.ndarray:
    """The message of the least score."""
    return np.asarray(x, np.float64)[np.argmin(krum_scores(x, f))]


def multi_krum(x: np.ndarray, f: int) -> np.ndarray:
    """The mean of the n - f messages of the least scores."""
    x = np.asarray(x, np.float64)
    return x[np.argsort(krum_scores(x, f), kind="stable")[: len(x) - f]].mean(axis=0)


def monna(x: np.ndarray, f: int, trusted: int) -> np.ndarray:
    """The mean of the n - f messages nearest to a trusted one."""
    x = np.asarray(x, np.float64)
    order = np.argsort(np.linalg.norm(x - x[trusted], axis=1), kind="stable")
    return x[order[: len(x) - f]].mean(axis=0)


def _best_subset(x: np.ndarray, f: int, score) -> np.ndarray:
    x = np.asarray(x, np.float64)
    subsets = [list(subset) for subset in itertools.combinations(range(len(x)), len(x) - f)]
    return x[min(subsets, key=lambda subset: score(x[subset]))].mean(axis=0)


def mda(x: np.ndarray, f: int) -> np.ndarray:
    """The mean of the n - f messages of the least diameter."""
    return _best_subset(x, f, lambda chosen: _distances(chosen).max())


def smea(x: np.ndarray, f: int) -> np.ndarray:
    """The mean of the n - f messages whose covariance has the least top eigenvalue."""
    return _best_subset(x, f, lambda chosen: np.linalg.norm(chosen - chosen.mean(axis=0), ord=2))


def geometric_median(x: np.ndarray) -> np.ndarray:
    """The minimiser of the sum of distances, by damped Newton steps in d dimensions."""
    x = np.asarray(x, np.float64)
    n = len(x)
    # An optimum at a message: the unit vectors from it to the others sum to no more than its multiplicity.
    for candidate in x:
        away = x - candidate
        length = np.linalg.norm(away, axis=1)
        others = length > 0
        pull = (away[others] / length[others, None]).sum(axis=0)
        if np.linalg.norm(pull) <= n - others.sum():
            return candidate
    z = np.median(x, axis=0)
    for _ in range(1000):
        away = x - z
        length = np.maximum(np.linalg.norm(away, axis=1), 1e-300)
        unit = away / length[:, None]
        gradient = -unit.sum(axis=0)
        hessian = np.eye(x.shape[1]) * (1 / length).sum() - (unit / length[:, None]).T @ unit
        newton = -np.linalg.lstsq(hessian, gradient, rcond=None)[0]
        # The step that goes lowest: Newton's, shortened, or Weiszfeld's.
        steps = [newton * 0.5**k for k in range(30)] + [-gradient / (1 / length).sum()]
        drops = [
            ((step @ step - 2 * away @ step) / (length + np.linalg.norm(away - step, axis=1))).sum()
            for step in steps
        ]
        best = steps[int(np.argmin(drops))]
        z = z + best
        if np.linalg.norm(gradient) <= 1e-13 * n:
            break
    return z


def weiszfeld(x: np.ndarray, iterations: int, smoothing: float) -> np.ndarray:
    """A fixed number of Weiszfeld steps from 0."""
    x = np.asarray(x, np.float64)
    z = np.zeros(x.shape[1])
    for _ in range(iterations):
        inverse = 1 / np.maximum(np.linalg.norm(x - z, axis=1), smoothing)
        z = inverse @ x / inverse.sum()
    return z


def centered_clipping(x: np.ndarray, radius: float, iterations: int, count: int | None = None) -> np.ndarray:
    """Steps by the mean of the clipped differences, from 0; the mean is over `count` workers."""
    x = np.asarray(x, np.float64)
    v = np.zeros(x.shape[1])
    for _ in range(iterations):
        away = x - v
        length = np.linalg.norm(away, axis=1)
        v = v + (away * np.minimum(1, radius / np.maximum(length, 1e-300))[:, None]).sum(axis=0) / (
            count or len(x)
        )
    return v


def median(x: np.ndarray) -> np.ndarray:
    """The coordinate-wise median."""
    return np.median(np.asarray(x, np.float64), axis=0)


def trimmed_mean(x: np.ndarray, f: int) -> np.ndarray:
    """The mean without the f largest and f smallest values of every coordinate."""
    return np.sort(np.asarray(x, np.float64), axis=0)[f : len(x) - f].mean(axis=0)


def meamed(x: np.ndarray, f: int) -> np.ndarray:
    """The mean of the n - f values nearest to the median; of two equally near, the smaller."""
    x = np.sort(np.asarray(x, np.float64), axis=0)
    order = np.argsort(np.abs(x - np.median(x, axis=0)), axis=0, kind="stable")
    return np.take_along_axis(x, order[: len(x) - f], axis=0).mean(axis=0)


def nnm(x: np.ndarray, f: int) -> np.ndarray:
    """Every message replaced by the mean of the n - f nearest to it."""
    x = np.asarray(x, np.float64)
    order = np.argsort(_distances(x), axis=1, kind="stable")
    return np.stack([x[near[: len(x) - f]].mean(axis=0) for near in order])


def clipped(x: np.ndarray, radius: float) -> np.ndarray:
    """Longer messages shortened to the radius."""
    x = np.asarray(x, np.float64)
    length = np.linalg.norm(x, axis=1, keepdims=True)
    return np.where(length > radius, x * (radius / np.maximum(length, 1e-300)), x)


def arc(x: np.ndarray, f: int) -> np.ndarray:
    """The floor(2 f (n - f) / n) longest messages shortened to the length of the next one."""
    x = np.asarray(x, np.float64)
    n = len(x)
    return clipped(x, np.sort(np.linalg.norm(x, axis=1))[n - 2 * f * (n - f) // n - 1])
