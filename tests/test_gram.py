"""The two passes over the dimension against their float64 definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cafcor_jax.columns import num_workers
from cafcor_jax.gram import gram, mix

B = 8192  # columns a block
LARGE = 2**16  # from here on products are in float32, to 3e-7 where a processor adds 8 numbers at once
N = 5

jit_gram, jit_mix = jax.jit(gram), jax.jit(mix)


def distances(g):
    """Squared distances between the rows: what does not depend on the centre."""
    g = np.asarray(g, np.float64)
    return np.diag(g)[:, None] + np.diag(g)[None] - 2 * g


def true_distances(x):
    x = np.asarray(x, np.float64)
    return ((x[:, None] - x[None]) ** 2).sum(axis=-1)


def rows(d, n=N, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


@pytest.mark.parametrize("d", [1, B - 1, B, B + 1, 3 * B + 7, LARGE, LARGE + 1])
def test_gram_at_block_boundaries(d):
    x = rows(d)
    exact = x.astype(np.float64) @ x.astype(np.float64).T
    np.testing.assert_allclose(jit_gram(x), exact, rtol=0, atol=(1e-6 if d >= LARGE else 1e-12) * exact.max())


@pytest.mark.parametrize("column", [0, B - 1, B, 2 * B - 1, 2 * B, 2 * B + 6])
def test_gram_sees_every_column_once(column):
    x = np.zeros((N, 2 * B + 7), np.float32)
    x[:, column] = [0, 1, 2, 3, 4]
    np.testing.assert_allclose(distances(jit_gram(x)), true_distances(x[:, [column]]), rtol=1e-6)


def test_gram_of_a_pytree_is_that_of_its_columns():
    x = rows(B + 90)
    tree = {
        "large": x[:, :B].reshape(N, 64, 128),
        "small": [x[:, B + 3 * i : B + 3 * i + 3] for i in range(30)],
    }
    want = np.asarray(jit_gram(x))  # JAX's own `max` would round to float32 here
    np.testing.assert_allclose(jit_gram(tree), want, rtol=0, atol=1e-5 * want.max())


def test_gram_of_mixed_dtypes():
    x = rows(20)
    tree = (jnp.asarray(x[:, :10], jnp.bfloat16), jnp.asarray(x[:, 10:]))
    got = jit_gram(tree)
    assert got.dtype == np.float64
    joined = np.concatenate([np.asarray(leaf.astype(jnp.float32)) for leaf in tree], axis=1)
    np.testing.assert_allclose(distances(got), true_distances(joined), rtol=1e-5, atol=1e-5)


def test_gram_does_not_feel_a_common_offset():
    # On a grid, so that the offset is added without rounding.
    x = np.round(256 * rows(100)) / np.float32(256)
    far = x + np.float32(2**13)
    np.testing.assert_allclose(distances(jit_gram(far)), true_distances(x), rtol=1e-5, atol=1e-4)
    # The plain formula does: what this protects from.
    naive = far @ far.T
    assert np.abs(distances(naive) - true_distances(x)).max() > 0.1 * true_distances(x).max()


@pytest.mark.parametrize("shift", [1e2, 1e3, 1e5, 1e6])
def test_a_far_message_does_not_drown_the_others(shift):
    """On either side of where the computation changes to the robust centre."""
    x = rows(100)
    x[0] += np.float32(shift)
    got = distances(jit_gram(x))
    np.testing.assert_allclose(got[1:, 1:], true_distances(x)[1:, 1:], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[0, 1:], true_distances(x)[0, 1:], rtol=1e-5)


@pytest.mark.parametrize("scale", [1e10, 1e20, 1e30, 3e37])
@pytest.mark.parametrize("d", [100, LARGE])
def test_messages_of_absurd_length(scale, d):
    x = rows(d, n=7)
    x[:3] *= np.float32(scale) * np.array([[1], [1], [1e-3]], np.float32)
    np.testing.assert_allclose(distances(jit_gram(x))[3:], true_distances(x)[3:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-33, 1e-25, 1e-15, 1e15, 1e25, 1e36])
@pytest.mark.parametrize("d", [100, LARGE])
def test_all_messages_near_the_ends_of_the_range(scale, d):
    x = rows(d) * np.float32(scale)
    np.testing.assert_allclose(
        distances(jit_gram(x)) / scale**2, true_distances(x) / scale**2, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("base", [1e-10, 1.0, 1e10])
def test_many_scales_at_once(base):
    x = rows(100, n=12) * np.float32(base)
    x[:5] *= np.array([1e5, 1e10, 1e15, 1e20, 1e25], np.float32)[:, None]
    np.testing.assert_allclose(
        distances(jit_gram(x))[5:] / base**2, true_distances(x)[5:] / base**2, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("bad", [None, np.nan, 1e38])
@pytest.mark.parametrize("d", [20, LARGE])
def test_about_the_origin(bad, d):
    x = rows(d) + np.float32(100)
    if bad is not None:
        x[1] = bad
    want = x.astype(np.float64) @ x.astype(np.float64).T
    got = np.asarray(jax.jit(lambda x: gram(x, about_origin=True))(x))
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_message_that_is_not_finite_is_nan_in_the_gram_matrix(bad):
    x = rows(B + 3, n=6)
    x[2, B + 1] = bad
    x[4, 0] = bad
    got = np.asarray(jit_gram(x))
    marked = np.isin(np.arange(6), [2, 4])
    np.testing.assert_array_equal(np.isnan(got), marked[:, None] | marked[None])
    kept = ~marked
    np.testing.assert_allclose(
        distances(got)[np.ix_(kept, kept)], true_distances(x[kept]), rtol=1e-6, atol=1e-6
    )


def test_only_messages_that_are_not_finite():
    assert np.isnan(jit_gram(np.full((N, 3), np.nan, np.float32))).all()


@pytest.mark.parametrize("value", [0.0, 0.1, 1e30, -1e-30])
def test_identical_messages_are_at_distance_zero(value):
    np.testing.assert_array_equal(jit_gram(np.full((N, 33), value, np.float32)), 0)


def test_gram_is_symmetric():
    x = rows(B + 1)
    np.testing.assert_array_equal(jit_gram(x), jit_gram(x).T)


def test_gram_in_float64():
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(N, 100)) + 1e3
        got = gram(jnp.asarray(x))
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(distances(got), true_distances(x), rtol=1e-11, atol=1e-9)


@pytest.mark.parametrize("d", [1, B, B + 1])
def test_mix(d):
    x, weights = rows(d), np.array([0.1, 0.2, 0.3, 0.4, 0], np.float32)
    want = weights.astype(np.float64) @ x.astype(np.float64)
    np.testing.assert_allclose(jit_mix(weights, x), want, rtol=0, atol=1e-6)


def test_mix_of_a_pytree():
    x, weights = rows(24), np.array([0.1, 0.2, 0.3, 0.4, -1], np.float32)
    got = jit_mix(weights, {"a": x[:, :12].reshape(N, 3, 4), "b": [x[:, 12], x[:, 13:]]})
    assert got["a"].shape == (3, 4) and got["b"][0].shape == () and got["b"][1].shape == (11,)
    joined = np.concatenate([got["a"].ravel(), got["b"][0][None], got["b"][1]])
    np.testing.assert_allclose(joined, jit_mix(weights, x), atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_mix_does_not_see_messages_of_weight_zero(bad):
    x, weights = rows(50), np.array([0.5, 0, 0.5, 0, 0], np.float32)
    want = np.asarray(jit_mix(weights, x))  # now: it may be computed later, from the very memory of x
    x[1], x[3, 7] = bad, bad
    np.testing.assert_allclose(jit_mix(weights, x), want, atol=1e-7)
    # With weight it counts: the NaN is not hidden from who asks for it.
    assert not np.isfinite(jit_mix(np.full(N, 0.2, np.float32), x)).all()


def test_mix_protects_every_leaf_by_itself():
    x, y = rows(4), rows(3, seed=1)
    y[1] = np.inf
    weights = np.array([0.5, 0, 0.5, 0, 0], np.float32)
    got = jit_mix(weights, {"x": x, "y": y})
    np.testing.assert_allclose(got["x"], (x[0] + x[2]) / 2, atol=1e-6)
    np.testing.assert_allclose(got["y"], (y[0] + y[2]) / 2, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_mix_accumulates_half_precision_in_float32(dtype):
    n = 4096
    got = jit_mix(jnp.full(n, 1 / n, jnp.float32), jnp.ones((n, 2), dtype))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(jnp.float32), 1)


def test_num_workers():
    assert num_workers({"a": jnp.zeros((4, 2)), "b": jnp.zeros(4)}) == 4
