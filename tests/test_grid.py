import decimal
import functools
import itertools
import math
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from cafcor_jax import discrete_gaussian as tables
from cafcor_jax import grid, noise, privacy, secrets
from cafcor_jax.errors import UserError
from tests.compiling import fast_jit

B = noise.BLOCK
KEY = jax.random.key(7)
SIGMA = 4.0
ONE_TABLE, TWO_TABLES = 4, 12  # bits: 64 and 16,384 steps

# Whole numbers are the same however they are compiled: rows, as users compile them, are compared with these.
jit_independent = fast_jit(grid.independent, static_argnums=(2, 3, 4))
jit_pairwise = fast_jit(grid.pairwise, static_argnums=(2, 3, 4))
jit_row = jax.jit(grid.pairwise_row, static_argnums=(3, 4, 5))


@functools.cache
def keys(n, impl="threefry2x32"):
    return secrets.key_matrix(jax.random.key(7, impl=impl), n)


def plan_of(**changes):
    settings = dict(
        threat_model="byzldp",
        num_workers=100,
        num_byzantine=10,
        num_colluding=10,
        rounds=30,
        clip_norm=2.25,
        delta=1e-4,
        sigma_ind=3.0,
        sigma_cor=3.0,
    )
    return privacy.PrivacyPlan(**{**settings, **changes})


# What floating point gives away.


@functools.cache
def all_normals():
    """Every value that the float mode can draw."""
    bits = jnp.arange(2**23, dtype=jnp.uint32) << 9
    return np.sort(np.unique(np.asarray(jax.jit(noise._normal_from_bits)(bits))))


def float_candidates(y, g, sigma):
    """Whether y = float32(g + float32(sigma z)) for one of the values of z."""
    values = np.float32(sigma) * all_normals()
    near = np.searchsorted(values, y.astype(np.float64) - g)
    # A sum that rounds to y lies within half a last place of it; so do at most the values next to y - g,
    # or as many of them as y has room for.
    found = np.zeros(y.shape, bool)
    for offset in range(-40, 41):
        found |= np.float32(g) + values[np.clip(near + offset, 0, values.size - 1)] == y
    return found


def pairwise_candidates(y, g, num_workers, sigma):
    """Whether y = float32(g + row) for a whole number of the float mode's units in the row."""
    unit = np.float32(2.0 ** -noise._grid_bits(num_workers) * sigma)
    near = np.rint((y.astype(np.float64) - g) / unit)
    found = np.zeros(y.shape, bool)
    for offset in range(-40, 41):
        found |= np.float32(g) + (near + offset).astype(np.float32) * unit == y
    return found


def two_gradients(size):
    """Two gradients of norm 1, each coordinate about 1 / sqrt(d)."""
    rng = np.random.default_rng(0)
    both = rng.normal(size=(2, size))
    return (both / np.linalg.norm(both, axis=1, keepdims=True)).astype(np.float32)


def test_the_float_generator_has_few_values():
    values = all_normals()
    assert values.size <= 2**23
    assert np.abs(values).max() < 5.6


def test_float_noise_gives_the_gradient_away():
    """Of 8,192 coordinates more than half exclude the wrong gradient, and none the right one."""
    right, wrong = two_gradients(B)
    drawn = np.asarray(noise.independent(keys(2)[0], 0, B, SIGMA))[0]
    y = right + drawn
    assert y.dtype == np.float32
    assert float_candidates(y, right, SIGMA).all()
    excluded = ~float_candidates(y, wrong, SIGMA)
    assert excluded.mean() > 0.5


def test_float_noise_of_pairs_gives_the_gradient_away():
    """The row is on a grid, the gradient is not: where the sum is small, its last bits are the gradient's."""
    n = 100
    right, wrong = two_gradients(B)
    row = np.asarray(jax.jit(noise.pairwise_row, static_argnums=3)(keys(n)[0], 0, 0, B, SIGMA))
    y = right + row
    assert pairwise_candidates(y, right, n, SIGMA).all()
    excluded = ~pairwise_candidates(y, wrong, n, SIGMA)
    assert excluded.mean() > 0.1


@pytest.mark.parametrize("bits", [ONE_TABLE, TWO_TABLES])
def test_a_message_on_the_grid_excludes_no_gradient(bits):
    right, wrong = (grid.to_grid_toward_zero(jnp.asarray(g), bits) for g in two_gradients(B))
    y = right + jit_independent(keys(2)[0], 0, B, SIGMA, bits)[0]
    reach = grid.draw_reach(SIGMA, bits)
    for candidate in (right, wrong):
        assert (np.abs(np.asarray(y - candidate)) <= reach).all()
    # Every whole number within reach is drawn: no bin is empty, the fine part fills the coarse one's gaps.
    sampler = grid.discrete_gaussian(SIGMA * 2.0**bits)
    for table in filter(None, (sampler.fine, sampler.coarse)):
        assert min(law_of(table)) > 0
    assert reach == sampler.fine.reach + sampler.scale * (sampler.coarse.reach if sampler.coarse else 0)
    assert 2 * sampler.fine.reach + 1 >= sampler.scale


# The tables.


def law_of(table):
    """The exact weights of -reach, ..., reach, from the table alone."""
    weights = [0] * (2 * table.reach + 1)
    capacity = 1 << 128
    for index in range(table.alias.size):
        threshold = 0
        for word in table.thresholds[:, index]:
            threshold = (threshold << 32) | int(word)
        if threshold:
            weights[index] += threshold
        weights[int(table.alias[index]) + table.reach] += capacity - threshold
    return weights


def discrete_gaussian(variance, points):
    """P(x) in 60 digits, by the definition."""
    reach = math.ceil(20 * math.sqrt(variance))
    total = 1 + 2 * sum((-Decimal(x * x) / (2 * variance)).exp() for x in range(1, reach + 1))
    return [(-Decimal(x * x) / (2 * variance)).exp() / total for x in points]


@pytest.mark.parametrize("sigma", [1.0, 1.7, 64.0])
def test_a_table_is_the_discrete_gaussian(sigma):
    with decimal.localcontext(prec=60):
        variance = Decimal(sigma) ** 2
        table, error = tables._table(variance)
        weights = law_of(table)
        assert sum(weights) == table.alias.size << 128
        assert weights == tables._weights(variance)[0]
        ideal = discrete_gaussian(variance, range(-table.reach, table.reach + 1))
        gaps = [Decimal(w) / sum(weights) - p for w, p in zip(weights, ideal, strict=True)]
        distance = (sum(map(abs, gaps)) + 1 - sum(ideal)) / 2
        assert distance <= Decimal(error) < Decimal(2) ** -127
        # A wrong scale is far away.
        wrong = discrete_gaussian(variance * Decimal("1.01"), range(-table.reach, table.reach + 1))
        assert sum(abs(p - q) for p, q in zip(wrong, ideal, strict=True)) > Decimal("1e-3")


def test_two_tables_are_the_discrete_gaussian():
    sigma = 300.0
    sampler = grid.discrete_gaussian(sigma)
    assert sampler.coarse is not None
    with decimal.localcontext(prec=60):
        fine, coarse = law_of(sampler.fine), law_of(sampler.coarse)
        total = Decimal(sum(fine)) * sum(coarse)
        points = [0, 1, -7, 300, 901, -1501, 2400]
        for x, ideal in zip(points, discrete_gaussian(Decimal(sigma) ** 2, points), strict=True):
            mass = 0
            for h in range(-sampler.coarse.reach, sampler.coarse.reach + 1):
                low = x - sampler.scale * h + sampler.fine.reach
                if 0 <= low < len(fine):
                    mass += coarse[h + sampler.coarse.reach] * fine[low]
            # Out to 8 standard deviations, also relative to a probability of 10^-17.
            assert abs(mass / total / ideal - 1) < Decimal("1e-20")
            assert abs(mass / total - ideal) < 2 * Decimal(sampler.error)
    assert sampler.error < 2.0**-125


@pytest.mark.parametrize("width", [grid.NARROWEST, 256.0, 256.1, 2.0**15, 277_000.0, 280_000.0, grid.WIDEST])
def test_every_width_has_tables(width):
    sampler = grid.discrete_gaussian(width)
    tables = [table for table in (sampler.fine, sampler.coarse) if table]
    bits = [(table.alias.size - 1).bit_length() for table in tables]
    assert sum(bits) <= 32 and max(bits) <= 15
    assert sampler.error < 2.0**-125
    assert 13 * width < grid.draw_reach(width, 0) < 20 * width + 5
    assert 2 * grid.draw_reach(width, 0) < 2**31


def integer_draw(sampler, words, rest):
    """The definition of a draw, with Python's integers."""

    def pick(table, index, bits):
        number = functools.reduce(lambda value, word: (value << 32) | int(word), bits, 0)
        threshold = functools.reduce(lambda v, w: (v << 32) | int(w), table.thresholds[:, index], 0)
        return index - table.reach if number < threshold else int(table.alias[index])

    fine_bits = sampler.fine.alias.size.bit_length() - 1
    chosen = int(words[0])
    value = pick(sampler.fine, chosen % 2**fine_bits, [words[1], *rest[:3]])
    if sampler.coarse:
        index = (chosen >> fine_bits) % sampler.coarse.alias.size
        value += sampler.scale * pick(sampler.coarse, index, [words[2], *rest[3:]])
    return value


@pytest.mark.parametrize("sigma", [3.0, 1000.0])
@pytest.mark.parametrize("ties", [False, True])
def test_ties_look_at_all_bits(monkeypatch, sigma, ties):
    """Words made equal to a threshold's first, or first three, words."""
    sampler = grid.discrete_gaussian(sigma)
    parts = 2 if sampler.coarse else 1
    rng = np.random.default_rng(1)
    half = 200
    monkeypatch.setattr(tables, "BLOCK", 2 * half)
    words = rng.integers(0, 2**32, (2 * (1 + parts), 1, half), dtype=np.uint32)
    rest = rng.integers(0, 2**32, (2 * 3 * parts, 1, half), dtype=np.uint32)
    if ties:
        fine_bits = sampler.fine.alias.size.bit_length() - 1
        for column in range(0, half, 3):
            for start, more in ((0, 0), (1 + parts, 3 * parts)):
                chosen = int(words[start, 0, column])
                thresholds = sampler.fine.thresholds[:, chosen % 2**fine_bits]
                words[start + 1, 0, column] = thresholds[0]
                if column % 2:
                    rest[more : more + 2, 0, column] = thresholds[1:3]
                    rest[more + 2, 0, column] = max(int(thresholds[3]) - (column % 4 == 1), 0)
    groups = {0: words, 1 + parts: rest}
    monkeypatch.setattr(tables, "_words", lambda _, first, count: [jnp.asarray(w) for w in groups[first]])
    for got, start, more in zip(tables.draw(sampler, KEY), (0, 1 + parts), (0, 3 * parts), strict=True):
        for column in range(half):
            own = words[start : start + 1 + parts, 0, column]
            expected = integer_draw(sampler, own, rest[more : more + 3 * parts, 0, column])
            assert int(got[0, column]) == expected
    # The case has ties that the first word alone decides wrongly.
    first_only = tables._from_words(sampler, [jnp.asarray(w) for w in words[: 1 + parts]], ())
    assert bool((first_only & 1).any()) == ties
    full = [jnp.asarray(w) for w in rest[: 3 * parts]]
    settled = tables._from_words(sampler, [jnp.asarray(w) for w in words[: 1 + parts]], full)
    assert bool(((first_only >> 1) != (settled >> 1)).any()) == ties


# The law of what is drawn.

ROWS = 40
EDGES = np.array([-np.inf, *np.arange(-4.5, 4.6, 0.25), np.inf])


def cell_p_value(draws, width):
    """Chi-square over cells out to 4.5 standard deviations, of draws in steps."""
    edges = np.concatenate([[-np.inf], np.round(EDGES[1:-1] * width) + 0.5, [np.inf]])
    counts = np.histogram(draws, edges)[0]
    expected = np.diff(stats.norm.cdf(edges / width)) * draws.size
    return stats.chisquare(counts, expected * draws.size / expected.sum()).pvalue


@pytest.mark.parametrize(("bits", "impl"), [(TWO_TABLES, "threefry2x32"), (ONE_TABLE, "rbg")])
def test_the_law_of_the_draws(bits, impl):
    draws = np.asarray(jit_independent(keys(ROWS, impl)[0], 0, 3 * B, SIGMA, bits))
    assert draws.dtype == np.int32
    width = SIGMA * 2**bits
    # Cells of whole numbers against the continuous law: they agree to 1e-4 of a cell at 64 steps.
    assert cell_p_value(draws, width) > 1e-4
    for wrong in (0.98, 1.02):
        assert cell_p_value(draws, wrong * width) < 1e-9
    # Every residue comes as often: nothing is left of the coarse part's spacing.
    for modulus in (2, 3, 16):
        assert stats.chisquare(np.bincount(draws.ravel() % modulus, minlength=modulus)).pvalue > 1e-4
    # Rows are different and uncorrelated, as are neighbours.
    unit = draws / width
    assert np.abs(np.corrcoef(unit) - np.eye(ROWS)).max() < 6 / math.sqrt(3 * B)
    assert abs(np.mean(unit[:, 1:] * unit[:, :-1])) < 5 / math.sqrt(unit.size)


def test_the_float_generator_has_the_wrong_law_in_the_tails():
    """All its values, rounded to a grid: most points beyond 4 standard deviations are never drawn."""
    width = SIGMA * 2.0**TWO_TABLES
    bits = jnp.arange(2**23, dtype=jnp.uint32) << 9
    rounded = np.rint(width * np.asarray(jax.jit(noise._normal_from_bits)(bits), np.float64)).astype(int)
    reach = grid.draw_reach(SIGMA, TWO_TABLES)
    counts = np.bincount(rounded + reach, minlength=2 * reach + 1)
    points = np.arange(-reach, reach + 1)
    tail = (np.abs(points) > 4 * width) & (np.abs(points) < 4.5 * width)
    assert (counts[tail] == 0).mean() > 0.5
    law = np.exp(-(points**2) / (2 * width**2))
    distance = np.abs(counts / 2**23 - law / law.sum()).sum() / 2
    assert distance > 1e-3  # ours: 2^-125


# Cancellation.


@pytest.mark.parametrize(("n", "bits"), [(5, TWO_TABLES), (4, ONE_TABLE)])
def test_pairs_cancel_bitwise_in_any_order(n, bits):
    rows = np.asarray(jit_pairwise(keys(n), 3, B + 5, SIGMA, bits))
    assert rows.dtype == np.int32 and rows.shape == (n, B + 5)
    rng = np.random.default_rng(0)
    for _ in range(5):
        total = np.zeros(B + 5, np.int32)
        for i in rng.permutation(n):
            total = total + rows[i]
        np.testing.assert_array_equal(total, 0)
    assert np.abs(rows).min(axis=1).max() < np.abs(rows).max(axis=1).min()
    for i in range(n):
        np.testing.assert_array_equal(jit_row(keys(n)[i], i, 3, B + 5, SIGMA, bits), rows[i])
    # Each row has the variance of n - 1 draws, each pair of rows the covariance of one.
    covariance = np.cov(rows / (SIGMA * 2**bits))
    np.testing.assert_allclose(covariance, n * np.eye(n) - 1, atol=0.35)
    # Another round is another draw.
    assert (np.asarray(jit_row(keys(n)[0], 0, 4, B + 5, SIGMA, bits)) == rows[0]).mean() < 0.1


def test_messages_cancel_to_the_sum_of_gradients():
    """Also in partial sums that pass 2^31."""
    n, size = 5, 100
    noises = np.asarray(jit_pairwise(keys(n), 3, B + 5, SIGMA, TWO_TABLES))[:, :size]
    far = np.int32(2**31 - 1) - np.abs(noises[0])  # a first message at the end of the range
    gradients = np.stack([far, *(-far // 4 for _ in range(4))])
    messages = gradients + noises
    with np.errstate(over="ignore"):
        for order in itertools.permutations(range(n)):
            total = functools.reduce(np.add, messages[list(order)])
            np.testing.assert_array_equal(total, gradients.sum(axis=0, dtype=np.int32))


def test_pairs_cancel_with_other_keys():
    n = 3
    rows = np.asarray(jit_pairwise(keys(n, "rbg"), 0, 50, SIGMA, ONE_TABLE))
    np.testing.assert_array_equal(rows.sum(axis=0), 0)
    for i in range(n):
        np.testing.assert_array_equal(jit_row(keys(n, "rbg")[i], i, 0, 50, SIGMA, ONE_TABLE), rows[i])


def test_without_noise_or_partners_rows_are_zero():
    np.testing.assert_array_equal(grid.independent(keys(2)[0], 0, 5, 0.0, 4), 0)
    np.testing.assert_array_equal(grid.pairwise(keys(2), 0, 5, 0.0, 4), 0)
    np.testing.assert_array_equal(grid.pairwise_row(keys(2)[0], 0, 0, 5, 0.0, 4), 0)
    np.testing.assert_array_equal(grid.pairwise(keys(1), 0, 5, SIGMA, 4), 0)


def test_int32_under_x64_too():
    with jax.enable_x64(True):
        k = secrets.key_matrix(jax.random.key(7), 4)
        got = fast_jit(lambda k: grid.pairwise(k, 3, 20, SIGMA, ONE_TABLE))(k)
        row = jax.jit(lambda k: grid.pairwise_row(k, 1, 3, 20, SIGMA, ONE_TABLE))(k[1])
        gradient = grid.to_grid_toward_zero(jnp.array([0.3], jnp.float64), 4)
        back = grid.to_float(gradient, 4)
    assert got.dtype == row.dtype == gradient.dtype == np.int32 and back.dtype == np.float32
    np.testing.assert_array_equal(got, np.asarray(jit_pairwise(keys(4), 3, B + 5, SIGMA, ONE_TABLE))[:, :20])
    np.testing.assert_array_equal(row, got[1])


# The gradient.

floats = st.floats(-4, 4, width=32)


@settings(max_examples=100, deadline=None)
@given(st.lists(floats, min_size=1, max_size=20), st.integers(-3, 28))
def test_rounding_toward_zero_never_raises_a_norm(values, bits):
    gradient = np.array(values, np.float32)
    units = np.asarray(grid.to_grid_toward_zero(jnp.asarray(gradient), bits))
    exact = units.astype(np.float64) * 2.0**-bits
    assert (np.abs(exact) <= np.abs(gradient.astype(np.float64))).all()
    assert (exact * gradient >= 0).all()
    assert (np.abs(exact - gradient) < 2.0**-bits).all()
    assert np.linalg.norm(exact) <= np.linalg.norm(gradient.astype(np.float64))
    np.testing.assert_array_equal(
        np.asarray(grid.to_float(jnp.asarray(units), bits)), exact.astype(np.float32)
    )


def test_rounding_to_nearest_would_raise_it():
    gradient = np.full(10, 0.26, np.float32)
    nearest = np.rint(gradient * 2**1) / 2**1
    assert np.linalg.norm(nearest) > 1.9 * np.linalg.norm(gradient)
    assert not np.asarray(grid.to_grid_toward_zero(jnp.asarray(gradient), 1)).any()


def test_what_is_out_of_range_does_not_wrap():
    got = grid.to_grid_toward_zero(jnp.array([np.nan, np.inf, -np.inf, 1e30, 2.0**31]), 4)
    np.testing.assert_array_equal(got, [0, 2**31 - 128, -(2**31) + 128, 2**31 - 128, 2**31 - 128])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(floats, floats), min_size=1, max_size=8), st.integers(0, 6))
def test_example_level_sensitivity_bounds_the_rounded_means(pairs, bits):
    first, second = np.array(pairs, np.float32).T
    moved = np.linalg.norm(np.subtract(first, second, dtype=np.float64))
    units = [np.asarray(grid.to_grid_toward_zero(jnp.asarray(g), bits), np.float64) for g in (first, second)]
    if moved:
        bound = grid.example_level_sensitivity(moved / 2, 1, first.size, bits)
        assert np.linalg.norm(units[0] - units[1]) * 2.0**-bits <= bound + 1e-12


def test_a_small_change_can_move_every_rounded_coordinate():
    """So 2C/b alone is not a bound at the example level."""
    below = np.nextafter(np.float32(1), np.float32(0))
    first, second = jnp.full(100, 1.0), jnp.full(100, below)
    moved = np.linalg.norm(
        np.asarray(grid.to_grid_toward_zero(first, 2) - grid.to_grid_toward_zero(second, 2))
    )
    assert moved * 0.25 == 2.5 == pytest.approx(grid.example_level_sensitivity(1e-9, 1, 100, 2), rel=1e-6)


# The range.


def test_range():
    setting = dict(sigma_ind=0.5, sigma_cor=0.6, num_workers=100, clip_norm=2.25)
    bits = grid.propose_bits(**setting)
    assert 2**16 < 0.6 * 2**bits <= 2**17
    grid.check_range(bits=bits, **setting)
    grid.check_range(bits=bits, num_summed=100, **setting)
    ind, cor = grid.draw_reach(0.5, bits), grid.draw_reach(0.6, bits)
    assert grid.largest_sum(bits=bits, **setting) == int(2.25 * 2**bits) + ind + 99 * cor
    assert grid.largest_sum(bits=bits, num_summed=90, **setting) == (
        90 * (int(2.25 * 2**bits) + ind) + 90 * 10 * cor
    )


def test_the_error_names_the_largest_bits():
    setting = dict(sigma_ind=0.0, sigma_cor=1.0, num_workers=2000, clip_norm=1.0)
    with pytest.raises(UserError, match=r"bits must be at most 16, got 18.*sigma_cor=1.*num_workers=2000"):
        grid.check_range(bits=18, **setting)
    grid.check_range(bits=16, **setting)
    with pytest.raises(UserError, match="at most 16, got 17"):
        grid.check_range(bits=17, **setting)
    assert grid.propose_bits(**setting) == 16
    with pytest.raises(UserError, match="sum of 1000 messages"):
        grid.check_range(bits=16, num_summed=1000, **setting)
    with pytest.raises(UserError, match="no number of bits fits"):
        grid.check_range(bits=0, sigma_ind=1.0, sigma_cor=1.0, num_workers=10, clip_norm=1e10)
    with pytest.raises(UserError, match="at most -3, got 0"):
        grid.check_range(bits=0, sigma_ind=0.0, sigma_cor=0.0, num_workers=10, clip_norm=1e10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(bits=1.5), "bits must be a whole number"),
        (dict(bits=True), "bits must be a whole number"),
        (dict(bits=61), "between -60 and 60, got 61"),
        (dict(bits=20), r"sigma_cor=1.0 is .* steps wide at bits=20; .*bits must be between 0 and 19"),
        (dict(bits=-1), "bits must be between 0 and 19"),
        (dict(sigma_cor=math.nan), "sigma_cor must be finite"),
        (dict(sigma_ind=-1.0), "sigma_ind must be finite and at least 0, got -1"),
        (dict(num_workers=0), "num_workers"),
        (dict(num_summed=11), "num_summed must be at most num_workers=10, got 11"),
        (dict(clip_norm=math.inf), "clip_norm"),
    ],
)
def test_bad_ranges(changes, message):
    setting = dict(bits=4, sigma_ind=0.0, sigma_cor=1.0, num_workers=10, clip_norm=1.0)
    with pytest.raises(UserError, match=message):
        grid.check_range(**{**setting, **changes})


def test_bad_proposals():
    for setting, message in (
        (dict(sigma_ind=0.0, sigma_cor=0.0), "both 0"),
        (dict(sigma_ind=1e-6, sigma_cor=1.0), "too far apart"),
        (dict(sigma_ind=1.0, sigma_cor=0.0, clip_norm=1e12), "no grid fits"),
    ):
        with pytest.raises(UserError, match=message):
            grid.propose_bits(**{"num_workers": 10, "clip_norm": 1.0, **setting})


def test_a_traced_sigma_is_refused():
    with pytest.raises(ValueError, match="sigma is traced"):
        jax.jit(lambda s: grid.independent(keys(2)[0], 0, 5, s, 4))(1.0)


def test_draws_never_pass_the_bound():
    """The largest value of each table, not only of what was drawn."""
    for bits in (ONE_TABLE, TWO_TABLES):
        sampler = grid.discrete_gaussian(SIGMA * 2.0**bits)
        largest = np.abs(sampler.fine.alias).max(), sampler.fine.reach
        assert max(largest) == sampler.fine.reach
    with pytest.raises(UserError, match="between 1 and 524288 steps"):
        grid.discrete_gaussian(0.5)


# What the grid costs.


def exact_law(sigma_ind, sigma_cor, honest, silent, half):
    """P(y) of the honest messages' noise on {-half, ..., half}^h, by summing over all noises."""
    x = np.arange(-half, half + 1)

    def law(sigma):
        masses = np.where(np.abs(x) <= 12 * sigma, np.exp(-(x**2) / (2 * sigma**2)), 0)
        return masses / masses.sum()

    own = (x == 0).astype(float)
    for sigma in [sigma_cor] * silent + [sigma_ind] * (sigma_ind > 0):
        own = np.convolve(own, law(sigma), "same")
    joint = functools.reduce(np.multiply.outer, [own] * honest)
    for i, j in itertools.combinations(range(honest), 2):
        shifts = [(v, p) for v, p in zip(x, law(sigma_cor), strict=True) if p > 0]
        joint = sum(p * np.roll(joint, (v, -v), (i, j)) for v, p in shifts)
    return joint


def renyi(p, q, alpha):
    both = (p > 0) & (q > 0)
    return special.logsumexp(alpha * np.log(p[both]) + (1 - alpha) * np.log(q[both])) / (alpha - 1)


CASES = [
    # sigma_ind, sigma_cor, n, f, q, half
    (0.0, 1.0, 3, 1, 0, 40),
    (1.0, 1.0, 3, 1, 1, 40),
    (1.0, 1.5, 3, 1, 0, 60),
    (0.0, 4.0, 3, 1, 0, 150),
    (1.0, 1.0, 5, 2, 1, 50),
]


@pytest.mark.parametrize("case", CASES)
def test_exact_divergence_on_the_lattice(case):
    sigma_ind, sigma_cor, n, f, q, half = case
    honest = n - f
    setting = dict(sigma_ind=sigma_ind, sigma_cor=sigma_cor, num_workers=n, num_byzantine=f, num_colluding=q)
    plan = plan_of(**setting, rounds=1, threat_model="byzldp" if q else "secldp")
    law = exact_law(sigma_ind, sigma_cor, honest, f - q, half)
    assert law.sum() == pytest.approx(1, abs=1e-12)
    covariance = privacy.honest_covariance(**setting)
    excess = []
    for shift, alpha in itertools.product((1, 2), (1.5, 2.0, 3.0)):
        ideal = alpha * privacy.step_divergence_of_covariance(covariance, shift / 2)
        got = renyi(np.roll(law, shift, 0), law, alpha)
        excess.append(got - ideal)
        assert got <= ideal + alpha / (alpha - 1) * grid.divergence_cost(plan, 0, 1) + 1e-8
        assert got <= ideal + alpha / 2 * grid.integer_shift_cost(plan, 0) + 1e-8
    if sigma_cor == 1:  # a step as large as sigma: the grid is seen
        assert np.abs(excess).max() > (1e-6 if honest == 2 else 1e-8)
        assert grid.divergence_cost(plan, 0, 1) > 1e-4
    if sigma_cor == 4:
        assert np.abs(excess).max() < 1e-8 and grid.divergence_cost(plan, 0, 1) < 1e-30
        # The bound is sharp: noise one part in a thousand narrower does not keep it.
        narrower = exact_law(0.0, 3.996, 2, 1, half)
        ideal = 2 * privacy.step_divergence_of_covariance(covariance, 1 / 2)
        assert renyi(np.roll(narrower, 1, 0), narrower, 2.0) > ideal * 1.001


def test_independent_noise_costs_nothing():
    """The discrete Gaussian has the divergences of the continuous one, at every width."""
    x = np.arange(-60, 61)
    for sigma in (1.0, 2.5):
        law = np.exp(-(x**2) / (2 * sigma**2))
        law /= law.sum()
        for shift, alpha in itertools.product((1, 2), (1.5, 3.0)):
            got = renyi(np.roll(law, shift)[20:-20], law[20:-20], alpha)
            ideal = alpha * shift**2 / (2 * sigma**2)
            assert got <= ideal * (1 + 1e-12)
            # Equal where alpha shift is whole, and elsewhere to about exp(-2 pi^2 sigma^2).
            assert got == pytest.approx(ideal, rel=1e-6 if alpha * shift % 1 else 1e-12)
    plan = plan_of(threat_model="ldp", num_colluding=0, sigma_cor=0.0)
    assert grid.smoothing_error(plan, 0) == grid.divergence_cost(plan, 0, 1000) == 0


def test_smoothing_error_of_sums():
    """CDP: the sum of n draws, whose law is known by convolution."""
    plan = plan_of(
        threat_model="cdp", num_workers=3, num_byzantine=1, num_colluding=0, sigma_cor=0.0, sigma_ind=1.0
    )
    x = np.arange(-30, 31)
    law = np.exp(-(x**2) / 2)
    total = np.convolve(np.convolve(law, law, "same"), law, "same")
    ratio = (total / np.exp(-(x**2) / 6))[20:41]
    spread = (ratio.max() - ratio.min()) / (ratio.max() + ratio.min())
    bound = grid.smoothing_error(plan, 0)
    assert 1e-6 < spread <= bound < 0.01
    wider = plan_of(
        threat_model="cdp", num_workers=3, num_byzantine=1, num_colluding=0, sigma_cor=0.0, sigma_ind=4.0
    )
    assert 0 < grid.smoothing_error(wider, 0) < 1e-40


def test_extra_delta():
    """(1 + e^epsilon) T d N tau, with N counted."""
    plan = plan_of(num_workers=5, num_byzantine=2, num_colluding=1)
    tau = grid.discrete_gaussian(3.0).error
    noises = 3 + 3 + 3 * 1  # own, honest pairs, with the silent one
    expected = (1 + math.exp(2)) * 30 * 1000 * noises * tau
    assert grid.extra_delta(plan, 0, 1000, epsilon=2.0) == pytest.approx(expected, rel=1e-9)
    assert grid.extra_delta(plan, 0, 1000, epsilon=1e6) == 1
    # The paper's settings and their large epsilon.
    big = plan_of(threat_model="secldp", num_colluding=0, sigma_ind=0.0, sigma_cor=0.6)
    assert 0 < grid.extra_delta(big, 17, 431_080, epsilon=39.6) < 1e-7
    with pytest.raises(UserError, match="epsilon must be at least 0"):
        grid.extra_delta(plan, 0, 10, epsilon=math.nan)


def test_plans_the_grid_cannot_keep():
    grid.check_plan(plan_of(), 14, 431_080)
    grid.check_plan(plan_of(), grid.propose_bits(**noise_of(plan_of())), 431_080)
    example = dict(level="example", batch_size=10, samples_per_worker=60, sampling="without_replacement")
    for plan, bits, message in (
        (plan_of(**example), 14, "level must be 'user' on the grid, got 'example'"),
        (plan_of(accountant="exact"), 14, "accountant must be 'rdp' or 'paper' on the grid, got 'exact'"),
        (plan_of(), 1, "bits=1 is too coarse"),
        (plan_of(num_workers=2000), 17, "bits must be at most"),
        (plan_of(sigma_ind=0.2, sigma_cor=0.2), 17, "is too large for the grid: that draws are not exactly"),
    ):
        with pytest.raises(UserError, match=message):
            grid.check_plan(plan, bits, 431_080)
    ring = dict(graph=privacy.graphs.ring(100))
    grid.check_plan(plan_of(**ring, sigma_ind=9.0), 14, 10)
    with pytest.raises(UserError, match="complete on the grid without independent noise, got a ring graph"):
        grid.check_plan(plan_of(**ring, threat_model="secldp", sigma_ind=0.0, num_colluding=0), 14, 10)
    none = plan_of(threat_model="none", sigma_ind=0.0, sigma_cor=0.0, num_colluding=0)
    with pytest.raises(UserError, match="nothing to put on a grid"):
        grid.check_plan(none, 14, 10)


def noise_of(plan):
    return dict(
        sigma_ind=plan.sigma_ind,
        sigma_cor=plan.sigma_cor,
        num_workers=plan.num_workers,
        clip_norm=plan.clip_norm,
    )


@pytest.mark.parametrize("name", ["ring", "regular:4", "complete"])
def test_on_a_secret_graph(name):
    n, d = 8, 9000
    graph, keys = privacy.graphs.parse(name, n), secrets.key_matrix(jax.random.key(4), n)
    rows = np.asarray(fast_jit(lambda t: grid.pairwise(keys, t, d, 1.0, 12, graph))(2))
    assert not rows.sum(axis=0).any()
    row = jax.jit(lambda own, i: grid.pairwise_row(own, i, 2, d, 1.0, 12, graph))
    for i in range(n):
        np.testing.assert_array_equal(rows[i], row(keys[i], i))
    laplacian = np.diag(graph.degrees) - graph.adjacency.astype(float)
    steps = rows / 2.0**12
    np.testing.assert_allclose(steps @ steps.T / d, laplacian, atol=6 * graph.degrees.max() * (2 / d) ** 0.5)
    if name == "complete":
        np.testing.assert_array_equal(rows, jax.jit(lambda: grid.pairwise(keys, 2, d, 1.0, 12))())
