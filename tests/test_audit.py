"""The audit: statistics against closed forms, adversary against accountant, and faults that it must find."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from cafcor_jax import aggregators, attacks, audit, privacy
from cafcor_jax.audit import Faults
from cafcor_jax.federation import Data, federation
from tests.compiling import compiled_quickly  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("compiled_quickly")

SMALL = {"num_workers": 5, "num_byzantine": 2, "rounds": 1, "epsilon": 2.0, "delta": 0.01}


def make_plan(threat_model, **settings):
    settings = SMALL | {"clip_norm": 1.5, "accountant": "exact"} | settings
    return privacy.calibrate(threat_model=threat_model, **settings)


# Statistics.


@pytest.mark.parametrize("confidence", [0.6, 0.95, 0.999])
def test_clopper_pearson_is_scipys_and_solves_its_definition(confidence):
    trials, count = 50, np.arange(51)
    low, high = audit.clopper_pearson(count, trials, confidence)
    np.testing.assert_allclose(high[:-1], stats.beta.ppf(confidence, count[:-1] + 1, trials - count[:-1]))
    np.testing.assert_allclose(low[1:], stats.beta.ppf(1 - confidence, count[1:], trials - count[1:] + 1))
    assert low[0] == 0 and high[-1] == 1
    np.testing.assert_allclose(stats.binom.cdf(count[:-1], trials, high[:-1]), 1 - confidence)
    np.testing.assert_allclose(stats.binom.sf(count[1:] - 1, trials, low[1:]), 1 - confidence)


def test_each_clopper_pearson_limit_covers():
    """Summed over all outcomes: no limit fails more often than it may, and some nearly that often."""
    trials, count = 40, np.arange(41)
    low, high = audit.clopper_pearson(count, trials, 0.9)
    rates = np.linspace(0.01, 0.99, 197)
    chances = stats.binom.pmf(count, trials, rates[:, None])
    for failures in ((chances * (high < rates[:, None])).sum(1), (chances * (low > rates[:, None])).sum(1)):
        assert failures.max() <= 0.1 + 1e-12
        assert failures.max() > 0.08


def test_bound_without_errors_has_a_closed_form():
    trials, delta = 1000, 1e-3
    limit = 1 - 0.025 ** (1 / trials)
    expected = math.log((1 - delta - limit) / limit)
    assert audit.epsilon_lower_bound(0, 0, trials, delta, 0.95) == pytest.approx(expected, rel=1e-9)


def test_bound_is_symmetric_never_negative_and_uses_both_rates():
    bounds = audit.epsilon_lower_bound(
        np.array([5, 200, 500, 1000]), np.array([200, 5, 500, 1000]), 1000, 0.0
    )
    assert bounds[0] == bounds[1] > 0
    assert bounds[2:].tolist() == [0, 0]
    one_sided = math.log((1 - stats.beta.ppf(0.975, 201, 800)) / stats.beta.ppf(0.975, 6, 995))
    assert bounds[0] == pytest.approx(one_sided)


@pytest.mark.parametrize("mu, delta", [(0.9, 1e-2), (1.2, 1e-3), (1.5, 1e-4)])
def test_with_endless_trials_the_best_threshold_shows_the_exact_epsilon(mu, delta):
    trials = 10**12
    epsilon = float(privacy.gaussian_epsilon(mu, delta))
    thresholds = epsilon / mu + np.linspace(-1, 1, 21)  # the best one is where the log ratio is epsilon
    wrong = [np.round(trials * stats.norm.cdf(sign * thresholds - mu / 2)) for sign in (-1, 1)]
    best = audit.epsilon_lower_bound(*wrong, trials, delta).max()
    assert 0.999 * epsilon < best <= epsilon
    assert best > 1.001 * audit.epsilon_lower_bound(wrong[0][0], wrong[1][0], trials, delta)


def gaussian_bounds(mu, repeats, trials, confidence):
    rng = np.random.default_rng(3)
    for _ in range(repeats):
        noises = rng.standard_normal((2, trials))
        yield audit.bound(noises[0] - mu / 2, noises[1] + mu / 2, delta=0.01, confidence=confidence).epsilon


def test_bound_is_above_the_truth_no_more_often_than_it_says():
    truth = float(privacy.gaussian_epsilon(1.0, 0.01))
    above = sum(found > truth for found in gaussian_bounds(1.0, 300, 2000, 0.8))
    assert above <= 0.2 * 300  # half of the risk is the other rate's, so far fewer are expected
    assert above >= 3  # a bound that is never wrong would not use its risk
    # The same bound against a claim for less than the truth: it is mostly refuted.
    less = float(privacy.gaussian_epsilon(0.5, 0.01))
    assert sum(found > less for found in gaussian_bounds(1.0, 100, 2000, 0.8)) > 90


def test_bound_is_close_to_the_truth_with_many_trials():
    truth = float(privacy.gaussian_epsilon(1.0, 0.01))
    (found,) = gaussian_bounds(1.0, 1, 1_000_000, 0.95)
    assert 0.94 * truth < found <= truth


def test_threshold_is_picked_on_the_first_half_and_judged_on_the_second():
    rng = np.random.default_rng(0)
    minus, plus = rng.normal(-1, 1, 4001), rng.normal(1, 1, 4001)
    found = audit.bound(minus, plus, delta=0.01)
    assert found.trials == 2001
    assert found.false_positives == np.sum(minus[2000:] > found.threshold)
    assert found.false_negatives == np.sum(plus[2000:] <= found.threshold)
    other = audit.bound(
        np.append(minus[:2000], rng.normal(9, 1, 2001)), np.append(plus[:2000], plus[2000:]), delta=0.01
    )
    assert other.threshold == found.threshold and other.epsilon == 0


def test_worlds_that_do_not_overlap_are_told_apart_without_error():
    rng = np.random.default_rng(0)
    minus, plus = rng.normal(-1, 1e-7, 2000), rng.normal(1, 1e-7, 2000)
    found = audit.bound(minus, plus, delta=0.01)
    assert found.false_positives == found.false_negatives == 0 and abs(found.threshold) < 1e-3


# The adversary.

PLANS = {
    "ldp": make_plan("ldp", rounds=3),
    "cdp": make_plan("cdp", rounds=2),
    "secldp": make_plan("secldp", rounds=2),
    "byzldp": make_plan("byzldp", num_workers=9, num_byzantine=3, rounds=4),
    "partial": make_plan("byzldp", num_workers=9, num_byzantine=3, num_colluding=1),
    "ring": make_plan("byzldp", num_workers=8, num_byzantine=1, graph=privacy.graphs.ring(8)),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_best_score_has_the_accountants_mu(name):
    """2 w.s / sqrt(w Sigma w) is what the exact accountant starts from, and other weights have less."""
    plan = PLANS[name]
    covariance, signal = audit.view_covariance(plan), audit.worlds(plan)

    def mu(weights):
        return (
            2 * weights.ravel() @ signal.ravel() / math.sqrt(weights.ravel() @ covariance @ weights.ravel())
        )

    best = mu(audit.optimal_weights(covariance, signal))
    assert best == pytest.approx(math.sqrt(2 * plan.rounds * plan.step_divergence), rel=1e-9)
    rng = np.random.default_rng(0)
    assert all(mu(rng.standard_normal(signal.shape)) <= best * (1 + 1e-12) for _ in range(100))


def test_noise_free_part_of_a_signal_decides_alone():
    covariance = np.diag([1.0, 0.0, 2.0])
    np.testing.assert_allclose(audit.optimal_weights(covariance, np.array([1.0, 0.5, 0.0])), [0, 0.5, 0])
    np.testing.assert_allclose(audit.optimal_weights(covariance, np.array([1.0, 0.0, 2.0])), [1, 0, 1])


def test_what_a_broken_pair_does_to_epsilon():
    """Forgotten by one end: worse for that worker, better for the other. A public key: worse for both."""
    plan = make_plan("secldp")

    def worst(faults):
        return np.diag(np.linalg.inv(audit.view_covariance(plan, faults)))

    right = worst(Faults())
    forgotten, public = worst(Faults(forgotten_end=(0, 1))), worst(Faults(public_pair=(0, 1)))
    assert forgotten[0] > 1.2 * right[0] and forgotten[1] < 0.9 * right[1]
    assert public[0] > 1.2 * right[0] and public[1] > 1.2 * right[1] and public[2] == pytest.approx(right[2])


SIZE = 8 * 8192


@pytest.mark.parametrize(
    "plan, noise_mode, faults",
    [
        (PLANS["partial"], "pairwise", Faults()),
        (PLANS["ring"], "pairwise", Faults(gradient_scale=2.0)),
        (PLANS["secldp"], "projected", Faults(reused_round=True, noise_scale=0.5)),
        (PLANS["secldp"], "pairwise", Faults(forgotten_end=(1, 0))),
        (make_plan("byzldp"), "pairwise", Faults(public_pair=(0, 2), no_independent=True)),
    ],
)
def test_what_is_left_of_real_noise_has_the_covariance_that_the_server_thinks(plan, noise_mode, faults):
    view = audit.server_view(plan, noise_mode, faults)(jax.random.key(0), jnp.float32(-1), SIZE)
    view = np.asarray(view, np.float64).reshape(-1, SIZE)
    expected = audit.view_covariance(plan, faults)
    scale = np.diag(expected).max()
    spread = math.sqrt(2 / SIZE) * scale
    np.testing.assert_allclose(
        view.mean(1), -audit.worlds(plan, faults).ravel(), atol=6 * math.sqrt(scale / SIZE)
    )
    np.testing.assert_allclose(np.cov(view), expected, atol=6 * spread)
    # A server that took its noise for another would be seen to be wrong.
    if faults == Faults():
        other = audit.view_covariance(dataclasses.replace(plan, num_colluding=0))
        assert np.abs(np.cov(view) - other).max() > 20 * spread
    else:
        right = audit.view_covariance(plan), audit.worlds(plan)
        shift = np.abs(view.mean(1) + right[1].ravel()).max() / math.sqrt(scale / SIZE)
        assert max(np.abs(np.cov(view) - right[0]).max() / spread, shift) > 20


# Audits. Worker 0 of two honest ones: a fault of the only pair moves epsilon by a quarter.

PAIR = make_plan("secldp", num_workers=3, num_byzantine=1)
BYZLDP = make_plan("byzldp", rounds=2)


@pytest.mark.parametrize(
    "plan, noise_mode", [(BYZLDP, "pairwise"), (PAIR, "pairwise"), (PLANS["cdp"], "independent")]
)
def test_right_mechanisms_hold_and_nothing_is_given_away(plan, noise_mode):
    found = audit.audit(plan, trials=200_000, seed=1, confidence=0.9999, noise_mode=noise_mode)
    assert not found.broken
    assert found.claimed == privacy.epsilon(plan, "exact")
    assert 0.85 < found.ratio <= 1
    if plan.threat_model != "cdp":
        assert found.own_message < 0.9 * found.lower_bound


@pytest.mark.parametrize(
    "plan, faults, trials",
    [
        (BYZLDP, Faults(reused_round=True), 140_000),
        (BYZLDP, Faults(no_independent=True), 140_000),
        (BYZLDP, Faults(noise_scale=0.5), 140_000),
        (BYZLDP, Faults(gradient_scale=3.0), 140_000),
        (PAIR, Faults(forgotten_end=(0, 1)), 200_000),
        (PAIR, Faults(public_pair=(0, 1)), 200_000),
    ],
)
def test_broken_mechanisms_are_caught(plan, faults, trials):
    found = audit.audit(plan, trials=trials, seed=1, confidence=0.9999, faults=faults)
    assert found.broken
    assert found.ratio > (1.05 if plan is PAIR else 1.5)


def test_a_fault_on_the_safe_side_is_not_called_broken():
    found = audit.audit(PAIR, trials=200_000, seed=1, faults=Faults(forgotten_end=(1, 0)))
    assert not found.broken and found.ratio < 0.9


def test_an_audit_is_a_function_of_its_seed():
    first, again, other = (audit.audit(PAIR, trials=140_001, seed=seed) for seed in (5, 5, 6))
    assert first == again
    assert first.detail.threshold != other.detail.threshold
    assert first.trials == 140_001 and first.detail.trials == 70_001


def test_trials_are_independent_between_chunks_and_worlds(monkeypatch):
    monkeypatch.setattr(audit, "_CHUNK", audit.noise.BLOCK)
    plan = make_plan("ldp")
    weights = audit.worlds(plan)[None]
    minus, plus = audit.draw_scores(audit.server_view(plan), weights, 3 * audit.noise.BLOCK, 0)
    parts = [*np.split(minus[0], 3), *np.split(plus[0], 3)]
    off_diagonal = np.corrcoef(parts) - np.eye(6)
    assert np.abs(off_diagonal).max() < 6 / math.sqrt(audit.noise.BLOCK)
    assert np.mean(plus) - np.mean(minus) == pytest.approx(2 * plan.clip_norm, rel=0.1)


# A canary in training.


def test_canary_of_a_training_run():
    """With one key the worlds differ by the signal alone; over keys the noise has the variance it should."""
    plan = make_plan("byzldp", num_workers=6, num_byzantine=2, rounds=3, epsilon=8.0)
    beta = 0.8
    rounds = federation(
        loss_fn=audit.with_canary(lambda params, x, y: jnp.mean((x @ params - y) ** 2)),
        plan=plan,
        aggregator=aggregators.BY_NAME["mean"](num_byzantine=2),
        attack=attacks.BY_NAME["sign_flip"](),
        optimizer=optax.sgd(0.1),
        momentum=beta,
        batch_size=2,
    )
    run = audit.canary_run(rounds, plan, momentum=beta)
    rng = np.random.default_rng(0)
    data = Data(
        jnp.asarray(rng.normal(size=(4, 5, 4)), jnp.float32),
        jnp.asarray(rng.integers(0, 3, (4, 5)), jnp.int32),
        jnp.full(4, 5, jnp.int32),
    )
    params = {"canary": jnp.zeros(1), "model": jnp.zeros(4)}
    keys = jax.random.split(jax.random.key(0), 3 * 60).reshape(3, 60)

    @jax.jit
    def scores(keys, world):
        return jax.lax.map(lambda key: run(key, params, audit.canary_data(data, world)), keys)

    plus = np.concatenate([np.asarray(scores(part, 1)) for part in keys], axis=1)
    minus = np.asarray(scores(keys[0], -1))
    single = dataclasses.replace(plan, rounds=1)
    covariance = audit.view_covariance(single)
    weights = audit.optimal_weights(covariance, audit.worlds(single))[0]
    # Two of three rounds carry data, and the two worlds are 2C apart in each.
    np.testing.assert_allclose(plus[0, :60] - minus[0], 2 * 2 * plan.clip_norm * weights[0], rtol=1e-4)
    expected = 2 * weights @ covariance @ weights
    assert np.var(plus[0]) == pytest.approx(expected, rel=5 * math.sqrt(2 / 180))
    # What the server would be left with without the colluding worker's keys is far more.
    unknown = audit.view_covariance(dataclasses.replace(single, num_colluding=0))
    assert 2 * weights @ unknown @ weights > 1.6 * expected
    # The model alone tells less, but it tells: its canary went down in world +.
    assert np.mean(plus[1]) > np.mean(minus[1])


# Bad input.


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: audit.clopper_pearson(3, 2, 0.95), "count must be whole numbers from 0 to trials=2, got 3."),
        (lambda: audit.clopper_pearson(0.5, 2, 0.95), "count must be whole numbers"),
        (lambda: audit.clopper_pearson(0, 0, 0.95), "trials must be a whole number of at least 1, got 0."),
        (lambda: audit.clopper_pearson(0, 2, 1.0), "confidence must be strictly between 0 and 1, got 1.0."),
        (lambda: audit.epsilon_lower_bound(0, 0, 2, 1.0), "delta must be at least 0 and below 1, got 1.0."),
        (lambda: audit.epsilon_lower_bound(0, 0, 2, 0.1, math.nan), "confidence must be strictly between"),
        (
            lambda: audit.bound(np.zeros(3), np.zeros(3), delta=0.1),
            "minus and plus must be vectors of one len",
        ),
        (
            lambda: audit.bound(np.zeros(8), np.zeros(9), delta=0.1),
            "minus and plus must be vectors of one len",
        ),
        (lambda: audit.bound(np.zeros(8), np.full(8, np.nan), delta=0.1), "minus and plus must be finite"),
        (lambda: audit.audit(PAIR, trials=3, seed=0), "trials must be a whole number of at least 4, got 3."),
        (lambda: audit.audit(PAIR, trials=8, seed=-1), "seed must be a whole number of at least 0, got -1."),
        (lambda: audit.audit(PAIR, trials=8, seed=2**32), "seed must be below 2^32, got 4294967296."),
        (lambda: audit.audit(PAIR, trials=8, seed=0, confidence=0), "confidence must be strictly between"),
        (
            lambda: audit.server_view(PAIR, "fast"),
            "noise_mode must be one of pairwise, projected, independent",
        ),
        (
            lambda: audit.server_view(PAIR, "independent"),
            "noise_mode is 'independent', but the plan has corr",
        ),
        (lambda: audit.server_view(BYZLDP, "projected"), "noise_mode is 'projected', but num_colluding is 2"),
        (
            lambda: audit.worlds(privacy.no_privacy(num_workers=3, num_byzantine=1, rounds=1)),
            "the plan has threat model 'none'",
        ),
        (
            lambda: audit.worlds(
                make_plan("ldp", level="example", accountant="rdp", batch_size=2, samples_per_worker=9)
            ),
            "the plan must be at the user level, got 'example'",
        ),
        (
            lambda: audit.worlds(PAIR, Faults(noise_scale=0.0)),
            "noise_scale must be finite and positive, got 0.0.",
        ),
        (
            lambda: audit.worlds(PAIR, Faults(gradient_scale=math.inf)),
            "gradient_scale must be finite and pos",
        ),
        (lambda: audit.worlds(PAIR, Faults(no_independent=True)), "no_independent has no effect"),
        (
            lambda: audit.worlds(PAIR, Faults(reused_round=True)),
            "reused_round needs at least 2 rounds, got 1.",
        ),
        (lambda: audit.worlds(PAIR, Faults(public_pair=(0, 0))), "public_pair must be two different workers"),
        (
            lambda: audit.worlds(PAIR, Faults(forgotten_end=(0, 2))),
            "forgotten_end must be two different work",
        ),
        (lambda: audit.worlds(PLANS["ldp"], Faults(public_pair=(0, 1))), "public_pair has no effect"),
        (
            lambda: audit.worlds(PLANS["ring"], Faults(public_pair=(0, 2))),
            "public_pair must be two workers th",
        ),
        (
            lambda: audit.worlds(PAIR, Faults(public_pair=(0, 1), forgotten_end=(1, 0))),
            "forgotten_end and public_pair must be different pairs",
        ),
        (lambda: audit.canary_run(None, PAIR, momentum=0.9), "a canary needs at least 2 rounds"),
        (lambda: audit.canary_run(None, BYZLDP, momentum=1.0), "momentum must be at least 0 and below 1"),
    ],
)
def test_bad_input_is_one_sentence(call, sentence):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value).startswith(sentence) and str(caught.value).endswith(".")
