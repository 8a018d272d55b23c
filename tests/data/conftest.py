"""A tiny dataset with checksums of its own, in place of the real ones."""

import dataclasses
import gzip
from pathlib import Path

import numpy as np
import pytest

from cafcor_jax.data import catalog, idx

NUM_TRAIN, NUM_TEST = 50, 20


@pytest.fixture
def arrays() -> idx.Arrays:
    rng = np.random.default_rng(0)

    def images(count):
        return rng.integers(0, 256, (count, 28, 28), np.uint8)

    def labels(count):
        return rng.integers(0, 10, count, np.uint8)

    return {
        "train-images": images(NUM_TRAIN),
        "train-labels": labels(NUM_TRAIN),
        "t10k-images": images(NUM_TEST),
        "t10k-labels": labels(NUM_TEST),
    }


@pytest.fixture
def spec(arrays) -> catalog.Spec:
    return dataclasses.replace(
        catalog.MNIST, checksums={key: idx.checksum(array) for key, array in arrays.items()}
    )


@pytest.fixture
def idx_dir(arrays, tmp_path) -> Path:
    """A directory as a user would bring it: two files packed, two not."""
    directory = tmp_path / "idx"
    directory.mkdir()
    for key, array in arrays.items():
        packed, _, raw, _ = idx.file_names(key)
        content = idx.header(array) + array.tobytes()
        if key.startswith("train"):
            (directory / packed).write_bytes(gzip.compress(content))
        else:
            (directory / raw).write_bytes(content)
    return directory
