import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cafcor_jax import clipping


def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=5), jnp.float32), "b": jnp.float32(0.3)}
    x = jnp.asarray(rng.normal(size=(12, 5)), jnp.float32)
    y = jnp.asarray(3 * rng.normal(size=12), jnp.float32)
    return params, x, y


def example_gradients(params, x, y):
    error = 2 * (np.asarray(x) @ np.asarray(params["w"]) + float(params["b"]) - np.asarray(y))
    return np.concatenate([error[:, None] * np.asarray(x), error[:, None]], axis=1)


def flat(gradient):
    return np.concatenate([np.ravel(gradient["w"]), np.ravel(gradient["b"])])


@pytest.mark.parametrize("clip_norm", [0.1, 1.0, 1e3, float("inf")])
def test_user_level_is_the_definition(problem, clip_norm):
    mean = example_gradients(*problem).mean(0)
    norm = np.linalg.norm(mean)
    result = clipping.user_level(loss_fn, clip_norm)(*problem)
    np.testing.assert_allclose(flat(result.gradient), mean * min(1, clip_norm / norm), rtol=2e-5, atol=1e-6)
    assert result.norm == pytest.approx(norm, rel=1e-5)
    assert result.clipped == (norm > clip_norm)


@pytest.mark.parametrize("clip_norm", [0.1, 1.0, 5.0, float("inf")])
@pytest.mark.parametrize("batch", [12, 11, 1])
def test_example_level_is_the_definition(problem, clip_norm, batch):
    params, x, y = problem
    x, y = x[:batch], y[:batch]
    each = example_gradients(params, x, y)
    norms = np.linalg.norm(each, axis=1)
    expected = (each * np.minimum(1, clip_norm / norms)[:, None]).mean(0)
    result = clipping.example_level(loss_fn, clip_norm)(params, x, y)
    np.testing.assert_allclose(flat(result.gradient), expected, rtol=2e-5, atol=1e-6)
    assert result.norm == pytest.approx(norms.mean(), rel=1e-5)
    assert result.clipped == pytest.approx((norms > clip_norm).mean())
    assert result.loss == pytest.approx(float(loss_fn(params, x, y)), rel=1e-5)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e6, 1e15])
def test_norm_never_exceeds_the_threshold(scale):
    gradient = {"w": jnp.asarray(np.random.default_rng(1).normal(size=10_000) * scale, jnp.float32)}
    norm = jnp.linalg.norm(gradient["w"])
    clipped = clipping.clip(gradient, norm, 0.7)["w"]
    assert 0.7 * (1 - 2e-5) <= np.linalg.norm(np.asarray(clipped, np.float64)) <= 0.7 or scale < 1e-10


def test_an_overflow_in_the_data_cannot_break_the_sensitivity(problem):
    params, x, y = problem
    for bad in (jnp.inf, jnp.nan, 1e38):
        result = clipping.user_level(loss_fn, 1.0)(params, x.at[0, 0].set(bad), y)
        assert np.linalg.norm(flat(result.gradient)) <= 1.0
        result = clipping.example_level(loss_fn, 1.0)(params, x.at[0, 0].set(bad), y)
        assert np.linalg.norm(flat(result.gradient)) <= 1.0


def test_one_example_moves_the_example_level_mean_by_at_most_two_c_over_b(problem):
    params, x, y = problem
    gradient = jax.jit(clipping.example_level(loss_fn, 0.5))
    before = flat(gradient(params, x, y).gradient)
    for seed in range(20):
        other = 10 * jax.random.normal(jax.random.key(seed), (5,))
        after = flat(gradient(params, x.at[3].set(other), y.at[3].set(100.0)).gradient)
        assert np.linalg.norm(after - before) <= 2 * 0.5 / 12 * (1 + 1e-5)
