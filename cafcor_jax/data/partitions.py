"""How the training set is split over the workers."""

from __future__ import annotations

import math

import numpy as np

from cafcor_jax.errors import UserError

PARTITIONS = ("homogeneous", "dirichlet", "extreme")


def partition(
    labels: np.ndarray, num_workers: int, *, kind: str, alpha: float | None = None, seed: int
) -> list[np.ndarray]:
    """Splits samples over workers; every sample goes to exactly one worker, and every worker gets one.

    - `homogeneous`: a random split into parts whose sizes differ by at most one.
    - `dirichlet`: for each class k on its own, shares p_k ~ Dir(alpha, ..., alpha) over the workers; worker
      i gets a share p_ki of the samples of class k, at random, rounded. Each share has mean 1/n and variance
      (1/n)(1 - 1/n) / (n alpha + 1). Sizes are unequal and may be small. A worker that would be left
      with nothing gets one sample of the largest worker.
    - `extreme`: sorted by label and cut into parts whose sizes differ by at most one, as `np.array_split`;
      nothing in it is random.

    Args:
      labels: Integer labels `[N]`.
      num_workers: Number of parts n, at most N.
      kind: One of `PARTITIONS`.
      alpha: Concentration, above 0, for `dirichlet`; small is heterogeneous. The other kinds ignore it.
      seed: Of everything random.

    Returns:
      One int64 array of indices into `labels` a worker.

    Example:
      >>> parts = partition(np.array([0, 1, 0, 1]), 2, kind="extreme", seed=0)
      >>> [part.tolist() for part in parts]
      [[0, 2], [1, 3]]
    """
    labels = np.asarray(labels)
    _validate(labels, num_workers, kind, alpha)
    rng = np.random.default_rng(seed)
    if kind == "homogeneous":
        return np.array_split(rng.permutation(len(labels)), num_workers)
    if kind == "extreme":
        return np.array_split(np.argsort(labels, kind="stable"), num_workers)
    assert alpha is not None
    return _dirichlet(labels, num_workers, alpha, rng)


def _dirichlet(
    labels: np.ndarray, num_workers: int, alpha: float, rng: np.random.Generator
) -> list[np.ndarray]:
    pieces: list[list[np.ndarray]] = [[] for _ in range(num_workers)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(num_workers, alpha))
        # Rounding the cumulative shares, not the shares, is what uses every sample exactly once.
        cuts = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        for worker, piece in enumerate(np.split(members, cuts)):
            pieces[worker].append(piece)
    parts = [np.concatenate(worker) for worker in pieces]
    for worker, part in enumerate(parts):
        if len(part) == 0:
            largest = int(np.argmax([len(other) for other in parts]))
            take = rng.integers(len(parts[largest]))
            parts[worker] = parts[largest][take : take + 1]
            parts[largest] = np.delete(parts[largest], take)
    return parts


def _validate(labels: np.ndarray, num_workers: int, kind: str, alpha: float | None) -> None:
    if kind not in PARTITIONS:
        raise UserError(f"unknown partition {kind!r}: choose one of {', '.join(PARTITIONS)}")
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"labels must be a vector of integers, not {labels.dtype} of shape {labels.shape}")
    if not 1 <= num_workers <= len(labels):
        raise UserError(
            f"num_workers={num_workers} must be between 1 and the number of samples, {len(labels)}"
        )
    if kind == "dirichlet" and (alpha is None or not 0 < alpha < math.inf):
        raise UserError(f"alpha={alpha} must be a number above 0 for the dirichlet partition")
