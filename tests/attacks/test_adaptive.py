"""Adaptive attacks: the search against brute force, Gram space against the rules themselves."""

import dataclasses
import functools
import inspect
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cafcor_jax import aggregators, attacks
from cafcor_jax.attacks import adaptive, vectors
from cafcor_jax.attacks.adaptive import DIRECT, IN_GRAM_SPACE, LineSearch
from tests.compiling import fast_jit

H, F, D = 9, 2, 60
KEY = jax.random.key(0)

ATTACKS = {
    name: (make, functools.partial(adaptive.best_factor, name))
    for name, make in (("alie", adaptive.alie_adaptive), ("foe", adaptive.foe_adaptive))
}
FIXED = {"alie": (1.5,), "foe": (1.0, 2.0)}
each_attack = pytest.mark.parametrize("name", list(ATTACKS))

PRE = aggregators.mixing.BY_NAME
RULES = {name: make(num_byzantine=F) for name, make in aggregators.BY_NAME.items()} | {
    f"{pre}+{rule}": aggregators.compose(PRE[pre](F), aggregators.BY_NAME[rule](num_byzantine=F))
    for pre, rule in [
        ("nnm", "caf"),
        ("nnm", "median"),
        ("arc", "geometric_median"),
        ("bucketing", "krum"),
        ("clipping", "mean"),
        ("clipping", "trimmed_mean"),
    ]
}

# Both kinds of rules, and every pre-aggregation, with one attack each.
SEARCHED = [
    ("caf", "alie"),
    ("multi_krum", "alie"),
    ("centered_clipping", "foe"),
    ("median", "foe"),
    ("trimmed_mean", "alie"),
    ("nnm+caf", "alie"),
    ("nnm+median", "alie"),
    ("arc+geometric_median", "foe"),
    ("bucketing+krum", "alie"),
    ("clipping+mean", "foe"),
]
both_ways = pytest.mark.parametrize(("rule", "name"), [("caf", "alie"), ("median", "foe")])


def messages(kind="normal", seed=0, shape=(D,)):
    """Honest messages [h, ...]."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(H, *shape))
    if kind == "normal":
        x = 1 + 2 * x
    elif kind == "noise":  # the mean drowns, as under local noise
        x = 0.01 + 300 * x
    elif kind == "two camps":
        x[: H // 3] += 4
        x += 1
    elif kind == "uneven":
        x = (0.5 + x) * np.geomspace(1e-3, 1e2, x[0].size).reshape(shape)
    return x.astype(np.float32)


def tree():
    return {"w": messages(shape=(3, 4)), "b": [messages(seed=1, shape=(5,)), messages(seed=2, shape=())]}


def line(name, x):
    """Start and direction of the messages start + tau * p, in float64."""
    x = np.asarray(x, np.float64)
    mean = x.mean(axis=0)
    if name == "foe":
        return 0 * mean, -mean
    return mean, x.std(axis=0, ddof=1)


def unit_of_search(name, x):
    x = np.asarray(x, np.float64)
    radius = np.linalg.norm(x - x.mean(axis=0), axis=1).max()
    return max(1.0, radius / np.linalg.norm(line(name, x)[1]))


def searching(rule, name, f=F, search=None):
    """honest -> what is chosen and what is sent, compiled, as NumPy's."""

    def both(x):  # as the public functions do, with one search for the two
        chosen, message = adaptive._best(adaptive._FAMILIES[name], rule, x, f, search)
        return chosen, vectors.repeat(message, f)

    run = fast_jit(both)
    return lambda x: jax.tree.map(lambda leaf: np.asarray(leaf)[()], run(x))


@functools.cache
def search_for(rule, name):
    return searching(RULES[rule], name)


@functools.cache
def aggregates(rule_name):
    """Messages of many rounds [k, n, d] -> their aggregates [k, d], in float64, by the rule itself."""
    rule = RULES[rule_name]
    if not isinstance(rule, aggregators.LinearRule):
        call = fast_jit(functools.partial(jax.lax.map, rule))
        return lambda rounds: np.asarray(call(jnp.asarray(rounds)))
    weigh = fast_jit(functools.partial(jax.lax.map, rule.weigh))

    def of_linear(rounds):
        weights = np.asarray(weigh(jnp.asarray(rounds @ rounds.transpose(0, 2, 1))))
        return np.einsum("kn,knd->kd", weights, rounds)

    return of_linear


def distances(rule, name, x, taus):
    """D(tau) from its definition, in float64."""
    x = np.asarray(x, np.float64)
    start, p = line(name, x)
    sent = start + np.asarray(taus, np.float64)[:, None] * p
    k = len(taus)
    rounds = np.concatenate([np.broadcast_to(x, (k, *x.shape)), np.repeat(sent[:, None], F, axis=1)], axis=1)
    with jax.enable_x64(True):
        return np.linalg.norm(aggregates(rule)(rounds) - x.mean(axis=0), axis=1)


def test_the_rules_take_both_ways():
    direct = [name for name, rule in RULES.items() if not isinstance(rule, aggregators.LinearRule)]
    assert direct == ["median", "trimmed_mean", "meamed", "nnm+median", "clipping+trimmed_mean"]
    assert {rule for rule, _ in SEARCHED} <= set(RULES)


@pytest.mark.parametrize(("rule", "name"), SEARCHED)
def test_against_brute_force(rule, name):
    """The distance is the true one, not below that of the fixed attacks, and nearly the largest there is."""
    grid = np.geomspace(1e-3, 1e2, 2000)
    for kind in ["normal", "noise", "two camps", "uneven"]:
        x = messages(kind)
        found, _ = search_for(rule, name)(x)
        fixed = [*FIXED[name], *FIXED[name]][:2]
        taus = np.array([found.factor, *fixed, *(grid * unit_of_search(name, x))])
        at_found, *others = distances(rule, name, x, taus)
        rounding = 1e-6 * float(np.linalg.norm(x - x.mean(axis=0)))  # where the attack has no effect at all
        assert found.distance == pytest.approx(at_found, rel=1e-4, abs=rounding), kind
        assert found.distance >= max(others[:2]) * (1 - 1e-5), kind
        assert found.distance >= 0.98 * max(others), kind


@each_attack
def test_against_the_mean_the_largest_factor(name):
    """f/n (offset + tau) ||p||, which grows with tau."""
    offset = 1 if name == "foe" else 0
    search = search_for("mean", name)
    for kind in ["normal", "noise"]:
        x = messages(kind)
        found, _ = search(x)
        assert found.factor == pytest.approx(100 * unit_of_search(name, x), rel=1e-4)
        length = np.linalg.norm(line(name, x)[1])
        assert found.distance == pytest.approx(F / (H + F) * (offset + found.factor) * length, rel=1e-4)


def test_a_mean_that_is_tiny_beside_the_noise():
    """Its square is too small for float32, and so is its product with a message."""
    x = messages("noise")
    x[1], x[2:] = -x[0], 0
    x[:, -1] = 1e-23
    found, sent = search_for("mean", "foe")(x)
    radius = np.linalg.norm(x.astype(np.float64), axis=1).max()
    np.testing.assert_allclose(sent[:, -1], -100 * radius, rtol=1e-4)
    assert found.distance == pytest.approx(F / (H + F) * 100 * radius, rel=1e-4)


@pytest.mark.parametrize(
    ("rule", "least"),
    [
        # Of 0, 1, 2, 3 and z the middle one is 2 from z = 2 on.
        (aggregators.median(1), 2.0),
        # Without the smallest and the largest, the mean is (1 + 2 + 3) / 3 = 2 from z = 3 on.
        (aggregators.trimmed_mean(1), 3.0),
    ],
)
def test_a_plateau_by_hand(rule, least):
    """The mean is 1.5. Of equally good factors it is the smallest, to the resolution of the search."""
    found, _ = searching(rule, "alie", f=1)(jnp.array([[0.0], [1.0], [2.0], [3.0]]))
    assert found.distance == pytest.approx(0.5, rel=1e-6)
    factor = (least - 1.5) / np.sqrt(5 / 3)
    assert factor * (1 - 1e-5) <= found.factor <= 1.03 * factor


def test_caf_does_not_see_a_little_in_much_noise():
    """The fixed factor is filtered out; the searched one moves the aggregate by f/n tau ||p||."""
    n, f, d = 40, 2, 3000
    x = np.random.default_rng(0).normal(0.001, 5, size=(n - f, d)).astype(np.float32)
    rule = aggregators.caf(f)
    found, _ = searching(rule, "alie", f)(x)
    start, p = line("alie", x)
    weigh = fast_jit(rule.weigh)

    def distance(tau):
        rows = np.concatenate([x.astype(np.float64), np.tile(start + tau * p, (f, 1))])
        with jax.enable_x64(True):
            return np.linalg.norm(np.asarray(weigh(jnp.asarray(rows @ rows.T))) @ rows - start)

    assert found.distance == pytest.approx(distance(found.factor), rel=1e-4)
    assert found.distance == pytest.approx(f / n * found.factor * np.linalg.norm(p), rel=0.05)
    assert found.distance > 10 * distance(1.5)
    assert distance(1.05 * found.factor) < found.distance


def test_gram_space_and_direct_calls_agree():
    """A rule and a pre-aggregation that need lengths, and a function that is not known to be linear."""
    rule = RULES["arc+geometric_median"]
    in_gram_space = search_for("arc+geometric_median", "foe")
    direct = searching(lambda updates: rule(updates), "foe", search=IN_GRAM_SPACE)
    for kind in ["normal", "two camps"]:
        (a, _), (b, _) = (search(messages(kind, seed=3)) for search in (in_gram_space, direct))
        assert a.distance == pytest.approx(b.distance, rel=1e-4)
        assert a.factor == pytest.approx(b.factor, rel=1e-2)


def test_a_rule_with_its_own_inner_products_is_called():
    """Nothing is known of what such a rule sees."""
    rule = aggregators.LinearRule(
        lambda products: jnp.where(jnp.diagonal(products) < 1, 1.0, 0.0),
        0,
        inner_products=lambda updates: jnp.diag((updates[:, 0] > 2).astype(float)),
    )
    found, _ = searching(rule, "alie", f=1)(jnp.array([[0.0], [1.0]]))
    # The messages up to 2 are summed up: 0 + 1 + 2 - 0.5 at the most.
    assert 2.45 < found.distance <= 2.5


def test_wide_leaves():
    """Wide enough for products in float32, and a small leaf beside it."""
    rng = np.random.default_rng(5)
    x = {"w": rng.normal(0.1, 1, size=(4, 70_000)), "b": rng.normal(3, 1, size=(4, 2, 3))}
    x = jax.tree.map(lambda leaf: leaf.astype(np.float32), x)
    flat = np.concatenate([leaf.reshape(4, -1) for leaf in jax.tree.leaves(x)], axis=1).astype(np.float64)
    found, sent = searching(aggregators.multi_krum(1), "foe", f=1)(x)
    rounds = np.concatenate([flat, [-np.float64(found.factor) * flat.mean(axis=0)]])
    with jax.enable_x64(True):
        weights = aggregators.multi_krum(1).weigh(jnp.asarray(rounds @ rounds.T))
    want = np.linalg.norm(np.asarray(weights) @ rounds - flat.mean(axis=0))
    assert found.distance == pytest.approx(want, rel=1e-4)
    for key, leaf in sent.items():
        np.testing.assert_allclose(leaf[0], -found.factor * x[key].mean(axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", ["caf", "nnm+caf", "trimmed_mean"])
def test_far_from_the_origin(rule):
    """The messages drown in their mean."""
    x = (100 + 0.01 * np.random.default_rng(5).normal(size=(H, D))).astype(np.float32)
    found, _ = search_for(rule, "alie")(x)
    # float32 has steps of 8e-6 at 100, a thousandth of the spread.
    best = distances(rule, "alie", x, np.geomspace(1e-3, 1e2, 2003)).max()
    assert found.distance == pytest.approx(best, rel=0.02)


def two_peaks(tau):
    """Up to 1.5 at 0.5, then a jump; and a broad peak of 1 at 30."""
    return jnp.where(tau <= 0.5, 3 * tau, 1 / (1 + jnp.log(tau / 30) ** 2))


def test_the_higher_of_two_peaks():
    """The grid sees less of the higher one, which ends with a jump."""
    x = jnp.array([[-1.0], [1.0]]) / np.sqrt(2)  # mean 0, standard deviation 1

    def rule(updates):
        return two_peaks(jnp.maximum(updates[-1], 1e-6))

    assert max(two_peaks(tau) for tau in DIRECT.grid() if tau <= 0.5) < 0.97
    found, _ = searching(rule, "alie", f=1)(x)
    assert 0.98 * 0.5 <= found.factor <= 0.5
    assert found.distance == pytest.approx(3 * found.factor, rel=1e-4)
    one_peak = LineSearch(smallest=1e-2, per_decade=4, zooms=6, peaks=1, others=0)
    found, _ = searching(rule, "alie", f=1, search=one_peak)(x)
    assert found.factor == pytest.approx(30, rel=0.1)


def test_distances_that_are_not_finite_are_skipped():
    x = jnp.array([[-1.0], [1.0]]) / np.sqrt(2)

    def rule(updates):
        z = updates[-1]
        return jnp.where(z > 7, jnp.nan, jnp.where(z > 5, jnp.inf, z))

    found, _ = searching(rule, "alie", f=1)(x)
    assert 0.98 * 5 <= found.factor <= 5


def test_where_no_distance_is_finite_the_attack_is_the_fixed_one():
    found, sent = searching(lambda updates: updates[0] * jnp.nan, "foe")(jnp.array([[1.0], [2.0]]))
    assert found.factor == 2
    assert np.isnan(found.distance)
    np.testing.assert_array_equal(sent, np.full((F, 1), -3.0))


def test_the_message_is_that_of_the_factor():
    """What the fixed attack sends with this factor, on pytrees."""
    x = tree()
    found, got = search_for("trimmed_mean", "alie")(x)
    assert float(found.factor) not in FIXED["alie"]
    want = fast_jit(vectors.alie(float(found.factor)), static_argnums=2)(KEY, x, F)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), got, want)
    # A pytree is its columns.
    flat = np.concatenate([leaf.reshape(H, -1) for leaf in jax.tree.leaves(x)], axis=1)
    distance = distances("trimmed_mean", "alie", flat, [found.factor])[0]
    assert found.distance == pytest.approx(distance, rel=1e-4)


@pytest.mark.parametrize("rule", ["caf", "median"])
@each_attack
@pytest.mark.parametrize("f", [0, F])
def test_shapes_and_structure(rule, name, f):
    halves = [jnp.asarray(messages(shape=(6,)), dtype) for dtype in (jnp.float16, jnp.bfloat16)]
    t = {**tree(), "halves": halves}
    got = jax.eval_shape(lambda x: ATTACKS[name][0](RULES[rule])(KEY, x, f), t)
    assert jax.tree.structure(got) == jax.tree.structure(t)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(t), strict=True):
        assert ours.shape == (f, *theirs.shape[1:])
        assert ours.dtype == theirs.dtype


@pytest.mark.parametrize(
    ("rule", "name", "dtype"), [("caf", "alie", jnp.bfloat16), ("median", "foe", jnp.float16)]
)
def test_half_precision(rule, name, dtype):
    """Squares of 300 are beyond float16; nothing is rounded but the message. And at the end of the range."""
    x = jnp.asarray(300 * messages(), dtype)
    found, got = search_for(rule, name)(x)
    start, p = line(name, np.asarray(x, np.float64))
    eps = float(jnp.finfo(dtype).eps)
    want = np.clip(start + float(found.factor) * p, float(jnp.finfo(dtype).min), float(jnp.finfo(dtype).max))
    np.testing.assert_allclose(np.asarray(got, np.float64), np.tile(want, (F, 1)), rtol=eps, atol=1e-3)
    assert found.factor.dtype == found.distance.dtype == jnp.float32
    check_at_the_end_of_the_range(rule, name, dtype)


def check_at_the_end_of_the_range(rule, name, dtype):
    largest = 0.9 * float(jnp.finfo(dtype).max)
    x = jnp.asarray(np.random.default_rng(0).choice([-largest, largest], size=(H, D)), dtype)
    got = np.asarray(search_for(rule, name)(x)[1], np.float64)
    assert np.isfinite(got).all()
    assert np.abs(got).max() > 0.1 * largest


@both_ways
def test_finite_at_the_end_of_the_range(rule, name):
    check_at_the_end_of_the_range(rule, name, jnp.float32)


def test_finite_where_the_deviation_is_not():
    """Of two messages at the two ends of the range the standard deviation is beyond it."""
    largest = float(jnp.finfo(jnp.float32).max)
    x = jnp.array([[largest, 1.0], [-largest, 1.0]], jnp.float32)
    assert np.isfinite(searching(aggregators.caf(1), "alie", f=1)(x)[1]).all()


@both_ways
def test_tiny_and_huge_messages(rule, name):
    """Squares that float32 has no room for: the factor is the same as at any other length."""
    x = messages().astype(np.float64)
    want, _ = search_for(rule, name)(x.astype(np.float32))
    for scale in (2.0**-83, 2.0**83, 2.0**118):
        found, sent = search_for(rule, name)((scale * x).astype(np.float32))
        assert np.isfinite(sent).all()
        assert found.distance == pytest.approx(scale * float(want.distance), rel=1e-4)
        assert found.factor == pytest.approx(want.factor, rel=1e-2)


@both_ways
def test_nothing_to_search(rule, name):
    """No direction: equal messages for ALIE, a mean of 0 for FOE. The mean is sent."""
    x = messages()
    if name == "alie":
        x[:] = 0.125
    else:
        x[1], x[2:] = -x[0], 0
    found, sent = search_for(rule, name)(x)
    assert found.factor == 0
    np.testing.assert_allclose(sent, np.tile(x.mean(axis=0), (F, 1)), rtol=1e-6, atol=1e-7)


@each_attack
def test_one_honest_worker(name):
    """The deviation is 0, and ALIE sends the mean; the unit of the search is 1 for FOE."""
    x = messages()[:1]
    _, sent = searching(aggregators.mean(), name, f=1)(x)
    np.testing.assert_allclose(sent, {"alie": x, "foe": -100 * x}[name], rtol=1e-5)


@both_ways
def test_jit_scan_and_vmap(rule, name):
    """The key is not used."""
    one = functools.partial(ATTACKS[name][0](RULES[rule]), num_byzantine=F)
    x = np.stack([messages(), messages(seed=1), messages()])
    keys = jax.random.split(KEY, 3)
    want = np.stack([search_for(rule, name)(rows)[1] for rows in x])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    got = jax.vmap(fast_jit(one))(keys, x)
    close(got, want)
    np.testing.assert_array_equal(got[0], got[2])
    if rule == "median":
        return  # a scan over calls of the rule is what the search is made of

    def step(carry, now):
        return carry, jax.vmap(one)(*now)

    close(fast_jit(lambda: jax.lax.scan(step, 0, (keys[None], x[None])))()[1][0], want)


@each_attack
def test_the_public_functions_agree(name):
    """The examples in the docstrings run them without `jit`."""
    make, best = ATTACKS[name]
    x = messages()
    want = search_for("mean", name)(x)
    got = fast_jit(lambda x: (best(RULES["mean"], x, F), make(RULES["mean"])(KEY, x, F)))(x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, want)


def test_float64():
    x = np.random.default_rng(0).normal(1, 1, size=(H, 10))
    with jax.enable_x64(True):
        found, sent = searching(RULES["caf"], "alie")(jnp.asarray(x))
        assert sent.dtype == found.factor.dtype == jnp.float64
        start, p = line("alie", x)
        np.testing.assert_allclose(sent[0], start + float(found.factor) * p, rtol=1e-12)
        assert found.distance == pytest.approx(distances("caf", "alie", x, [found.factor])[0], rel=1e-9)


@each_attack
@pytest.mark.parametrize("aggregator", [None, "caf", 3])
def test_refuses_an_aggregator(name, aggregator):
    make, best = ATTACKS[name]
    match = re.escape(f"aggregator is {aggregator!r}; an adaptive attack needs the rule of the server")
    with pytest.raises(ValueError, match=match):
        make(aggregator)
    with pytest.raises(ValueError, match=match):
        best(aggregator, messages(), F)


def test_refuses_a_family():
    with pytest.raises(ValueError, match="family is 'mimic'; it must be one of alie, foe"):
        adaptive.best_factor("mimic", RULES["mean"], messages(), F)


@each_attack
def test_signature(name):
    make, _ = ATTACKS[name]
    assert list(inspect.signature(make).parameters) == ["aggregator", "search"]
    with pytest.raises(ValueError, match="aggregator is None"):
        make()


@both_ways
@pytest.mark.parametrize(
    ("updates", "message"),
    [({}, "no arrays"), (jnp.zeros((3, 2), jnp.int32), "int32"), (jnp.zeros((0, 2)), "0 workers")],
)
def test_refuses_updates(rule, name, updates, message):
    with pytest.raises(ValueError, match=message):
        ATTACKS[name][0](RULES[rule])(KEY, updates, F)


@pytest.mark.parametrize("rule", ["caf", "median"])
def test_refuses_what_the_rule_refuses(rule):
    attack = adaptive.alie_adaptive(RULES[rule])
    with pytest.raises(ValueError, match="num_byzantine = 2 of n = 4 workers: fewer than half"):
        jax.eval_shape(lambda x: attack(KEY, x, 2), messages()[:2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"smallest": 0.0}, "smallest is 0.0 and largest is 100.0"),
        ({"smallest": 2.0, "largest": 1.0}, "smallest is 2.0 and largest is 1.0"),
        ({"largest": np.inf}, "largest is inf"),
        ({"smallest": np.nan}, "smallest is nan"),
        ({"per_decade": 0}, "per_decade is 0; it must be a whole number of at least 1"),
        ({"zooms": -1}, "zooms is -1; it must be a whole number of at least 0"),
        ({"zooms": 1.0}, "zooms is 1.0; it must be a whole number"),
        ({"peaks": True}, "peaks is True; it must be a whole number of at least 1"),
        ({"others": -1}, "others is -1; it must be a whole number of at least 0"),
    ],
)
def test_refuses_a_search(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LineSearch(**options)


def test_a_sample_of_coordinates_finds_nearly_the_best():
    """The distance is that of all coordinates, and no smaller than that of the fixed attack."""
    x = {"a": messages(shape=(90, 100)), "b": messages(seed=1, shape=(77,))}
    rule = aggregators.trimmed_mean(F)

    def best(coordinates):
        search = dataclasses.replace(DIRECT, coordinates=coordinates)
        return fast_jit(lambda x: attacks.best_factor("alie", rule, x, F, search=search))(x)

    exact, sampled = best(10**6), best(500)
    assert 0.99 * exact.distance <= sampled.distance <= exact.distance * (1 + 1e-6)
    assert sampled.factor != exact.factor
    bad = attacks.alie(float(sampled.factor))(jax.random.key(0), x, F)
    out = rule(jax.tree.map(lambda h, z: jnp.concatenate([h, z]), x, bad))
    moved = jax.tree.map(lambda a, h: jnp.sum((a - h.mean(0)) ** 2), out, x)
    np.testing.assert_allclose(sampled.distance, math.sqrt(sum(jax.tree.leaves(moved))), rtol=1e-4)
    # On one coordinate the search knows nothing, and the fixed attack is still there.
    one = best(1)
    fixed = attacks.alie(1.5)(jax.random.key(0), x, F)
    out = rule(jax.tree.map(lambda h, z: jnp.concatenate([h, z]), x, fixed))
    moved = jax.tree.map(lambda a, h: jnp.sum((a - h.mean(0)) ** 2), out, x)
    assert one.distance >= math.sqrt(sum(jax.tree.leaves(moved))) * (1 - 1e-4)


def test_grids():
    grid = IN_GRAM_SPACE.grid()
    assert len(grid) == 126
    assert grid[0] == pytest.approx(1e-3)
    assert grid[-1] == pytest.approx(1e2)
    np.testing.assert_allclose(grid[1:] / grid[:-1], 10 ** (1 / 25))
    assert len(DIRECT.grid()) == 17


@each_attack
def test_a_rule_is_called_as_often_as_the_search_says(name):
    calls = []

    def rule(updates):
        jax.debug.callback(lambda: calls.append(1))
        return updates.mean(0)

    search = LineSearch(smallest=0.1, largest=1.0, per_decade=3, zooms=2, peaks=1, others=1)
    searching(rule, name, search=search)(messages())
    jax.effects_barrier()
    assert len(calls) == search.num_trials(len(FIXED[name])) == (2 + (2 if name == "alie" else 3)) * 3
