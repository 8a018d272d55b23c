"""The law of honest messages under known noise, and the messages that break it.

The server knows the public parameters of the noise, so it knows what the Gram matrix of honest messages looks
like, whatever their data: x_i = g_i + z_i with ||g_i|| <= S, the columns of z independent normal vectors with
a known covariance K between workers (K = sigma_ind^2 I + sigma_cor^2 L, L the Laplacian of the secret graph).
With d coordinates and a chance of at most `false_alarm` that any of it fails in a round without malicious
workers:

* lengths: ||x_i|| is within S of sqrt(K_ii) times [sqrt(d - 2 sqrt(d u)), sqrt(d + 2 sqrt(d u) + 2 u)];
* pairs: <x_i, x_j> is within sqrt(2 d (K_ij^2 + K_ii K_jj) u) + (|K_ij| + sqrt(K_ii K_jj)) u of d K_ij, up to
  what signals add, S (||x_i|| + ||x_j||) + 3 S^2;
* along the mean: given the sum M of all messages, what noise adds to <x_i - beta_i M, M / ||M||> is normal,
  with beta_i the regression of z_i on the sum of all z. Noise of pairs cancels in M, so where there is little
  independent noise M is nearly without noise: a bias that moves the mean shows in this one direction, where
  the noise of a message is that of one coordinate and not of d;
* groups: for every group of k = f workers and every unit vector v on them, ||sum_i v_i x_i|| is at most
  sqrt(v^T K v) (sqrt(d) + sqrt(k) + sqrt(2 u)) + S sqrt(k).

u is the logarithm of the number of cases over their share of `false_alarm` (union bounds; all tails
hold for every n and d, not only in the limit). The third is conditional on the sum: it needs gradients that
do not depend on the noise but through sums, as they do while nobody has lost weight.

References:
  Laurent and Massart, Adaptive Estimation of a Quadratic Functional by Model Selection, Annals of Statistics
    2000 (lengths and pairs).
  Davidson and Szarek, Local Operator Theory, Random Matrices and Banach Spaces, 2001 (groups).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from cafcor_jax.aggregators.linear import valid_workers, without_invalid
from cafcor_jax.float64 import argmax, dot
from cafcor_jax.privacy.graphs import SecretGraph
from cafcor_jax.types import Array

# Steps of the search for a group. A group that stands out is found in two or three.
_GROUP_STEPS = 6
# A sum of messages shorter than this, relative to what it would be without cancellation, is rounding.
_SHORTEST_SUM = 1e-3


class Limits(NamedTuple):
    """What honest messages keep to, for n workers, d coordinates, and signals of length 0; float64."""

    shortest: np.ndarray
    """Least length of every message, [n]."""
    longest: np.ndarray
    """Greatest length of every message, [n]."""
    noise: np.ndarray
    """K, [n, n]."""
    products: np.ndarray
    """Expected inner products d K, [n, n]."""
    products_reach: np.ndarray
    """How far inner products are from that at most, [n, n]."""
    group_size: int
    """k, the workers in a group; at most f."""
    group_length: float
    """Greatest length of a unit combination of a group's messages, where its noise has variance 1."""
    length: float
    """Greatest singular value of all honest messages."""
    mean_reach: float
    """How many standard deviations a message is off along the mean at most."""


class Evidence(NamedTuple):
    """What the server has of all workers that the law speaks of, in units in which the noise is K."""

    gram: Array
    """G about the origin, [n, n] in float64, NaN in the rows of messages that are not finite."""
    signal: Array | float
    """S."""
    counts: Array | bool = True
    """Whether there is any noise in it: round 0 of a momentum has none, and no law."""


class Verdict(NamedTuple):
    """What the law says of a Gram matrix."""

    malicious: Array
    """[n] booleans: those who break the law by themselves."""
    kept: Array
    """[n] in [0, 1]: what breaches of the law in which honest workers may have a part leave of the weight."""
    fits: Array
    """Whether the law can be true: at most f workers break it by themselves. If not, nobody is judged."""

    @property
    def flagged(self) -> Array:
        """[n] booleans: who loses half of the weight or more."""
        return self.malicious | (self.kept < 0.5)


def covariance(
    num_workers: int, sigma_ind: float, sigma_cor: float, graph: SecretGraph | None = None
) -> np.ndarray:
    """The covariance of one coordinate of the noise between workers, K [n, n].

    Example:
      >>> covariance(3, 1.0, 2.0).tolist()
      [[9.0, -4.0, -4.0], [-4.0, 9.0, -4.0], [-4.0, -4.0, 9.0]]
    """
    if graph is None:
        laplacian = num_workers * np.eye(num_workers) - 1
    else:
        laplacian = np.diag(graph.degrees) - graph.adjacency.astype(np.float64)
    return sigma_ind**2 * np.eye(num_workers) + sigma_cor**2 * laplacian


def limits(noise: np.ndarray, dimension: int, num_byzantine: int, false_alarm: float) -> Limits:
    """The limits of the law, on the host.

    Args:
      noise: K [n, n], with a positive diagonal.
      dimension: d.
      num_byzantine: f.
      false_alarm: the chance that honest workers break any limit in a round.
    """
    n, d, k = noise.shape[0], dimension, max(num_byzantine, 1)
    share = false_alarm / 4
    variances = np.diagonal(noise)
    u = math.log(2 * n / share)
    shortest = np.sqrt(variances * max(d - 2 * math.sqrt(d * u), 0))
    longest = np.sqrt(variances * (d + 2 * math.sqrt(d * u) + 2 * u))
    u = math.log(n * max(n - 1, 1) / share)
    scale = np.sqrt(np.outer(variances, variances))
    reach = np.sqrt(2 * d * (noise**2 + scale**2) * u) + (np.abs(noise) + scale) * u
    top = math.sqrt(float(np.linalg.eigvalsh(noise)[-1]))
    return Limits(
        shortest=shortest,
        longest=longest,
        noise=noise,
        products=d * noise,
        products_reach=reach,
        group_size=k,
        group_length=_singular_value(d, k, _log_choose(n, k) + math.log(1 / share)),
        length=top * _singular_value(d, n, math.log(1 / share)),
        mean_reach=math.sqrt(2 * math.log(n / share)),
    )


class Multiple(NamedTuple):
    """A sum of noisy gradients, by what it has of them."""

    variance: Any
    """How many times the covariance of the noise of one."""
    signal: Any
    """How many times the length of what is under the noise of one, if it is the same in all."""


ONE_GRADIENT = Multiple(1.0, 1.0)


def of_momentum(momentum: float, rounds: Any) -> Multiple:
    """m_t = (1 - beta) sum_s beta^(t-s) r_s, of t noisy gradients r_s.

    Example:
      >>> print(of_momentum(0.0, 7), of_momentum(0.5, 1))
      Multiple(variance=1.0, signal=1.0) Multiple(variance=0.25, signal=0.5)
    """
    power = momentum**rounds
    return Multiple((1 - momentum) / (1 + momentum) * (1 - power**2), 1 - power)


def of_sum_of_momenta(momentum: float, rounds: Any) -> Multiple:
    """m_1 + ... + m_t = sum_s (1 - beta^(t-s+1)) r_s: all count fully but the last few.

    Example:
      >>> print(of_sum_of_momenta(0.0, 7), of_sum_of_momenta(0.5, 1))
      Multiple(variance=7.0, signal=7.0) Multiple(variance=0.25, signal=0.5)
    """
    power = momentum**rounds
    powers = momentum / (1 - momentum) * (1 - power)  # beta + ... + beta^t
    squares = momentum**2 / (1 - momentum**2) * (1 - power**2)
    return Multiple(rounds - 2 * powers + squares, rounds - powers)


class HiddenBias(NamedTuple):
    """How long a bias of f workers can be before it shows."""

    spectral: float
    """Beyond this the top eigenvalue of all messages, whitened, leaves that of noise (the spectral threshold
    of random-matrix theory): below it no test of eigenvalues can see the bias when n and d are large. The
    direction of the mean counts if it has noise."""
    in_group: float
    """Beyond this the group of the f workers breaks the law of `limits`."""
    along_mean: float
    """Beyond this each of the f workers breaks it along the mean, if nothing else moves the mean."""

    @property
    def detected(self) -> float:
        """Beyond this the law is broken."""
        return min(self.in_group, self.along_mean)


def hidden_bias(
    *,
    num_workers: int,
    num_byzantine: int,
    dimension: int,
    sigma_ind: float,
    sigma_cor: float,
    clip_norm: float = 0.0,
    false_alarm: float = 1e-3,
    multiple: Multiple = ONE_GRADIENT,
) -> HiddenBias:
    """The length that a bias common to f workers, hidden under the noise they owe, can have unseen.

    With nu = sigma_ind^2 + n sigma_cor^2, and v times the variance of noise and s times the bias in what is
    looked at:

    * spectral: (s b)^2 (f (1 - f/n) / nu + f^2 / (n sigma_ind^2)) = v sqrt(n d);
    * in a group: v (nu - f sigma_cor^2) d + f (s b)^2 is the square of the group's limit;
    * along the mean: the mean moves by s f b / n beside noise of length sqrt(v sigma_ind^2 d / n), and each
      of the f workers stands out along it by s b times the cosine.

    A mean of n messages is then moved by f b / n.

    Args:
      num_workers: n, everyone with a secret with everyone.
      num_byzantine: f, at least 1.
      dimension: d.
      sigma_ind: of the independent noise of one round.
      sigma_cor: of a pair's noise of one round.
      clip_norm: C.
      false_alarm: as for `limits`.
      multiple: what is looked at, of noisy gradients; one of them unless given.

    Example:
      >>> settings = dict(num_workers=100, num_byzantine=5, dimension=431_080, sigma_ind=0.0, sigma_cor=0.6)
      >>> found = hidden_bias(**settings)
      >>> print(f"{found.spectral:.0f} {found.in_group:.0f} {found.along_mean:.0f}")
      223 293 30
    """
    n, f, d = num_workers, num_byzantine, dimension
    v, s = multiple
    nu = sigma_ind**2 + n * sigma_cor**2
    noise = covariance(n, sigma_ind, sigma_cor)
    law = limits(noise, d, f, false_alarm)
    excess = f * (1 - f / n) / nu + (f**2 / (n * sigma_ind**2) if sigma_ind > 0 else 0)
    # Of the f together, in which what they share with one another cancels.
    common = v * (nu - f * sigma_cor**2)
    longest = math.sqrt(common) * law.group_length + s * clip_norm * math.sqrt(f)
    # Along the mean: less the mean itself, if that has noise.
    own = 1 - f / n if sigma_ind > 0 else 1.0
    reach = math.sqrt(v * (noise[0, 0] - sigma_ind**2 / n)) * law.mean_reach
    reach += s * clip_norm * (2 if sigma_ind > 0 else 1)
    # s b own cos = reach, with cos^2 = (s f b / n)^2 / ((s f b / n)^2 + rest): a quadratic equation in b^2.
    rest = v * sigma_ind**2 * d / n
    moved, ratio = (s * f / n) ** 2, (reach / (s * own)) ** 2
    square = (ratio * moved + math.sqrt((ratio * moved) ** 2 + 4 * moved * ratio * rest)) / (2 * moved)
    return HiddenBias(
        spectral=math.sqrt(v * math.sqrt(n * d) / excess) / s,
        in_group=math.sqrt((longest**2 - common * d) / f) / s,
        along_mean=math.sqrt(square),
    )


def _singular_value(dimension: int, rows: int, u: float) -> float:
    """What the top singular value of unit normals [rows, d] exceeds with a chance of at most exp(-u)."""
    return math.sqrt(dimension) + math.sqrt(rows) + math.sqrt(2 * u)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def judge(evidence: Sequence[Evidence], law: Limits, num_byzantine: int) -> Verdict:
    """Holds all that there is of the workers against the law; inside `in_float64`.

    Who is too short or too long, or in discord with more than f others, is malicious: an honest worker can be
    in discord with malicious ones only. That a worker stands out along the mean, or in a group, does not
    prove as much, since malicious workers can turn the mean towards an honest one's noise, and copy it. As
    CAF's filter does, these tests take weight: from the worst one all of it, and from the others that stand
    out in proportion to the square of how much they do. All together they take no more than twice the f that
    are left: what CAF's filter may take at most.

    Args:
      evidence: one or more Gram matrices of the same workers.
      law: for as many workers.
      num_byzantine: f. Messages that are not finite count among them.
    """
    valid = functools.reduce(jnp.logical_and, [valid_workers(one.gram) for one in evidence])
    malicious = functools.reduce(
        jnp.logical_or, [_law_breakers(one, law, num_byzantine) & one.counts for one in evidence]
    )
    # Of more than f, some are honest: then the parameters of the law are not those of the messages.
    fits = jnp.sum(~valid | malicious) <= num_byzantine
    malicious = malicious & fits
    start = jnp.where(valid & ~malicious, 1.0, 0.0)
    budget = 2.0 * (num_byzantine - jnp.sum(~valid | malicious))
    least = jnp.sum(start) - budget
    kept = start
    for one in evidence:
        # Every one begins with everybody: without those whom another one took out, noise that would have
        # cancelled stays in the mean, and there is nothing to see along it.
        left = lax.cond(fits & one.counts, functools.partial(_lawful, one, law, start, least), lambda: start)
        both = jnp.minimum(kept, left)
        fewer = jnp.where(jnp.sum(left) < jnp.sum(kept), left, kept)
        kept = jnp.where(jnp.sum(both) >= least * (1 - 1e-12), both, fewer)
    return Verdict(malicious, jnp.where(malicious, 1.0, kept), fits)


def _lawful(one: Evidence, law: Limits, kept: Array, least: Array) -> Array:
    """What the tests along the mean and of groups leave of the weights, one after the other, [n]."""
    one = one._replace(gram=without_invalid(one.gram))
    for test in [_off_along_mean] if law.group_size == 1 else [_off_along_mean, _off_in_group]:
        kept = _without(functools.partial(test, one, law), kept, least)
    return kept


def _law_breakers(one: Evidence, law: Limits, num_byzantine: int) -> Array:
    """Who breaks the law of lengths, or that of pairs with more than f others, [n] booleans."""
    gram, signal, _ = one
    valid = valid_workers(gram)
    lengths = jnp.sqrt(jnp.where(valid, jnp.diagonal(gram), 0))
    good_length = (lengths <= law.longest + signal) & (lengths >= law.shortest - signal)
    judged = valid & good_length
    reach = law.products_reach + signal * (lengths[:, None] + lengths[None, :]) + 3 * signal**2
    discord = (jnp.abs(without_invalid(gram) - law.products) > reach) & ~np.eye(gram.shape[0], dtype=bool)
    in_discord = jnp.sum(discord & judged[:, None] & judged[None, :], axis=1)
    return valid & ~(good_length & (in_discord <= num_byzantine))


def _without(off: Callable[[Array], Array], kept: Array, least: Array) -> Array:
    """Takes weight from those who are off, until nobody is or less than `least` would be left in all.

    `off` gives from [n] weights the square of how much everyone stands out, 0 for who does not.
    """

    def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
        kept, scores = state
        top = argmax(scores)
        # The top one goes as a whole, whatever rounding makes of its quotient.
        share = jnp.minimum(scores / scores[top], 1).at[top].set(1)
        after = kept * (1 - share)
        allowed = jnp.sum(after) >= least * (1 - 1e-12)
        return jnp.where(allowed, after, kept), jnp.where(allowed, off(after), 0)

    return lax.while_loop(lambda state: jnp.any(state[1] > 0), step, (kept, off(kept)))[0]


def _off_along_mean(one: Evidence, law: Limits, kept: Array) -> Array:
    """Squares of how far messages are off in the direction of their sum, for those beyond the limit, [n]."""
    noise = jnp.asarray(law.noise)
    with_sum, noise_with_sum = dot(one.gram, kept), dot(noise, kept)
    square, noise_of_sum = dot(kept, with_sum), dot(kept, noise_with_sum)
    # Where noise cancels in the sum, nothing is to be regressed on it.
    noisy = noise_of_sum > 1e-9 * jnp.trace(noise)
    beta = jnp.where(noisy, noise_with_sum / jnp.where(noisy, noise_of_sum, 1), 0)
    long_enough = square > _SHORTEST_SUM**2 * dot(kept, jnp.diagonal(one.gram))
    along = (with_sum - beta * square) / jnp.sqrt(jnp.where(long_enough, square, 1))
    variance = jnp.maximum(jnp.diagonal(noise) - beta * noise_with_sum, 0)
    reach = law.mean_reach * jnp.sqrt(variance) + one.signal * (1 + jnp.abs(beta) * jnp.sum(kept))
    off = (jnp.abs(along) > reach) & (kept > 0) & long_enough
    return jnp.where(off, along**2, 0)


def _off_in_group(one: Evidence, law: Limits, kept: Array) -> Array:
    """Squares of the parts of its members in a group that breaks the law, [n]; 0 if none is found."""
    slack = one.signal * math.sqrt(law.group_size)

    def search() -> Array:
        vector, square, noise = worst_group(one.gram, law, kept)
        return jnp.where(square > (jnp.sqrt(noise) * law.group_length + slack) ** 2, vector**2, 0)

    # Nearly always it can be told beforehand that there is none.
    may_be = longest_beyond(one.gram, law, kept) > slack**2
    return lax.cond(may_be, search, lambda: jnp.zeros_like(kept))


def _beyond(gram: Array, law: Limits, kept: Array) -> Array:
    """What G has beyond noise in any group: v^T of it v > 0 is needed to break the law, [n, n]."""
    root = jnp.sqrt(kept)
    return (gram - law.group_length**2 * law.noise) * root[:, None] * root[None, :]


def longest_beyond(gram: Array, law: Limits, kept: Array) -> Array:
    """A bound on v^T (G - limit^2 K) v over unit vectors v on k workers: Gershgorin's for every group.

    In a group worker i has k - 1 others, and they are not worse than those with which it has the most.
    """
    beyond = _beyond(gram, law, kept)
    others = jnp.abs(jnp.where(np.eye(gram.shape[0], dtype=bool), 0, beyond))
    worst = lax.top_k(others, law.group_size - 1)[0]
    return jnp.max(jnp.diagonal(beyond) + jnp.sum(worst, axis=1))


def worst_group(gram: Array, law: Limits, kept: Array) -> tuple[Array, Array, Array]:
    """A unit vector v [n] on k workers whose combination of messages exceeds what noise allows by the most.

    The group around every worker is grown by truncated power iteration on what G has beyond its expectation;
    then the best v on each is that of an eigenproblem of k workers. There may be worse groups: what is found
    is a lower bound, so a group that breaks the law by it breaks it.

    Args:
      gram: G [n, n].
      law: with the group's size k.
      kept: [n] in [0, 1]; message i counts sqrt(kept_i) times.

    Returns:
      v, v^T G v and v^T K v.
    """
    n, k = gram.shape[0], law.group_size
    root = jnp.sqrt(kept)
    counted = root[:, None] * root[None, :]
    excess = (gram - law.products) * counted
    # Makes the most positive direction the dominant one: by about as much as pure noise goes below 0.
    shift = math.sqrt(k) * float(np.max(law.products_reach)) / 4
    excess = excess + shift * jnp.eye(n, dtype=gram.dtype)
    everyone = np.arange(n)

    def members(vectors: Array) -> tuple[Array, Array]:
        """From [n, n], a vector in every row: the next ones, and the k workers of each, itself among them."""
        ahead = dot(vectors, excess)
        own = jnp.abs(ahead).at[everyone, everyone].set(jnp.inf)
        return ahead, lax.top_k(own, k)[1]  # exactly k, also of equals

    def step(_: int, vectors: Array) -> Array:
        ahead, group = members(vectors)
        chosen = jnp.zeros((n, n), bool).at[everyone[:, None], group].set(True)
        ahead = jnp.where(chosen, ahead, 0)
        norms = jnp.sqrt(jnp.sum(ahead**2, axis=1, keepdims=True))
        return ahead / jnp.where(norms > 0, norms, 1)

    vectors = lax.fori_loop(0, _GROUP_STEPS - 1, step, jnp.eye(n, dtype=gram.dtype))
    group = members(vectors)[1]
    blocks = group[:, :, None], group[:, None, :]
    values, on_group = jnp.linalg.eigh(_beyond(gram, law, kept)[blocks])
    best = argmax(values[:, -1])
    vector = jnp.zeros(n, gram.dtype).at[group[best]].set(on_group[best, :, -1])
    scaled = root * vector
    return vector, dot(scaled, dot(gram, scaled)), dot(scaled, dot(jnp.asarray(law.noise), scaled))
