"""From the noise of a plan to the (epsilon, delta) that it guarantees."""

import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy.special import log_ndtr, logsumexp

from cafcor_jax.errors import UserError
from cafcor_jax.privacy import mechanism
from cafcor_jax.privacy.plan import TRUNCATED, PrivacyPlan, check_accountant

OPACUS_ORDERS: tuple[float, ...] = (*(1 + x / 10 for x in range(1, 100)), *range(12, 64))

# Opacus' orders, and more beyond both of their edges for very large and very small epsilons. A fixed set:
# epsilon is then a minimum of increasing functions, so continuous and monotone, and equals Opacus' wherever
# the best order is inside their range.
ORDERS: tuple[float, ...] = (
    *(1 + np.geomspace(1e-3, 0.1, 49)[:-1]).tolist(),
    *OPACUS_ORDERS,
    *np.geomspace(64, 1e6, 102).tolist(),
)

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)


def gaussian_log_delta(epsilon: np.ndarray | float, mu: np.ndarray | float) -> np.ndarray:
    """Log of delta(epsilon) of the Gaussian mechanism with sensitivity/sigma = mu, exactly.

        delta(epsilon; mu) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)

    Args:
      epsilon: At least 0; broadcasts with `mu`.
      mu: Positive.

    Returns:
      log delta, in logs throughout so that delta may be far below the smallest float.

    Example:
      >>> round(float(np.exp(gaussian_log_delta(1.0, 1.0))), 6)
      0.126937

    References:
      Balle and Wang, Improving the Gaussian Mechanism for Differential Privacy, ICML 2018.
    """
    epsilon, mu = np.asarray(epsilon, np.float64), np.asarray(mu, np.float64)
    log_p = log_ndtr(mu / 2 - epsilon / mu)
    log_q = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    with np.errstate(divide="ignore"):  # the two terms may round to the same value: then delta is 0
        return log_p + np.log(-np.expm1(np.minimum(log_q - log_p, 0.0)))


def gaussian_epsilon(mu: np.ndarray | float, delta: float) -> np.ndarray:
    """The smallest epsilon of a Gaussian mechanism: `gaussian_log_delta` solved for epsilon.

    Args:
      mu: sensitivity/sigma, at least 0; any shape.
      delta: In (0, 1).

    Returns:
      epsilon, of the shape of `mu`; 0 where delta alone is enough.

    Example:
      >>> round(float(gaussian_epsilon(np.sqrt(2 * 9), delta=1e-4)), 2)
      24.06
    """
    mu = np.asarray(mu, np.float64)
    safe = np.where(mu > 0, mu, 1.0)
    # delta <= Phi(mu/2 - epsilon/mu) <= exp(-(epsilon/mu - mu/2)^2 / 2) bounds epsilon from above.
    low, high = np.zeros_like(safe), safe**2 / 2 + safe * math.sqrt(2 * math.log(1 / delta))
    # Bisection: each step gains a bit, for all of `mu` at once, and its upper end never claims too little.
    for _ in range(64):
        middle = (low + high) / 2
        enough = gaussian_log_delta(middle, safe) <= math.log(delta)
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    free = (mu == 0) | (gaussian_log_delta(0.0, safe) <= math.log(delta))
    return np.where(free, 0.0, high)


def rdp_epsilon(orders: Sequence[float] | np.ndarray, rdp: np.ndarray, delta: float) -> np.ndarray:
    """Converts Renyi DP to epsilon, as Opacus and dp-accounting do.

        epsilon = min_alpha  rdp(alpha) + log(1 - 1/alpha) - log(delta alpha) / (alpha - 1)

    Args:
      orders: alpha > 1, [orders].
      rdp: Renyi divergence at each order, [..., orders].
      delta: In (0, 1).

    Returns:
      epsilon, [...], at least 0.

    Example:
      >>> orders = np.array(OPACUS_ORDERS)
      >>> round(float(rdp_epsilon(orders, 9 * orders, delta=1e-4)), 2)
      25.82

    References:
      Canonne, Kamath and Steinke, The Discrete Gaussian for Differential Privacy, 2020, Proposition 12.
    """
    alpha = np.asarray(orders, np.float64)
    cost = np.log1p(-1 / alpha) - (math.log(delta) + np.log(alpha)) / (alpha - 1)
    return np.maximum(np.min(rdp + cost, axis=-1), 0.0)


def paper_epsilon(rho: np.ndarray | float, delta: float) -> np.ndarray:
    """The closed form in the proof of the paper's theorem: rho + 2 sqrt(rho log(1/delta)).

    It holds for every epsilon; only the theorem's simpler condition needs epsilon < log(1/delta).

    Args:
      rho: T eps_step, any shape.
      delta: In (0, 1).

    Returns:
      epsilon, of the shape of `rho`.

    Example:
      >>> round(float(paper_epsilon(9.0, delta=1e-4)), 2)
      27.21
    """
    rho = np.asarray(rho, np.float64)
    return rho + 2 * np.sqrt(rho * math.log(1 / delta))


def _subsampled_order(alpha: float, mu: float, rate: float) -> float:
    """`subsampled_gaussian_rdp` at one order."""
    gaussian = alpha * mu**2 / 2
    # Such orders are never the best ones (or epsilon is above ten thousand): spare the work, the bound holds.
    if mu > 200 or (alpha > 12 and gaussian > 100):
        return gaussian
    # The integrand varies on the scale mu, and on the scale 1 where e^s is not far above 1/rate. Past `end`
    # it is below e^-72 of its peak.
    end = (alpha + 0.5) * mu**2 + 12 * mu
    head = min(end, math.log(1 / rate) + 40)
    edges = np.linspace(0, head, math.ceil(head / min(mu, 1)) + 1)
    if head < end:
        tail = np.linspace(head, end, math.ceil((end - head) / max(min(mu, 1), mu / 2)) + 1)
        edges = np.concatenate([edges, tail[1:]])
    half = np.diff(edges)[:, None] / 2
    s = (edges[:-1, None] + half * (1 + _NODES)).ravel()
    log_weights = np.log(half * _WEIGHTS).ravel()
    # log(1 + rate (e^s - 1)); where e^s would overflow it grows like s.
    log_gamma = np.log1p(rate * np.expm1(np.minimum(s, 500))) + np.maximum(s - 500, 0)
    powers = np.logaddexp((alpha - 2) * log_gamma, -(alpha + 1) * log_gamma)
    log_integral = logsumexp(log_weights + 2 * math.log(rate) + s + gaussian_log_delta(s, mu) + powers)
    log_moment = np.logaddexp(0.0, math.log(alpha * (alpha - 1)) + log_integral)
    return min(float(log_moment) / (alpha - 1), gaussian)


@functools.lru_cache(maxsize=256)
def _subsampled_curve(orders: tuple[float, ...], mu: float, rate: float) -> np.ndarray:
    curve = np.array([_subsampled_order(alpha, mu, rate) for alpha in orders])
    curve.setflags(write=False)
    return curve


def subsampled_gaussian_rdp(orders: Sequence[float], mu: float, rate: float) -> np.ndarray:
    """Renyi DP of a Gaussian mechanism on a batch drawn without replacement; neighbours replace one example.

    The batch mechanism has privacy profile delta(epsilon; mu). Sampling b of m, rate = b/m, gives
    delta'(log(1 + rate (e^s - 1))) <= rate delta(s; mu), which is tight, and every Renyi divergence is an
    integral over the profile. With gamma(s) = 1 + rate (e^s - 1):

        exp((alpha-1) rdp) = 1 + alpha (alpha-1) rate^2
                               int_0^inf (gamma^(alpha-2) + gamma^(-alpha-1)) delta(s; mu) e^s ds

    All terms are positive, so nothing cancels. The value is never above that of dp-accounting's
    `SampledWithoutReplacementDpEvent` (Wang, Balle and Kasiviswanathan, Theorem 27), which is loose at large
    orders, constant below order 2, and loses its digits where the noise and the rate are both large.

    Args:
      orders: alpha > 1.
      mu: Replace-one sensitivity of the batch mechanism over its noise.
      rate: b/m, in (0, 1].

    Returns:
      Renyi divergence at each order, [orders].

    Example:
      >>> [round(x, 4) for x in subsampled_gaussian_rdp([2, 8], mu=1.0, rate=1.0).tolist()]
      [1.0, 4.0]
      >>> round(subsampled_gaussian_rdp([2], mu=1.0, rate=0.01).item(), 6)
      0.000281

    References:
      Balle, Barthe and Gaboardi, Privacy Amplification by Subsampling, NeurIPS 2018 (the profile).
      Sason and Verdu, f-Divergence Inequalities, 2016 (the integral).
    """
    _check_subsampled(mu, rate)
    if rate == 1:
        return np.asarray(orders, np.float64) * mu**2 / 2
    return _subsampled_curve(tuple(float(alpha) for alpha in orders), float(mu), float(rate))


@functools.lru_cache(maxsize=256)
def _poisson_curve(orders: tuple[float, ...], mu: float, rate: float) -> np.ndarray:
    curve = np.array([_poisson_order(alpha, mu, rate) for alpha in orders])
    curve.setflags(write=False)
    return curve


def _poisson_order(alpha: float, mu: float, rate: float) -> float:
    """`poisson_gaussian_rdp` at one order."""
    gaussian = alpha * mu**2 / 2
    # As in `_subsampled_order`: such orders are never the best ones.
    if mu > 200 or (alpha > 12 and gaussian > 100):
        return gaussian
    # The integrand is at its largest between 0 and alpha mu, and varies on the scales 1 and 1 / mu.
    start, end = -13.0, alpha * mu + 13.0
    edges = np.linspace(start, end, math.ceil((end - start) / (0.5 * min(1.0, 1 / mu))) + 1)
    half = np.diff(edges)[:, None] / 2
    x = (edges[:-1, None] + half * (1 + _NODES)).ravel()
    log_weights = np.log(half * _WEIGHTS).ravel() - x**2 / 2 - math.log(2 * math.pi) / 2
    log_ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + mu * x - mu**2 / 2)
    return min(max(float(logsumexp(log_weights + alpha * log_ratio)) / (alpha - 1), 0.0), gaussian)


def poisson_gaussian_rdp(orders: Sequence[float], mu: float, rate: float) -> np.ndarray:
    """Renyi DP of a Gaussian mechanism on a Poisson batch; neighbours add or remove one example.

    Every example is in the batch with chance `rate`, by itself. With s(x) = mu x - mu^2/2,

        exp((alpha-1) rdp) = E_{x ~ N(0,1)} (1 - rate + rate e^s(x))^alpha,

    the larger of the two directions. Opacus and dp-accounting sum a series for the same number.

    Args:
      orders: alpha > 1.
      mu: Add-or-remove sensitivity of the batch mechanism over its noise: 1 / (noise multiplier).
      rate: In (0, 1].

    Returns:
      Renyi divergence at each order, [orders].

    Example:
      >>> orders = np.array(OPACUS_ORDERS)
      >>> round(float(rdp_epsilon(orders, 400 * poisson_gaussian_rdp(orders, 2.0, 100 / 6000), 1e-4)), 3)
      13.711

    References:
      Mironov, Talwar and Zhang, Renyi Differential Privacy of the Sampled Gaussian Mechanism, 2019.
    """
    _check_subsampled(mu, rate)
    if rate == 1:
        return np.asarray(orders, np.float64) * mu**2 / 2
    return _poisson_curve(tuple(float(alpha) for alpha in orders), float(mu), float(rate))


def _check_subsampled(mu: float, rate: float) -> None:
    if not 0 < rate <= 1:
        raise UserError(f"rate must be in (0, 1], got {rate!r}.")
    if not mu > 0:
        raise UserError(f"mu must be positive, got {mu!r}.")


def _spent(plan: PrivacyPlan, accountant: str | None, rounds: np.ndarray) -> np.ndarray:
    """Epsilon after each number of rounds (all at least 1)."""
    accountant = plan.accountant if accountant is None else accountant
    check_accountant(accountant, plan.level)
    if plan.threat_model == "none":
        return np.full(rounds.shape, math.inf)
    step = plan.step_divergence
    if accountant == "exact":
        # T adaptive Gaussian mechanisms of parameter mu are one of parameter sqrt(T) mu.
        return gaussian_epsilon(np.sqrt(2 * step * rounds), plan.delta)
    if accountant == "paper":
        return paper_epsilon(step * rounds, plan.delta)
    amplified = poisson_gaussian_rdp if plan.sampling == "poisson" else subsampled_gaussian_rdp
    curve = amplified(ORDERS, math.sqrt(2 * step), plan.sampling_rate)
    delta = plan.delta * (1 - TRUNCATED) if plan.sampling == "poisson" else plan.delta
    # In pieces, so that a schedule of a million rounds needs little memory.
    pieces = np.array_split(rounds, max(1, len(rounds) // 4096))
    return np.concatenate([rdp_epsilon(ORDERS, piece[:, None] * curve, delta) for piece in pieces])


def epsilon(plan: PrivacyPlan, accountant: str | None = None, rounds: int | None = None) -> float:
    """The epsilon that a plan spends, at its delta.

    Args:
      plan: The plan.
      accountant: "exact", "rdp" or "paper"; the plan's own by default. At the example level "rdp" only.
      rounds: After how many rounds; all of the plan's by default.

    Returns:
      epsilon; 0 before the first round, infinite under the threat model "none".

    Example:
      >>> plan = PrivacyPlan(threat_model="secldp", num_workers=100, num_byzantine=10, rounds=30,
      ...                    clip_norm=2.25, delta=1e-4, sigma_ind=0.0, sigma_cor=0.6)
      >>> [round(epsilon(plan, accountant), 2) for accountant in ("paper", "rdp", "exact")]
      [27.77, 26.39, 24.59]
      >>> round(epsilon(plan, rounds=10), 2)
      12.72
    """
    rounds = plan.rounds if rounds is None else rounds
    mechanism.check_int("rounds", rounds, 0)
    if rounds == 0:
        return 0.0
    return float(_spent(plan, accountant, np.array([rounds]))[0])


def epsilon_schedule(plan: PrivacyPlan, accountant: str | None = None) -> np.ndarray:
    """Epsilon spent after 1, 2, ..., T rounds.

    Args:
      plan: The plan.
      accountant: As for `epsilon`.

    Returns:
      Array [rounds], non-decreasing; entry t-1 is `epsilon(plan, accountant, rounds=t)`.

    Example:
      >>> plan = PrivacyPlan(threat_model="ldp", num_workers=10, num_byzantine=2, rounds=3, clip_norm=1.0,
      ...                    delta=1e-5, sigma_ind=4.0, sigma_cor=0.0, accountant="exact")
      >>> epsilon_schedule(plan).round(3).tolist()
      [1.993, 2.943, 3.709]
    """
    return _spent(plan, accountant, np.arange(1, plan.rounds + 1))
