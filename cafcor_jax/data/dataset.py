"""What the rest of the library sees of the data: two frozen records of NumPy arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from cafcor_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Dataset:
    """An image classification set, held in memory as uint8.

    Attributes:
      name: One of `cafcor_jax.data.NAMES`.
      train_images: uint8 `[N, 28, 28, 1]`, in the order of the original IDX file.
      train_labels: int32 `[N]`.
      test_images: uint8 `[M, 28, 28, 1]`.
      test_labels: int32 `[M]`.
      num_classes: Labels are `0 .. num_classes - 1`.
      mean: A model's input is `(image / 255 - mean) / std`.
      std: See `mean`.
      flip: Whether training flips images left to right at random.
      checksums: SHA-256 of each decompressed IDX file (for `synthetic`: of its arrays written as IDX).
      source: One line for people: where the data came from.
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    num_classes: int
    mean: float
    std: float
    flip: bool
    checksums: dict[str, str]
    source: str


@dataclasses.dataclass(frozen=True)
class FederatedData:
    """Training data with a leading worker axis; rows past a worker's size are zeros.

    Attributes:
      images: uint8 `[workers, m_max, 28, 28, 1]`.
      labels: int32 `[workers, m_max]`.
      sizes: int32 `[workers]`, how many rows of each worker are real.
    """

    images: np.ndarray
    labels: np.ndarray
    sizes: np.ndarray


def federate(dataset: Dataset, parts: Sequence[np.ndarray]) -> FederatedData:
    """Gives each worker its part of the training set, padded with zeros to the largest part.

    Args:
      dataset: Where the samples come from.
      parts: One array of sample indices a worker, as `partition` returns them.

    Returns:
      The padded arrays and the true sizes. They take `workers * max(sizes)` images of memory, which is
      more than the dataset when the parts are very unequal.
    """
    if len(parts) == 0:
        raise UserError("parts is empty: federate needs the samples of at least one worker")
    sizes = np.array([len(part) for part in parts], np.int32)
    if sizes.min() == 0:
        raise UserError(f"worker {int(sizes.argmin())} has no samples: every worker needs at least one")
    shape = (len(parts), int(sizes.max()))
    images = np.zeros(shape + dataset.train_images.shape[1:], np.uint8)
    labels = np.zeros(shape, np.int32)
    for worker, part in enumerate(parts):
        images[worker, : len(part)] = dataset.train_images[part]
        labels[worker, : len(part)] = dataset.train_labels[part]
    return FederatedData(images, labels, sizes)
