"""Attacks that keep to the protocol, but for their gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cafcor_jax import attacks

H, F, D = 6, 3, 4000
KEY = jax.random.key(0)
NAMES = [
    name for name, make in attacks.BY_NAME.items() if make.__module__.endswith("hidden")
]  # found by their module: a new one joins


@functools.cache
def compiled(name, factor=20.0):
    return jax.jit(attacks.BY_NAME[name](factor).gradients, static_argnums=2)


def sent(name, x, round_index=1, key=KEY):
    return compiled(name)(key, x, F, round_index)


@pytest.fixture(scope="module")
def honest():
    return np.random.default_rng(0).normal(0.1, 1, size=(H, D)).astype(np.float32)


def against(x):
    mean = x.astype(np.float64).mean(0)
    return -mean / np.linalg.norm(mean)


def test_all_of_them_are_here():
    assert set(NAMES) == {
        "bias",
        "bias_cancel",
        "bias_fixed",
        "bias_top",
        "bias_spread",
        "bias_drift",
        "bias_sleeper",
    }


@pytest.mark.parametrize(
    ("name", "round_index", "length"),
    [
        ("bias", 1, 20),
        ("bias_drift", 1, 2),
        ("bias_drift", 5, 10),
        ("bias_drift", 30, 20),
        ("bias_sleeper", 11, 20),
    ],
)
def test_along_minus_the_gradient(honest, name, round_index, length):
    expected = np.tile(length * against(honest), (F, 1))
    np.testing.assert_allclose(sent(name, honest, round_index), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("round_index", [0, 1, 10])
def test_a_sleeper_sends_the_honest_mean_before(honest, round_index):
    expected = np.tile(honest.mean(0), (F, 1))
    np.testing.assert_allclose(sent("bias_sleeper", honest, round_index), expected, rtol=1e-4, atol=1e-6)


def test_cancelling_takes_the_sum_of_all_gradients_to_zero(honest):
    got = np.asarray(attacks.BY_NAME["bias_cancel"]()(KEY, honest, F), np.float64)
    np.testing.assert_allclose(got.sum(0) + honest.astype(np.float64).sum(0), 0, atol=1e-5)
    half = np.asarray(attacks.BY_NAME["bias_cancel"](0.5)(KEY, honest, F), np.float64)
    np.testing.assert_allclose(half, got / 2, rtol=1e-6)


def test_a_fixed_direction_is_that_of_all_rounds(honest):
    first = np.asarray(sent("bias_fixed", honest))
    other = np.asarray(sent("bias_fixed", 2 * honest, 7, jax.random.key(1)))
    np.testing.assert_array_equal(first, other)
    np.testing.assert_allclose(np.linalg.norm(first, axis=1), 20, rtol=1e-5)
    assert abs(first[0] @ against(honest)) < 20 * 5 / np.sqrt(D)


def test_top_is_the_direction_in_which_the_honest_differ_most(honest):
    top = np.linalg.svd(honest.astype(np.float64) - honest.mean(0), full_matrices=False)[2][0]
    got = np.asarray(sent("bias_top", honest), np.float64)
    np.testing.assert_allclose(np.abs(got @ top), 20, rtol=1e-4)
    assert (got @ honest.mean(0) <= 0).all()


def test_spread_adds_up_and_no_two_are_alike(honest):
    got = np.asarray(sent("bias_spread", honest), np.float64)
    np.testing.assert_allclose(got.mean(0), 20 * against(honest), atol=1e-4)
    gram = got @ got.T
    tolerance = 6 * F * 20**2 / np.sqrt(D)
    np.testing.assert_allclose(gram, F * 20**2 * np.eye(F), atol=tolerance)
    again = np.asarray(sent("bias_spread", honest, key=jax.random.key(1)))
    assert np.abs(got - again).max() > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_structure(name, honest):
    tree = {"w": jnp.asarray(honest[:, :12]).reshape(H, 3, 4), "b": (jnp.asarray(honest[:, 12]),)}
    for f in (0, 1, F):
        got = attacks.BY_NAME[name]()(KEY, tree, f)
        assert jax.tree.map(lambda leaf: leaf.shape, got) == {"w": (f, 3, 4), "b": ((f,),)}
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("factor", [-1.0, np.inf, np.nan])
def test_refuses_a_factor(name, factor):
    with pytest.raises(ValueError, match="factor is"):
        attacks.BY_NAME[name](factor)


@pytest.mark.parametrize("name", NAMES)
def test_equal_gradients_and_no_gradient_at_all(name):
    for x in (jnp.ones((H, 8)), jnp.zeros((H, 8))):
        assert np.isfinite(attacks.BY_NAME[name]()(KEY, x, 2)).all()
