"""What every rule must do. A new rule joins with one line in RULES."""

import collections
import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cafcor_jax.aggregators import BY_NAME
from cafcor_jax.columns import cpu_block
from tests.aggregators import reference
from tests.compiling import fast_jit


class Row(NamedTuple):
    definition: Callable[[np.ndarray, int], np.ndarray]
    options: dict = {}  # noqa: RUF012  # an index of -1 is that of the last worker
    is_robust: bool = True  # f messages of 1e38 move the result by no more than the honest spread
    is_symmetric: bool = True  # the order of the workers does not matter
    is_equivariant: bool = True  # shifted or scaled messages give a shifted or scaled result
    is_reversible: bool = True  # has a derivative in reverse mode


RADIUS = 3.0

RULES = {
    "mean": Row(lambda x, f: reference.mean(x), is_robust=False),
    "caf": Row(lambda x, f: reference.caf(x, f).mean, is_reversible=False),
    "smea": Row(reference.smea),
    "krum": Row(reference.krum),
    "multi_krum": Row(reference.multi_krum),
    "geometric_median": Row(lambda x, f: reference.geometric_median(x), is_reversible=False),
    "mda": Row(reference.mda),
    "monna": Row(
        # The trusted worker is the last one, also when workers before it are left out.
        lambda x, f: reference.monna(x, f, len(x) - 1),
        options={"trusted": -1},
        is_symmetric=False,
    ),
    "centered_clipping": Row(
        lambda x, f: reference.centered_clipping(x, RADIUS, 3),
        options={"radius": RADIUS, "iterations": 3},
        is_equivariant=False,
        is_reversible=False,
    ),
    "median": Row(lambda x, f: reference.median(x)),
    "trimmed_mean": Row(reference.trimmed_mean),
    "meamed": Row(reference.meamed),
}

N, D, F = 10, 20, 3
each_rule = pytest.mark.parametrize("name", list(RULES))


def build(name, f=F, n=N):
    options = {key: n - 1 if value == -1 else value for key, value in RULES[name].options.items()}
    return BY_NAME[name](num_byzantine=f, **options)


# Of every rule one program, that of the messages in float32, is compiled as in a run. The others, with other
# inputs or transformations, need not be fast.
TRACES = collections.defaultdict(list)  # the shapes that `jitted` was traced with, by the rule's name


@functools.cache
def jitted(name):
    rule = build(name)

    def counted(x):
        TRACES[name].append(x.shape)
        return rule(x)

    return jax.jit(counted)


@functools.cache
def jitted_variant(name, f=F, n=N):
    """For trees, other dtypes and other numbers of workers, and to be transformed."""
    return fast_jit(build(name, f, n))


def skip_unless(condition, reason):
    if not condition:
        pytest.skip(reason)


def messages(seed=0, n=N, d=D):
    x = np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)
    x[: n // 4] += 2  # so that a robust rule differs from the mean
    return x


def tree_of(x):
    """The columns of x [n, 20] as a pytree with leaves of several ranks."""
    n = len(x)
    return {"a": x[:, :12].reshape(n, 3, 4), "b": (x[:, 12], x[:, 13:].reshape(n, 7, 1))}


def test_the_table_is_complete():
    assert set(RULES) == set(BY_NAME)


@each_rule
@pytest.mark.parametrize("seed", range(5))
def test_definition(name, seed):
    x = messages(seed)
    np.testing.assert_allclose(jitted(name)(x), RULES[name].definition(x, F), atol=1e-5)


def test_the_messages_tell_rules_from_the_mean():
    for name, row in RULES.items():
        gap = np.abs(row.definition(messages(), F) - reference.mean(messages())).max()
        assert (gap > 0.1) == row.is_robust, name


@each_rule
def test_permutation_invariance(name):
    skip_unless(RULES[name].is_symmetric, "one worker is trusted")
    x = messages()
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(N)
        np.testing.assert_allclose(jitted(name)(x[order]), jitted(name)(x), atol=1e-6)


@each_rule
@pytest.mark.parametrize("shift", [1.0, -1e4])
def test_translation_equivariance(name, shift):
    skip_unless(RULES[name].is_equivariant, "the rule has a unit of length")
    x = np.round(messages() * 256) / 256  # so that adding 1e4 does not round
    np.testing.assert_allclose(
        jitted(name)(x + np.float32(shift)) - shift, jitted(name)(x), atol=2e-7 * abs(shift) + 1e-6
    )


@each_rule
@pytest.mark.parametrize("scale", [-1.0, 3.0, 1e-30, 1e-15, 1e15, 1e30])
def test_scale_equivariance(name, scale):
    skip_unless(RULES[name].is_equivariant, "the rule has a unit of length")
    x = messages()
    np.testing.assert_allclose(jitted(name)(x * np.float32(scale)) / scale, jitted(name)(x), atol=3e-6)


@each_rule
@pytest.mark.parametrize("value", [0.0, 0.1, -1e30, 1e-30])
def test_identical_messages(name, value):
    x = np.full((N, D), value, np.float32)
    want = x[0] if RULES[name].is_equivariant else RULES[name].definition(x, F)
    np.testing.assert_allclose(jitted(name)(x), want, rtol=1e-6)


@each_rule
def test_duplicates(name):
    """Two messages, seven and three times: with f = 3 a robust rule returns the first one."""
    first, second = messages(n=2)
    x = np.stack([second] * 3 + [first] * 7)
    got = np.asarray(jitted(name)(x))
    exact = RULES[name].is_robust and RULES[name].is_equivariant
    want = first if exact else RULES[name].definition(x, F)
    np.testing.assert_allclose(got, want, atol=1e-5)


@each_rule
def test_one_worker(name):
    x = messages(n=1)
    want = RULES[name].definition(x, 0)
    np.testing.assert_allclose(jitted_variant(name, 0, 1)(x), want, rtol=1e-6)
    if RULES[name].is_equivariant:
        np.testing.assert_allclose(want, x[0])


@each_rule
def test_no_malicious_workers(name):
    x = messages()
    np.testing.assert_allclose(jitted_variant(name, 0)(x), RULES[name].definition(x, 0), atol=1e-6)


@each_rule
def test_a_pytree_is_its_columns(name):
    x = messages()
    got = jitted_variant(name)(tree_of(x) | {"empty": jnp.zeros((N, 0))})
    assert got.pop("empty").shape == (0,)
    want = jax.tree.map(lambda leaf: leaf[0], tree_of(np.asarray(jitted(name)(x))[None]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)


@each_rule
@pytest.mark.parametrize("dtype", [jnp.bfloat16])
def test_dtype_in_is_dtype_out(name, dtype):
    """Half precision is accumulated in float32: the result is the definition's, rounded once."""
    x = jnp.asarray(messages(), dtype)
    got = jitted_variant(name)(x)
    assert got.dtype == dtype
    want = RULES[name].definition(np.asarray(x.astype(jnp.float32)), F)
    rounding = 1e-6 + float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=rounding, atol=1e-5)


@each_rule
def test_mixed_dtypes(name):
    x = messages()
    got = jax.eval_shape(
        jitted_variant(name), {"half": jnp.asarray(x[:, :5], jnp.bfloat16), "full": jnp.asarray(x[:, 5:])}
    )
    assert got["half"].dtype == jnp.bfloat16 and got["full"].dtype == jnp.float32


@each_rule
@pytest.mark.parametrize("scale", [1.0, 1e100])
def test_float64(name, scale):
    x = np.random.default_rng(0).normal(size=(N, D)) * scale
    with jax.enable_x64(True):
        got = jitted_variant(name)(jnp.asarray(x))
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(np.asarray(got) / scale, RULES[name].definition(x, F) / scale, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["mean", "caf", "geometric_median", "median"]
)  # one of each kind: it is slow
def test_without_jit(name):
    x = messages()
    np.testing.assert_allclose(build(name)(x), jitted(name)(x), atol=1e-6)


@each_rule
def test_strict_promotion(name):
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jax.jit(build(name)).lower(tree_of(messages()))


@each_rule
def test_vmap_over_seeds(name):
    x = np.stack([messages(seed) for seed in range(3)])
    x[1, 0] = np.inf  # the batch needs both ways through the computation
    want = np.stack([jitted(name)(batch) for batch in x])
    np.testing.assert_allclose(fast_jit(jax.vmap(build(name)))(x), want, atol=1e-5)
    # Another program: there vmap comes after float64 is turned off again.
    np.testing.assert_allclose(jax.vmap(jitted_variant(name))(x), want, atol=1e-5)


@each_rule
def test_in_a_scan(name):
    x = np.stack([messages(seed) for seed in range(3)])
    rule = build(name)
    _, got = fast_jit(lambda xs: jax.lax.scan(lambda carry, batch: (carry, rule(batch)), 0, xs))(x)
    np.testing.assert_allclose(got, np.stack([jitted(name)(batch) for batch in x]), atol=1e-6)


@pytest.mark.parametrize("name", ["mean", "caf", "krum", "geometric_median", "centered_clipping", "meamed"])
def test_derivatives(name):
    """Forward mode, and reverse mode for rules that have it, against differences in float64.

    One rule of each kind: it is slow.
    """
    rng = np.random.default_rng(0)
    x, direction, out = messages().astype(np.float64), rng.normal(size=(N, D)), rng.normal(size=D)
    with jax.enable_x64(True):
        rule = jitted_variant(name)
        step = 1e-5
        want = (rule(x + step * direction) - rule(x - step * direction)) / (2 * step)
        inner = jax.jit(build(name))
        forward = fast_jit(lambda x, direction: jax.jvp(inner, (x,), (direction,))[1])
        np.testing.assert_allclose(forward(x, direction), want, atol=1e-6)
        np.testing.assert_allclose(forward(np.float32(x), np.float32(direction)), want, atol=1e-4)
        if RULES[name].is_reversible:
            gradient = fast_jit(jax.grad(lambda x: jnp.sum(inner(x) * out)))(x)
            np.testing.assert_allclose(jnp.sum(gradient * direction), jnp.sum(want * out), rtol=1e-5)


@each_rule
def test_one_trace_per_shape(name):
    hostile = messages()
    hostile[:3] = [[np.nan], [np.inf], [1e38]]
    for x in (messages(0), messages(1), hostile, np.zeros((N, D), np.float32)):
        jitted(name)(x)
    assert TRACES[name] == [(N, D)]
    jitted(name).lower(messages(d=D + 1))
    assert TRACES[name] == [(N, D), (N, D + 1)]


@each_rule
def test_deterministic(name):
    x = messages()
    np.testing.assert_array_equal(jitted(name)(x), jitted(name)(x.copy()))


@each_rule
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("whole_row", [True, False])
@pytest.mark.parametrize("count", [1, F])
def test_messages_that_are_not_finite_are_left_out(name, bad, whole_row, count):
    x = messages()
    x[:count, slice(None) if whole_row else 3] = bad
    want = RULES[name].definition(x[count:], F - count)
    np.testing.assert_allclose(jitted(name)(x), want, atol=1e-5)


@each_rule
@pytest.mark.parametrize("count", [1, F])
def test_huge_messages(name, count):
    x = messages()
    x[:count] = np.where(x[:count] > 0, 1e38, -1e38)
    got = np.asarray(jitted(name)(x), np.float64)
    assert np.isfinite(got).all()
    size = 1 if RULES[name].is_robust else 1e38
    np.testing.assert_allclose(got / size, RULES[name].definition(x, F) / size, atol=1e-4)


@each_rule
def test_one_of_each_kind(name):
    x = messages()
    x[0], x[1], x[2] = np.nan, np.inf, 1e38
    got = jitted(name)(x)
    assert np.isfinite(got).all()
    if RULES[name].is_robust:
        np.testing.assert_allclose(got, RULES[name].definition(x[2:], 1), atol=1e-4)


@each_rule
@pytest.mark.parametrize("count", [F + 1, N - 1, N])
def test_more_messages_that_are_not_finite_than_f(name, count):
    """Defined: they are left out all the same, and nothing is left of the budget."""
    x = messages()
    x[:count] = np.nan
    want = RULES[name].definition(x[count:], 0) if count < N else np.zeros(D)
    np.testing.assert_allclose(jitted(name)(x), want, atol=1e-6)


# Many blocks of the CPU's loop, one of an accelerator's.
WIDE = 10 * cpu_block(N) + 5


@functools.cache
def lowered(name, platform):
    exported = jax.export.export(jax.jit(build(name)), platforms=[platform])
    return exported(jax.ShapeDtypeStruct((N, WIDE), jnp.float32)).mlir_module()


@each_rule
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_lowers_for_accelerators(name, platform):
    """In large blocks there: the loop over cache-sized ones is for CPUs."""
    cpu_blocks = f"tensor<10x{cpu_block(N)}xf"
    assert cpu_blocks not in lowered(name, platform)
    assert cpu_blocks in lowered(name, "cpu")


@each_rule
def test_products_are_in_full_float32(name):
    """A TPU multiplies in bfloat16 unless told otherwise."""
    products = re.findall(r"stablehlo\.dot_general.*", lowered(name, "tpu"))
    assert products
    assert all("precision = [HIGHEST, HIGHEST]" in product for product in products), products


@each_rule
@pytest.mark.parametrize("value", [-1, 1.5, True, "3", None])
def test_refuses_a_number_of_malicious_workers(name, value):
    with pytest.raises(ValueError, match=re.escape(f"num_byzantine is {value!r}")):
        BY_NAME[name](num_byzantine=value)


@each_rule
@pytest.mark.parametrize(("n", "f"), [(10, 5), (10, 6), (1, 1), (3, 2)])
def test_refuses_half_of_the_workers(name, n, f):
    with pytest.raises(ValueError, match=f"num_byzantine = {f} of n = {n} "):
        build(name, f, n)(messages(n=n))


@each_rule
@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ({}, "no arrays"),
        (jnp.float32(1), "scalar"),
        ({"a": jnp.zeros((3, 2)), "b": jnp.float32(1)}, "scalar"),
        ({"a": jnp.zeros((4, 2)), "b": jnp.zeros(3)}, r"\[3, 4\]"),
        (jnp.zeros((3, 2), jnp.int32), "int32"),
        ({"a": jnp.zeros((3, 2)), "b": jnp.zeros((3, 2), bool)}, "bool"),
        (jnp.zeros((0, 2)), "0 workers"),
    ],
)
def test_refuses_updates(name, updates, message):
    rule = build(name, 0)
    with pytest.raises(ValueError, match=message):
        rule(updates)
    with pytest.raises(ValueError, match=message):
        jax.jit(rule)(updates)
