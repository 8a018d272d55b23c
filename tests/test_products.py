"""The product of wide rows: every tile, every block, every column once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cafcor_jax import products
from cafcor_jax.products import products_of_wide_rows

jit_products = jax.jit(products_of_wide_rows)
# One step of the loop over columns takes 16 blocks of 8,192 columns at n = 10.
STEP = 16 * 8192
# Blocks are summed in float32, in an order that is the processor's own: with 16 numbers at once the error is
# below 1e-7 of the longest row's square, with 8 it is 3e-7. One of 70,000 columns left out would be 1.4e-5.
FLOAT32 = 1e-6


def exact(x):
    x = np.asarray(x, np.float64)
    return x @ x.T


def rows(n, d, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


@pytest.mark.parametrize("n", [1, 2, 10, 16, 17, 30, 47, 64, 65, 100, 128, 129, 200])
def test_every_pair_of_tiles(n):
    x = rows(n, 70_000)
    want = exact(x)
    got = np.asarray(jit_products(x))
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=0, atol=FLOAT32 * want.max())
    np.testing.assert_array_equal(got, got.T)


@pytest.mark.parametrize("d", [STEP - 1, STEP, STEP + 1, 2 * STEP, 2 * STEP + 8193])
def test_every_column_once(d):
    x = np.zeros((10, d), np.float32)
    marked = [0, 8191, 8192, STEP - 2, d // 2, d - 1]
    x[:, marked] = rows(10, len(marked))
    np.testing.assert_allclose(jit_products(x), exact(x[:, sorted(set(marked))]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_spoils_its_own_products_only(bad):
    x = rows(10, STEP)
    x[3, 5] = bad
    got = np.asarray(jit_products(x))
    spoilt = ~np.isfinite(got)
    assert spoilt[3].all() and spoilt[:, 3].all() and spoilt.sum() == 19


def test_bfloat16_is_summed_in_float32():
    x = jnp.asarray(rows(10, STEP), jnp.bfloat16)
    # Squares of such numbers have few digits, and sums of them round down more often than up: 4e-6 where 8
    # numbers are added at once. A sum in bfloat16 would be off by 1e-3 and more.
    np.testing.assert_allclose(jit_products(x), exact(x.astype(jnp.float32)), rtol=0, atol=1e-5 * STEP)


def test_tiles_cover_the_rows():
    for n in range(1, 400):
        tiles, in_flight = products._tiles(n)
        assert [row for tile in tiles for row in range(tile.start, tile.start + tile.rows)] == list(range(n))
        # XLA runs what a step loads and multiplies at once only if it is more than some thirty operations.
        assert in_flight * (len(tiles) + len(tiles) * (len(tiles) + 1) // 2) >= 32
