"""Pre-aggregation against its definitions, and before every kind of rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cafcor_jax import aggregators
from cafcor_jax.aggregators import LinearRule, arc, bucketing, clipping, compose, mixing, nnm
from tests.aggregators import messages, reference
from tests.compiling import fast_jit

N, D, F = 10, 20, 3
RADIUS = 3.0

DEFINITIONS = {
    "nnm": (nnm(F), lambda x, f: reference.nnm(x, f)),
    "bucketing": (bucketing(F, bucket_size=1), lambda x, f: x[np.random.default_rng(0).permutation(N)]),
    "clipping": (clipping(F, radius=RADIUS), lambda x, f: reference.clipped(x, RADIUS)),
    "arc": (arc(F), reference.arc),
}
each_mixing = pytest.mark.parametrize("name", list(DEFINITIONS))


def draw(seed=0, kind=messages.sign_flip):
    return kind(np.random.default_rng(seed), N, D, F).astype(np.float32)


@functools.cache
def jitted(name):
    return jax.jit(DEFINITIONS[name][0])


def test_the_table_is_complete():
    assert set(DEFINITIONS) == set(mixing.BY_NAME)


@pytest.mark.parametrize("name", ["nnm", "clipping", "arc"])
@pytest.mark.parametrize("kind", messages.KINDS)
def test_definition(name, kind):
    x = draw(kind=kind)
    got, want = np.asarray(jitted(name)(x), np.float64), DEFINITIONS[name][1](x, F)
    # Each row on its own scale: some are huge.
    scale = np.abs(want).max(axis=1, keepdims=True)
    np.testing.assert_allclose(got / scale, want / scale, atol=1e-5)


@pytest.mark.parametrize("bucket_size", [1, 3, 11])
def test_bucketing_averages_every_message_once(bucket_size):
    x = draw()
    got = np.asarray(fast_jit(bucketing(bucket_size=bucket_size, seed=5))(x), np.float64)
    assert got.shape == (-(-N // bucket_size), D)
    members = np.bincount(np.arange(N) // bucket_size)
    np.testing.assert_allclose(members @ got / N, x.mean(0), atol=1e-6)
    order = np.argsort(np.random.default_rng(5).permutation(N))
    np.testing.assert_allclose(got[0], x[order[:bucket_size]].mean(0), atol=1e-6)


def test_bucketing_depends_on_its_seed():
    x = draw()
    one, other = fast_jit(lambda x: (bucketing(seed=1)(x), bucketing(seed=2)(x)))(x)
    assert not np.allclose(one, other)


RULES = {
    "mean": aggregators.mean(F),
    "caf": aggregators.caf(F),
    "centered_clipping": aggregators.centered_clipping(F, radius=1.0, iterations=2),
    "median": aggregators.median(F),
}


@functools.cache
def composed_and_apart(name, rule):
    pre = DEFINITIONS[name][0]
    composed = compose(pre, RULES[rule])
    assert isinstance(composed, LinearRule) == isinstance(RULES[rule], LinearRule)
    return fast_jit(lambda x: (composed(x), RULES[rule](pre(x))))


@each_mixing
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("bad", [None, np.nan, 1e38])
def test_composition_is_the_rule_on_the_mixtures(name, rule, bad):
    x = draw(kind=messages.normal)
    if bad is not None:
        x[1] = bad
    got, want = composed_and_apart(name, rule)(x)
    if rule == "mean" and bad == 1e38 and name in ("nnm", "bucketing"):
        got, want = got / 1e38, want / 1e38
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_nnm_then_caf_against_the_definitions():
    x = draw(kind=messages.alie)
    want = reference.caf(reference.nnm(x, F), F).mean
    np.testing.assert_allclose(jax.jit(compose(nnm(F), aggregators.caf(F)))(x), want, atol=1e-5)


def test_composition_reads_the_messages_twice():
    """One product for the Gram matrix and one to mix: no mixtures of the size of the messages."""
    wide = 10**6
    rule = jax.jit(compose(nnm(F), aggregators.caf(F)))
    lowered = rule.lower(jax.ShapeDtypeStruct((N, wide), jnp.float32)).compile()
    assert lowered.memory_analysis().temp_size_in_bytes < 0.5 * 4 * N * wide


@each_mixing
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_messages_that_are_not_finite(name, bad):
    """Their mixtures are NaN, which the next rule leaves out; the others are as if they were not there."""
    x = draw(kind=messages.normal)
    x[:2] = bad
    definition = DEFINITIONS[name][1]
    got = np.asarray(jitted(name)(x))
    if name == "bucketing":
        assert np.isnan(got).all(axis=1).sum() == 2
        got, want = np.sort(got[~np.isnan(got[:, 0])], axis=0), np.sort(x[2:], axis=0)
    else:
        assert np.isnan(got[:2]).all()
        got, want = got[2:], definition(x[2:], F - 2)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_bucket_leaves_out_what_is_not_finite():
    x = draw(kind=messages.normal)
    x[3] = np.nan
    got = np.asarray(fast_jit(bucketing(bucket_size=5, seed=0))(x))
    assert np.isfinite(got).all()


@pytest.mark.parametrize("radius", [1e-6, 1.0])
def test_clipping_a_huge_message(radius):
    x = draw(kind=messages.normal)
    x[0] = 1e38
    got, mean = fast_jit(
        lambda x: (clipping(radius=radius)(x), compose(clipping(radius=radius), aggregators.mean())(x))
    )(x)
    np.testing.assert_allclose(np.linalg.norm(np.asarray(got, np.float64), axis=1), radius, rtol=1e-5)
    np.testing.assert_allclose(mean, reference.clipped(x, radius).mean(0), atol=1e-5 * radius)


@each_mixing
def test_pytrees_and_dtypes(name):
    pre = DEFINITIONS[name][0]
    x = jnp.asarray(draw(kind=messages.normal), jnp.bfloat16)
    tree = {"a": x[:, :12].reshape(N, 3, 4), "b": x[:, 12:]}
    got, flat = fast_jit(lambda tree, x: (pre(tree), pre(x)))(tree, x)
    assert got["a"].dtype == jnp.bfloat16 and got["a"].shape == (N, 3, 4)
    joined = np.concatenate([np.asarray(leaf, np.float32).reshape(N, -1) for leaf in got.values()], axis=1)
    np.testing.assert_allclose(joined, np.asarray(flat, np.float32), rtol=1e-2)


@each_mixing
def test_vmap(name):
    pre = DEFINITIONS[name][0]
    x = np.stack([draw(seed) for seed in range(3)])
    got = fast_jit(jax.vmap(pre))(x)
    np.testing.assert_allclose(got, np.stack([jitted(name)(batch) for batch in x]), atol=1e-5)


def test_refuses_too_few_buckets():
    with pytest.raises(ValueError, match="num_byzantine = 3 of n = 5 workers"):
        compose(bucketing(bucket_size=2), aggregators.caf(F))(draw())
