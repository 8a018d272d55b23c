"""CAF that knows the noise: messages that break the law of honest noise are taken out before the filter."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cafcor_jax.aggregators import noise_law
from cafcor_jax.aggregators.caf import spectral_filter
from cafcor_jax.aggregators.linear import (
    LinearRule,
    check_num_byzantine,
    check_tolerance,
    gram_about_origin,
    valid_workers,
)
from cafcor_jax.aggregators.noise_law import Limits, Verdict
from cafcor_jax.columns import common_dtype, num_coordinates, num_workers
from cafcor_jax.float64 import in_float64
from cafcor_jax.gram import mix
from cafcor_jax.privacy.graphs import SecretGraph
from cafcor_jax.types import Aggregate, Array, PyTree, Updates


class Judged(NamedTuple):
    """An aggregate, and how it came about."""

    aggregate: Aggregate
    weights: Array
    """[n]."""
    flagged: Array
    """[n] booleans: who was found to break the law of honest noise."""
    law_fits: Array
    """Whether the noise parameters fit the messages; if not, the weights are those of plain CAF."""


@dataclasses.dataclass(frozen=True)
class StatefulRule:
    """A rule that remembers: a pair of pure functions."""

    init: Callable[[Updates], PyTree]
    """Messages (or their shapes), leaves [n, ...] -> the state before the first round."""
    apply: Callable[[PyTree, Updates], tuple[Judged, PyTree]]
    """(state, messages) -> (the aggregate of the round, the state for the next)."""
    this_round: Callable[[PyTree, int], LinearRule]
    """(state, d) -> what the rule does in this round with messages alone: for attacks that know it."""
    views: Callable[[PyTree, Updates], list[Updates]]
    """(state, messages) -> all that it takes inner products of, like the messages and affine in them: for
    attacks that know all of it."""
    weigh: Callable[[PyTree, list[Array], int], Array]
    """(state, the Gram matrices of the views about the origin, d) -> weights [n]; inside `in_float64`."""


@dataclasses.dataclass(frozen=True)
class _Noise:
    """The parameters of the law; nothing is computed yet."""

    num_byzantine: int
    sigma_ind: float
    sigma_cor: float
    clip_norm: float
    false_alarm: float
    graph: SecretGraph | None

    def __post_init__(self) -> None:
        check_num_byzantine(self.num_byzantine)
        for name in ("sigma_ind", "sigma_cor", "clip_norm"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value!r}; it must be a finite number of at least 0.")
        if not 0 < self.false_alarm < 1:
            raise ValueError(
                f"false_alarm is {self.false_alarm!r}; it must be between 0 and 1, a probability."
            )

    @property
    def without_law(self) -> bool:
        """Whether there is no noise, and so no law."""
        return self.sigma_ind == 0 and self.sigma_cor == 0

    def limits(self, n: int, dimension: int) -> Limits | None:
        """The law for n workers and d coordinates; None if there is no noise and so no law."""
        check_tolerance(n, self.num_byzantine)
        if self.graph is not None and self.graph.num_workers != n:
            raise ValueError(
                f"graph is over {self.graph.num_workers} workers, and there are {n} messages: it must be "
                "over as many."
            )
        if self.without_law:
            return None
        noise = noise_law.covariance(n, self.sigma_ind, self.sigma_cor, self.graph)
        without = np.flatnonzero(np.diagonal(noise) <= 0)
        if without.size:
            raise ValueError(
                f"worker {without[0]} shares no secret and sigma_ind is 0, so its messages have no noise to "
                "be judged by: give everyone a secret or independent noise, or use caf."
            )
        return noise_law.limits(noise, dimension, self.num_byzantine, self.false_alarm)


def caf_noise_aware(
    num_byzantine: int,
    sigma_ind: float | None = None,
    sigma_cor: float | None = None,
    *,
    clip_norm: float = 0.0,
    false_alarm: float = 1e-3,
    graph: SecretGraph | None = None,
) -> LinearRule:
    r"""Builds CAF for messages with known noise: who breaks the law of that noise is taken out first.

    CAF's guarantee is relative to the spread of the honest messages. Where that is mostly noise, colluders
    can hide in it. But the noise has public parameters, so the Gram matrix of honest messages has a known law
    (`noise_law`): lengths, inner products of pairs, components along the mean, and the top eigenvalue of
    every group of f. Workers whose lengths or pairs break it get weight 0 and use up one of the f each; those
    who break it along the mean or as a group lose weight as in CAF's filter; then CAF goes on with what is
    left, and stops as soon as noise alone explains the covariance.

    The cost is CAF's: two passes over d. Without noise it is CAF. With a chance of `false_alarm` at most the
    honest workers of a round without malicious ones lose any weight to the law. Otherwise the filters
    together take no more weight than CAF's own may, and what they leave is used only if noise explains its
    covariance or CAF's own weights have no smaller one: so the bound is CAF's, or that of a covariance that
    noise explains.

    Args:
      num_byzantine: f, with 2f < n.
      sigma_ind: standard deviation of a coordinate of the independent noise in a message, as it arrives.
      sigma_cor: the same, of the noise that a pair of workers shares.
      clip_norm: the greatest length of what is not noise in a message.
      false_alarm: the chance that the honest workers of a round break any part of the law.
      graph: who shares a secret with whom; None for everyone with everyone.

    Returns:
      A linear rule.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> noise = 6 * jax.random.normal(jax.random.key(0), (20, 5000))
      >>> x = noise.at[18:].set(noise[:18].mean(0) + 0.5 * noise[:18].std(0))  # a little is enough
      >>> rule = caf_noise_aware(2, sigma_ind=6.0, sigma_cor=0.0)
      >>> print(rule.weights(x)[16:].round(3))
      [0.056 0.056 0.    0.   ]
    """
    noise = _given(num_byzantine, sigma_ind, sigma_cor, clip_norm, false_alarm, graph)
    return LinearRule(
        _unknown_dimension,
        num_byzantine,
        gram_about_origin,
        in_dimension=lambda dimension: _rule(noise, dimension),
    )


def _given(
    num_byzantine: int,
    sigma_ind: float | None,
    sigma_cor: float | None,
    clip_norm: float,
    false_alarm: float,
    graph: SecretGraph | None,
) -> _Noise:
    for name, value in (("sigma_ind", sigma_ind), ("sigma_cor", sigma_cor)):
        if value is None:
            raise ValueError(f"{name} is not given: a rule that knows the noise needs it, 0 for none.")
    return _Noise(num_byzantine, sigma_ind, sigma_cor, clip_norm, false_alarm, graph)  # type: ignore[arg-type]


def _unknown_dimension(gram: Array) -> Array:
    raise ValueError(
        "The law of noise depends on the number of coordinates: take rule.in_dimension(d).weigh."
    )


def _rule(noise: _Noise, dimension: int, variance: Array | float = 1.0) -> LinearRule:
    """The rule for messages of d coordinates whose noise is `variance` times that of the parameters."""

    def weigh(gram: Array) -> Array:
        law = noise.limits(gram.shape[0], dimension)
        if law is None:
            return spectral_filter(gram, noise.num_byzantine).weights
        verdict = noise_law.judge([_evidence(gram, noise, variance)], law, noise.num_byzantine)
        return _weigh(gram, verdict, law, variance, noise.num_byzantine)

    return LinearRule(weigh, noise.num_byzantine, gram_about_origin)


def _evidence(
    gram: Array, noise: _Noise, variance: Array | float, signal: Array | float = 1.0
) -> noise_law.Evidence:
    """Of messages with `variance` times the noise and `signal` times the clipping norm."""
    variance = jnp.asarray(variance, gram.dtype)
    there = variance > 0
    scale = jnp.where(there, variance, 1)
    return noise_law.Evidence(gram / scale, noise.clip_norm * signal / jnp.sqrt(scale), there)


def _weigh(gram: Array, verdict: Verdict, law: Limits, variance: Array | float, num_byzantine: int) -> Array:
    """CAF's filter on what the law leaves, or without it where that would be worse."""
    out = verdict.malicious[:, None] | verdict.malicious[None, :]
    enough = jnp.where(verdict.fits, law.length**2 * jnp.asarray(variance, gram.dtype), 0)
    run = functools.partial(spectral_filter, jnp.where(out, jnp.nan, gram), num_byzantine, enough=enough)
    lawful = run(start=verdict.kept)
    # CAF's bound is in the top eigenvalue of the covariance that is left. Weights that others than CAF took
    # are good if noise explains that eigenvalue, or if CAF finds none smaller.
    explained = lawful.variance <= enough * jnp.max(lawful.weights)

    def better_of_both() -> Array:
        plain = run()
        return jnp.where(lawful.variance <= plain.variance, lawful.weights, plain.weights)

    return lax.cond(jnp.all(verdict.kept >= 1) | explained, lambda: lawful.weights, better_of_both)


class _History(NamedTuple):
    round: Array  # int32
    memory: _Memory | tuple[()]  # nothing for a rule that forgets


class _Memory(NamedTuple):
    total: Updates  # the sum of all messages so far, leaves [n, ...]
    products: Array  # of these sums when they were last judged, [n, n] in float32
    judged: Array  # int32, the round in which that was; 0 for never, and if nothing was found


def caf_noise_aware_over_rounds(
    num_byzantine: int,
    *,
    momentum: float,
    sigma_ind: float | None = None,
    sigma_cor: float | None = None,
    clip_norm: float = 0.0,
    false_alarm: float = 1e-3,
    graph: SecretGraph | None = None,
) -> StatefulRule:
    """`caf_noise_aware` for the messages of a federation: momenta, of which round 0's are 0.

    In round t >= 1 a momentum has v_t = (1 - beta)^2 (1 + beta^2 + ... + beta^(2t-2)) times the variance of
    the noise that a worker adds.

    Args:
      num_byzantine: f.
      momentum: beta of the workers.
      sigma_ind: as for `caf_noise_aware`, but of one round's gradient, before the momentum.
      sigma_cor: likewise.
      clip_norm: the greatest length of a gradient.
      false_alarm: as for `caf_noise_aware`, of a round.
      graph: as there.

    Returns:
      A rule with a state.
    """
    noise = _given(num_byzantine, sigma_ind, sigma_cor, clip_norm, false_alarm, graph)
    return _over_rounds(noise, momentum, every=None)


def caf_history(
    num_byzantine: int,
    *,
    momentum: float,
    sigma_ind: float | None = None,
    sigma_cor: float | None = None,
    clip_norm: float = 0.0,
    false_alarm: float = 1e-3,
    graph: SecretGraph | None = None,
    every: int = 10,
) -> StatefulRule:
    r"""`caf_noise_aware_over_rounds` that also judges what a worker has sent in all rounds together.

    Noise adds up like sqrt(t) over rounds, a steady bias like t. The sum of a worker's momenta is one of its
    noisy gradients, m_1 + ... + m_t = sum_s (1 - beta^(t-s+1)) r_s: all count fully but the last few. So it
    has a known multiple of the noise's covariance, and a signal of t C at most. Its Gram matrix is held
    against the same law, with half of `false_alarm` for each of the two. The server keeps a sum for every
    worker.

    Only every few rounds a Gram matrix of sums is made; if it breaks the law, it counts until the next one is
    made. What a worker does in between is in its sum all the same.

    Args:
      num_byzantine: f.
      momentum: beta of the workers.
      sigma_ind: as for `caf_noise_aware_over_rounds`.
      sigma_cor: likewise.
      clip_norm: likewise.
      false_alarm: likewise.
      graph: likewise.
      every: rounds from one Gram matrix of sums to the next. With 1 every round costs two of them.

    Returns:
      A rule with a state.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every is {every!r}; it must be a whole number of at least 1.")
    noise = _given(num_byzantine, sigma_ind, sigma_cor, clip_norm, false_alarm / 2, graph)
    return _over_rounds(noise, momentum, every)


def _over_rounds(noise: _Noise, momentum: float, every: int | None) -> StatefulRule:
    """A rule that judges sums every so many rounds; with None it keeps none."""
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum is {momentum!r}; it must be at least 0 and less than 1.")
    # Without noise there is no law, and nothing to remember for it.
    remembers = every is not None and not noise.without_law

    def variance(round_index: Array) -> Array:
        return noise_law.of_momentum(momentum, round_index.astype(np.float64)).variance

    def init(updates: Updates) -> _History:
        if not remembers:
            return _History(jnp.int32(0), ())
        n = num_workers(updates)
        total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), updates)
        return _History(jnp.int32(0), _Memory(total, jnp.zeros((n, n), jnp.float32), jnp.int32(0)))

    def views(state: _History, updates: Updates) -> list[Updates]:
        if not state.memory:
            return [updates]
        return [updates, jax.tree.map(jnp.add, state.memory.total, updates)]

    def is_judged(state: _History) -> Array:
        """Whether sums are judged in this round: the last of every so many; there is nothing in round 0."""
        assert every is not None
        return (state.round > 0) & ((state.round + 1) % every == 0)

    def judged_products(state: _History, new: Callable[[], Array]) -> tuple[Array, Array]:
        """The Gram matrix that sums are judged by in this round, and its round."""
        memory, now = state.memory, is_judged(state)
        assert memory
        # A state has no float64. Nobody's numbers may become infinite in others' rows.
        limit = float(np.finfo(np.float32).max)
        products = lax.cond(
            now,
            lambda: jnp.clip(new(), -limit, limit).astype(np.float32),
            lambda: memory.products,
        )
        return products, jnp.where(now, state.round, memory.judged)

    def decide(
        state: _History, products: Array, of_sums: tuple[Array, Array] | None, dimension: int
    ) -> tuple[Array, Verdict]:
        """The weights, and what the law says."""
        n, f = products.shape[0], noise.num_byzantine
        law = noise.limits(n, dimension)
        if law is None:
            nobody = Verdict(jnp.zeros(n, bool), jnp.ones(n), jnp.asarray(True))
            return spectral_filter(products, f).weights, nobody
        evidence = [_evidence(products, noise, variance(state.round))]
        if of_sums is not None:
            of_these, t = of_sums
            multiple = noise_law.of_sum_of_momenta(momentum, t.astype(np.float64))
            evidence.append(_evidence(of_these.astype(np.float64), noise, *multiple))
        verdict = noise_law.judge(evidence, law, f)
        return _weigh(products, verdict, law, variance(state.round), f), verdict

    @in_float64
    def apply(state: _History, updates: Updates) -> tuple[Judged, _History]:
        num_workers(updates)
        products = gram_about_origin(updates)
        valid = valid_workers(products)
        memory, of_sums = state.memory, None
        if memory:

            def added(total: Array, m: Array) -> Array:
                # A message that is not finite must not stay in a sum; that it is missing breaks the law.
                return total + jnp.where(valid.reshape(-1, *[1] * (m.ndim - 1)), m, 0)

            # The new sum first: a condition that reads the old one would have it copied in every round.
            total = jax.tree.map(added, memory.total, updates)
            of_sums = judged_products(state, lambda: gram_about_origin(total))
        weights, verdict = decide(state, products, of_sums, num_coordinates(updates))
        if of_sums is not None:
            lawful = verdict.fits & ~verdict.malicious.any() & (verdict.kept >= 1).all()
            memory = _Memory(total, of_sums[0], jnp.where(lawful, 0, of_sums[1]))
        aggregate = mix(weights, updates, all_finite=valid.all())
        judged = Judged(aggregate, weights.astype(common_dtype(updates)), verdict.flagged, verdict.fits)
        return judged, _History(state.round + 1, memory)

    def this_round(state: _History, dimension: int) -> LinearRule:
        with jax.enable_x64(True):
            return _rule(noise, dimension, variance(state.round))

    def weigh(state: _History, products: list[Array], dimension: int) -> Array:
        of_sums = judged_products(state, lambda: products[1]) if state.memory else None
        return decide(state, products[0], of_sums, dimension)[0]

    return StatefulRule(init, apply, this_round, views, weigh)
