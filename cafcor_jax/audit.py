"""Empirical privacy audits: the curious server attacks, and its success is a lower bound on epsilon.

An accountant proves that epsilon is at most so much; an audit shows that it is at least so much. Two worlds
differ in the clipped gradient of worker 0, +C u or -C u. The server sees what the threat model lets it see,
takes off the noise whose keys it knows, and says which world it is in. How often it is wrong gives a lower
bound on epsilon, with a stated confidence. A bound above the claim means that the noise, its keys, the
clipping or the accountant is broken.

Only the component along u matters, and coordinates are drawn independently. So every coordinate of a long
vector is a trial of its own, and millions of trials are cheap. The noise is drawn by `noise` and `secrets`.

What an audit cannot show: that a mechanism is private. It finds only what its adversary looks for.

>>> from cafcor_jax import audit, privacy
>>> plan = privacy.calibrate(threat_model="byzldp", epsilon=2.0, delta=0.01, num_workers=5, num_byzantine=1,
...                          rounds=1, clip_norm=1.0, accountant="exact")
>>> audit.audit(plan, trials=20_000, seed=0).broken
False
>>> audit.audit(plan, trials=20_000, seed=0, faults=audit.Faults(noise_scale=0.5)).broken
True

References:
  Jagielski, Ullman and Oprea, Auditing Differentially Private Machine Learning, NeurIPS 2020.
  Nasr et al., Adversary Instantiation: Lower Bounds for Differentially Private Machine Learning, S&P 2021.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy.special import betaincinv

from cafcor_jax import federation as rounds
from cafcor_jax import noise, privacy, secrets
from cafcor_jax.clipping import LossFn
from cafcor_jax.errors import UserError
from cafcor_jax.privacy import graphs
from cafcor_jax.privacy.mechanism import check_int
from cafcor_jax.types import Array, PyTree

#: (key, world, size) -> [T, rows, size]: what the server is left with in world +1 or -1, in `size` trials.
View = Callable[[Array, Array, int], Array]

# Trials drawn by one call of compiled code: T x rows x this many floats are in memory.
_CHUNK = 16 * noise.BLOCK
# Thresholds tried from each side; between two of them the bound hardly changes.
_THRESHOLDS = 300
# The key that a broken mechanism takes for a pair, and that everybody knows.
_PUBLIC_SEED = 0
# A canary's loss is this steep: whatever C is, its gradient is clipped.
_STEEP = 1e6


# From errors to a bound on epsilon.


def clopper_pearson(
    count: np.ndarray | int, trials: int, confidence: float
) -> tuple[np.ndarray | float, np.ndarray | float]:
    """Exact lower and upper confidence limits of a probability, each alone at the given confidence.

        low  = the p with P(Bin(trials, p) >= count) = 1 - confidence
        high = the p with P(Bin(trials, p) <= count) = 1 - confidence

    Args:
      count: How often the event was seen; any shape.
      trials: Out of how many.
      confidence: Of each limit, in (0, 1). The two together are an interval of confidence 2 confidence - 1.

    Returns:
      low and high, of the shape of `count`.

    Example:
      >>> low, high = clopper_pearson(0, 100, 0.95)
      >>> float(low), round(float(high), 6), round(1 - 0.05 ** (1 / 100), 6)
      (0.0, 0.029513, 0.029513)

    References:
      Clopper and Pearson, The Use of Confidence or Fiducial Limits, Biometrika 1934.
    """
    check_int("trials", trials, 1)
    _check_open("confidence", confidence)
    k = np.asarray(count, np.float64)
    if not np.all((k >= 0) & (k <= trials) & (k == np.floor(k))):
        raise UserError(f"count must be whole numbers from 0 to trials={trials}, got {count!r}.")
    # At the ends betaincinv would be asked for a parameter of 0; the limits there are 0 and 1.
    low = np.where(k > 0, betaincinv(np.maximum(k, 1), trials - k + 1, 1 - confidence), 0.0)
    high = np.where(k < trials, betaincinv(k + 1, np.maximum(trials - k, 1), confidence), 1.0)
    return low[()], high[()]


def epsilon_lower_bound(
    false_positives: np.ndarray | int,
    false_negatives: np.ndarray | int,
    trials: int,
    delta: float,
    confidence: float = 0.95,
) -> np.ndarray:
    """An epsilon that a mechanism must have at least, from the errors of one test between two worlds.

    A test of an (epsilon, delta)-private mechanism has fpr e^epsilon + fnr >= 1 - delta and
    fpr + fnr e^epsilon >= 1 - delta. With upper confidence limits of both rates,

        epsilon >= max(log((1 - delta - fnr) / fpr), log((1 - delta - fpr) / fnr), 0).

    Args:
      false_positives: How often the test said + in world -; any shape.
      false_negatives: How often it said - in world +.
      trials: In each world.
      delta: At which epsilon is meant, in [0, 1).
      confidence: That both rates are below their limits; half of the risk is spent on each.

    Returns:
      The bound, at least 0.

    Example:
      >>> round(float(epsilon_lower_bound(0, 0, trials=1000, delta=1e-5)), 2)  # no error at all
      5.6

    References:
      Kairouz, Oh and Viswanath, The Composition Theorem for Differential Privacy, ICML 2015.
    """
    _check_open("confidence", confidence)
    if not 0 <= delta < 1:
        raise UserError(f"delta must be at least 0 and below 1, got {delta!r}.")
    each = 1 - (1 - confidence) / 2
    fpr = np.asarray(clopper_pearson(false_positives, trials, each)[1])
    fnr = np.asarray(clopper_pearson(false_negatives, trials, each)[1])
    ratio = np.maximum((1 - delta - fnr) / fpr, (1 - delta - fpr) / fnr)
    return np.log(np.maximum(ratio, 1.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """A lower bound on epsilon and the errors it is made of.

    Attributes:
      epsilon: The bound.
      threshold: Scores above it are said to be of world +; picked on the first half of the trials.
      false_positives: In the second half of world -.
      false_negatives: In the second half of world +.
      trials: In each of these halves.
    """

    epsilon: float
    threshold: float
    false_positives: int
    false_negatives: int
    trials: int


def bound(minus: np.ndarray, plus: np.ndarray, *, delta: float, confidence: float = 0.95) -> Bound:
    """Audits any mechanism from the scores that an adversary gave to its outputs.

    The threshold is picked on the first half of the trials, where it gives the largest bound, and judged on
    the second half, which had no say in it: the confidence is that of a single test.

    Args:
      minus: One score for every independent trial in world -.
      plus: As many in world +; larger scores speak for this world.
      delta: At which epsilon is meant.
      confidence: Of the bound.

    Returns:
      The bound and its errors.

    Example:
      >>> noises = np.random.default_rng(0).standard_normal((2, 100_000))
      >>> found = bound(noises[0] - 0.5, noises[1] + 0.5, delta=0.01)
      >>> round(found.epsilon, 2), round(float(privacy.gaussian_epsilon(1.0, 0.01)), 2)
      (2.03, 2.32)
    """
    minus, plus = np.asarray(minus), np.asarray(plus)
    if minus.ndim != 1 or minus.shape != plus.shape or len(minus) < 4:
        raise UserError(
            "minus and plus must be vectors of one length, at least 4, got shapes "
            f"{minus.shape} and {plus.shape}."
        )
    if not (np.isfinite(minus).all() and np.isfinite(plus).all()):
        raise UserError("minus and plus must be finite, got scores that are infinite or NaN.")
    half = len(minus) // 2
    first = np.sort(minus[:half]), np.sort(plus[:half])
    candidates = _thresholds(*first)
    wrong = (
        half - np.searchsorted(first[0], candidates, "right"),
        np.searchsorted(first[1], candidates, "right"),
    )
    best = np.argmax(epsilon_lower_bound(*wrong, half, delta, confidence))
    threshold = float(candidates[best])
    judged = minus[half:], plus[half:]
    false_positives = int(np.sum(judged[0] > threshold))
    false_negatives = int(np.sum(judged[1] <= threshold))
    trials = len(judged[0])
    return Bound(
        epsilon=float(epsilon_lower_bound(false_positives, false_negatives, trials, delta, confidence)),
        threshold=threshold,
        false_positives=false_positives,
        false_negatives=false_negatives,
        trials=trials,
    )


def _thresholds(minus: np.ndarray, plus: np.ndarray) -> np.ndarray:
    """Candidates from both tails of sorted scores, dense where errors are rare."""
    ranks = np.unique(np.geomspace(1, len(minus), _THRESHOLDS).astype(int))
    values = np.concatenate([minus[-ranks], plus[ranks - 1]])
    # In the middle of the gap above each: where the worlds do not overlap, the next trial should not either.
    nexts = [
        side[np.minimum(np.searchsorted(side, values, "right"), len(side) - 1)] for side in (minus, plus)
    ]
    above = np.min([np.where(after > values, after, np.inf) for after in nexts], axis=0)
    return values / 2 + np.where(np.isfinite(above), above, values) / 2


# The mechanism: two worlds, what the server sees, and what it does with it.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faults:
    """What is wrong with a mechanism, to see whether an audit finds it. By default nothing.

    Attributes:
      gradient_scale: Norm of the changed gradient over C; above 1, clipping was forgotten.
      noise_scale: Factor of all noise; 1/2 is noise for the sensitivity C instead of 2C.
      no_independent: sigma_ind is left out.
      reused_round: Every round draws the noise of the first one.
      forgotten_end: (i, j): worker i leaves out the noise of its pair with j, who adds it.
      public_pair: (i, j): the key of this pair is a constant that everybody knows.
    """

    gradient_scale: float = 1.0
    noise_scale: float = 1.0
    no_independent: bool = False
    reused_round: bool = False
    forgotten_end: tuple[int, int] | None = None
    public_pair: tuple[int, int] | None = None


NO_FAULTS = Faults()


def worlds(plan: privacy.PrivacyPlan, faults: Faults = NO_FAULTS) -> np.ndarray:
    """What the server would see in world + without noise; world - is its negative.

    Worker 0 sends +C and -C in turn, beginning with + in world +. With fresh noise in every round the signs'
    order has no effect; noise that comes again cancels in the difference of two rounds, the gradients do not.

    Args:
      plan: The plan.
      faults: Of the mechanism.

    Returns:
      Array [T, rows]; rows are the n-f honest workers, or under "cdp" the mean of all n messages.

    Example:
      >>> plan = privacy.PrivacyPlan(threat_model="ldp", num_workers=4, num_byzantine=1, rounds=2,
      ...                            clip_norm=3.0, delta=0.01, sigma_ind=1.0, sigma_cor=0.0)
      >>> worlds(plan)
      array([[ 3.,  0.,  0.],
             [-3.,  0.,  0.]])
    """
    _check(plan, faults)
    signs = (-1.0) ** np.arange(plan.rounds)[:, None]
    size = faults.gradient_scale * plan.clip_norm
    if plan.threat_model == "cdp":
        return signs * size / plan.num_workers
    return signs * size * np.eye(plan.num_workers - plan.num_byzantine)[0] + 0.0  # no -0


def server_view(plan: privacy.PrivacyPlan, noise_mode: str = "pairwise", faults: Faults = NO_FAULTS) -> View:
    """Runs the mechanism and leaves the server with what it cannot remove.

    The server sees the messages of the n-f honest workers, without momentum: from two momentums in a row it
    knows the message. It computes the noise of every pair with one of the q colluding workers (the last ones)
    from its key, and subtracts it. The f-q other Byzantine workers say nothing. Under "cdp" it sees the mean.

    Args:
      plan: Gives the noise.
      noise_mode: "pairwise", or "projected" where nobody colludes; "independent" without correlated noise.
      faults: Of the mechanism; the server knows of them.

    Returns:
      (key, world, size) -> [T, rows, size].
    """
    _check(plan, faults)
    _check_noise_mode(plan, noise_mode)
    sigmas = faults.noise_scale * np.array([0.0 if faults.no_independent else plan.sigma_ind, plan.sigma_cor])
    structure = _Structure(
        num_workers=plan.num_workers,
        num_senders=plan.num_workers if plan.threat_model == "cdp" else plan.num_workers - plan.num_byzantine,
        graph=plan.graph,
        noise_mode=noise_mode,
        has_independent=bool(sigmas[0]),
        has_correlated=bool(sigmas[1]),
        only_mean=plan.threat_model == "cdp",
        public_pair=faults.public_pair,
        taken_off=(*_known_pairs(plan), *_removed(faults)),
    )
    means = worlds(plan, faults)
    indices = np.ones(plan.rounds, int) if faults.reused_round else np.arange(1, plan.rounds + 1)

    def view(key: Array, world: Array, size: int) -> Array:
        return _run(structure, size, key, world * means, indices, sigmas)

    return view


class _Structure(NamedTuple):
    """What decides the shape of the compiled code; mechanisms that differ in numbers only share it."""

    num_workers: int
    num_senders: int
    graph: graphs.SecretGraph | None
    noise_mode: str
    has_independent: bool
    has_correlated: bool
    only_mean: bool
    public_pair: tuple[int, int] | None
    taken_off: tuple[tuple[int, int], ...]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(is_: _Structure, size: int, key: Array, means: Array, indices: Array, sigmas: Array) -> Array:
    """All rounds in `size` trials, [T, rows, size], from the noiseless view [T, rows]."""
    n, senders = is_.num_workers, is_.num_senders
    sigma_ind, sigma_cor = sigmas
    pairs, own = jax.random.split(key)
    pair_keys = secrets.key_matrix(pairs, n)
    if is_.public_pair:
        i, j = is_.public_pair
        public = jax.random.key(_PUBLIC_SEED)
        pair_keys = pair_keys.at[i, j].set(public).at[j, i].set(public)

    def one_round(inputs: tuple[Array, Array]) -> Array:
        mean, t = inputs
        rows = jnp.zeros((senders, size))
        if is_.has_independent:
            rows += noise.independent(jax.random.split(own, n)[:senders], t, size, sigma_ind)
        if is_.has_correlated and is_.noise_mode == "projected":
            rows += noise.projected(pairs, n, t, size, sigma_cor, is_.graph)[:senders]
        if is_.has_correlated and is_.noise_mode == "pairwise":
            rows += noise.pairwise(pair_keys, t, size, sigma_cor, is_.graph)[:senders]
            rows -= noise_of_pairs(pair_keys, is_.taken_off, senders, t, size, sigma_cor)
        if is_.only_mean:
            rows = jnp.mean(rows, axis=0, keepdims=True)
        return rows + mean.astype(jnp.float32)[:, None]

    return lax.map(one_round, (means, indices))


def noise_of_pairs(
    pair_keys: Array,
    pairs: Sequence[tuple[int, int]],
    num_rows: int,
    round_index: Array | int,
    size: int,
    sigma: Array | float,
) -> Array:
    """The noise that whoever has some of the pairs' keys can compute, and take off.

    Args:
      pair_keys: [n, n] typed keys (`secrets.key_matrix`); only those of the pairs are used.
      pairs: (i, j): the noise v_ij that worker i adds for its pair with j.
      num_rows: How many workers have a row; i is below it.
      round_index: t.
      size: d.
      sigma: sigma_cor.

    Returns:
      [rows, d]: row i is the sum of v_ij over the pairs (i, j).
    """
    total = jnp.zeros((num_rows, size))
    if not pairs:
        return total
    ends = np.array(pairs)

    def one(pair: Array) -> Array:
        i, j = pair
        return noise.pair_noise(pair_keys[i, j], i, j, pair_keys.shape[0], round_index, size, sigma)

    return total.at[ends[:, 0]].add(jax.vmap(one)(jnp.asarray(ends)))


def _known_pairs(plan: privacy.PrivacyPlan) -> list[tuple[int, int]]:
    """Pairs (honest i, colluding j) that share a secret: the server has their keys."""
    honest = range(plan.num_workers - plan.num_byzantine)
    colluding = range(plan.num_workers - plan.num_colluding, plan.num_workers)
    return [(i, j) for i in honest for j in colluding if plan.graph is None or plan.graph.adjacency[i, j]]


def view_covariance(plan: privacy.PrivacyPlan, faults: Faults = NO_FAULTS) -> np.ndarray:
    """Covariance of all that the server is left with: `privacy.honest_covariance`, put right for the faults.

    A pair {i, j} of honest workers contributes sigma_cor^2 (e_i - e_j)(e_i - e_j)^T. With a public key it
    contributes nothing. If worker i forgets it, sigma_cor^2 e_j e_j^T is left of it: less noise in message i,
    and nothing that would cancel in a sum. (If both ends added it, the sum would carry more noise: that is
    worse for learning, and better for privacy.) Rounds are independent, or the same if their key is reused.

    Args:
      plan: The plan.
      faults: Of the mechanism.

    Returns:
      Array [T rows, T rows], in the order of `worlds`.

    Example:
      >>> plan = privacy.PrivacyPlan(threat_model="secldp", num_workers=3, num_byzantine=1, rounds=1,
      ...                            clip_norm=1.0, delta=0.01, sigma_ind=0.0, sigma_cor=1.0)
      >>> view_covariance(plan)
      array([[ 2., -1.],
             [-1.,  2.]])
      >>> view_covariance(plan, Faults(forgotten_end=(0, 1)))
      array([[1., 0.],
             [0., 2.]])
    """
    _check(plan, faults)
    sigma_ind = 0.0 if faults.no_independent else plan.sigma_ind
    if plan.threat_model == "cdp":
        one = np.array([[sigma_ind**2 / plan.num_workers]])
    elif plan.graph is not None:
        silent = range(plan.num_workers - plan.num_byzantine, plan.num_workers - plan.num_colluding)
        one = graphs.covariance(
            plan.graph,
            sigma_ind=sigma_ind,
            sigma_cor=plan.sigma_cor,
            colluding=range(silent.stop, plan.num_workers),
            silent=silent,
        )
    else:
        one = privacy.honest_covariance(
            sigma_ind=sigma_ind,
            sigma_cor=plan.sigma_cor,
            num_workers=plan.num_workers,
            num_byzantine=plan.num_byzantine,
            num_colluding=plan.num_colluding,
        )
    unit = np.eye(len(one))
    for pair in filter(None, (faults.forgotten_end, faults.public_pair)):
        i, j = pair
        one = one - plan.sigma_cor**2 * np.outer(unit[i] - unit[j], unit[i] - unit[j])
        if pair == faults.forgotten_end:
            one = one + plan.sigma_cor**2 * np.outer(unit[j], unit[j])
    between = np.ones((plan.rounds, plan.rounds)) if faults.reused_round else np.eye(plan.rounds)
    return np.kron(between, one) * faults.noise_scale**2


def optimal_weights(covariance: np.ndarray, signal: np.ndarray) -> np.ndarray:
    """The likelihood ratio between N(signal, Sigma) and N(-signal, Sigma) as a weighted sum: Sigma^-1 signal.

    By Neyman and Pearson no other score has fewer errors. Where Sigma is singular and the signal has a part
    that carries no noise, that part alone decides, and is returned.

    Args:
      covariance: Sigma, [k, k].
      signal: Of k entries, any shape.

    Returns:
      The weights, of the shape of `signal`, with weights . signal > 0.

    Example:
      >>> optimal_weights(np.diag([4.0, 1.0]), np.array([2.0, 1.0]))
      array([0.5, 1. ])
      >>> optimal_weights(np.ones((2, 2)), np.array([1.0, -1.0]))  # the same noise twice: subtract
      array([ 1., -1.])
    """
    values, vectors = np.linalg.eigh(covariance)
    parts = vectors.T @ np.ravel(signal)
    silent = values <= 1e-10 * max(values[-1], np.finfo(float).tiny)
    if np.linalg.norm(parts[silent]) > 1e-6 * np.linalg.norm(signal):
        weights = vectors[:, silent] @ parts[silent]
    else:
        weights = vectors[:, ~silent] @ (parts[~silent] / values[~silent])
    return np.where(np.abs(weights) > 1e-12 * np.abs(weights).max(), weights, 0.0).reshape(np.shape(signal))


def draw_scores(view: View, weights: np.ndarray, trials: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Runs both worlds and scores what the server sees.

    Args:
      view: The mechanism (`server_view`, or one of your own).
      weights: [k, T, rows]: k scores, each a weighted sum of the view.
      trials: Independent trials in each world.
      seed: Of all randomness.

    Returns:
      The scores in world - and in world +, each [k, trials] in float32.
    """
    check_int("trials", trials, 4)
    check_int("seed", seed, 0)
    if seed >= 2**32:
        raise UserError(f"seed must be below 2^32, got {seed!r}.")
    size = min(_CHUNK, -(-trials // noise.BLOCK) * noise.BLOCK)
    factors = jnp.asarray(weights / np.abs(weights).max(axis=(1, 2), keepdims=True), jnp.float32)

    def all_of(world: int) -> np.ndarray:
        key = jax.random.fold_in(jax.random.key(seed), int(world > 0))
        keys = [jax.random.fold_in(key, chunk) for chunk in range(-(-trials // size))]
        parts = [_weighted_sums(factors, view(key, jnp.float32(world), size)) for key in keys]
        return np.concatenate([np.asarray(part) for part in parts], axis=1)[:, :trials]

    return all_of(-1), all_of(1)


@jax.jit
def _weighted_sums(weights: Array, view: Array) -> Array:
    return jnp.einsum("ktr,trs->ks", weights, view, precision=lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """A claim and what an attack on it found.

    Attributes:
      claimed: Epsilon by the accountant.
      lower_bound: Epsilon that the server's best attack has shown.
      own_message: The same for a server that looks at the worker's own messages only (under "cdp", where
        there is only the mean, the same attack).
      delta: Of both.
      confidence: Of each of the bounds.
      trials: In each world; half of them picked the threshold.
      detail: The best attack's errors.
    """

    claimed: float
    lower_bound: float
    own_message: float
    delta: float
    confidence: float
    trials: int
    detail: Bound

    @property
    def ratio(self) -> float:
        """The audited bound over the claim; near 1 if nothing is given away on either side."""
        return self.lower_bound / self.claimed

    @property
    def broken(self) -> bool:
        """Whether the claim is refuted."""
        return self.lower_bound > self.claimed


def audit(
    plan: privacy.PrivacyPlan,
    *,
    trials: int,
    seed: int,
    confidence: float = 0.95,
    noise_mode: str = "pairwise",
    faults: Faults = NO_FAULTS,
) -> Audit:
    """Attacks what a plan claims, with the noise it is run with.

    Worker 0 is attacked, and the last workers are Byzantine. On a secret graph other than the complete one
    the claim is for the worst choice of both, and the bound may be further below it.

    Args:
      plan: At user level. Its claim is that of the accountant "exact", which leaves no slack.
      trials: In each world. Two million show about 97% of epsilon = 2 at delta = 0.01. Smaller deltas rest on
        rarer events: at delta = 1e-5 the same two million show about 79%.
      seed: Of the attack.
      confidence: Of the bound.
      noise_mode: As for `server_view`.
      faults: Of the mechanism; the claim remains that of the plan, and the server knows of them.

    Returns:
      The claim and the bound.

    Raises:
      UserError: (a ValueError) if a value is out of range or does not fit the plan.
    """
    view = server_view(plan, noise_mode, faults)
    _check_open("confidence", confidence)
    signal = worlds(plan, faults)
    best = optimal_weights(view_covariance(plan, faults), signal)
    minus, plus = draw_scores(view, np.stack([best, signal]), trials, seed)
    found, own = (
        bound(low, high, delta=plan.delta, confidence=confidence)
        for low, high in zip(minus, plus, strict=True)
    )
    return Audit(
        claimed=privacy.epsilon(plan, "exact"),
        lower_bound=found.epsilon,
        own_message=own.epsilon,
        delta=plan.delta,
        confidence=confidence,
        trials=trials,
        detail=found,
    )


# A canary in a real training run.


def with_canary(loss_fn: LossFn) -> LossFn:
    """A loss with one more parameter, "canary", that only a worker with negative labels moves.

    Parameters become {"canary": [1], "model": the model's own}. A worker whose labels are -1 or -2 has the
    gradient + or -C in the canary alone, after clipping, and no other worker has any there: so the other
    workers' data, which the server may know, need not be subtracted.

    Args:
      loss_fn: Of the model.

    Returns:
      The loss with the canary.
    """

    def loss(params: PyTree, images: Array, labels: Array) -> Array:
        model = loss_fn(params["model"], images, jnp.maximum(labels, 0))
        steep = jnp.where(labels[0] == -1, _STEEP, -_STEEP) * params["canary"][0]
        return jnp.where(labels[0] < 0, steep, model)

    return loss


def canary_data(data: rounds.Data, world: Array | int) -> rounds.Data:
    """The data with those of worker 0 replaced: its labels say the world, +1 or -1, to `with_canary`."""
    label = jnp.where(jnp.asarray(world) > 0, -1, -2)
    return data._replace(labels=data.labels.at[0].set(label.astype(data.labels.dtype)))


def canary_run(
    federation: rounds.Federation, plan: privacy.PrivacyPlan, *, momentum: float
) -> Callable[[Array, PyTree, rounds.Data], tuple[Array, Array]]:
    """A whole training run as its server sees it, scored for the canary.

    From the messages of two rounds in a row, momentums m, the server has y = (m_t - momentum m_{t-1}) /
    (1 - momentum): the clipped gradients with their noise. It subtracts the noise it knows, as `server_view`
    does, and scores by `optimal_weights`. Round 0 sends zeros, so T rounds show T-1 noisy gradients although
    the accountant counts T: the bound cannot quite reach the claim.

    Args:
      federation: Built with a loss from `with_canary` and the plan, and with pairwise noise.
      plan: The plan, of at least 2 rounds.
      momentum: Of the workers.

    Returns:
      (key, params, data) -> (score of all messages, score of the final parameters alone). Larger speaks for
      world +.
    """
    _check(plan, NO_FAULTS)
    if plan.rounds < 2 or plan.threat_model == "cdp":
        raise UserError(
            f"a canary needs at least 2 rounds and messages that the server sees, got {plan.rounds} rounds "
            f"under {plan.threat_model!r}."
        )
    if not 0 <= momentum < 1:
        raise UserError(f"momentum must be at least 0 and below 1, got {momentum!r}.")
    known = _known_pairs(plan) if plan.sigma_cor > 0 else []
    single = dataclasses.replace(plan, rounds=1)
    weights = jnp.asarray(optimal_weights(view_covariance(single), worlds(single))[0], jnp.float32)

    def run(key: Array, params: PyTree, data: rounds.Data) -> tuple[Array, Array]:
        def step(state: rounds.State, _: Any) -> tuple[rounds.State, Array]:
            state, _info = federation.step(key, state, data)
            return state, state.momentum["canary"][:, 0]

        start = federation.init(params)
        end, sent = lax.scan(step, start, length=plan.rounds)
        noisy = (sent[1:] - momentum * sent[:-1]) / (1 - momentum)
        if known:
            # The canary is the first coordinate: leaves are in the order of their names.
            pair_keys = secrets.key_matrix(rounds._streams(key).pairs, plan.num_workers)
            noisy -= lax.map(
                lambda t: noise_of_pairs(pair_keys, known, noisy.shape[1], t, 1, plan.sigma_cor)[:, 0],
                jnp.arange(1, plan.rounds),
            )
        return jnp.sum(noisy @ weights), -end.params["canary"][0]

    return run


# Checks.


def _check_open(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise UserError(f"{name} must be strictly between 0 and 1, got {value!r}.")


def _check(plan: privacy.PrivacyPlan, faults: Faults) -> None:
    """Raises unless the plan has a claim of one Gaussian, and the faults are possible in it."""
    if plan.threat_model == "none":
        raise UserError("the plan has threat model 'none': it claims nothing that could be audited.")
    if plan.level != "user":
        raise UserError(
            f"the plan must be at the user level, got {plan.level!r}: there sampled batches make a mixture "
            "of Gaussians, for which this adversary is not the best one."
        )
    for name in ("gradient_scale", "noise_scale"):
        value = getattr(faults, name)
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{name} must be finite and positive, got {value!r}.")
    if faults.no_independent and plan.sigma_ind == 0:
        raise UserError("no_independent has no effect: sigma_ind is 0 in this plan.")
    if faults.reused_round and plan.rounds < 2:
        raise UserError(f"reused_round needs at least 2 rounds, got {plan.rounds}.")
    honest = plan.num_workers - plan.num_byzantine
    for name in ("forgotten_end", "public_pair"):
        pair = getattr(faults, name)
        if pair is None:
            continue
        if plan.sigma_cor == 0:
            raise UserError(f"{name} has no effect: sigma_cor is 0 in this plan.")
        if len(set(pair)) != 2 or not all(i in range(honest) for i in pair):
            raise UserError(
                f"{name} must be two different workers below {honest} (honest ones), got {pair!r}."
            )
        if plan.graph is not None and not plan.graph.adjacency[pair]:
            raise UserError(f"{name} must be two workers that share a secret, got {pair!r}.")
    if faults.forgotten_end and faults.public_pair and {*faults.forgotten_end} == {*faults.public_pair}:
        raise UserError(f"forgotten_end and public_pair must be different pairs, got {faults.public_pair!r}.")


def _check_noise_mode(plan: privacy.PrivacyPlan, noise_mode: str) -> None:
    if noise_mode not in noise.MODES:
        raise UserError(f"noise_mode must be one of {', '.join(noise.MODES)}, got {noise_mode!r}.")
    if noise_mode == "independent" and plan.sigma_cor > 0:
        raise UserError(
            "noise_mode is 'independent', but the plan has correlated noise "
            f"(sigma_cor = {plan.sigma_cor:g})."
        )
    if noise_mode == "projected" and plan.num_colluding:
        raise UserError(
            f"noise_mode is 'projected', but num_colluding is {plan.num_colluding}: projected noise has no "
            "pair keys that a colluding worker could reveal."
        )


def _removed(faults: Faults) -> list[tuple[int, int]]:
    """Ends (i, j) whose noise v_ij is not in what the server is left with, beyond what colluders reveal."""
    ends = [faults.forgotten_end] if faults.forgotten_end else []
    if faults.public_pair:
        ends += [faults.public_pair, faults.public_pair[::-1]]
    return ends
