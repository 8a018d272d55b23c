"""CAF against Algorithm 2 in float64, and the paper's Proposition."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from cafcor_jax.aggregators import caf, spectral_filter
from cafcor_jax.aggregators.caf import top_eigenvector
from cafcor_jax.gram import gram, mix
from tests.aggregators import messages, reference

# Few shapes, since each one is a compilation: (n, d, f).
SHAPES = [(5, 3, 1), (7, 50, 3), (10, 20, 3), (13, 1, 4), (20, 50, 9)]


@functools.cache
def filtered(f):
    """x [n, d] -> (the output, what the filter reports)."""

    def run(x):
        report = spectral_filter(gram(x), f)
        return mix(report.weights, x), report

    return jax.jit(run)


@functools.cache
def jitted(f, eigenvector):
    return jax.jit(caf(f, eigenvector=eigenvector))


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(st.sampled_from(SHAPES), st.sampled_from(messages.KINDS), st.integers(0, 10**6))
@example((5, 3, 1), messages.sign_flip, 14)  # one message kept a 1e-7 of its weight when it should have gone
@example((20, 50, 9), messages.huge_outliers, 5)  # the loop did not end
def test_equals_the_definition(shape, make, seed):
    """To 1e-5 of the result, whatever the eigenvalues' gap.

    Left out is only what has no single answer: two top eigenvalues that are equal, and a step's decision (sum
    of weights against n - 2f, top eigenvalue against the best one) on the very edge.
    """
    n, d, f = shape
    x = make(np.random.default_rng(seed), n, d, f).astype(np.float32)
    want = reference.caf(x, f)
    got, report = filtered(f)(x)
    assert 1 <= report.steps <= 2 * f + 1

    assume(want.gap > 1e-7 and want.stop_margin > 1e-8 and want.best_margin > 1e-8)
    assert np.linalg.norm(got - want.mean) <= 1e-5 * np.linalg.norm(want.mean)
    np.testing.assert_allclose(report.weights, want.weights, rtol=0, atol=1e-6)
    assert report.steps == want.steps


def test_an_offset_loses_nothing():
    """The weights do not feel a mean 1e4 times the spread (the messages themselves are rounded to it)."""
    rng = np.random.default_rng(0)
    n, d, f = 10, 20, 3
    # Numbers on a grid, so that the offset is added without rounding.
    x = np.round(256 * rng.normal(size=(n, d))).astype(np.float32) / 256
    far = x + np.float32(2**13)
    assert np.array_equal(far - np.float32(2**13), x)
    np.testing.assert_allclose(filtered(f)(far)[1].weights, filtered(f)(x)[1].weights, rtol=0, atol=1e-6)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.sampled_from(SHAPES), st.sampled_from(["grid", "few rows", "line", "huge line"]), st.integers(0, 10**6)
)
def test_never_more_than_2f_plus_1_steps(shape, kind, seed):
    """Also with ties, where the result is not unique: finite, and a weighted mean."""
    n, d, f = shape
    rng = np.random.default_rng(seed)
    x = {
        "grid": lambda: rng.integers(-1, 2, (n, d)),
        "few rows": lambda: rng.normal(size=(2, d))[rng.integers(0, 2, n)],
        "line": lambda: np.arange(n)[:, None] * np.ones(d),
        "huge line": lambda: (
            np.where(np.arange(n) < f, 1e36, 1)[:, None] * rng.integers(1, 4, (n, 1)) * np.ones(d)
        ),
    }[kind]().astype(np.float32)
    got, report = filtered(f)(x)
    assert 1 <= report.steps <= 2 * f + 1
    assert np.isfinite(got).all()
    assert (report.weights >= 0).all()
    np.testing.assert_allclose(report.weights.sum(), 1, atol=1e-5)
    if kind == "huge line":
        assert np.abs(got).max() <= 3.001


def test_the_maximum_over_all_rows_runs_for_thousands_of_steps():
    """As printed in the paper; and why ours is over the rows that still have weight."""
    x = np.random.default_rng(76).standard_t(2, size=(8, 2))
    assert reference.caf(x, 3, maximum_over_all=True).steps > 2000
    assert reference.caf(x, 3).steps <= 7


def test_who_was_filtered():
    x = np.random.default_rng(0).normal(size=(10, 20)).astype(np.float32)
    x[[2, 5]] += 100
    got, report = filtered(3)(x)
    assert report.weights[2] == 0 and report.weights[5] == 0
    want = reference.caf(x, 3)
    centred = x - want.mean
    covariance = (want.weights[:, None] * centred).T @ centred
    np.testing.assert_allclose(report.variance, np.linalg.eigvalsh(covariance)[-1], rtol=1e-5)


@pytest.mark.parametrize("below", [1e-7, 1e-6, 1e-5, 1e-4, 1e-2])
def test_a_pair_of_huge_messages_where_no_honest_one_looks(below):
    """The second is left with a small weight, in a direction in which no honest message has any part."""
    x = np.random.default_rng(0).normal(size=(10, 20)).astype(np.float32)
    x[:, 10:] = 0
    x[:3] = 0
    x[0, 12], x[1, 12], x[2, 13] = 1e37, np.nextafter(np.float32(1e37 * (1 - below)), np.float32(0)), 1e36
    got, report = filtered(3)(x)
    np.testing.assert_allclose(got, reference.caf(x, 3).mean, atol=1e-4)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_message_that_is_not_finite_uses_up_one_of_the_f(bad, count):
    x = np.random.default_rng(1).normal(size=(10, 20)).astype(np.float32)
    x[:count, 7] = bad
    got, report = filtered(3)(x)
    want = reference.caf(x[count:], 3 - count)
    assert (report.weights[:count] == 0).all()
    np.testing.assert_allclose(got, want.mean, atol=1e-5)


@pytest.mark.parametrize("count", [4, 9, 10])
def test_more_than_f_messages_that_are_not_finite(count):
    """The mean of the finite ones; 0 if there are none."""
    x = np.random.default_rng(1).normal(size=(10, 20)).astype(np.float32)
    finite_mean = x[count:].mean(0) if count < 10 else np.zeros(20)
    x[:count] = np.nan
    got, report = filtered(3)(x)
    np.testing.assert_allclose(got, finite_mean, atol=1e-6)
    np.testing.assert_allclose(report.weights.sum(), 1 if count < 10 else 0, atol=1e-6)


# The Proposition.


def worst_ratio(outputs, x, f):
    """The largest ||output - mean_S||^2 / (kappa lambda_max(cov_S)) over all S, for a batch x [b, n, d]."""
    n = x.shape[1]
    kappa = 6 * f / (n - f) * (1 + f / (n - 2 * f)) ** 2
    worst = np.zeros(len(x))
    for subset in itertools.combinations(range(n), n - f):
        chosen = x[:, subset].astype(np.float64)
        mean = chosen.mean(axis=1)
        centred = chosen - mean[:, None]
        top = np.linalg.eigvalsh(centred.swapaxes(1, 2) @ centred / (n - f))[:, -1]
        worst = np.maximum(worst, ((outputs - mean) ** 2).sum(axis=1) / (kappa * top))
    return worst


@functools.cache
def batched(rule_name, f):
    rule = {"caf": lambda x: caf(f)(x), "mean": lambda x: x.mean(axis=0)}[rule_name]
    return jax.jit(jax.vmap(rule))


def adversaries(rng, batch, n, d, f):
    """Honest messages, and malicious ones far from their mean, in a random or the worst direction."""
    x = rng.normal(size=(batch, n, d)) * 10 ** rng.uniform(-1, 1, (batch, 1, d))
    honest_mean = x[:, f:].mean(axis=1)
    direction = rng.normal(size=(batch, d))
    centred = x[:, f:] - honest_mean[:, None]
    worst = np.linalg.svd(centred)[2][:, 0]
    direction = np.where(rng.integers(0, 2, (batch, 1)), direction, worst)
    distance = 10 ** rng.uniform(-1, 4, (batch, 1))
    x[:, :f] = (honest_mean + distance * direction)[:, None] + 0.01 * rng.normal(size=(batch, f, d))
    return x.astype(np.float32)


def climb(rule_name, x, f, rounds, rng):
    """Moves the malicious messages uphill, by random steps, in the ratio that the Proposition bounds."""
    run = batched(rule_name, f)
    best = worst_ratio(np.asarray(run(x), np.float64), x, f)
    for _ in range(rounds):
        moved = x.copy()
        size = 10 ** rng.uniform(-2, 0.5, (len(x), 1, 1))
        moved[:, :f] += (size * rng.normal(size=moved[:, :f].shape)).astype(np.float32)
        ratio = worst_ratio(np.asarray(run(moved), np.float64), moved, f)
        better = ratio > best
        x, best = np.where(better[:, None, None], moved, x), np.maximum(best, ratio)
    return best


@pytest.mark.parametrize("shape", [(6, 3, 2), (7, 4, 3)])
def test_the_proposition_holds_for_every_subset(shape):
    n, d, f = shape
    rng = np.random.default_rng(n)
    ratio = climb("caf", adversaries(rng, 128, n, d, f), f, 30, rng)
    assert ratio.max() <= 1
    assert ratio.max() > 1e-3  # the adversaries do something


def test_the_proposition_does_not_hold_for_the_mean():
    rng = np.random.default_rng(0)
    assert climb("mean", adversaries(rng, 128, 6, 3, 2), 2, 0, rng).max() > 10


# The eigenvector.

eigenvector = jax.jit(top_eigenvector)


def with_eigenvalues(values, seed=0):
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(len(values), len(values))))
    return (q * values) @ q.T


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("second", [0.0, 0.3, 0.9, 0.99])
def test_top_eigenvector_against_eigh(second, seed):
    matrix = with_eigenvalues([second, second / 2, 0, 1, second / 3, 0, second, second / 7], seed)
    got = np.asarray(eigenvector(matrix.astype(np.float32)), np.float64)
    want = np.linalg.eigh(matrix)[1][:, -1]
    np.testing.assert_allclose(abs(got @ want), 1, atol=1e-6)
    assert np.linalg.norm(got - np.sign(got @ want) * want) <= 1e-6 / (1 - second)


BLOCK = np.zeros((8, 8))
BLOCK[0, 0] = 1
BLOCK[5:7, 5:7] = [[1, -1], [-1, 1]]  # its top eigenvector, of value 2, is orthogonal to all ones and to e_1
HADAMARD = np.array([[(-1) ** bin(i & j).count("1") for j in range(8)] for i in range(8)])


@pytest.mark.parametrize(
    "matrix",
    [
        np.eye(8),
        np.diag([1.0, 1, 0, 0, 0, 0, 0, 0]),
        with_eigenvalues([1, 1, 1, 0.5, 0.5, 0, 0, 0]),
        with_eigenvalues([1, 1 - 1e-4, 0.5, 0, 0, 0, 0, 0]),
        with_eigenvalues([1, 1 - 1e-6, 0.5, 0, 0, 0, 0, 0]),
        with_eigenvalues([1, 1 - 1e-8, 0.5, 0, 0, 0, 0, 0]),
        with_eigenvalues([1e-30, 0, 0, 0, 0, 0, 0, 0]),
        with_eigenvalues([1e30, 0, 0, 0, 0, 0, 0, 0]),
        BLOCK,
        np.outer(HADAMARD[3], HADAMARD[3]) + 0.5 * np.outer(HADAMARD[0], HADAMARD[0]),
        np.kron(np.eye(4), [[1, -1], [-1, 1]]),
    ],
)
def test_top_eigenvector_attains_the_top_eigenvalue(matrix):
    """With ties every vector of the top eigenspace is right, so test what makes it one."""
    vector = np.asarray(eigenvector(matrix.astype(np.float32)), np.float64)
    top = np.linalg.eigvalsh(matrix)[-1]
    np.testing.assert_allclose(np.linalg.norm(vector), 1, rtol=1e-6)
    np.testing.assert_allclose(vector @ matrix @ vector, top, rtol=1e-6)
    assert np.linalg.norm(matrix @ vector - top * vector) <= 1e-5 * top


def test_top_eigenvector_of_zero_is_finite():
    assert np.isfinite(eigenvector(jnp.zeros((8, 8)))).all()


@pytest.mark.parametrize("make", messages.KINDS)
def test_power_iteration_and_eigendecomposition_agree(make):
    n, d, f = 10, 20, 3
    x = make(np.random.default_rng(3), n, d, f).astype(np.float32)
    by_eigh = jitted(f, "eigh")(x)
    np.testing.assert_allclose(by_eigh, filtered(f)(x)[0], rtol=1e-6, atol=1e-6 * np.abs(x[f:]).max())


def test_refuses_an_unknown_way_to_the_eigenvector():
    with pytest.raises(ValueError, match="eigenvector is 'lanczos'; it must be one of"):
        caf(3, eigenvector="lanczos")


def test_the_start_is_not_orthogonal_to_the_top_direction():
    """One honest message has no part in the top direction, and more of the second than others of the first.

    A power iteration that starts from the largest diagonal entry too early starts from that message, and then
    finds the second direction for ever.
    """
    half = np.float32(np.sqrt(0.5))
    x = np.concatenate(
        [
            [[2, 6.4]],
            np.repeat([[half, 0]], 48, 0),
            np.repeat([[-half, 0]], 48, 0),
            np.repeat([[8, 0]], 32, 0),
        ]
    ).astype(np.float32)
    honest = x[:97].astype(np.float64)
    n, f = len(x), 32
    kappa = 6 * f / (n - f) * (1 + f / (n - 2 * f)) ** 2
    bound = kappa * np.linalg.eigvalsh(np.cov(honest.T, bias=True))[-1]
    for choice in ("power", "eigh"):
        error = np.sum((np.asarray(jitted(f, choice)(x), np.float64) - honest.mean(0)) ** 2)
        assert error <= bound


@pytest.mark.parametrize("n", [5, 31, 64, 129, 300])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 0.99, 0.999])
def test_a_spread_out_top_eigenvector_beside_a_concentrated_second_one(n, ratio):
    top = np.r_[0, np.full(n - 1, (n - 1) ** -0.5)]
    matrix = np.outer(top, top)
    matrix[0, 0] = ratio
    with jax.enable_x64(True):
        found = np.asarray(eigenvector(jnp.asarray(matrix)))
    np.testing.assert_allclose(np.abs(found), top, atol=1e-12)
