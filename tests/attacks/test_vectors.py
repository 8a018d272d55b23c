"""Attacks against their closed forms, and what every attack must do."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from cafcor_jax import attacks

H, F = 7, 3
KEY = jax.random.key(0)
# The adaptive ones need to know the rule, those that hide send gradients: they have tests of their own.
HIDDEN = [name for name in attacks.BY_NAME if name in {*attacks.SEARCHED, "bias_cancel"}]
NAMES = [name for name in attacks.BY_NAME if not name.endswith("_adaptive") and name not in HIDDEN]
each_attack = pytest.mark.parametrize("name", NAMES)

# The one message of all malicious workers, in float64.
CLOSED_FORMS = {
    "none": lambda x: x.mean(axis=0),
    "sign_flip": lambda x: -x.mean(axis=0),
    "foe": lambda x: -2 * x.mean(axis=0),
    "alie": lambda x: x.mean(axis=0) + 1.5 * x.std(axis=0, ddof=1),
    "label_flip": lambda x: x.mean(axis=0),  # of the gradients on flipped labels, which it is called with
    "mimic": lambda x: x[0],
    "inf": lambda x: np.full(x.shape[1:], np.inf),
    "nan": lambda x: np.full(x.shape[1:], np.nan),
    "zero": lambda x: np.zeros(x.shape[1:]),
    "min_max": lambda x: farthest(x, "min_max", "std"),
    "min_sum": lambda x: farthest(x, "min_sum", "std"),
}
DRAWN = {"gaussian"}
NOT_FINITE = {"inf", "nan"}


@functools.cache
def compiled(name, *options):
    return jax.jit(attacks.BY_NAME[name](*options), static_argnums=2)


def send(name, x, *options, key=KEY, f=F):
    """What the attack sends, compiled once for all tests that give it the same shapes."""
    return compiled(name, *([] if options == ("std",) else options))(key, x, f)


def unit_or_zero(v):
    return v / np.linalg.norm(v) if v.any() else v


DIRECTIONS = {
    "std": lambda x: -x.std(axis=0, ddof=1) if len(x) > 1 else np.zeros(x.shape[1]),
    "unit": lambda x: -unit_or_zero(x.mean(axis=0)),
    "sign": lambda x: -np.sign(x.mean(axis=0)),
}
each_direction = pytest.mark.parametrize("direction", list(DIRECTIONS))
each_search = pytest.mark.parametrize("name", ["min_max", "min_sum"])


def allowed(x, name, message):
    """The condition of Shejwalkar and Houmansadr, word for word: message [d], honest x [h, d]."""
    to_honest = ((message - x) ** 2).sum(axis=1)
    among = ((x[:, None] - x[None]) ** 2).sum(axis=2)
    if name == "min_max":
        return to_honest.max() <= among.max()
    return to_honest.sum() <= among.sum(axis=1).max()


def largest_gamma(x, name, p):
    """By bisection, to the last digit."""
    mean, low, high = x.mean(axis=0), 0.0, 1e-30
    if not p.any():
        return 0.0
    while allowed(x, name, mean + high * p):
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if allowed(x, name, mean + middle * p) else (low, middle)
    return low


def farthest(x, name, direction):
    p = DIRECTIONS[direction](x)
    return x.mean(axis=0) + largest_gamma(x, name, p) * p


def honest(shape=(40,), seed=0):
    return np.random.default_rng(seed).normal(1, 2, size=(H, *shape)).astype(np.float32)


def tree():
    return {"w": honest((3, 4)), "b": [honest((5,), 1), honest((), 2)]}


def test_the_table_is_complete():
    expected = "none sign_flip foe alie label_flip mimic gaussian inf nan zero min_max min_sum".split()
    assert list(attacks.BY_NAME) == [*expected, "alie_adaptive", "foe_adaptive", *HIDDEN]
    assert set(CLOSED_FORMS) | DRAWN == set(NAMES) == set(expected)


@pytest.mark.parametrize("name", list(CLOSED_FORMS))
def test_closed_form(name):
    x = honest()
    got = send(name, x)
    want = CLOSED_FORMS[name](x.astype(np.float64))
    np.testing.assert_allclose(got, np.tile(want, (F, 1)), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("factor", [0.0, -2.0, 10.0])
def test_alie_factor(factor):
    x = honest().astype(np.float64)
    want = x.mean(axis=0) + factor * x.std(axis=0, ddof=1)
    np.testing.assert_allclose(send("alie", honest(), factor)[0], want, rtol=1e-5, atol=1e-5)


def test_alie_without_a_factor_is_alie_with_1_5():
    x = honest()
    np.testing.assert_array_equal(send("alie", x, None), send("alie", x, 1.5))


@pytest.mark.parametrize("factor", [0.0, 1.0, -0.5, 10.0])
def test_foe_factor(factor):
    want = -factor * honest().astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(send("foe", honest(), factor)[0], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [np.inf, -np.inf, np.nan, 1e39])
@pytest.mark.parametrize("name", ["alie", "foe", "gaussian"])
def test_refuses_a_factor(name, factor):
    with pytest.raises(ValueError, match=re.escape(f"factor is {factor}; it must be finite")):
        attacks.BY_NAME[name](factor)


def test_gaussian_refuses_a_negative_factor():
    with pytest.raises(ValueError, match="factor is -1.0; it must be finite, from 0 to"):
        attacks.gaussian(-1.0)


def test_which_attacks_have_a_strength():
    """The flag --attack_factor finds them by the name of the option."""
    strong = [
        name for name, make in attacks.BY_NAME.items() if "factor" in inspect.signature(make).parameters
    ]
    assert strong == ["foe", "alie", "gaussian", *HIDDEN]


# Of n - f honest workers, s = floor(n/2 + 1) - f are beyond z_max: the quantiles are written out by hand.
@pytest.mark.parametrize(
    ("n", "f", "quantile", "rounded"),
    [
        (100, 5, 49 / 95, 0.04),
        (100, 10, 49 / 90, 0.11),
        (50, 24, 24 / 26, 1.43),
        (25, 11, 12 / 14, 1.07),
        (3, 1, 1 / 2, 0.0),
        (10, 1, 4 / 9, -0.14),
    ],
)
def test_alie_z_max(n, f, quantile, rounded):
    z = attacks.alie_z_max(n, f)
    assert z == pytest.approx(scipy.stats.norm.ppf(quantile), abs=1e-12)
    assert z == pytest.approx(rounded, abs=5e-3)


@pytest.mark.parametrize(("n", "f"), [(10, 0), (10, 5), (10, 11), (2, 1), (10, -1)])
def test_alie_z_max_refuses(n, f):
    with pytest.raises(ValueError, match=f"num_byzantine is {f}; .* num_workers = {n}"):
        attacks.alie_z_max(n, f)


@pytest.mark.parametrize("worker", range(H))
def test_mimic_copies_a_worker(worker):
    got = attacks.mimic(worker)(KEY, tree(), F)
    jax.tree.map(lambda ours, x: np.testing.assert_array_equal(ours, [x[worker]] * F), got, tree())


@pytest.mark.parametrize("worker", [-1, 1.0, True, "0", None])
def test_mimic_refuses_a_worker(worker):
    with pytest.raises(ValueError, match=re.escape(f"worker is {worker!r}; it must be a whole number")):
        attacks.mimic(worker)


def test_mimic_refuses_a_worker_that_is_not_there():
    with pytest.raises(
        ValueError, match=f"worker is {H}; it must be below the number of honest workers, {H}"
    ):
        attacks.mimic(H)(KEY, honest(), F)


@pytest.mark.parametrize("name", list(CLOSED_FORMS))
def test_one_honest_worker(name):
    x = honest()[:1]
    want = {"sign_flip": -x[0], "foe": -2 * x[0]}.get(name, x[0])
    want = {"zero": 0 * want, "inf": want + np.inf, "nan": want + np.nan}.get(name, want)
    np.testing.assert_allclose(send(name, x, f=2), np.stack([want, want]), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [("alie", ())] + [(name, (p,)) for name in ("min_max", "min_sum") for p in DIRECTIONS],
)
def test_where_the_honest_agree(name, options):
    x = np.full((H, 40), 0.1, np.float32)
    np.testing.assert_allclose(send(name, x, *options)[0], x[0], rtol=1e-6)


def test_alie_in_half_precision():
    """The squares are not taken in float16, where they overflow at 256."""
    x = jnp.asarray(300 * np.random.default_rng(0).normal(size=(H, 40)), jnp.float16)
    wide = np.asarray(x, np.float64)
    np.testing.assert_allclose(send("alie", x)[0], CLOSED_FORMS["alie"](wide), rtol=3e-3, atol=0.5)


@pytest.mark.parametrize(
    ("name", "dtype"), [("min_max", jnp.float16), ("min_sum", jnp.float16), ("min_max", jnp.bfloat16)]
)
def test_search_in_half_precision(name, dtype):
    x = jnp.asarray(300 * honest(), dtype)
    want = farthest(np.asarray(x, np.float64), name, "std")
    got = np.asarray(send(name, x, "std")[0], np.float64)
    # One rounding of the message, none before.
    np.testing.assert_allclose(got, want, rtol=float(jnp.finfo(dtype).eps), atol=1e-3)


def spread(kind, d):
    """Honest messages [h, d] of several shapes."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(H, d))
    if kind == "one outlier":
        x[2] *= 30
    elif kind == "two camps":
        x[: H // 2] += 3
    elif kind == "uneven coordinates":
        x *= np.geomspace(1e-4, 1e2, d)
    elif kind == "skewed":
        x = np.exp(2 * x)
    elif kind == "many who agree":
        x[1:-1] = x[0]
    return x.astype(np.float32)


@each_search
@each_direction
@pytest.mark.parametrize(
    "kind", ["normal", "one outlier", "two camps", "uneven coordinates", "skewed", "many who agree"]
)
def test_search_against_bisection(name, direction, kind):
    """Gamma to 1e-4, and a hundredth more of it breaks the condition."""
    x = spread(kind, 40).astype(np.float64)
    p, mean = DIRECTIONS[direction](x), x.mean(axis=0)
    message = np.asarray(send(name, spread(kind, 40), direction)[-1], np.float64)
    gamma = (message - mean) @ p / (p @ p)
    np.testing.assert_allclose(message, mean + gamma * p, atol=1e-5 * np.abs(message).max())
    assert gamma == pytest.approx(largest_gamma(x, name, p), rel=1e-4)
    assert allowed(x, name, mean + gamma / 1.0001 * p)
    assert not allowed(x, name, mean + 1.01 * gamma * p)


@pytest.mark.parametrize(("name", "direction"), [("min_max", "std"), ("min_sum", "unit")])
def test_search_over_a_wide_leaf(name, direction):
    """Wide enough for the products in float32."""
    x = np.random.default_rng(3).normal(0.1, 1, size=(4, 70_000)).astype(np.float32)
    wide = x.astype(np.float64)
    p, mean = DIRECTIONS[direction](wide), wide.mean(axis=0)
    message = np.asarray(send(name, x, direction)[0], np.float64)
    gamma = (message - mean) @ p / (p @ p)
    assert allowed(wide, name, mean + gamma / 1.0001 * p)
    assert not allowed(wide, name, mean + gamma * 1.0001 * p)


@each_search
@each_direction
def test_search_far_from_the_origin(name, direction):
    """The messages drown in their mean; the inner products about the origin would have lost them."""
    x = (100 + 0.01 * np.random.default_rng(5).normal(size=(H, 40))).astype(np.float32)
    wide = x.astype(np.float64)
    p, mean = DIRECTIONS[direction](wide), wide.mean(axis=0)
    message = np.asarray(send(name, x, direction)[0], np.float64)
    # float32 has steps of 8e-6 at 100, a thousandth of the spread.
    assert (message - mean) @ p / (p @ p) == pytest.approx(largest_gamma(wide, name, p), rel=2e-3)


@each_search
def test_the_usual_direction_is_std(name):
    parameters = inspect.signature(attacks.BY_NAME[name]).parameters
    assert [(p.name, p.default) for p in parameters.values()] == [("direction", "std")]


@each_direction
def test_min_sum_is_as_far_as_the_farthest(direction):
    x = honest().astype(np.float64)
    got = send("min_sum", honest(), direction)[0]
    radius = np.linalg.norm(x - x.mean(axis=0), axis=1).max()
    assert np.linalg.norm(got - x.mean(axis=0)) == pytest.approx(radius, rel=1e-5)


@pytest.mark.parametrize(("name", "direction"), [("min_max", "sign"), ("min_sum", "unit")])
def test_no_direction(name, direction):
    """The honest mean is 0 exactly, and so is what is sent."""
    x = np.array([[1.0, -2.0], [-1.0, 2.0]], np.float32)
    np.testing.assert_array_equal(send(name, x, direction, f=1), np.zeros((1, 2)))


@each_search
@pytest.mark.parametrize("direction", ["mean", "", None, 1])
def test_search_refuses_a_direction(name, direction):
    with pytest.raises(ValueError, match=f"direction is {direction!r}; it must be one of std, unit, sign"):
        attacks.BY_NAME[name](direction)


def chi_square_score(draws, scale):
    """How many standard deviations the sum of squares is from that of N(0, scale^2)."""
    count = draws.size
    return (np.sum((np.asarray(draws, np.float64) / scale) ** 2) - count) / np.sqrt(2 * count)


@pytest.mark.parametrize("scale", [200.0, 0.3])
def test_gaussian_law(scale):
    got = np.asarray(attacks.gaussian(scale)(KEY, honest((10_000,)), 6))
    assert attacks.gaussian(200.0)(KEY, honest(), 1).tolist() == attacks.gaussian()(KEY, honest(), 1).tolist()
    assert abs(chi_square_score(got, scale)) < 6
    assert chi_square_score(got, 0.95 * scale) > 6
    assert chi_square_score(got, 1.05 * scale) < -6
    # Not only the variance: uniform numbers of the same variance are refused.
    assert scipy.stats.kstest(got.ravel() / scale, "norm").pvalue > 1e-6
    uniform = np.random.default_rng(0).uniform(-np.sqrt(3), np.sqrt(3), got.size)
    assert scipy.stats.kstest(uniform, "norm").pvalue < 1e-6


def test_gaussian_rows_leaves_and_keys_are_independent():
    honest_leaves = [honest((10_000,)), honest((100, 100))]
    rows = [
        np.asarray(leaf, np.float64).reshape(3, -1)
        for key in (KEY, jax.random.key(1))
        for leaf in attacks.gaussian()(key, honest_leaves, 3)
    ]
    correlations = np.corrcoef(np.concatenate(rows))
    assert np.abs(correlations - np.eye(12)).max() < 6 / np.sqrt(10_000)
    repeated = np.corrcoef(np.concatenate([rows[0], rows[0]]))
    assert np.abs(repeated - np.eye(6)).max() > 0.99


def test_gaussian_of_the_honest_messages_takes_the_shapes_alone():
    a, b = (attacks.gaussian()(KEY, x, F) for x in (honest(), honest(seed=1)))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["foe", "alie", "min_max", "min_sum"])
@pytest.mark.parametrize("scale", [1e-25, 1e25, 1e36])
def test_tiny_and_huge_messages(name, scale):
    """Squares that float32 has no room for."""
    x = (scale * honest().astype(np.float64)).astype(np.float32)
    want = CLOSED_FORMS[name](x.astype(np.float64))
    np.testing.assert_allclose(send(name, x)[0], want, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("name", sorted(set(NAMES) - NOT_FINITE))
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_finite_at_the_end_of_the_range(name, dtype):
    largest = 0.9 * float(jnp.finfo(dtype).max)
    x = jnp.asarray(np.random.default_rng(0).choice([-largest, largest], size=(H, 40)), dtype)
    assert np.isfinite(np.asarray(send(name, x), np.float64)).all()


def test_a_message_beyond_the_range_is_the_largest():
    x = jnp.full((2, 3), 40_000, jnp.float16)
    np.testing.assert_array_equal(attacks.foe()(KEY, x, 1), np.full((1, 3), np.finfo(np.float16).min))


@each_attack
@pytest.mark.parametrize("f", [0, F])
def test_shapes_and_structure(name, f):
    halves = [jnp.asarray(honest((6,)), dtype) for dtype in (jnp.float16, jnp.bfloat16)]
    t = {**tree(), "halves": halves}
    got = jax.eval_shape(lambda x: attacks.BY_NAME[name]()(KEY, x, f), t)
    assert jax.tree.structure(got) == jax.tree.structure(t)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(t), strict=True):
        assert ours.shape == (f, *theirs.shape[1:])
        assert ours.dtype == theirs.dtype


@each_attack
def test_finite(name):
    assert all(
        np.isfinite(leaf).all() != (name in NOT_FINITE) for leaf in jax.tree.leaves(send(name, tree()))
    )


@pytest.mark.parametrize("name", list(CLOSED_FORMS))
def test_a_pytree_is_its_columns(name):
    t = tree()
    flat = np.concatenate([leaf.reshape(H, -1) for leaf in jax.tree.leaves(t)], axis=1)
    got = [leaf.reshape(F, -1) for leaf in jax.tree.leaves(send(name, t))]
    want = np.tile(CLOSED_FORMS[name](flat.astype(np.float64)), (F, 1))
    np.testing.assert_allclose(np.concatenate(got, axis=1), want, rtol=1e-5, atol=3e-6)


@each_attack
def test_deterministic_in_the_key(name):
    first, again, other = (send(name, honest(), key=key) for key in (KEY, KEY, jax.random.key(1)))
    np.testing.assert_array_equal(first, again)
    assert np.array_equal(first, other, equal_nan=True) == (name not in DRAWN)


@each_attack
def test_in_a_scan(name):
    attack = attacks.BY_NAME[name]()
    keys = jax.random.split(KEY, 2)
    x = np.stack([honest(), honest(seed=1)])
    _, got = jax.jit(lambda: jax.lax.scan(lambda c, now: (c, attack(now[0], now[1], F)), 0, (keys, x)))()
    for i in range(2):
        np.testing.assert_allclose(got[i], send(name, x[i], key=keys[i]), rtol=1e-5, atol=3e-6)


@each_attack
def test_float64(name):
    x = np.random.default_rng(0).normal(size=(H, 10))
    with jax.enable_x64(True):
        got = jax.jit(attacks.BY_NAME[name](), static_argnums=2)(KEY, jnp.asarray(x), F)
        assert got.dtype == jnp.float64
        if name in CLOSED_FORMS:
            np.testing.assert_allclose(got[0], CLOSED_FORMS[name](x), rtol=1e-12, atol=1e-13)


@each_attack
def test_vmap_over_seeds(name):
    attack = attacks.BY_NAME[name]()
    keys = jax.random.split(KEY, 2)
    x = np.stack([honest(), honest(seed=1)])
    one = functools.partial(attack, num_byzantine=F)
    for batch in (jax.jit(jax.vmap(one)), jax.vmap(jax.jit(one))):
        got = batch(keys, x)
        for i in range(2):
            np.testing.assert_allclose(got[i], send(name, x[i], key=keys[i]), rtol=1e-5, atol=3e-6)


@each_attack
@pytest.mark.parametrize(
    ("updates", "message"),
    [({}, "no arrays"), (jnp.zeros((3, 2), jnp.int32), "int32"), (jnp.zeros((0, 2)), "0 workers")],
)
def test_refuses_updates(name, updates, message):
    with pytest.raises(ValueError, match=message):
        attacks.BY_NAME[name]()(KEY, updates, F)
