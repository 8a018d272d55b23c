"""Attacks that keep to the protocol, but for their gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cafcor_jax import aggregators, attacks
from tests.compiling import compiled_quickly, fast_jit  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("compiled_quickly")

H, F, D = 6, 3, 4000
KEY = jax.random.key(0)
NAMES = [
    name for name, make in attacks.BY_NAME.items() if make.__module__.endswith("hidden")
]  # found by their module: a new one joins


@functools.cache
def compiled(name, factor=20.0):
    return fast_jit(attacks.BY_NAME[name](factor), static_argnums=2)


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
        "bias_sacrifice",
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


def test_a_sacrifice_is_one_of_them_and_the_rest_push(honest):
    got = np.asarray(sent("bias_sacrifice", honest), np.float64)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), [1e6, 20, 20], rtol=1e-4)
    np.testing.assert_allclose(got[1:], np.tile(20 * against(honest), (F - 1, 1)), rtol=1e-4, atol=1e-6)


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
        got = attacks.BY_NAME[name](7.0)(KEY, tree, f)
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
        assert np.isfinite(attacks.BY_NAME[name](7.0)(KEY, x, 2)).all()


def test_all_are_searched_but_the_one_whose_strength_is_known():
    assert set(NAMES) - attacks.SEARCHED == {"bias_cancel"} and attacks.SEARCHED < set(NAMES)


@pytest.mark.parametrize("name", sorted(attacks.SEARCHED))
def test_the_strength_is_searched_unless_given(name, honest):
    attack = attacks.BY_NAME[name]()
    assert attack.factor is None
    with pytest.raises(ValueError, match="only a federation has one"):
        attack(KEY, honest, F)
    # Whatever the strength, the messages are those of start + factor * direction.
    push = attack.push(KEY, jnp.asarray(honest), F, jnp.asarray(12))
    np.testing.assert_allclose(push.gradients(20.0), sent(name, honest, 12), rtol=1e-5, atol=1e-6)


# The search for the strength, against calls of the rule for very many strengths.

N, NUM_BAD = 12, 3
TAUS = np.concatenate([[0.0], np.geomspace(1e-2, 3e3, 300)]).astype(np.float32)


def noisy_messages(d=3000):
    """Messages [n, d] with noise as under SecLDP, and directions of a bias [f, d]."""
    rng = np.random.default_rng(3)
    noise = rng.normal(size=(N, d))
    x = 0.5 * np.sqrt(N) * (noise - noise.mean(0))
    g = rng.normal(size=d)
    g /= np.linalg.norm(g)
    x[: N - NUM_BAD] += g
    return x.astype(np.float32), np.tile(-0.5 * g, (NUM_BAD, 1)).astype(np.float32)


def components(rule, state, x, direction):
    """What the rule's aggregate has along the direction, for all TAUS."""
    unit = direction.sum(0) / np.linalg.norm(direction.sum(0))

    def component(tau):
        sent = jnp.asarray(x).at[-NUM_BAD:].add(tau * direction)
        stateful = isinstance(rule, aggregators.StatefulRule)
        return (rule.apply(state, sent)[0].aggregate if stateful else rule(sent)) @ unit

    return np.asarray(fast_jit(lambda taus: jax.lax.map(component, taus))(TAUS))


KNOWN = dict(momentum=0.5, sigma_ind=0.0, sigma_cor=0.5 * np.sqrt(3), clip_norm=1.0)


def history_of(x):
    """A rule with a memory of four rounds like this one; in the fifth it judges sums."""
    rule = aggregators.caf_history(NUM_BAD, **KNOWN)
    state = rule.init(jnp.asarray(x))
    apply = fast_jit(rule.apply)
    rng = np.random.default_rng(4)
    for _ in range(4):
        noise = rng.normal(size=x.shape)
        sent = 0.5 * np.sqrt(N) * (noise - noise.mean(0))
        state = apply(state, jnp.asarray(sent, jnp.float32))[1]
    return rule, state


@pytest.mark.parametrize("name", ["mean", "caf", "median", "aware", "history"])
def test_the_search_finds_the_push_that_gets_through(name):
    x, direction = noisy_messages()
    state = ()
    if name == "history":
        rule, state = history_of(x)
    elif name == "aware":
        rule = aggregators.caf_noise_aware_over_rounds(NUM_BAD, **KNOWN)
        state = rule.init(jnp.asarray(x))._replace(round=jnp.int32(20))
    else:
        rule = aggregators.BY_NAME[name](num_byzantine=NUM_BAD)
    got = fast_jit(functools.partial(attacks.best_push, rule))(state, jnp.asarray(x), jnp.asarray(direction))
    brute = components(rule, state, x, direction)
    at_zero = brute[0]
    best = brute.max()
    assert best > at_zero
    if name == "mean":  # it grows without bound: the largest that is tried, ten times the longest message
        longest = np.linalg.norm(x[:-NUM_BAD], axis=1).max() / np.linalg.norm(direction[0])
        np.testing.assert_allclose(got.factor, 10 * longest, rtol=1e-4)
    else:
        assert got.distance - at_zero >= 0.85 * (best - at_zero)
    # What is claimed is what the rule does with these messages.
    sent = jnp.asarray(x).at[-NUM_BAD:].add(got.factor * direction)
    stateful = name in ("aware", "history")
    aggregate = fast_jit(rule.apply)(state, sent)[0].aggregate if stateful else rule(sent)
    unit = direction.sum(0) / np.linalg.norm(direction.sum(0))
    np.testing.assert_allclose(got.distance, aggregate @ unit, rtol=1e-3, atol=1e-3)


def test_nothing_to_push_along():
    x, direction = noisy_messages(50)
    search = fast_jit(functools.partial(attacks.best_push, aggregators.caf(NUM_BAD), ()))
    got = search(jnp.asarray(x), jnp.zeros_like(direction))
    assert got.factor == 0 and got.distance == 0
