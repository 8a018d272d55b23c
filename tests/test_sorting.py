"""Sorting networks and the median over rows."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cafcor_jax.sorting import comparators, median_of_rows

median = jax.jit(median_of_rows)


def run(network, values):
    """Applies the comparators to wires [n, cases]."""
    values = values.copy()
    for low, high in network:
        values[[low, high]] = np.minimum(values[low], values[high]), np.maximum(values[low], values[high])
    return values


@pytest.mark.parametrize("n", range(1, 13))
def test_sorts_all_zeros_and_ones(n):
    """The 0-1 principle: a network that sorts these sorts everything."""
    cases = np.array(list(itertools.product([0, 1], repeat=n))).T
    np.testing.assert_array_equal(run(comparators(n), cases), np.sort(cases, axis=0))


@pytest.mark.parametrize("n", range(13, 41))
def test_sorts(n):
    """By the 0-1 principle again: every threshold of random permutations, and all blocks of ones."""
    rng = np.random.default_rng(n)
    permutations = rng.permuted(np.tile(np.arange(n)[:, None], 500), axis=0)
    blocks = np.array([[a <= i < b for i in range(n)] for a in range(n) for b in range(a, n + 1)]).T.astype(
        int
    )
    for cases in (permutations, blocks, 1 - blocks):
        np.testing.assert_array_equal(run(comparators(n), cases), np.sort(cases, axis=0))


@pytest.mark.parametrize("n", range(1, 41))
def test_comparators_are_in_order(n):
    assert all(0 <= low < high < n for low, high in comparators(n))


@pytest.mark.parametrize("n", range(2, 9))
def test_a_network_without_its_last_comparator_is_caught(n):
    cases = np.array(list(itertools.product([0, 1], repeat=n))).T
    assert not np.array_equal(run(comparators(n)[:-1], cases), np.sort(cases, axis=0))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 10, 16, 33])
def test_median_of_rows(n):
    x = np.random.default_rng(n).normal(size=(n, 50)).astype(np.float32)
    np.testing.assert_array_equal(median(x, np.ones(n, bool)), np.sort(x, axis=0)[(n - 1) // 2])


@pytest.mark.parametrize("n", [1, 2, 7, 10])
def test_median_of_the_valid_rows(n):
    """Of an even number, one of the two in the middle; the invalid rows hold nonsense."""
    rng = np.random.default_rng(n)
    for trial in range(20):
        x = rng.normal(size=(n, 50)).astype(np.float32)
        valid = rng.random(n) < 0.6
        x[~valid] = rng.choice([0.0, 1e38, -1e38])
        got = np.asarray(median(x, valid))
        count = valid.sum()
        if count == 0:
            np.testing.assert_array_equal(got, 0)
            continue
        ascending = np.sort(x[valid], axis=0)
        low, high = ascending[(count - 1) // 2], ascending[count // 2]
        assert ((got == low) | (got == high)).all(), (n, trial)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_keeps_the_dtype(dtype):
    assert median(jnp.ones((5, 3), dtype), np.ones(5, bool)).dtype == dtype
