"""Every rule against its float64 definition on messages of every kind, and what is special about each."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cafcor_jax import aggregators
from cafcor_jax.aggregators import BY_NAME, MAX_SUBSETS, centered_clipping, geometric_median, monna
from cafcor_jax.aggregators.subsets import _left_out
from tests.aggregators import messages, reference
from tests.aggregators.test_conformance import RULES, build
from tests.compiling import fast_jit

# Few shapes, since each one is a compilation for every rule: (n, d, f).
SHAPES = [(6, 3, 2), (9, 20, 4)]

# CAF has a test of its own: where two eigenvalues are equal its definition has no single answer.
NAMES = [name for name in RULES if name != "caf"]


@functools.cache
def jitted(name, n, f):
    return jax.jit(build(name, f, n))


@settings(max_examples=1200, deadline=None, derandomize=True)
@given(
    st.sampled_from(NAMES), st.sampled_from(SHAPES), st.sampled_from(messages.KINDS), st.integers(0, 10**6)
)
def test_equals_the_definition(name, shape, make, seed):
    n, d, f = shape
    x = make(np.random.default_rng(seed), n, d, f).astype(np.float32)
    want = RULES[name].definition(x, f)
    got = np.asarray(jitted(name, n, f)(x), np.float64)
    assert np.isfinite(got).all()
    spread = np.median(np.linalg.norm(x.astype(np.float64) - want, axis=1))
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want) + 1e-6 * spread


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "meamed"])
@pytest.mark.parametrize("count", [0, 2, 40])
def test_many_workers(name, count):
    """Where the sorting network is a loop."""
    n, f = 75, 30
    x = np.random.default_rng(0).normal(size=(n, 50)).astype(np.float32)
    x[:f] += 1
    want = RULES[name].definition(x[count:], max(f - count, 0))
    x[:count] = np.nan
    np.testing.assert_allclose(jitted(name, n, f)(x), want, atol=1e-6)


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "meamed"])
@pytest.mark.parametrize("n", [1, 2, 4, 7, 16])
def test_ties_and_small_numbers(name, n):
    """Few different values: the sorting network and the choice among equals."""
    f = (n - 1) // 2
    x = np.random.default_rng(n).integers(-2, 3, size=(n, 200)).astype(np.float32)
    np.testing.assert_allclose(jitted(name, n, f)(x), RULES[name].definition(x, f), atol=1e-6)


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "meamed", "caf", "multi_krum"])
def test_several_blocks_of_columns(name):
    n, f = 5, 1
    x = np.random.default_rng(0).normal(size=(n, 3 * 8192 + 11)).astype(np.float32)
    x[0] += 3
    np.testing.assert_allclose(jitted(name, n, f)(x), RULES[name].definition(x, f), atol=1e-6)


@pytest.mark.parametrize("name", ["mean", "median", "trimmed_mean", "meamed", "caf", "geometric_median"])
def test_the_largest_values_of_float32(name):
    x = np.array([[3.0e38], [3.1e38], [3.2e38], [3.3e38], [3.4e38]], np.float32)
    np.testing.assert_allclose(jitted(name, 5, 1)(x), RULES[name].definition(x, 1), rtol=1e-5)


@pytest.mark.parametrize("kind", ["sorted", "reversed", "random"])
def test_geometric_median_of_points_on_a_line(kind):
    """Odd: the middle point, where the sum of distances has a corner."""
    x = {"sorted": np.arange(7.0), "reversed": -np.arange(7.0), "random": np.array([3, 1, 4, 1.5, 9, 2.6, 5])}
    points = x[kind][:, None].astype(np.float32)
    got = jitted("geometric_median", 7, 3)(points)
    np.testing.assert_allclose(got, np.median(points, axis=0), atol=1e-5)


@pytest.mark.parametrize("iterations, smoothing", [(1, 0.1), (3, 0.1), (3, 10.0), (50, 1e-3)])
def test_geometric_median_in_a_fixed_number_of_steps(iterations, smoothing):
    x = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32) + 1
    got = fast_jit(geometric_median(2, iterations=iterations, smoothing=smoothing))(x)
    np.testing.assert_allclose(got, reference.weiszfeld(x, iterations, smoothing), rtol=1e-5, atol=1e-6)


@functools.cache
def jitted_clipping(radius):
    return fast_jit(centered_clipping(2, radius=radius, iterations=2))


@pytest.mark.parametrize("radius", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("size", [1.0, 1e10, 1e38])
def test_centered_clipping_of_huge_messages(radius, size):
    """The weight of a huge message is tiny, and its part in the result is not."""
    x = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    x[0] = size
    got = np.asarray(jitted_clipping(radius)(x))
    np.testing.assert_allclose(got, reference.centered_clipping(x, radius, 2), rtol=1e-5, atol=1e-6 * radius)


@pytest.mark.parametrize("name", ["geometric_median", "centered_clipping"])
@pytest.mark.parametrize("kind", ["a zero", "equal", "one", "two"])
def test_derivatives_where_a_distance_is_zero(name, kind):
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    x = {"a zero": np.vstack([x[:4], 0 * x[4:]]), "equal": x[[0] * 5], "one": x[:1], "two": x[:2]}[kind]
    _, got = jax.jvp(jitted(name, len(x), 0), (jnp.asarray(x),), (jnp.ones_like(x),))
    assert np.isfinite(got).all()
    if name == "geometric_median" and kind != "two":  # of two messages every point between them is one
        np.testing.assert_allclose(got, 1, rtol=1e-3)


@pytest.mark.parametrize("name", ["krum", "multi_krum", "caf"])
def test_lengths_and_distances_at_once(name):
    """A pre-aggregation that clips nobody changes nothing, also far from the origin and in wide leaves."""
    x = (1000 + np.random.default_rng(0).normal(size=(10, 2**16))).astype(np.float32)
    composed = aggregators.compose(aggregators.clipping(radius=1e9), build(name))
    got, want = fast_jit(lambda x: (composed.weights(x), build(name).weights(x)))(x)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_subsets_are_in_lexicographic_order():
    outside = _left_out(5, 2)
    inside = [tuple(sorted(set(range(5)) - set(row.tolist()))) for row in outside]
    assert inside == sorted(inside)
    assert len(inside) == math.comb(5, 2)


@pytest.mark.parametrize("name", ["smea", "mda"])
def test_too_many_subsets(name):
    with pytest.raises(ValueError, match=r"num_byzantine = 10 of n = 40 workers gives 847,660,528 subsets"):
        BY_NAME[name](num_byzantine=10)(jnp.zeros((40, 3)))
    assert math.comb(30, 5) <= MAX_SUBSETS < math.comb(30, 6)


def test_monna_without_its_trusted_message():
    x = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    x[4] = np.nan
    np.testing.assert_allclose(fast_jit(monna(2, trusted=4))(x), np.delete(x, 4, axis=0).mean(0), atol=1e-6)


@pytest.mark.parametrize(
    ("build_rule", "message"),
    [
        (lambda: geometric_median(1, iterations=0), "iterations is 0"),
        (lambda: geometric_median(1, iterations=2.5), "iterations is 2.5"),
        (lambda: geometric_median(1, iterations=1, smoothing=0.0), "smoothing is 0.0"),
        (lambda: centered_clipping(1, radius=-1.0), "radius is -1.0"),
        (lambda: centered_clipping(1, radius=float("nan")), "radius is nan"),
        (lambda: centered_clipping(1, radius=float("inf")), "radius is inf"),
        (lambda: geometric_median(1, smoothing=-1.0), "smoothing is -1.0"),
        (lambda: centered_clipping(1, iterations=0), "iterations is 0"),
        (lambda: monna(1, trusted=-1), "trusted is -1"),
        (lambda: monna(1, trusted=5)(jnp.zeros((5, 2))), "trusted = 5 of n = 5 workers"),
        (lambda: aggregators.bucketing(bucket_size=0), "bucket_size is 0"),
        (lambda: aggregators.clipping(radius=0), "radius is 0"),
        (lambda: aggregators.nnm(5)(jnp.zeros((5, 2))), "num_byzantine = 5 of n = 5 workers"),
        (lambda: aggregators.arc(5)(jnp.zeros((5, 2))), "num_byzantine = 5 of n = 5 workers"),
    ],
)
def test_refuses_options(build_rule, message):
    with pytest.raises(ValueError, match=message):
        build_rule()
