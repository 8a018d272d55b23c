"""The accountants against the paper's numbers, dp-accounting, and the definitions."""

import dataclasses
import math
import subprocess
import sys

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from scipy import integrate, stats

from cafcor_jax import privacy

OPACUS = np.array(privacy.OPACUS_ORDERS)


def plan(**overrides):
    values = dict(
        threat_model="secldp", num_workers=100, num_byzantine=10, rounds=30, clip_norm=2.25, delta=1e-4,
        sigma_ind=0.0, sigma_cor=0.6,
    )  # fmt: skip
    return privacy.PrivacyPlan(**{**values, **overrides})


def example_plan(**overrides):
    values = dict(
        threat_model="ldp", level="example", num_workers=10, num_byzantine=2, rounds=400, clip_norm=5.0,
        delta=1e-4, sigma_ind=0.1, sigma_cor=0.0, batch_size=100, samples_per_worker=6000,
        sampling="without_replacement",
    )  # fmt: skip
    return privacy.PrivacyPlan(**{**values, **overrides})


def ldp_of_rho(rho, delta=1e-4):
    """One round of LDP with T eps_step = rho."""
    return plan(
        threat_model="ldp", rounds=1, clip_norm=1.0, sigma_cor=0.0, sigma_ind=math.sqrt(2 / rho), delta=delta
    )


def test_import_needs_no_jax_and_no_dp_accounting():
    code = "import sys, cafcor_jax.privacy; sys.exit(any(m in sys.modules for m in ('jax', 'dp_accounting')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "rho, paper, opacus, exact", [(1, 7.07, 6.31, 5.77), (9, 27.21, 25.82, 24.06), (15, 38.51, 36.97, 34.61)]
)
def test_three_conversions_of_the_same_rho(rho, paper, opacus, exact):
    got = [privacy.epsilon(ldp_of_rho(rho), accountant) for accountant in ("paper", "rdp", "exact")]
    assert got == pytest.approx([paper, opacus, exact], abs=5.001e-3)


def test_budgets_of_the_paper():
    assert privacy.epsilon(plan()) == pytest.approx(26.39, abs=5e-3)
    assert privacy.epsilon(plan(sigma_cor=0.2, clip_norm=1.0)) == pytest.approx(39.56, abs=5e-3)


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1, 10, 100, 1e3])
@pytest.mark.parametrize("delta", [0.3, 1e-4, 1e-8, 1e-12])
def test_exact_is_dp_accountings_gaussian_in_both_directions(epsilon, delta):
    sigma = dp_accounting.get_sigma_gaussian(epsilon, delta)
    assert privacy.gaussian_epsilon(1 / sigma, delta) == pytest.approx(epsilon, rel=1e-6)
    assert privacy.gaussian_log_delta(epsilon, 1 / sigma) == pytest.approx(math.log(delta), rel=1e-6)


@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
def test_exact_is_pld(mu):
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(math.sqrt(5) / mu), 5))
    ours = privacy.gaussian_epsilon(mu, 1e-5)
    # PLD rounds losses up to its grid of 1e-4, so it is above, and by less than that.
    assert 0 <= accountant.get_epsilon(1e-5) - ours < 1e-4


@pytest.mark.parametrize("epsilon, mu", [(0.0, 0.5), (0.5, 1.0), (3.0, 1.0), (8.0, 3.0)])
def test_exact_delta_is_the_definition(epsilon, mu):
    """delta is the integral of (p - e^epsilon q)_+ for p = N(mu, 1), q = N(0, 1)."""
    start = epsilon / mu + mu / 2  # where p = e^epsilon q

    def excess(x):
        return stats.norm.pdf(x - mu) - math.exp(epsilon) * stats.norm.pdf(x)

    definition, _ = integrate.quad(excess, start, start + 40, epsabs=0, epsrel=1e-11, limit=200)
    assert math.exp(privacy.gaussian_log_delta(epsilon, mu)) == pytest.approx(definition, rel=1e-8)


def test_exact_far_out_and_where_delta_suffices():
    assert privacy.gaussian_epsilon(0.0, 1e-5) == 0
    assert privacy.gaussian_epsilon(1e-6, 1e-5) == 0  # total variation mu/sqrt(2 pi) is below delta
    assert privacy.gaussian_epsilon(1e-4, 1e-5) > 0
    huge = privacy.gaussian_epsilon(1e4, 1e-12)
    assert 5e7 < huge < 5e7 + 1e4 * math.sqrt(2 * math.log(1e12))


@pytest.mark.parametrize("delta", [1e-2, 1e-4, 1e-6])
def test_rdp_is_dp_accounting_with_opacus_orders(delta):
    for rho in np.geomspace(0.03, 30, 25):
        theirs, best = rdp.compute_epsilon(OPACUS, rho * OPACUS, delta)
        assert OPACUS[0] < best < OPACUS[-1], "choose rho such that the grid's edges do not matter"
        assert privacy.rdp_epsilon(OPACUS, rho * OPACUS, delta) == pytest.approx(theirs, rel=1e-12)
        assert privacy.epsilon(ldp_of_rho(rho, delta), "rdp") == pytest.approx(theirs, rel=1e-10)


@pytest.mark.parametrize("rho", [1e-6, 1e-4, 1e4, 1e5])
def test_rdp_goes_beyond_opacus_orders_at_their_edges(rho):
    at_edge, best = rdp.compute_epsilon(OPACUS, rho * OPACUS, 1e-6)
    assert best in (OPACUS[0], OPACUS[-1])
    ours = privacy.epsilon(ldp_of_rho(rho, 1e-6), "rdp")
    dense = 1 + np.geomspace(1e-4, 1e7, 200_000)
    optimum = privacy.rdp_epsilon(dense, rho * dense, 1e-6)
    assert optimum * (1 - 1e-12) <= ours < optimum * 1.005
    assert ours < at_edge


def test_the_three_are_ordered():
    for rho in np.geomspace(1e-4, 500, 40):
        exact, renyi, paper = (privacy.epsilon(ldp_of_rho(rho), name) for name in ("exact", "rdp", "paper"))
        # Opacus' orders are coarse near 1.1, which costs up to half a percent at a very large epsilon.
        assert exact < renyi < (paper if rho < 30 else 1.005 * paper)


@pytest.mark.parametrize("accountant", privacy.ACCOUNTANTS)
def test_schedule_is_epsilon_after_each_round(accountant):
    p = plan(accountant=accountant)
    schedule = privacy.epsilon_schedule(p)
    assert schedule.shape == (30,) and (np.diff(schedule) > 0).all()
    for t in (1, 2, 17, 30):
        assert schedule[t - 1] == pytest.approx(privacy.epsilon(p, rounds=t), rel=1e-12)
    assert privacy.epsilon(p) == pytest.approx(schedule[-1], rel=1e-12)
    assert privacy.epsilon(p, rounds=0) == 0
    assert privacy.epsilon(p, rounds=60) > schedule[-1]


def test_long_schedule_in_pieces():
    p = plan(rounds=10_000)
    schedule = privacy.epsilon_schedule(p)
    assert schedule.shape == (10_000,) and (np.diff(schedule) > 0).all()
    assert schedule[5000] == pytest.approx(privacy.epsilon(p, rounds=5001), rel=1e-12)


def test_no_privacy_is_infinite_from_the_first_round():
    p = privacy.no_privacy(num_workers=10, num_byzantine=2, rounds=3)
    assert privacy.epsilon(p, rounds=0) == 0 and privacy.epsilon(p) == math.inf
    assert np.isinf(privacy.epsilon_schedule(p)).all()


@pytest.mark.parametrize("accountant", privacy.ACCOUNTANTS)
def test_epsilon_is_monotone_in_every_parameter(accountant):
    base = dict(
        threat_model="byzldp",
        num_colluding=4,
        sigma_ind=0.5,
        sigma_cor=0.5,
        num_workers=40,
        accountant=accountant,
    )

    def over(name, values):
        return np.diff([privacy.epsilon(plan(**{**base, name: value})) for value in values])

    assert (over("sigma_ind", [0.1, 0.5, 0.50001, 3, 30]) < 0).all()
    assert (over("sigma_cor", [0.1, 0.5, 0.50001, 3, 30]) < 0).all()
    assert (over("num_workers", [21, 22, 40, 400]) < 0).all()
    assert (over("num_byzantine", [4, 5, 10, 19]) < 0).all()
    assert (over("num_colluding", range(11)) > 0).all()
    assert (over("rounds", [1, 2, 3, 30, 31, 3000]) > 0).all()
    assert (over("clip_norm", [0.01, 0.1, 1, 1.00001, 10]) > 0).all()
    assert (over("delta", [1e-12, 1e-8, 1e-4, 1.00001e-4, 0.1]) < 0).all()


# The example level.


def sampled_rdp(event_type, sigma, orders, relation):
    accountant = rdp.RdpAccountant(orders, relation)
    accountant.compose(event_type(dp_accounting.GaussianDpEvent(sigma)))
    return accountant.rdp


@pytest.mark.parametrize("rate", [1 / 60, 0.1, 0.5])
@pytest.mark.parametrize("mu", [0.25, 1.0, 4.0])
def test_subsampled_rdp_lies_between_two_of_dp_accounting(rate, mu):
    """Below the general bound for this sampling, above the divergence of one actual pair of data sets."""
    orders = [2, 3, 5, 10]
    ours = privacy.subsampled_gaussian_rdp(orders, mu, rate)
    size = round(rate * 6000)
    upper = sampled_rdp(
        lambda event: dp_accounting.SampledWithoutReplacementDpEvent(6000, size, event),
        1 / mu, orders, dp_accounting.NeighboringRelation.REPLACE_ONE,
    )  # fmt: skip
    # All gradients -C, one of them replaced by +C: the mixture (1-rate) N(0,1) + rate N(mu,1) and N(0,1).
    # Its divergence is that of Poisson sampling with the noise multiplier 1/mu.
    lower = sampled_rdp(
        lambda event: dp_accounting.PoissonSampledDpEvent(rate, event),
        1 / mu, orders, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    )  # fmt: skip
    rounding = 1 + 1e-9  # the two meet where the order is large
    assert (0 < lower).all() and (lower <= rounding * ours).all() and (ours <= rounding * upper).all()


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 5.0, 30.0])
def test_subsampled_rdp_tends_to_the_gaussian(mu):
    """At rate 1 the integral is exp(alpha (alpha-1) mu^2 / 2); just below it must nearly be that."""
    orders = np.array([1.001, 1.5, 2, 3.7, 12])
    gaussian = orders * mu**2 / 2
    np.testing.assert_allclose(privacy.subsampled_gaussian_rdp(orders, mu, 1.0), gaussian, rtol=1e-15)
    near = privacy.subsampled_gaussian_rdp(orders, mu, 1 - 1e-9)
    assert (near <= gaussian).all()
    np.testing.assert_allclose(near, gaussian, rtol=1e-6)


def test_subsampled_rdp_integral_against_scipy():
    for alpha, mu, rate in [(1.3, 2.0, 0.02), (2.0, 0.5, 0.3), (7.5, 1.0, 0.01)]:

        def integrand(s, alpha=alpha, mu=mu, rate=rate):
            gamma = 1 + rate * math.expm1(s)
            delta = stats.norm.cdf(mu / 2 - s / mu) - math.exp(s) * stats.norm.cdf(-mu / 2 - s / mu)
            return (gamma ** (alpha - 2) + gamma ** (-alpha - 1)) * delta * math.exp(s)

        integral, _ = integrate.quad(integrand, 0, 25 * mu, epsabs=0, epsrel=1e-10, limit=500)
        expected = math.log1p(alpha * (alpha - 1) * rate**2 * integral) / (alpha - 1)
        assert privacy.subsampled_gaussian_rdp([alpha], mu, rate)[0] == pytest.approx(expected, rel=1e-7)


def test_example_level_with_full_batches_is_one_gaussian_of_sensitivity_2c_over_b():
    full = example_plan(batch_size=500, samples_per_worker=500)
    assert full.sensitivity == 2 * 5.0 / 500
    accountant = rdp.RdpAccountant(privacy.ORDERS, dp_accounting.NeighboringRelation.REPLACE_ONE)
    # dp-accounting's noise multiplier is sigma over the distance that one replacement moves the output.
    event = dp_accounting.GaussianDpEvent(full.sigma_ind / full.sensitivity)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(500, 500, event), 400)
    assert privacy.epsilon(full) == pytest.approx(accountant.get_epsilon(1e-4), rel=1e-9)
    user = plan(threat_model="ldp", sigma_cor=0.0, sigma_ind=0.1, clip_norm=5.0 / 500, rounds=400)
    assert privacy.epsilon(full) == pytest.approx(privacy.epsilon(user), rel=1e-12)
    # Sampling helps: the same mechanism on 500 of 501 examples.
    assert privacy.epsilon(example_plan(batch_size=500, samples_per_worker=501)) < privacy.epsilon(full)


def test_example_level_is_monotone():
    def over(name, values, **others):
        return np.diff([privacy.epsilon(example_plan(**{**others, name: value})) for value in values])

    assert (over("sigma_ind", np.geomspace(0.01, 1, 7)) < 0).all()
    # In this range dp-accounting's own event is not monotone: its finite differences lose their digits.
    assert (over("sigma_ind", np.geomspace(0.5, 50, 7), samples_per_worker=200, rounds=10) < 0).all()
    assert (over("samples_per_worker", [100, 101, 110, 200, 1000, 10_000]) < 0).all()
    assert (over("clip_norm", [1, 2, 5, 5.001]) > 0).all()
    assert (over("rounds", [1, 2, 400, 401]) > 0).all()
    assert (over("delta", [1e-8, 1e-4, 1e-2]) < 0).all()


def test_example_level_threat_models_share_the_lemma():
    """Correlated noise with eps_step of an LDP plan spends what that LDP plan spends."""
    byz = example_plan(threat_model="byzldp", num_colluding=2, sigma_ind=0.05, sigma_cor=0.05)
    step = privacy.step_divergence(
        sigma_ind=0.05, sigma_cor=0.05, num_workers=10, num_byzantine=2, num_colluding=2, clip_norm=5.0 / 100
    )
    ldp = example_plan(sigma_ind=math.sqrt(2 * 0.05**2 / step))
    assert privacy.epsilon(byz) == pytest.approx(privacy.epsilon(ldp), rel=1e-9)
    cdp = example_plan(threat_model="cdp", sigma_ind=0.1 / math.sqrt(10))
    assert privacy.epsilon(cdp) == pytest.approx(privacy.epsilon(example_plan(sigma_ind=0.1)), rel=1e-9)


def test_figure_2_noise_multiplier_one_half():
    """The paper's 13.7 counts one example added or removed (sensitivity C/b), sampled by Poisson."""
    # Opacus' best order is 1.9. (dp-accounting 0.6.0 has a loose series at fractional orders: 13.735 at 2.)
    order, rate, multiplier = 1.9, 100 / 6000, 0.5

    def moment(x):
        ratio = 1 - rate + rate * math.exp((2 * x - 1) / (2 * multiplier**2))
        return ratio**order * stats.norm.pdf(x, scale=multiplier)

    poisson = math.log(integrate.quad(moment, -6, 10, epsrel=1e-10, limit=200)[0]) / (order - 1)
    assert privacy.rdp_epsilon([order], 400 * np.array([poisson]), 1e-4) == pytest.approx(13.711, abs=1e-3)
    sigma = 0.5 * 5.0 / 100
    # The algorithm's own sampling, one example replaced: twice the sensitivity.
    assert privacy.epsilon(example_plan(sigma_ind=sigma)) == pytest.approx(111.89, abs=0.01)
    # The same with the sensitivity that the paper's number has.
    assert privacy.epsilon(example_plan(sigma_ind=2 * sigma)) == pytest.approx(14.90, abs=0.01)


def test_example_level_schedule():
    p = example_plan()
    schedule = privacy.epsilon_schedule(p)
    assert schedule[399] == pytest.approx(privacy.epsilon(p), rel=1e-12)
    assert schedule[7] == pytest.approx(privacy.epsilon(p, rounds=8), rel=1e-12)


@pytest.mark.parametrize("accountant", ["exact", "paper"])
def test_example_level_has_one_accountant(accountant):
    with pytest.raises(ValueError, match="mixture of Gaussians"):
        privacy.epsilon(example_plan(), accountant)
    with pytest.raises(ValueError, match="mixture of Gaussians"):
        dataclasses.replace(example_plan(), accountant=accountant)


def test_bad_arguments():
    with pytest.raises(ValueError, match="accountant must be one of exact, rdp, paper, got 'moments'"):
        privacy.epsilon(plan(), "moments")
    for rounds in (-1, 1.5, True):
        with pytest.raises(ValueError, match="rounds must be a whole number"):
            privacy.epsilon(plan(), rounds=rounds)
    for rate in (0, 1.1, math.nan):
        with pytest.raises(ValueError, match="rate must be in"):
            privacy.subsampled_gaussian_rdp([2], 1.0, rate)
    with pytest.raises(ValueError, match="mu must be positive"):
        privacy.subsampled_gaussian_rdp([2], 0.0, 0.5)


@pytest.mark.parametrize("rate", [1e-4, 1 / 60, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 2.0, 4.0])
def test_poisson_rdp_is_dp_accountings_and_the_integral(rate, mu):
    # At whole orders; at others the series of dp-accounting 0.6.0 is loose.
    orders = [2, 3, 8, 12, *([33, 63] if mu <= 1 else [])]
    theirs = sampled_rdp(
        lambda event: dp_accounting.PoissonSampledDpEvent(rate, event),
        1 / mu, orders, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    )  # fmt: skip
    np.testing.assert_allclose(privacy.poisson_gaussian_rdp(orders, mu, rate), theirs, rtol=1e-6, atol=1e-14)
    for order in (1.05, 1.9, 3.7):
        # Of the moment less 1: E(ratio) = 1, so what is linear in the ratio integrates to 0.
        def moment(x, order=order):
            excess = rate * math.expm1(mu * x - mu**2 / 2)
            return (math.expm1(order * math.log1p(excess)) - order * excess) * stats.norm.pdf(x)

        peaks = [0, mu, order * mu]
        value = integrate.quad(moment, -12, order * mu + 12, epsrel=1e-11, epsabs=0, limit=500, points=peaks)[
            0
        ]
        ours = privacy.poisson_gaussian_rdp([order], mu, rate)[0]
        assert ours == pytest.approx(math.log1p(value) / (order - 1), rel=1e-7, abs=1e-13)


@pytest.mark.parametrize("rate, multiplier", [(1 / 60, 0.5), (0.01, 1.0), (0.2, 2.0), (1.0, 3.0)])
def test_poisson_is_opacus(rate, multiplier):
    analysis = pytest.importorskip("opacus.accountants.analysis.rdp")
    theirs = analysis.compute_rdp(q=rate, noise_multiplier=multiplier, steps=400, orders=list(OPACUS))
    ours = 400 * privacy.poisson_gaussian_rdp(OPACUS, 1 / multiplier, rate)
    epsilon, _ = analysis.get_privacy_spent(orders=list(OPACUS), rdp=theirs, delta=1e-4)
    assert float(privacy.rdp_epsilon(OPACUS, ours, 1e-4)) == pytest.approx(epsilon, rel=1e-6)


def test_poisson_is_opacus_in_figure_2():
    poisson = example_plan(sampling="poisson", sigma_ind=0.5 * 5 / 100)
    assert privacy.epsilon(poisson) == pytest.approx(13.711, abs=5e-4)


def test_poisson_with_all_examples_is_the_gaussian():
    orders = [1.5, 2, 10]
    np.testing.assert_allclose(privacy.poisson_gaussian_rdp(orders, 0.7, 1.0), np.array(orders) * 0.7**2 / 2)
    near = privacy.poisson_gaussian_rdp(orders, 0.7, 1 - 1e-12)
    np.testing.assert_allclose(near, np.array(orders) * 0.7**2 / 2, rtol=1e-9)
    with pytest.raises(ValueError, match=r"rate must be in \(0, 1\], got 0"):
        privacy.poisson_gaussian_rdp(orders, 0.7, 0)
