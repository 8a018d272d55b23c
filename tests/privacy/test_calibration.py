"""Calibration: round trips over a grid, the splits, and plans that cannot exist."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from cafcor_jax import privacy
from cafcor_jax.errors import UserError

PRIVATE = privacy.THREAT_MODELS[1:]
MNIST = dict(epsilon=26.4, delta=1e-4, num_workers=100, num_byzantine=10, rounds=30, clip_norm=2.25)
EXAMPLE = dict(level="example", batch_size=100, samples_per_worker=6000)


def calibrate(threat_model="byzldp", **overrides):
    return privacy.calibrate(threat_model=threat_model, **{**MNIST, **overrides})


def assert_round_trip(plan, target):
    spent = privacy.epsilon(plan)
    assert spent <= target, "a plan must never exceed its budget"
    assert spent == pytest.approx(target, rel=1e-6)


@pytest.mark.parametrize("threat_model", PRIVATE)
def test_round_trip_over_hundreds_of_settings(threat_model):
    grid = itertools.product(
        [1e-3, 0.1, 1, 26.4, 1e3],
        [1e-12, 1e-4, 0.05],
        [(3, 1), (100, 10), (1000, 499)],
        [1, 5000],
        privacy.ACCOUNTANTS,
    )
    for number, (epsilon, delta, (n, f), rounds, accountant) in enumerate(grid):
        q = number % (f + 1) if threat_model == "byzldp" else None
        plan = privacy.calibrate(
            threat_model=threat_model, epsilon=epsilon, delta=delta, num_workers=n, num_byzantine=f,
            num_colluding=q, rounds=rounds, clip_norm=[0.01, 2.25, 40][number % 3], accountant=accountant,
        )  # fmt: skip
        assert_round_trip(plan, epsilon)
        # Not only its own epsilon: a little less noise must break the budget.
        less = dataclasses.replace(plan, sigma_ind=plan.sigma_ind * 0.9999, sigma_cor=plan.sigma_cor * 0.9999)
        assert privacy.epsilon(less) > epsilon
    assert number + 1 >= 200


@pytest.mark.parametrize(
    "threat_model, epsilon, delta, samples",
    [
        ("ldp", 0.2, 1e-6, 6000), ("cdp", 13.7, 1e-4, 6000), ("secldp", 3.0, 1e-4, 150),
        ("byzldp", 3.0, 1e-4, 6000), ("byzldp", 1e-3, 1e-12, 6000), ("byzldp", 1e3, 1e-12, 101),
    ],
)  # fmt: skip
def test_round_trip_at_the_example_level(threat_model, epsilon, delta, samples):
    settings = dict(epsilon=epsilon, delta=delta)
    plan = calibrate(threat_model, **settings, **{**EXAMPLE, "samples_per_worker": samples})
    assert_round_trip(plan, epsilon)
    user = calibrate(threat_model, **settings)
    # One example is at most 1/b of a message, and is sampled.
    assert plan.sigma_ind + plan.sigma_cor < (user.sigma_ind + user.sigma_cor) / 100


def test_splits():
    ldp, cdp, sec, byz = (calibrate(name) for name in PRIVATE)
    assert ldp.sigma_cor == cdp.sigma_cor == sec.sigma_ind == 0
    assert cdp.sigma_ind == pytest.approx(ldp.sigma_ind / math.sqrt(100), rel=1e-9)
    assert byz.sigma_ind == byz.sigma_cor > 0
    assert (ldp.num_colluding, cdp.num_colluding, sec.num_colluding, byz.num_colluding) == (0, 0, 0, 10)
    # Noise left in the honest mean: the order that the paper's Figure 1 shows.
    assert cdp.honest_mean_std < sec.honest_mean_std < byz.honest_mean_std < ldp.honest_mean_std


def test_sigmas_of_the_paper():
    assert calibrate("secldp", epsilon=26.39).sigma_cor == pytest.approx(0.6, abs=2e-4)
    assert calibrate("secldp", epsilon=27.8, num_byzantine=5).sigma_cor == pytest.approx(0.6033, abs=1e-4)
    assert calibrate("secldp", epsilon=39.6, clip_norm=1.0, num_byzantine=5).sigma_cor == pytest.approx(
        0.2088, abs=1e-4
    )


def test_partial_collusion_needs_noise_in_between():
    sigmas = [calibrate(num_colluding=q).sigma_ind for q in range(11)]
    assert (np.diff(sigmas) > 0).all()
    assert calibrate(num_colluding=None).sigma_ind == sigmas[-1]


def test_exact_needs_least_noise():
    exact, rdp, paper = (calibrate(accountant=name).sigma_ind for name in ("exact", "rdp", "paper"))
    assert exact < rdp < paper


def test_byzldp_without_byzantine_workers_is_defined():
    plan = calibrate(num_byzantine=0)
    assert plan.num_colluding == 0
    assert_round_trip(plan, 26.4)


def test_none():
    plan = calibrate("none")
    assert plan.sigma_ind == plan.sigma_cor == 0 and plan.epsilon == math.inf
    assert plan.clip_norm == 2.25
    assert calibrate("none", **EXAMPLE).level == "example"
    with pytest.raises(ValueError, match="num_colluding must be 0 under 'none'"):
        calibrate("none", num_colluding=3)


@pytest.mark.parametrize("threat_model", privacy.THREAT_MODELS)
def test_dict_round_trip_through_strict_json(threat_model):
    plan = calibrate(threat_model)
    text = json.dumps(plan.to_dict(), allow_nan=False)
    assert privacy.PrivacyPlan.from_dict(json.loads(text)) == plan
    assert list(plan.to_dict()) == [field.name for field in dataclasses.fields(plan)]


def test_dict_takes_numpy_numbers_and_checks_again():
    plan = calibrate(rounds=np.int64(30), num_workers=np.int32(100), clip_norm=np.float32(2.25))
    values = json.loads(json.dumps(plan.to_dict()))
    assert privacy.PrivacyPlan.from_dict(values) == plan
    with pytest.raises(ValueError, match="delta must be strictly between"):
        privacy.PrivacyPlan.from_dict({**values, "delta": 2})
    with pytest.raises(ValueError, match="unknown fields .'typo'. and lacks .'rounds'."):
        privacy.PrivacyPlan.from_dict({**{k: v for k, v in values.items() if k != "rounds"}, "typo": 1})


def test_plan_is_frozen_and_hashable():
    plan = calibrate()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.sigma_ind = 0.0
    assert hash(plan) == hash(dataclasses.replace(plan))


def test_describe_tells_a_person():
    text = calibrate().describe()
    for words in (
        "ByzLDP",
        "100 workers",
        "10 Byzantine",
        "10 colluding",
        "30 rounds",
        "epsilon = 26.4",
        "user level",
    ):
        assert words in text
    example = dataclasses.replace(calibrate(), sampling="without_replacement", **EXAMPLE)
    assert "batches of 100 of 6000" in example.describe()
    assert privacy.PrivacyPlan.from_dict(example.to_dict()) == example
    assert "no budget set" in dataclasses.replace(calibrate(), epsilon=math.inf).describe()


@pytest.mark.parametrize(
    "overrides, message",
    [
        (dict(threat_model="dp"), "threat_model must be one of none, ldp, cdp, secldp, byzldp, got 'dp'"),
        (dict(accountant="moments"), "accountant must be one of exact, rdp, paper, got 'moments'"),
        (dict(level="client"), "level must be one of user, example, got 'client'"),
        (dict(epsilon=0), "epsilon must be positive, got 0"),
        (dict(epsilon=-1.0), "epsilon must be positive, got -1.0"),
        (dict(epsilon=math.nan), "epsilon must be positive, got nan"),
        (dict(epsilon=math.inf), "epsilon must be finite, got inf"),
        (dict(delta=0), "delta must be strictly between 0 and 1, got 0: .*no finite epsilon"),
        (dict(delta=1), "delta must be strictly between 0 and 1, got 1"),
        (dict(delta=-1e-5), "delta must be strictly between 0 and 1, got -1e-05"),
        (dict(delta=math.nan), "delta must be strictly between 0 and 1, got nan"),
        (dict(num_colluding=11), "num_colluding must be at most num_byzantine=10, got 11"),
        (dict(num_colluding=-1), "num_colluding must be a whole number of at least 0, got -1"),
        (dict(threat_model="secldp", num_colluding=1), "num_colluding must be 0 under 'secldp', got 1"),
        (dict(threat_model="ldp", num_colluding=10), "num_colluding must be 0 under 'ldp', got 10"),
        (dict(threat_model="cdp", num_colluding=10), "num_colluding must be 0 under 'cdp', got 10"),
        (dict(num_byzantine=50), "less than half of num_workers, got num_byzantine=50 of num_workers=100"),
        (
            dict(num_byzantine=-1, num_colluding=0),
            "num_byzantine must be a whole number of at least 0, got -1",
        ),
        (dict(num_workers=0, num_byzantine=0), "num_workers must be a whole number of at least 1, got 0"),
        (
            dict(num_workers=10.5, num_byzantine=0),
            "num_workers must be a whole number of at least 1, got 10.5",
        ),
        (dict(rounds=0), "rounds must be a whole number of at least 1, got 0"),
        (dict(clip_norm=0), "clip_norm must be finite and positive, got 0"),
        (dict(clip_norm=-1), "clip_norm must be finite and positive, got -1"),
        (dict(clip_norm=math.inf), "clip_norm must be finite and positive, got inf: .*epsilon is infinite"),
        (dict(clip_norm=math.nan), "clip_norm must be finite and positive, got nan"),
        (
            dict(threat_model="secldp", num_byzantine=0),
            "num_byzantine must be at least 1 .*epsilon is infinite",
        ),
        (dict(level="example"), "batch_size must be given at the example level"),
        (dict(level="example", batch_size=10), "samples_per_worker must be given at the example level"),
        (dict(EXAMPLE, batch_size=6001), "batch_size must be at most samples_per_worker=6000, got 6001"),
        (dict(EXAMPLE, batch_size=0), "batch_size must be a whole number of at least 1, got 0"),
        (dict(EXAMPLE, accountant="exact"), "accountant must be 'rdp' at the example level, got 'exact'"),
        (
            dict(batch_size=60, samples_per_worker=50),
            "batch_size must be at most samples_per_worker=50, got 60",
        ),
    ],
)
def test_impossible_budgets_are_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        calibrate(**overrides)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (dict(sigma_ind=0.0), "sigma_ind is 0 and all num_byzantine=10 .*epsilon is infinite"),
        (dict(sigma_ind=0.0, sigma_cor=0.0), "both 0: without noise epsilon is infinite"),
        (dict(sigma_ind=-0.1), "sigma_ind must be finite and at least 0, got -0.1"),
        (dict(sigma_cor=math.nan), "sigma_cor must be finite and at least 0, got nan"),
        (dict(threat_model="ldp", num_colluding=0), "sigma_cor must be 0 under 'ldp', got 0.5"),
        (
            dict(threat_model="cdp", num_colluding=0, sigma_cor=0, sigma_ind=0),
            "sigma_ind must be finite and positive",
        ),
        (dict(threat_model="none", epsilon=math.inf), "threat_model 'none' has sigma_ind = sigma_cor = 0"),
        (
            dict(sampling="shuffled"),
            "sampling must be one of none, without_replacement, poisson, got 'shuffled'",
        ),
        (dict(sampling="without_replacement"), "sampling must be 'none' at the user level"),
        (
            dict(EXAMPLE, sampling="none"),
            "sampling must be 'without_replacement' or 'poisson' at the example level",
        ),
    ],
)
def test_impossible_plans_cannot_exist(overrides, message):
    good = dataclasses.replace(calibrate(), sigma_ind=0.5, sigma_cor=0.5)
    with pytest.raises(UserError, match=message):
        dataclasses.replace(good, **overrides)


def test_step_divergence_says_why_epsilon_is_infinite():
    base = dict(num_workers=10, num_byzantine=2, num_colluding=2, clip_norm=1.0)
    with pytest.raises(ValueError, match="epsilon is infinite"):
        privacy.step_divergence(sigma_ind=0.0, sigma_cor=1.0, **base)
    with pytest.raises(ValueError, match="epsilon is infinite"):
        privacy.step_divergence(sigma_ind=1e-200, sigma_cor=1.0, **base)
    with pytest.raises(ValueError, match="clip_norm must be finite and positive, got 0"):
        privacy.step_divergence(sigma_ind=1.0, sigma_cor=1.0, **{**base, "clip_norm": 0})


FIGURE_1 = [(26.4, 10, 2.25), (27.8, 5, 2.25), (39.6, 10, 1.0), (39.6, 5, 1.0)]


@pytest.mark.parametrize("epsilon, f, clip_norm", FIGURE_1)
def test_best_splits_keep_the_budget_and_do_what_they_are_for(epsilon, f, clip_norm):
    settings = dict(epsilon=epsilon, num_byzantine=f, clip_norm=clip_norm)
    equal, mean, robust = (calibrate(split=split, **settings) for split in privacy.SPLITS)
    for plan in (equal, mean, robust):
        assert_round_trip(plan, epsilon)
    gain = 1 - mean.honest_mean_std / equal.honest_mean_std
    assert gain == pytest.approx({5: 0.072, 10: 0.124}[f], abs=0.001)

    def purpose(plan):
        hidden = f / 100 * plan.message_std**2 / (100 - f)
        return plan.honest_mean_std**2 + hidden

    assert robust.message_std < mean.message_std < equal.message_std
    assert purpose(robust) < min(purpose(mean), purpose(equal))
    assert mean.honest_mean_std < robust.honest_mean_std < equal.honest_mean_std


@pytest.mark.parametrize("split", ["mean_noise", "robust"])
@pytest.mark.parametrize("n, f, q", [(100, 10, 10), (100, 10, 3), (9, 4, 4), (30, 1, 1), (30, 5, 0)])
def test_no_other_split_is_better(split, n, f, q):
    def purpose(ind, cor):
        leaked = privacy.step_divergence(
            sigma_ind=math.sqrt(ind), sigma_cor=math.sqrt(cor), num_workers=n, num_byzantine=f,
            num_colluding=q, clip_norm=1.0,
        )  # fmt: skip
        noise = f * cor + ind
        if split == "robust":
            noise += f / n * ((n - 1) * cor + ind)
        return noise * leaked

    ind, cor = np.square(privacy.best_split(split=split, num_workers=n, num_byzantine=f, num_colluding=q))
    assert ind + cor == pytest.approx(1)
    found = purpose(ind, cor)
    shares = np.concatenate([np.geomspace(1e-6, 0.5, 300), 1 - np.geomspace(1e-6, 0.5, 300)])
    assert found <= min(purpose(1 - share, share) for share in shares) * (1 + 1e-6)


def test_a_split_needs_two_kinds_of_noise():
    with pytest.raises(ValueError, match="split must be 'equal' with num_byzantine=0, got 'mean_noise'"):
        calibrate(num_byzantine=0, split="mean_noise")
    with pytest.raises(ValueError, match="split must be 'equal' under 'secldp', got 'robust'"):
        calibrate("secldp", split="robust")
    with pytest.raises(ValueError, match="split must be one of equal, mean_noise, robust, got 'best'"):
        calibrate(split="best")
    with pytest.raises(ValueError, match="graph must be None under 'ldp'"):
        calibrate("ldp", graph=privacy.graphs.ring(100))


def test_poisson_plans():
    plan = calibrate("cdp", epsilon=13.7, sampling="poisson", **EXAMPLE)
    assert_round_trip(plan, 13.7)
    assert plan.sensitivity == pytest.approx(2.25 / 100)
    assert "batches of 100 of 6000 on average (Poisson)" in plan.describe()
    # One place for the example in question; more than the others are exceeded next to never, at any size.
    from scipy import stats

    chance = 1e-6 * plan.delta / plan.rounds
    most = plan.largest_batch
    for m in (101, 150, 1000, 6000, 10**6):
        assert stats.binom.sf(most - 1, m, 100 / m) <= chance
    assert stats.poisson.sf(most - 3, 100) > chance
    # Far out in the tail too.
    tiny = calibrate("cdp", epsilon=13.7, sampling="poisson", **EXAMPLE, delta=1e-12, rounds=10_000)
    assert 180 < tiny.largest_batch < 230
    with pytest.raises(ValueError, match="sampling must be 'none' at the user level, got 'poisson'"):
        calibrate("cdp", sampling="poisson")
