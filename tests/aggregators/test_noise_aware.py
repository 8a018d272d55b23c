"""CAF that knows the noise: the law of honest messages, who breaks it, and what is left to hide."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cafcor_jax import aggregators, attacks, privacy
from cafcor_jax.aggregators import noise_law
from cafcor_jax.float64 import in_float64
from cafcor_jax.privacy import graphs
from tests.aggregators import messages
from tests.compiling import fast_jit

N, F, D = 20, 3, 3000
IND, COR = 0.5, 0.3


def noise_rows(rng, n=N, d=D, ind=IND, cor=COR, rounds=1):
    """Protocol noise of n workers, [rounds, n, d] (without the first axis for one round)."""
    z = rng.normal(size=(rounds, n, d))
    rows = cor * math.sqrt(n) * (z - z.mean(1, keepdims=True)) + ind * rng.normal(size=(rounds, n, d))
    return rows[0] if rounds == 1 else rows


def wishart(rng, covariance, d):
    """X X^T for X [n, d] whose columns are normal with this covariance, by Bartlett's decomposition."""
    n = len(covariance)
    lower = np.tril(rng.normal(size=(n, n)), -1)
    lower[np.diag_indices(n)] = np.sqrt(rng.chisquare(d - np.arange(n)))
    # The covariance of correlated noise alone is singular.
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T
    return root @ lower @ lower.T @ root


@functools.cache
def judged(n, d, f, ind, cor, false_alarm):
    law = noise_law.limits(noise_law.covariance(n, ind, cor), d, f, false_alarm)
    return law, jax.jit(
        in_float64(lambda gram, signal: noise_law.judge([noise_law.Evidence(gram, signal)], law, f))
    )


def verdict(x, *, f=F, ind=IND, cor=COR, false_alarm=1e-3, signal=0.0):
    x = np.asarray(x, np.float64)
    with jax.enable_x64(True):
        gram = jnp.asarray(x @ x.T)
        return jax.device_get(judged(len(x), x.shape[1], f, ind, cor, false_alarm)[1](gram, signal))


@functools.cache
def rule(n=N, f=F, **options):
    return aggregators.caf_noise_aware(f, **({"sigma_ind": IND, "sigma_cor": COR} | options))


@functools.cache
def weights_of(f=F, **options):
    return fast_jit(rule(f=f, **options).weights)


@functools.cache
def caf_weights(f):
    return fast_jit(aggregators.caf(f).weights)


# The law.


@pytest.mark.parametrize("graph", [None, graphs.ring(6)])
def test_covariance_is_that_of_the_mechanism(graph):
    actual = noise_law.covariance(6, IND, COR, graph)
    # Of any set of honest workers the mechanism has the same: check it with the first four.
    adjacency = (graph or graphs.complete(6)).adjacency
    expected = np.diag(IND**2 + COR**2 * adjacency.sum(1)) - COR**2 * adjacency
    np.testing.assert_allclose(actual, expected, rtol=1e-12)
    if graph is None:
        honest = privacy.honest_covariance(
            sigma_ind=IND, sigma_cor=COR, num_workers=6, num_byzantine=2, num_colluding=0
        )
        np.testing.assert_allclose(actual[:4, :4], honest, rtol=1e-12)


@pytest.mark.parametrize(
    ("n", "d", "f", "ind", "cor"), [(10, 50, 2, 0.0, 1.0), (12, 2000, 3, 1.0, 0.0), (16, 400, 4, 0.7, 0.4)]
)
def test_false_alarms_are_as_rare_as_stated(n, d, f, ind, cor):
    stated, rounds = 0.05, 1500
    rng = np.random.default_rng(0)
    covariance = noise_law.covariance(n, ind, cor)
    _, judge = judged(n, d, f, ind, cor, stated)
    with jax.enable_x64(True):
        grams = jnp.asarray(np.stack([wishart(rng, covariance, d) for _ in range(rounds)]))
        found = jax.device_get(jax.lax.map(lambda gram: judge(gram, 0.0), grams))
    alarms = (found.flagged.any(1) | ~found.fits).mean()
    assert alarms <= stated + 3 * math.sqrt(stated / rounds)
    # Messages of a tenth more noise are a wrong law, and hardly ever pass for d = 2000.
    if d == 2000:
        with jax.enable_x64(True):
            wrong = jax.device_get(jax.lax.map(lambda gram: judge(1.21 * gram, 0.0), grams[:200]))
        assert (wrong.flagged.any(1) | ~wrong.fits).mean() > 0.99


def test_limits_are_not_far_from_what_happens():
    """A law that allows everything would have no false alarms either."""
    rng = np.random.default_rng(1)
    law = noise_law.limits(noise_law.covariance(N, IND, COR), D, F, 0.05)
    draws = [noise_rows(rng) for _ in range(40)]
    lengths = np.array([np.linalg.norm(x, axis=1) for x in draws])
    assert lengths.max() < law.longest[0] < 1.03 * lengths.max()
    assert 0.97 * lengths.min() < law.shortest[0] < lengths.min()
    off = ~np.eye(N, dtype=bool)
    pairs = np.array([np.abs(x @ x.T - law.products)[off].max() for x in draws])
    assert pairs.max() < law.products_reach[0, 1] < 1.5 * pairs.max()
    groups = np.array([_best_group(x @ x.T, law.noise, F) for x in draws[:5]])
    assert math.sqrt(groups.max()) < law.group_length < 1.08 * math.sqrt(groups.max())


def _best_group(gram, noise, k):
    """The largest v^T G v / v^T K v over all groups of k, by trying them all."""
    members = np.array(list(itertools.combinations(range(len(gram)), k)))
    g, noise = (m[members[:, :, None], members[:, None, :]] for m in (gram, noise))
    white = np.linalg.inv(np.linalg.cholesky(noise))
    return np.linalg.eigvalsh(white @ g @ white.transpose(0, 2, 1))[:, -1].max()


@pytest.mark.parametrize("bias", [0.0, 12.0, 25.0])
def test_groups_are_found_as_by_trying_all(bias):
    rng = np.random.default_rng(2)
    law = noise_law.limits(noise_law.covariance(N, IND, COR), D, F, 1e-3)
    find = jax.jit(in_float64(functools.partial(noise_law.worst_group, law=law)))
    for _ in range(5):
        x = noise_rows(rng)
        x[N - F :, 0] += bias
        gram = x @ x.T
        with jax.enable_x64(True):
            vector, square, noise = jax.device_get(find(jnp.asarray(gram), kept=jnp.ones(N)))
        assert (vector != 0).sum() <= F
        np.testing.assert_allclose(np.linalg.norm(vector), 1, rtol=1e-12)
        np.testing.assert_allclose(vector @ gram @ vector, square, rtol=1e-12)
        np.testing.assert_allclose(vector @ law.noise @ vector, noise, rtol=1e-12)
        best = _best_group(gram, law.noise, F)
        # Never more than the truth; and what stands out is found.
        assert square / noise <= best * (1 + 1e-12)
        assert square / noise - D >= (best - D) * (0.99 if bias == 25.0 else 0.8)


@pytest.mark.parametrize("bias", [0.0, 8.0, 25.0])
@pytest.mark.parametrize("everybody", [True, False])
def test_no_group_is_beyond_the_bound_on_all_of_them(bias, everybody):
    rng = np.random.default_rng(3)
    law = noise_law.limits(noise_law.covariance(N, IND, COR), D, F, 1e-3)
    x = noise_rows(rng)
    x[N - F :, 0] += bias
    kept = np.ones(N) if everybody else rng.uniform(size=N)
    beyond = (x @ x.T - law.group_length**2 * law.noise) * np.sqrt(np.outer(kept, kept))
    groups = [np.ix_(group, group) for group in itertools.combinations(range(N), F)]
    best = max(np.linalg.eigvalsh(beyond[group])[-1] for group in groups)
    with jax.enable_x64(True):
        bound = float(noise_law.longest_beyond(jnp.asarray(x @ x.T), law, jnp.asarray(kept)))
    assert best <= bound
    if everybody and bias == 0:
        assert bound <= 0, "of no use: an honest round would be searched for groups"


# Who breaks it.


def attacked(kind, rng, f=F):
    x = noise_rows(rng)
    honest, bad = x[: N - f], x[N - f :]
    mean, std = honest.mean(0), honest.std(0)
    if kind == "a little":
        bad[:] = mean + 0.4 * std
    elif kind == "copies":
        bad[:] = bad[0]
    elif kind == "long":
        bad *= 1.1
    elif kind == "short":
        bad *= 0.9
    elif kind == "bias":
        bad[:, 0] += 60
    return x


@pytest.mark.parametrize("kind", ["a little", "copies", "long", "short", "bias"])
def test_who_breaks_the_law_gets_no_weight(kind):
    rng = np.random.default_rng(3)
    for _ in range(5):
        x = attacked(kind, rng)
        weights = np.asarray(weights_of()(x.astype(np.float32)))
        assert weights[N - F :].sum() < (0.02 if kind in ("copies", "bias") else 1e-12)
        assert weights[: N - F].min() > 0.04
        found = verdict(x)
        assert found.fits
        assert found.flagged[N - F :].sum() >= F - 1
        assert not found.flagged[: N - F].any()


def test_plain_caf_misses_what_the_law_sees():
    x = attacked("a little", np.random.default_rng(3)).astype(np.float32)
    assert np.asarray(caf_weights(F)(x))[N - F :].sum() > 0.1


def test_pair_noise_that_is_owed_is_missed():
    """Who draws noise of their own, and not that of the pairs, is in discord with all honest workers."""
    n, f, d, cor = 10, 2, 40_000, 1.0
    rng = np.random.default_rng(4)
    x = noise_rows(rng, n, d, 0.0, cor)
    x[n - f :] = rng.normal(size=(f, d)) * math.sqrt((n - 1) * cor**2)
    found = verdict(x, f=f, ind=0.0, cor=cor)
    assert found.malicious.tolist() == [False] * (n - f) + [True] * f


def test_a_signal_within_the_clipping_norm_is_allowed():
    rng = np.random.default_rng(5)
    clip = 8.0
    for _ in range(10):
        x = noise_rows(rng)
        signal = np.zeros((N, D))
        signal[:, 0] = clip * np.where(np.arange(N) < N // 2, 1, -1)  # the worst split of honest gradients
        assert not verdict(x + signal, signal=clip).flagged.any()


def test_more_law_breakers_than_f_mean_that_the_law_is_wrong():
    x = noise_rows(np.random.default_rng(6)).astype(np.float32)
    for wrong in (0.8, 1.25):
        options = {"sigma_ind": IND * wrong, "sigma_cor": COR * wrong}
        assert not verdict(x, ind=IND * wrong, cor=COR * wrong).fits
        np.testing.assert_allclose(weights_of(**options)(x), caf_weights(F)(x), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("make", [messages.normal, messages.offset, messages.heavy_tails, messages.outliers])
def test_without_noise_it_is_caf(make):
    x = np.asarray(make(np.random.default_rng(7), 9, 30, 2), np.float32)
    none = weights_of(f=2, sigma_ind=0.0, sigma_cor=0.0)
    # It asks for the Gram matrix about the origin, CAF for one about any centre.
    np.testing.assert_allclose(none(x), caf_weights(2)(x), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_messages_that_are_not_finite_count_among_the_f(bad):
    x = attacked("long", np.random.default_rng(8)).astype(np.float32)
    x[0, 0] = bad  # with the F long ones that is F + 1: the law cannot be true, and plain CAF weighs
    np.testing.assert_allclose(weights_of()(x), caf_weights(F)(x), rtol=1e-6, atol=1e-9)
    x = noise_rows(np.random.default_rng(8)).astype(np.float32)
    x[N - 1, 3] = bad
    weights = np.asarray(weights_of()(x))
    assert weights[N - 1] == 0
    np.testing.assert_allclose(weights[: N - 1], 1 / (N - 1), rtol=1e-6)


def test_honest_messages_are_averaged():
    """Where noise explains all of the covariance, nobody loses weight."""
    x = noise_rows(np.random.default_rng(9)).astype(np.float32)
    np.testing.assert_allclose(weights_of()(x), 1 / N, rtol=1e-6)


@pytest.mark.parametrize("name", ["alie_adaptive", "foe_adaptive"])
def test_an_attack_that_knows_the_rule_gains_less_than_against_caf(name):
    honest = noise_rows(np.random.default_rng(10))[: N - F].astype(np.float32)

    def gained(rule):
        family = name.removesuffix("_adaptive")
        return fast_jit(lambda x: attacks.best_factor(family, rule, x, F).distance)(honest)

    assert gained(rule()) < 0.5 * gained(aggregators.caf(F))


# The most that can stay hidden.


@pytest.mark.parametrize(
    ("ind", "cor", "first"), [(0.0, 0.5, "along_mean"), (0.5, 0.5, "along_mean"), (3.0, 0.0, "in_group")]
)
def test_the_largest_hidden_bias_is_as_computed(ind, cor, first):
    """At the computed length about half of a few draws are flagged; well below none is, well above all."""
    n, f, d = 40, 4, 4000
    predicted = noise_law.hidden_bias(
        num_workers=n, num_byzantine=f, dimension=d, sigma_ind=ind, sigma_cor=cor, false_alarm=1e-3
    )
    assert predicted.detected == getattr(predicted, first)
    rng = np.random.default_rng(11)
    rows = [noise_rows(rng, n, d, ind, cor) for _ in range(9)]

    def caught(bias):
        share = []
        for row in rows:
            x = row.copy()
            x[n - f :, 0] += bias
            share.append(verdict(x, f=f, ind=ind, cor=cor).flagged[n - f :].any())
        return np.mean(share)

    # One of f workers is ahead of the others by about 1 of the 4.8 standard deviations.
    assert caught(0.6 * predicted.detected) <= 0.3
    assert caught(1.25 * predicted.detected) >= 0.9


SETTINGS = {"num_workers": 100, "num_byzantine": 5, "dimension": 431_080, "sigma_ind": 0.0, "sigma_cor": 0.6}


def test_hidden_bias_in_sums():
    """Steady over t rounds, a bias is found when it is shorter by sqrt(t), but for what signals may add."""
    one = noise_law.hidden_bias(**SETTINGS)
    summed = noise_law.of_sum_of_momenta(0.0, 25)
    many = noise_law.hidden_bias(**SETTINGS, multiple=summed)
    np.testing.assert_allclose(np.array(one) / np.array(many), 5, rtol=1e-9)
    clipped = noise_law.hidden_bias(**SETTINGS, multiple=summed, clip_norm=2.25)
    assert many.in_group < clipped.in_group < one.in_group
    np.testing.assert_allclose(clipped.along_mean, many.along_mean + 2.25, rtol=1e-9)


def test_hidden_bias_depends_on_noise_and_bias_by_their_ratio_only():
    multiple = noise_law.Multiple(7.0, 3.0)
    settings = SETTINGS | {"sigma_ind": 0.3, "clip_norm": 0.0}
    found = noise_law.hidden_bias(**settings, multiple=multiple)
    scaled = {name: math.sqrt(7) / 3 * settings[name] for name in ("sigma_ind", "sigma_cor")}
    np.testing.assert_allclose(found, noise_law.hidden_bias(**(settings | scaled)), rtol=1e-9)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.85])
@pytest.mark.parametrize("rounds", [1, 2, 29])
def test_how_much_of_gradients_momenta_and_their_sums_have(beta, rounds):
    parts = np.zeros((rounds + 1, rounds))  # row t: how often each gradient is in m_t
    for t in range(rounds):
        parts[t + 1] = beta * parts[t]
        parts[t + 1, t] += 1 - beta
    for found, part in (
        (noise_law.of_momentum(beta, rounds), parts[-1]),
        (noise_law.of_sum_of_momenta(beta, rounds), parts.sum(0)),
    ):
        np.testing.assert_allclose(found, [np.sum(part**2), np.sum(part)], rtol=1e-12)


def test_the_spectral_threshold_is_that_of_the_whitened_spike():
    """Below it the top eigenvalue of the whitened Gram matrix is that of noise, above it not."""
    n, f, d, ind, cor = 60, 6, 60_000, 1.0, 0.3
    settings = {"num_workers": n, "num_byzantine": f, "dimension": d, "sigma_ind": ind, "sigma_cor": cor}
    threshold = noise_law.hidden_bias(**settings).spectral
    rng = np.random.default_rng(21)
    noise = noise_rows(rng, n, d, ind, cor)
    values, vectors = np.linalg.eigh(noise_law.covariance(n, ind, cor))
    white = (vectors / np.sqrt(values)) @ vectors.T

    def top(bias):
        x = noise.copy()
        x[n - f :, 0] += bias
        return np.linalg.eigvalsh(white @ (x @ x.T) @ white)[-1]

    edge, spread = (math.sqrt(n) + math.sqrt(d)) ** 2, math.sqrt(d) * n ** (-1 / 6)
    assert abs(top(0.7 * threshold) - edge) < 5 * spread
    assert top(1.6 * threshold) - edge > 10 * spread


def test_without_independent_noise_a_bias_against_the_gradient_is_plain_along_the_mean():
    """A tenth of what groups allow, and the malicious workers lose their weight; honest ones keep theirs."""
    found = noise_law.hidden_bias(
        num_workers=N, num_byzantine=F, dimension=D, sigma_ind=0.0, sigma_cor=COR, clip_norm=1.0
    )
    x = noise_rows(np.random.default_rng(22), ind=0.0)
    x[: N - F, 0] += 1.0  # the honest gradient
    x[N - F :, 0] -= 1.5 * found.along_mean
    assert 1.5 * found.along_mean < found.in_group
    got = verdict(x, ind=0.0, signal=1.0)
    assert got.flagged.tolist() == [False] * (N - F) + [True] * F
    # The same bias under noise that does not cancel in the sum stays hidden.
    y = x + 2 * np.random.default_rng(23).normal(size=x.shape)
    assert not verdict(y, ind=2.0, signal=1.0).flagged.any()


# Attacks on the law itself.


def _with_gradient(rng, biases):
    """Messages [n, d] under SecLDP, a common gradient of length 1 in them; the last have biases instead."""
    gradient = rng.normal(size=D)
    gradient /= np.linalg.norm(gradient)
    x = noise_rows(rng, ind=0.0, cor=0.3)
    x += gradient
    for place, length in enumerate(biases):
        x[N - len(biases) + place] -= (1 + length) * gradient
    return x


def test_what_one_test_takes_out_does_not_blind_another():
    """Messages show one of three along their mean, sums the two others, whose mean has everybody in it."""
    rng = np.random.default_rng(5)
    in_round, in_sums = _with_gradient(rng, [14.0, -1.0, -1.0]), _with_gradient(rng, [-1.0, 14.0, 14.0])
    law = noise_law.limits(noise_law.covariance(N, 0.0, 0.3), D, F, 1e-3)

    @jax.jit
    @in_float64
    def judge(*grams):
        return noise_law.judge([noise_law.Evidence(gram, 1.0) for gram in grams], law, F)

    with jax.enable_x64(True):
        grams = [jnp.asarray(x @ x.T) for x in (in_round, in_sums)]
        first, second = (jax.device_get(judge(gram)) for gram in grams)
        both = jax.device_get(judge(*grams))
    assert first.kept[N - 3] < 0.5 and (first.kept[N - 2 :] > 0.5).all()
    assert second.kept[N - 3] > 0.5 and (second.kept[N - 2 :] < 0.5).any()
    np.testing.assert_allclose(both.kept, np.minimum(first.kept, second.kept))
    assert both.kept.sum() >= N - 2 * F


def test_one_who_gives_itself_up_blinds_the_test_along_the_mean():
    """A limit that the docs name: without one worker the noise of its pairs stays in the mean."""
    x = _with_gradient(np.random.default_rng(6), [14.0, 14.0, 14.0])
    known = {"f": F, "ind": 0.0, "cor": 0.3, "signal": 1.0}
    assert (verdict(x, **known).kept[N - 3 :] < 0.5).any()
    x[N - 3] *= 50
    found = verdict(x, **known)
    assert found.malicious[N - 3] and found.malicious.sum() == 1
    assert (found.kept == 1).all()


def test_two_equal_messages_that_are_a_little_short_are_found():
    """They stand out as a pair by 0.96 of their length, whatever a search from each of them does first."""
    n, f, d = 20, 2, 3000
    for seed in range(5):
        x = noise_rows(np.random.default_rng(seed), n, d, 0.0, COR)
        x[-1] = x[-2] = 0.99 * x[-2]
        assert verdict(x, f=f, ind=0.0).flagged[-2:].any()


def test_opposite_messages_are_found():
    """Their sum is short and their difference long: the group's vector has both signs."""
    n, f, d = 20, 2, 3000
    x = noise_rows(np.random.default_rng(24), n, d, 1.0, 0.0)
    x[-1] = -x[-2]
    assert verdict(x, f=f, ind=1.0, cor=0.0).flagged[-2:].any()


def framing(rng, n, f, d):
    """Malicious workers that turn the mean towards the noise of honest ones, and copies of them."""
    x = noise_rows(rng, n, d, 0.0, COR)
    for j in range(f):
        honest = x[j] / np.linalg.norm(x[j])
        x[n - f + j] = x[j] if j % 2 else x[n - f + j] + 0.5 * np.sqrt(d) * honest
    return x


@pytest.mark.parametrize("name", ["framing", "bias", "copies", "a little"])
def test_no_more_weight_is_lost_than_caf_may_take(name):
    f = F + 1
    for seed in range(3):
        rng = np.random.default_rng(seed)
        x = framing(rng, N, f, D) if name == "framing" else attacked(name, rng, f)
        got = verdict(x, f=f, ind=0.0 if name == "framing" else IND)
        assert np.where(got.malicious, 1, 1 - got.kept).sum() <= 2 * f + 1e-9


def test_framing_does_not_beat_the_bound_of_caf():
    """kappa times the honest covariance bounds the error, although honest workers lose weight here."""
    f = F + 1
    kappa = 6 * f / (N - f) * (1 + f / (N - 2 * f)) ** 2
    for seed in range(3):
        x = framing(np.random.default_rng(seed), N, f, D)
        honest = x[: N - f]
        out = np.asarray(weights_of(f=f, sigma_ind=0.0)(x.astype(np.float32)), np.float64) @ x
        spread = np.linalg.norm(honest - honest.mean(0), 2)
        assert np.sum((out - honest.mean(0)) ** 2) <= kappa * spread**2 / (N - f)


# Over the rounds of a federation.


BETA = 0.8


def momenta(raw, beta=BETA):
    """Messages of rounds 0, 1, ...: m_0 = 0, then m_t = beta m_{t-1} + (1 - beta) r_t."""
    rows = [np.zeros_like(raw[0])]
    for r in raw:
        rows.append(beta * rows[-1] + (1 - beta) * r)
    return np.stack(rows).astype(np.float32)


@functools.cache
def over_rounds(name, **options):
    settings = {"num_byzantine": F, "momentum": BETA, "sigma_ind": IND, "sigma_cor": COR}
    made = aggregators.OVER_ROUNDS[name](**(settings | options))
    return made, fast_jit(made.apply)


def play(name, sent, **options):
    made, apply = over_rounds(name, **options)
    state = made.init(sent[0])
    out = []
    for x in sent:
        judged, state = apply(state, x)
        out.append(jax.device_get(judged))
    return out, state


@pytest.mark.parametrize("name", list(aggregators.OVER_ROUNDS))
def test_momenta_of_honest_noise_keep_the_law(name):
    out, _ = play(name, momenta(noise_rows(np.random.default_rng(12), rounds=12)))
    assert all(one.law_fits and not one.flagged.any() for one in out)
    for one in out[1:]:
        np.testing.assert_allclose(one.weights, 1 / N, rtol=1e-6)


@pytest.mark.parametrize("name", list(aggregators.OVER_ROUNDS))
def test_with_another_momentum_the_law_does_not_fit(name):
    raw = noise_rows(np.random.default_rng(12), rounds=6)
    out, _ = play(name, momenta(raw, beta=0.6))
    assert not out[-1].law_fits


def test_only_a_memory_finds_a_small_steady_bias():
    raw = noise_rows(np.random.default_rng(13), rounds=60)
    raw[:, N - F :, 0] += 4.0
    sent = momenta(raw)
    forgets, _ = play("caf_noise_aware", sent)
    remembers, state = play("caf_history", sent)
    assert not any(one.flagged.any() for one in forgets)
    assert remembers[-1].flagged[N - F :].sum() >= F - 1
    assert not any(one.flagged[: N - F].any() for one in remembers)
    assert remembers[-1].weights[N - F :].sum() < 0.7 * F / N
    # What is remembered: a sum of noisy gradients, of which the last ones count less.
    counted = 1 - BETA ** np.arange(len(raw), 0, -1.0)
    np.testing.assert_allclose(state.memory.total, np.tensordot(counted, raw, 1), atol=1e-3)


def test_a_worker_that_was_not_finite_once_stays_under_suspicion():
    raw = noise_rows(np.random.default_rng(14), rounds=5)
    sent = momenta(raw)
    sent[2, N - 1, 0] = math.nan
    out, state = play("caf_history", sent, every=1)
    assert np.isfinite(np.asarray(state.memory.total)).all()
    assert all(np.isfinite(one.aggregate).all() for one in out)
    assert all(one.weights[N - 1] < 1e-9 for one in out[2:4])
    assert not any(one.flagged[: N - 1].any() for one in out)


def test_a_verdict_on_sums_stands_until_the_next():
    """In the rounds in which sums are judged it is that of judging them always; then nothing changes."""
    raw = noise_rows(np.random.default_rng(13), rounds=59)
    raw[:, N - F :, 0] += 4.0
    sent = momenta(raw)
    always, _ = play("caf_history", sent, every=1)
    seldom, state = play("caf_history", sent, every=4)
    assert int(state.memory.judged) == 59
    flagged = np.array([one.flagged for one in seldom])
    assert flagged.any() and not flagged[:8].any()
    for t, one in enumerate(seldom):
        np.testing.assert_array_equal(one.flagged, flagged[t - (t + 1) % 4] if t > 2 else False)
        if (t + 1) % 4 == 0:
            np.testing.assert_array_equal(one.flagged, always[t].flagged)
            np.testing.assert_allclose(one.weights, always[t].weights, atol=1e-6)


def test_numbers_too_large_for_a_sum_harm_nobody_else():
    raw = noise_rows(np.random.default_rng(14), rounds=5)
    sent = momenta(raw)
    sent[1:, N - 1] = 3e38
    for every in (1, 2):
        out, _ = play("caf_history", sent, every=every)
        assert all(np.isfinite(one.aggregate).all() for one in out)
        assert all(one.weights[N - 1] < 1e-9 for one in out[1:])
        assert not any(one.flagged[: N - 1].any() for one in out)


def test_a_pytree_and_its_columns_are_judged_alike():
    x = attacked("bias", np.random.default_rng(15)).astype(np.float32)
    tree = {"a": x[:, :1000].reshape(N, 10, 100), "b": (x[:, 1000], x[:, 1001:])}
    np.testing.assert_allclose(weights_of()(tree), weights_of()(x), atol=1e-9)


# Bad input.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "sigma_ind is not given"),
        ({"sigma_ind": 1.0}, "sigma_cor is not given"),
        ({"sigma_ind": -1.0, "sigma_cor": 0.0}, "sigma_ind is -1.0"),
        ({"sigma_ind": math.nan, "sigma_cor": 0.0}, "sigma_ind is nan"),
        ({"sigma_ind": 1.0, "sigma_cor": math.inf}, "sigma_cor is inf"),
        ({"sigma_ind": 1.0, "sigma_cor": 1.0, "clip_norm": -1.0}, "clip_norm is -1.0"),
        ({"sigma_ind": 1.0, "sigma_cor": 1.0, "false_alarm": 0.0}, "false_alarm is 0.0"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        aggregators.caf_noise_aware(2, **options)


def test_refuses_what_does_not_fit_the_messages():
    x = np.ones((5, 3), np.float32)
    with pytest.raises(ValueError, match="fewer than half"):
        rule(f=3)(x)
    with pytest.raises(ValueError, match="graph is over 6 workers, and there are 5"):
        rule(f=1, graph=graphs.ring(6))(x)
    with pytest.raises(ValueError, match="takes no pre-aggregation"):
        aggregators.compose(aggregators.nnm(1), rule(f=1))
    with pytest.raises(ValueError, match="momentum is 1.0"):
        aggregators.caf_history(1, momentum=1.0, sigma_ind=1.0, sigma_cor=0.0)
    with pytest.raises(ValueError, match="sigma_cor is not given"):
        aggregators.caf_history(1, momentum=0.5, sigma_ind=1.0)
    with pytest.raises(ValueError, match="every is 0; it must be a whole number of at least 1"):
        aggregators.caf_history(1, momentum=0.5, sigma_ind=1.0, sigma_cor=0.0, every=0)


def test_refuses_a_worker_without_noise():
    """Left alone by the graph, and without independent noise, it cannot be held against anything."""
    lonely = graphs.SecretGraph("given", 5, ((0, 1), (1, 2), (2, 3)))
    x = np.random.default_rng(16).normal(size=(5, 8)).astype(np.float32)
    with pytest.raises(ValueError, match="worker 4 shares no secret and sigma_ind is 0"):
        aggregators.caf_noise_aware(1, sigma_ind=0.0, sigma_cor=1.0, graph=lonely)(x)
    assert np.isfinite(weights_of(f=1, sigma_ind=0.1, sigma_cor=1.0, graph=lonely)(x)).all()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_workers(n):
    x = np.random.default_rng(17).normal(size=(n, 50)).astype(np.float32)
    for f in range((n + 1) // 2):
        few = aggregators.caf_noise_aware(f, sigma_ind=1.0, sigma_cor=0.0)
        aggregate, weights = fast_jit(few.with_weights)(x)
        assert np.isfinite(aggregate).all()
        assert weights.sum() == pytest.approx(1)
