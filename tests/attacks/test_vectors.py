"""Attacks against their closed forms, and what every attack must do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cafcor_jax import attacks

H, F = 7, 3
KEY = jax.random.key(0)
each_attack = pytest.mark.parametrize("name", list(attacks.BY_NAME))

# The message of every malicious worker, in float64.
CLOSED_FORMS = {
    "none": lambda x: x.mean(axis=0),
    "sign_flip": lambda x: -x.mean(axis=0),
    "alie": lambda x: x.mean(axis=0) + 1.5 * x.std(axis=0, ddof=1),
}


def honest(shape=(40,), seed=0):
    return np.random.default_rng(seed).normal(1, 2, size=(H, *shape)).astype(np.float32)


def tree():
    return {"w": honest((3, 4)), "b": [honest((5,), 1), honest((), 2)]}


def test_the_table_is_complete():
    assert set(CLOSED_FORMS) == set(attacks.BY_NAME)


@pytest.mark.parametrize("name", list(CLOSED_FORMS))
def test_closed_form(name):
    x = honest()
    got = attacks.BY_NAME[name]()(KEY, x, F)
    want = CLOSED_FORMS[name](x.astype(np.float64))
    np.testing.assert_allclose(got, np.tile(want, (F, 1)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("factor", [0.0, -2.0, 10.0])
def test_alie_factor(factor):
    x = honest().astype(np.float64)
    want = x.mean(axis=0) + factor * x.std(axis=0, ddof=1)
    np.testing.assert_allclose(attacks.alie(factor)(KEY, honest(), 1)[0], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [np.inf, -np.inf, np.nan])
def test_alie_refuses_a_factor(factor):
    with pytest.raises(ValueError, match=f"factor is {factor}"):
        attacks.alie(factor)


@pytest.mark.parametrize("name", list(CLOSED_FORMS))
def test_one_honest_worker(name):
    x = honest()[:1]
    want = -x[0] if name == "sign_flip" else x[0]
    np.testing.assert_allclose(attacks.BY_NAME[name]()(KEY, x, 2), np.stack([want, want]), rtol=1e-6)


def test_alie_where_the_honest_agree():
    x = np.full((H, 4), 0.1, np.float32)
    np.testing.assert_allclose(attacks.alie()(KEY, x, 1)[0], x[0], rtol=1e-6)


def test_alie_in_half_precision():
    """The squares are not taken in float16, where they overflow at 256."""
    x = jnp.asarray(300 * np.random.default_rng(0).normal(size=(H, 40)), jnp.float16)
    wide = np.asarray(x, np.float64)
    np.testing.assert_allclose(attacks.alie()(KEY, x, 1)[0], CLOSED_FORMS["alie"](wide), rtol=3e-3, atol=0.5)


@each_attack
@pytest.mark.parametrize("f", [0, 1, F])
def test_shapes_and_structure(name, f):
    got = jax.jit(attacks.BY_NAME[name](), static_argnums=2)(KEY, tree(), f)
    assert jax.tree.structure(got) == jax.tree.structure(tree())
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(tree()), strict=True):
        assert ours.shape == (f, *theirs.shape[1:])
        assert np.isfinite(ours).all()


@each_attack
def test_a_pytree_is_its_columns(name):
    t = tree()
    flat = np.concatenate([leaf.reshape(H, -1) for leaf in jax.tree.leaves(t)], axis=1)
    got = [leaf.reshape(F, -1) for leaf in jax.tree.leaves(attacks.BY_NAME[name]()(KEY, t, F))]
    want = attacks.BY_NAME[name]()(KEY, flat, F)
    np.testing.assert_allclose(np.concatenate(got, axis=1), want, rtol=1e-5, atol=1e-6)


@each_attack
def test_deterministic_in_the_key(name):
    attack = jax.jit(attacks.BY_NAME[name](), static_argnums=2)
    np.testing.assert_array_equal(attack(KEY, honest(), F), attack(KEY, honest(), F))


@each_attack
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_keeps_the_dtype(name, dtype):
    assert attacks.BY_NAME[name]()(KEY, jnp.asarray(honest(), dtype), F).dtype == dtype


@each_attack
def test_float64(name):
    x = np.random.default_rng(0).normal(size=(H, 10))
    with jax.enable_x64(True):
        got = attacks.BY_NAME[name]()(KEY, jnp.asarray(x), F)
        assert got.dtype == jnp.float64
        if name in CLOSED_FORMS:
            np.testing.assert_allclose(got[0], CLOSED_FORMS[name](x), rtol=1e-12)


@each_attack
def test_vmap_over_seeds(name):
    attack = attacks.BY_NAME[name]()
    keys = jax.random.split(KEY, 2)
    x = np.stack([honest(), honest(seed=1)])
    got = jax.vmap(lambda key, rows: attack(key, rows, F))(keys, x)
    for i in range(2):
        np.testing.assert_allclose(got[i], attack(keys[i], x[i], F), rtol=1e-5, atol=1e-6)


@each_attack
@pytest.mark.parametrize(
    ("updates", "message"),
    [({}, "no arrays"), (jnp.zeros((3, 2), jnp.int32), "int32"), (jnp.zeros((0, 2)), "0 workers")],
)
def test_refuses_updates(name, updates, message):
    with pytest.raises(ValueError, match=message):
        attacks.BY_NAME[name]()(KEY, updates, F)
