"""Noise: exact cancellation bit by bit, and the law by tests that also reject wrong laws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from cafcor_jax import noise, secrets
from cafcor_jax.privacy import graphs

B = noise.BLOCK
KEY = jax.random.key(7)
SIGMA = 0.6

jit_pairwise = jax.jit(noise.pairwise, static_argnums=2)
jit_row = jax.jit(noise.pairwise_row, static_argnums=3)
jit_pair = jax.jit(noise.pair_noise, static_argnums=(3, 5))
jit_projected = jax.jit(noise.projected, static_argnums=(1, 3))
jit_independent = jax.jit(noise.independent, static_argnums=2)


@functools.cache
def keys(n, impl="threefry2x32"):
    return secrets.key_matrix(jax.random.key(7, impl=impl), n)


# Bit by bit.


@pytest.mark.parametrize("n", [5, 100])
def test_the_two_ends_of_a_pair_draw_opposite_noise(n):
    for i, j in [(0, 1), (n - 2, n - 1), (0, n - 1)]:
        ours = jit_pair(keys(n)[i, j], i, j, n, 3, B + 5, SIGMA)
        theirs = jit_pair(keys(n)[j, i], j, i, n, 3, B + 5, SIGMA)
        assert np.abs(ours).max() > 0
        np.testing.assert_array_equal(ours, -theirs)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 9])
def test_a_worker_alone_draws_its_row_bit_by_bit(n):
    whole = np.asarray(jit_pairwise(keys(n), 3, B + 5, SIGMA))
    assert whole.shape == (n, B + 5) and whole.dtype == np.float32
    for i in range(n):
        np.testing.assert_array_equal(jit_row(keys(n)[i], i, 3, B + 5, SIGMA), whole[i])


def test_with_and_without_jit_the_same_bits():
    n = 4
    whole = np.asarray(jit_pairwise(keys(n), 3, B + 5, SIGMA))
    np.testing.assert_array_equal(noise.pairwise(keys(n), 3, B + 5, SIGMA), whole)
    for i in (0, n - 1):
        np.testing.assert_array_equal(noise.pairwise_row(keys(n)[i], i, 3, B + 5, SIGMA), whole[i])


def test_a_row_does_not_depend_on_keys_of_others():
    """A real worker has its own row only; its diagonal entry is nobody's key."""
    n, i = 5, 2
    strange = secrets.key_matrix(jax.random.key(99), n)
    mixed = jax.random.key_data(strange).at[i].set(jax.random.key_data(keys(n))[i])
    mixed = mixed.at[:, i].set(jax.random.key_data(keys(n))[:, i]).at[i, i].set(0)
    mixed = jax.random.wrap_key_data(mixed)
    whole, other = (np.asarray(jit_pairwise(k, 3, B + 5, SIGMA)) for k in (keys(n), mixed))
    np.testing.assert_array_equal(whole[i], other[i])
    assert (whole[i - 1] != other[i - 1]).mean() > 0.99


@pytest.mark.parametrize("n", [2, 5, 8])
def test_a_row_is_the_sum_of_its_pairs(n):
    whole = np.asarray(jit_pairwise(keys(n), 3, B + 5, SIGMA), np.float64)
    for i in {0, n // 2, n - 1}:
        pairs = [jit_pair(keys(n)[i, j], i, j, n, 3, B + 5, SIGMA) for j in range(n) if j != i]
        np.testing.assert_allclose(whole[i], np.sum(pairs, axis=0, dtype=np.float64), atol=1e-6 * n)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 9])
def test_over_all_workers_the_noise_cancels(n):
    whole = np.asarray(jit_pairwise(keys(n), 3, B + 5, 1.0), np.float64)
    assert whole.std() > 0.9
    assert np.abs(whole.sum(axis=0)).max() <= 1e-6 * n


@pytest.mark.parametrize("n", [8])
def test_as_integers_the_noise_cancels_exactly(n, monkeypatch):
    """float32 rounds the integers once, so look at their two halves."""

    def draw(part):
        monkeypatch.setattr(noise, "_from_grid", lambda total, *_: part(total).astype(jnp.float32))
        drawn = jax.jit(lambda k: noise.pairwise(k, 3, 100, 1.0))(keys(n))
        return np.asarray(drawn).astype(np.int64)

    whole = draw(lambda total: total & 0xFFFF) + (draw(lambda total: total >> 16) << 16)
    assert np.abs(whole).max() > 2**24
    np.testing.assert_array_equal(whole.sum(axis=0), 0)


@pytest.mark.parametrize("name", ["ring", "regular:4", "complete"])
def test_on_a_graph_rows_pairs_and_cancellation(name):
    n, d = 8, B + 5
    graph = graphs.parse(name, n)
    rows = np.asarray(jax.jit(lambda keys: noise.pairwise(keys, 3, d, 0.7, graph))(keys(n)))
    row = jax.jit(lambda keys, i: noise.pairwise_row(keys, i, 3, d, 0.7, graph))
    for i in range(n):
        np.testing.assert_array_equal(rows[i], row(keys(n)[i], i))
        pairs = [jit_pair(keys(n)[i, j], i, j, n, 3, d, 0.7) for j in range(n) if graph.adjacency[i, j]]
        np.testing.assert_allclose(rows[i], np.sum(pairs, axis=0), rtol=0, atol=1e-5)
    assert np.abs(rows.sum(0)).max() < 1e-5
    if name == "complete":
        np.testing.assert_array_equal(rows, jit_pairwise(keys(n), 3, d, 0.7))


@pytest.mark.parametrize("name", ["ring", "regular:4"])
def test_on_a_graph_projected_has_the_covariance_of_pairwise(name):
    n, d = 10, 40_000
    graph = graphs.parse(name, n)
    laplacian = np.diag(graph.degrees) - graph.adjacency.astype(float)
    for rows in (
        noise.projected(jax.random.key(1), n, 2, d, 1.0, graph),
        noise.pairwise(secrets.key_matrix(jax.random.key(1), n), 2, d, 1.0, graph),
    ):
        rows = np.asarray(rows, np.float64)
        # The standard error of an entry is at most degree sqrt(2 / d).
        np.testing.assert_allclose(
            rows @ rows.T / d, laplacian, atol=6 * graph.degrees.max() * (2 / d) ** 0.5
        )


def test_a_graph_without_secrets_has_no_noise():
    empty = graphs.given(np.zeros((4, 4)))
    keys = secrets.key_matrix(jax.random.key(0), 4)
    assert not np.asarray(noise.pairwise(keys, 0, 10, 1.0, empty)).any()


def test_one_worker_has_no_pair():
    np.testing.assert_array_equal(noise.pairwise(keys(1), 0, 10, SIGMA), np.zeros((1, 10)))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_other_keys(impl):
    """JAX does not promise these the same bits under vmap; a worker alone must still draw its row."""
    n = 4
    whole = np.asarray(jit_pairwise(keys(n, impl), 3, B + 5, SIGMA))
    for i in range(n):
        np.testing.assert_array_equal(jit_row(keys(n, impl)[i], i, 3, B + 5, SIGMA), whole[i])
    if impl == "unsafe_rbg":
        return  # JAX promises nothing about its quality
    assert accepts(whitened(whole, SIGMA))
    key = jax.random.key(7, impl=impl)
    assert accepts(whitened(jit_projected(key, n, 3, B + 5, SIGMA), SIGMA))
    own = np.asarray(jit_independent(jax.random.split(key, n), 3, B + 5, SIGMA))
    assert accepts(own / SIGMA)


@pytest.mark.parametrize("size", [1, B + 5])
def test_a_smaller_model_draws_the_beginning(size):
    n = 4
    for draw in (
        lambda d: jit_pairwise(keys(n), 3, d, SIGMA),
        lambda d: jit_projected(KEY, n, 3, d, SIGMA),
        lambda d: jit_independent(keys(n)[0], 3, d, SIGMA),
    ):
        got = np.asarray(draw(size))
        assert got.shape == (n, size) and got.dtype == np.float32
        np.testing.assert_array_equal(got, np.asarray(draw(2 * B + 3))[:, :size])


def test_sigma_scales():
    n = 4
    for draw in (
        lambda s: jit_pairwise(keys(n), 3, B + 5, s),
        lambda s: jit_projected(KEY, n, 3, B + 5, s),
        lambda s: jit_independent(keys(n)[0], 3, B + 5, s),
    ):
        np.testing.assert_allclose(draw(4.0), 4 * np.asarray(draw(1.0)), rtol=1e-6)
        np.testing.assert_array_equal(draw(0.0), 0)


def test_float32_under_x64_too():
    n, d = 4, 50

    def draw(k):
        return (
            noise.pairwise(k, 3, d, SIGMA),
            noise.pairwise_row(k[1], 1, 3, d, jnp.asarray(SIGMA)),
            noise.pairwise(k[:1, :1], 3, d, SIGMA),
            noise.pair_noise(k[0, 1], 0, 1, n, 3, d, np.float64(SIGMA)),
            noise.projected(k[0, 1], n, 3, d, np.float64(SIGMA)),
            noise.independent(k[0], 3, d, jnp.asarray(SIGMA)),
        )

    with jax.enable_x64(True):
        assert jnp.asarray(SIGMA).dtype == np.float64
        got = jax.jit(draw)(secrets.key_matrix(jax.random.key(7), n))
    assert [array.dtype for array in got] == [np.float32] * 6
    np.testing.assert_array_equal(got[0], np.asarray(jit_pairwise(keys(n), 3, B + 5, SIGMA))[:, :d])
    np.testing.assert_array_equal(got[1], got[0][1])


# The law.

N, D = 5, 12 * B + 5


def whitened(x, sigma):
    """Independent unit normals if x [n, d] has covariance sigma^2 (n I - 1 1^T) across workers."""
    x = np.asarray(x, np.float64)
    n = len(x)
    helmert = np.linalg.svd(np.eye(n) - 1 / n)[0][:, : n - 1]  # a basis of what is orthogonal to all ones
    return helmert.T @ x / (sigma * np.sqrt(n))


def p_value(y):
    """Of the likelihood-ratio test (Wishart) that the columns of y [p, d] have the identity as covariance."""
    p, d = y.shape
    covariance = y @ y.T / d
    statistic = d * (np.trace(covariance) - np.linalg.slogdet(covariance)[1] - p)
    return stats.chi2.sf(statistic, p * (p + 1) / 2)


def accepts(y):
    """The covariance and, row by row, the normal law."""
    return p_value(y) > 1e-3 and all(stats.kstest(row, "norm").pvalue > 1e-4 for row in y)


@functools.cache
def drawn(mode, round_index=0):
    if mode == "pairwise":
        return np.asarray(jit_pairwise(keys(N), round_index, D, SIGMA), np.float64)
    return np.asarray(jit_projected(KEY, N, round_index, D, SIGMA), np.float64)


each_mode = pytest.mark.parametrize("mode", ["pairwise", "projected"])


@each_mode
@pytest.mark.parametrize("round_index", [0, 1])
def test_covariance_across_workers(mode, round_index):
    x = drawn(mode, round_index)
    assert p_value(whitened(x, SIGMA)) > 1e-3
    assert np.abs(x.sum(axis=0)).max() <= 1e-5


@each_mode
@pytest.mark.parametrize("wrong", [0.95, 1.05])
def test_a_wrong_sigma_is_rejected(mode, wrong):
    assert p_value(whitened(drawn(mode), wrong * SIGMA)) < 1e-6


def test_independent_noise_is_rejected():
    """Even with the right variance for every single worker."""
    x = np.asarray(jit_independent(keys(N)[0], 0, D, SIGMA * np.sqrt(N - 1)))
    assert p_value(whitened(x, SIGMA)) < 1e-6
    assert np.abs(x.sum(axis=0)).max() > 1


def test_a_pair_that_does_not_cancel_is_rejected():
    x = drawn("pairwise").copy()
    x[1] += 2 * np.asarray(jit_pair(keys(N)[0, 1], 0, 1, N, 0, D, SIGMA))
    assert p_value(whitened(x, SIGMA)) < 1e-6
    assert np.abs(x.sum(axis=0)).max() > 1


@each_mode
def test_every_worker_is_normal(mode):
    for row in drawn(mode):
        unit = row / (SIGMA * np.sqrt(N - 1))
        assert stats.kstest(unit, "norm").pvalue > 1e-4
        assert stats.kstest(unit * 1.05, "norm").pvalue < 1e-6
        assert stats.kstest(np.clip(unit, -2, 2), "norm").pvalue < 1e-6


def test_independent_is_independent_and_normal():
    x = np.asarray(jit_independent(keys(N)[0], 0, D, SIGMA), np.float64)
    assert accepts(x / SIGMA)
    assert not accepts(x / (1.05 * SIGMA))
    assert not accepts((x + 0.1 * x[:1]) / SIGMA)


def test_tails():
    """As many beyond 3 and 4 standard deviations as there should be, and none too far."""
    x = np.asarray(jit_independent(keys(8)[0], 0, D, 1.0)).ravel()
    for bound in (3.0, 4.0):
        count, expected = (np.abs(x) > bound).sum(), 2 * stats.norm.sf(bound) * x.size
        assert abs(count - expected) < 5 * np.sqrt(expected)
    assert np.abs(x).max() < noise._LARGEST_NORMAL


def are_uncorrelated(a, b):
    return abs(np.corrcoef(a, b)[0, 1]) * np.sqrt(a.size) < 4.5


def pair(i, j, round_index):
    n = 4
    return np.asarray(jit_pair(keys(n)[i, j], i, j, n, round_index, 2 * B, 1.0))


def test_rounds_blocks_and_pairs_are_uncorrelated():
    first = pair(0, 1, 0)
    blocks = first.reshape(2, B)
    halves = first.reshape(4, B // 2)
    assert are_uncorrelated(first, pair(0, 1, 1))
    assert are_uncorrelated(first, pair(0, 2, 0))
    assert are_uncorrelated(first, pair(2, 3, 0))
    assert are_uncorrelated(*blocks)
    assert all(are_uncorrelated(halves[i], halves[j]) for i in range(4) for j in range(i))
    assert are_uncorrelated(first[1:], first[:-1])
    assert not are_uncorrelated(first, pair(0, 1, 0))
    assert not are_uncorrelated(first, pair(0, 1, 1) + 0.1 * first)


@each_mode
def test_rounds_are_uncorrelated(mode):
    for a, b in zip(drawn(mode, 0), drawn(mode, 1), strict=True):
        assert are_uncorrelated(a, b)


# Shapes and memory.


def test_like_cuts_rows_into_a_pytree():
    template = {"w": jnp.zeros((3, 4)), "b": [jnp.zeros((), jnp.bfloat16), jnp.zeros((5,))]}
    flat = jnp.arange(36.0).reshape(2, 18)
    got = noise.like(template, flat)
    assert jax.tree.structure(got) == jax.tree.structure(template)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(template), strict=True):
        assert ours.shape == (2, *theirs.shape) and ours.dtype == theirs.dtype
    joined = [np.asarray(leaf, np.float32).reshape(2, -1) for leaf in jax.tree.leaves(got)]
    np.testing.assert_array_equal(np.concatenate(joined, axis=1), flat)


@pytest.mark.parametrize("n", [33])
def test_memory_is_that_of_the_result(n):
    d = 16 * B
    analysis = jit_pairwise.lower(keys(n), 0, d, SIGMA).compile().memory_analysis()
    if analysis is None:
        pytest.skip("this backend does not tell")
    total = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    assert total < 3 * 4 * n * d < 4 * n * n * d / 4


def test_one_trace_for_all_rounds():
    traces = []

    @jax.jit
    def counted(k, round_index, sigma):
        traces.append(1)
        return noise.pairwise(k, round_index, 10, sigma)

    assert not np.array_equal(counted(keys(3), 0, 1.0), counted(keys(3), 1, 2.0))
    assert len(traces) == 1
