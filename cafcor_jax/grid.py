"""Messages on a grid: gradient and noise are whole multiples of one step, 2^-bits.

Noise drawn in floating point breaks differential privacy: the low-order bits of g + sigma z tell which g are
possible at all (docs/floating_point.md). Here everything that enters a message is an integer, the multiple
of the step:

* The gradient is rounded toward zero. No coordinate grows, so its norm stays below C.
* Every draw has the discrete Gaussian law (`discrete_gaussian.py`). It has the Renyi divergences of the
  continuous one under whole shifts, at most alpha s^2 / (2 sigma^2).
* Sums are sums of int32: exact, in any order, and the noise of all pairs cancels bitwise.

All draws return int32 [rows, size] in units of the step; `to_float` gives the message as float32.

References:
  Mironov, On Significance of the Least Significant Bits for Differential Privacy, CCS 2012.
  Canonne, Kamath and Steinke, The Discrete Gaussian for Differential Privacy, NeurIPS 2020.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from cafcor_jax.discrete_gaussian import NARROWEST, WIDEST, Sampler, discrete_gaussian, draw, reach, theta
from cafcor_jax.errors import UserError
from cafcor_jax.noise import by_blocks, fold_in_keys, pair_totals, row_totals
from cafcor_jax.privacy import PrivacyPlan, SecretGraph
from cafcor_jax.privacy import epsilon as spent
from cafcor_jax.privacy.mechanism import check_int
from cafcor_jax.types import Array

# Each end of the noise's width in steps, and how its bits are rounded.
_ENDS = ((math.ceil, NARROWEST), (math.floor, WIDEST))
# What `propose_bits` aims at: the gradient's rounding is then far below the noise, the tables are small.
PREFERRED_WIDTH = 2.0**17
# The largest int32.
LARGEST = 2**31 - 1

# What T rounds may add to the Renyi divergence because draws are summed on the grid; anything visible is
# refused.
_LARGEST_COST = 1e-9
# What inexact draws may add to delta, as a part of it: below what is said of delta anywhere.
_LARGEST_EXTRA = 1e-3


# The grid.


def to_grid_toward_zero(gradient: Array, bits: int) -> Array:
    """Rounds toward zero to multiples of 2^-bits.

    No coordinate grows in absolute value, so the norm does not either, and the sensitivity 2C of a clipped
    gradient holds on the grid as it is.

    Args:
      gradient: floats, each at most C in absolute value (`check_range` says which C and bits fit). What is
        not a number becomes 0, what is out of range the nearest end of it.
      bits: the step is 2^-bits.

    Returns:
      int32, the multiples.

    Example:
      >>> to_grid_toward_zero(jnp.array([0.99, -0.99, 0.25]), bits=2).tolist()
      [3, -3, 1]
    """
    _check_bits(bits)
    # A power of two scales exactly; a value that underflows would have become 0 anyway.
    scaled = jnp.trunc(gradient.astype(jnp.float32) * np.float32(2.0**bits))
    limit = np.nextafter(np.float32(2**31), np.float32(0))
    return jnp.where(jnp.isnan(scaled), 0, jnp.clip(scaled, -limit, limit)).astype(jnp.int32)


def to_float(total: Array, bits: int) -> Array:
    """Grid units as float32: total * 2^-bits.

    Done to a finished message, the rounding is post-processing and costs no privacy.

    Args:
      total: int32.
      bits: the step is 2^-bits.

    Returns:
      float32; exact up to 2^24 steps.

    Example:
      >>> to_float(jnp.array([3, -3]), bits=2).tolist()
      [0.75, -0.75]
    """
    _check_bits(bits)
    return total.astype(jnp.float32) * np.float32(2.0**-bits)


# Noise.


def independent(
    keys: Array, round_index: Array | int, size: int, sigma: float, bits: int, *, first: Array | int = 0
) -> Array:
    """Independent noise: row i is discrete Gaussian on the grid, drawn from worker i's own key.

    Args:
      keys: [rows] typed keys, one a worker.
      round_index: t.
      size: d.
      sigma: standard deviation, a number (the tables are made from it).
      bits: the step is 2^-bits.
      first: the first coordinate that is drawn, of `size`: for a part of longer rows.

    Returns:
      int32 [rows, d], in steps.

    Example:
      >>> independent(jax.random.split(jax.random.key(0), 2), 0, 3, sigma=1.0, bits=2).shape
      (2, 3)
    """
    sampler = _sampler(sigma, bits)
    if sampler is None:
        return jnp.zeros((keys.shape[0], size), jnp.int32)
    round_keys = fold_in_keys(keys, round_index)

    def block(index: Array) -> Array:
        return jnp.concatenate(draw(sampler, fold_in_keys(round_keys, index)), axis=-1)

    return by_blocks(block, keys.shape[0], size, jnp.int32, first=first)


def pairwise(
    pair_keys: Array,
    round_index: Array | int,
    size: int,
    sigma: float,
    bits: int,
    graph: SecretGraph | None = None,
    *,
    first: Array | int = 0,
) -> Array:
    """Pairwise-cancelling noise of all workers: row i is sum_{j != i} v_ij with v_ij = -v_ji on the grid.

    The rows add up to zero bitwise, in any order of summation.

    Args:
      pair_keys: [n, n] typed keys, symmetric (`secrets.key_matrix`).
      round_index: t.
      size: d.
      sigma: sigma_cor, the standard deviation of one pair's noise, a number.
      bits: the step is 2^-bits.
      graph: who shares a secret with whom; None for everyone with everyone.
      first: the first coordinate that is drawn, as for `independent`.

    Returns:
      int32 [n, d], in steps; the memory is that of the result.

    Example:
      >>> from cafcor_jax import secrets
      >>> rows = pairwise(secrets.key_matrix(jax.random.key(0), 3), 0, 5, sigma=1.0, bits=10)
      >>> rows.sum(axis=0).tolist()
      [0, 0, 0, 0, 0]
    """
    n = pair_keys.shape[0]
    sampler = _sampler(sigma, bits)
    if sampler is None or n == 1 or (graph is not None and not graph.edges):
        return jnp.zeros((n, size), jnp.int32)
    totals = pair_totals(pair_keys, round_index, lambda keys: draw(sampler, keys), graph)
    return by_blocks(totals, n, size, jnp.int32, first=first)


def pairwise_row(
    own_pair_keys: Array,
    worker: Array | int,
    round_index: Array | int,
    size: int,
    sigma: float,
    bits: int,
    graph: SecretGraph | None = None,
) -> Array:
    """One worker's row of `pairwise`, bitwise the same, from its own keys alone.

    Args:
      own_pair_keys: [n] typed keys: the worker's row of the key matrix (its own entry is not used).
      worker: i.
      round_index: t.
      size: d.
      sigma: sigma_cor, a number.
      bits: the step is 2^-bits.
      graph: who shares a secret with whom; None for everyone with everyone.

    Returns:
      int32 [d], in steps.

    Example:
      >>> from cafcor_jax import secrets
      >>> keys = secrets.key_matrix(jax.random.key(0), 3)
      >>> row = pairwise_row(keys[1], 1, 0, 5, sigma=1.0, bits=10)
      >>> bool((row == pairwise(keys, 0, 5, sigma=1.0, bits=10)[1]).all())
      True
    """
    sampler = _sampler(sigma, bits)
    if sampler is None:
        return jnp.zeros((size,), jnp.int32)
    totals = row_totals(own_pair_keys, worker, round_index, lambda keys: draw(sampler, keys), graph)
    return by_blocks(totals, 1, size, jnp.int32)[0]


def _sampler(sigma: float, bits: int) -> Sampler | None:
    """The tables for noise of standard deviation sigma; None for no noise."""
    if isinstance(sigma, jax.core.Tracer):
        raise ValueError("sigma is traced; on the grid it must be a number: the tables are made from it.")
    width = _width("sigma", float(sigma), bits)
    return discrete_gaussian(width) if width else None


def draw_reach(sigma: float, bits: int) -> int:
    """The largest absolute value of one draw, in steps.

    Args:
      sigma: standard deviation.
      bits: the step is 2^-bits.

    Returns:
      About 13.3 sigma 2^bits; 0 for sigma = 0.

    Example:
      >>> draw_reach(1.0, bits=4)
      214
    """
    return _reach("sigma", sigma, bits)


def _reach(name: str, sigma: float, bits: int) -> int:
    width = _width(name, sigma, bits)
    if not width:
        return 0
    return reach(width)


def largest_sum(
    *,
    bits: int,
    sigma_ind: float,
    sigma_cor: float,
    num_workers: int,
    clip_norm: float,
    num_summed: int = 1,
) -> int:
    """The largest absolute value, in steps, of a coordinate of the sum of k messages out of n.

        k (C 2^bits + reach_ind) + k (n - k) reach_cor

    since the noise of pairs within the sum cancels. Sums of int32 are exact modulo 2^32, so a partial sum may
    pass the range on the way.

    Args:
      bits: the step is 2^-bits.
      sigma_ind: standard deviation of the independent noise.
      sigma_cor: standard deviation of one pair's noise.
      num_workers: n.
      clip_norm: C.
      num_summed: k; 1 for a message.

    Returns:
      The bound, a Python integer of any size.

    Example:
      >>> largest_sum(bits=10, sigma_ind=0.0, sigma_cor=1.0, num_workers=10, clip_norm=1.0, num_summed=10)
      10240
    """
    check_int("num_workers", num_workers, 1)
    check_int("num_summed", num_summed, 1)
    if num_summed > num_workers:
        raise UserError(f"num_summed must be at most num_workers={num_workers}, got {num_summed}.")
    if not (math.isfinite(clip_norm) and clip_norm > 0):
        raise UserError(f"clip_norm must be finite and positive, got {clip_norm!r}.")
    gradient = math.floor(clip_norm * 2.0 ** _check_bits(bits))
    own = num_summed * (gradient + _reach("sigma_ind", sigma_ind, bits))
    return own + num_summed * (num_workers - num_summed) * _reach("sigma_cor", sigma_cor, bits)


def check_range(
    *,
    bits: int,
    sigma_ind: float,
    sigma_cor: float,
    num_workers: int,
    clip_norm: float,
    num_summed: int = 1,
) -> None:
    """Raises `UserError` unless a message (or a sum of `num_summed` of them) always fits into int32.

    Args:
      bits: the step is 2^-bits.
      sigma_ind: standard deviation of the independent noise.
      sigma_cor: standard deviation of one pair's noise.
      num_workers: n.
      clip_norm: C.
      num_summed: k: 1 for messages.

    Example:
      >>> check_range(bits=16, sigma_ind=0.0, sigma_cor=0.6, num_workers=100, clip_norm=2.25)
      >>> check_range(bits=19, sigma_ind=0.0, sigma_cor=0.9, num_workers=1000, clip_norm=2.25)
      Traceback (most recent call last):
      ...
      cafcor_jax.errors.UserError: bits must be at most 17, got 19: with sigma_ind=0, sigma_cor=0.9,
      num_workers=1000 and clip_norm=2.25 a message can be 6.3e+09 steps and would overflow int32.
    """

    def bound(candidate: int) -> int:
        return largest_sum(
            bits=candidate,
            sigma_ind=sigma_ind,
            sigma_cor=sigma_cor,
            num_workers=num_workers,
            clip_norm=clip_norm,
            num_summed=num_summed,
        )

    largest = bound(bits)
    if largest <= LARGEST:
        return
    what = "a message" if num_summed == 1 else f"a sum of {num_summed} messages"
    setting = (
        f"with sigma_ind={sigma_ind:g}, sigma_cor={sigma_cor:g}, num_workers={num_workers} and "
        f"clip_norm={clip_norm:g} {what} can be {largest:.2g} steps and would overflow int32."
    )
    for fewer in range(bits - 1, _fewest_bits(sigma_ind, sigma_cor) - 1, -1):
        if bound(fewer) <= LARGEST:
            raise UserError(f"bits must be at most {fewer}, got {bits}: {setting}")
    raise UserError(f"no number of bits fits, got {bits}: {setting}")


def propose_bits(*, sigma_ind: float, sigma_cor: float, num_workers: int, clip_norm: float) -> int:
    """A grid for a plan's noise: as fine as is cheap, and without overflow.

    The largest bits for which the wider noise is at most 2^17 steps wide and messages and the sum of all n of
    them fit into int32.

    Args:
      sigma_ind: standard deviation of the independent noise.
      sigma_cor: standard deviation of one pair's noise.
      num_workers: n.
      clip_norm: C.

    Returns:
      bits, for a step of 2^-bits.

    Example:
      >>> propose_bits(sigma_ind=0.0, sigma_cor=0.6, num_workers=100, clip_norm=2.25)
      17
    """
    finest = math.floor(math.log2(PREFERRED_WIDTH / _widest(sigma_ind, sigma_cor)))
    fewest = _fewest_bits(sigma_ind, sigma_cor)
    if fewest > finest:
        raise UserError(
            f"sigma_ind={sigma_ind:g} and sigma_cor={sigma_cor:g} are too far apart for one grid: the "
            f"narrower must be at least 1 step wide where the wider is {PREFERRED_WIDTH:g}."
        )
    for bits in range(finest, fewest - 1, -1):
        sums = [
            largest_sum(
                bits=bits,
                sigma_ind=sigma_ind,
                sigma_cor=sigma_cor,
                num_workers=num_workers,
                clip_norm=clip_norm,
                num_summed=count,
            )
            for count in (1, num_workers)
        ]
        if max(sums) <= LARGEST:
            return bits
    raise UserError(
        f"no grid fits into int32 with sigma_ind={sigma_ind:g}, sigma_cor={sigma_cor:g}, "
        f"num_workers={num_workers} and clip_norm={clip_norm:g}: there are too many workers, or clip_norm is "
        "too large against the noise."
    )


# What the grid costs in privacy.


def smoothing_error(plan: PrivacyPlan, bits: int) -> float:
    """How far, as a factor 1 +- e, the honest messages are from one discrete Gaussian vector.

    In every coordinate the server sees y = g + A x, x the integer noises and A their signed incidence matrix.
    With the covariance Sigma of A x, P(A x = y) is proportional to exp(-y^T Sigma^-1 y / 2) (1 + e_y) with

        |e_y| <= e = (1 + theta)^m - 1,   theta = 2 sum_{k >= 1} exp(-2 pi^2 k^2 / lambda)

    where m is the number of noises beyond one for every message and lambda bounds the eigenvalues of a
    quadratic form: 1/sigma_cor^2 + (n-q)/sigma_ind^2 (independent noise), (n-q)/sigma_cor^2 (none),
    n/sigma_ind^2 (CDP, where only the sum is seen); sigmas in steps. Without correlated noise e = 0. The
    proof is in docs/floating_point.md.

    Args:
      plan: who sees what.
      bits: the step is 2^-bits.

    Returns:
      e, infinite if it is beyond floats.

    Example:
      >>> from cafcor_jax import privacy
      >>> plan = privacy.calibrate(threat_model="byzldp", epsilon=26.4, delta=1e-4, num_workers=100,
      ...                          num_byzantine=10, rounds=30, clip_norm=2.25)
      >>> smoothing_error(plan, bits=8) < 1e-100
      True
    """
    ind, cor = _width("sigma_ind", plan.sigma_ind, bits), _width("sigma_cor", plan.sigma_cor, bits)
    n, honest = plan.num_workers, plan.num_workers - plan.num_byzantine
    unknown = n - plan.num_colluding
    silent = plan.num_byzantine - plan.num_colluding
    pairs = honest * (honest - 1) // 2
    if plan.threat_model == "cdp":
        extra, eigenvalue = n - 1, n / ind**2
    elif not cor:
        return 0.0
    elif ind:
        extra, eigenvalue = pairs + honest * silent, 1 / cor**2 + unknown / ind**2
    else:
        extra, eigenvalue = pairs + honest * (silent - 1), unknown / cor**2
    exponent = extra * math.log1p(theta(1 / eigenvalue))
    return math.expm1(exponent) if exponent < 700 else math.inf


def divergence_cost(plan: PrivacyPlan, bits: int, size: int) -> float:
    """What the grid adds to the divergence of all T rounds: at most alpha / (alpha - 1) times this.

        T d log((1 + e) / (1 - e)),   e = smoothing_error(plan, bits)

    Args:
      plan: who sees what, for how many rounds.
      bits: the step is 2^-bits.
      size: d.

    Returns:
      The cost; infinite for a grid so coarse that the bound says nothing. 0 for a usual grid.

    Example:
      >>> from cafcor_jax import privacy
      >>> plan = privacy.calibrate(threat_model="secldp", epsilon=26.4, delta=1e-4, num_workers=100,
      ...                          num_byzantine=10, rounds=30, clip_norm=2.25)
      >>> divergence_cost(plan, bits=17, size=431080)
      0.0
    """
    check_int("size", size, 1)
    error = smoothing_error(plan, bits)
    return math.inf if error >= 1 else plan.rounds * size * (math.log1p(error) - math.log1p(-error))


def integer_shift_cost(plan: PrivacyPlan, bits: int) -> float:
    """Another bound, which needs no fine grid: D_alpha <= alpha / 2 (s^2 (Sigma^-1)_ii + this) a coordinate.

        1/4 sum_j 1 / sigma_j^2

    over the noises in the honest messages, sigma_j in steps. It comes from moving the noises instead of the
    gradient, by whole numbers, and holds for every step; with many coordinates it is loose.

    Args:
      plan: who sees what.
      bits: the step is 2^-bits.

    Returns:
      The cost in a coordinate where the gradient changes.

    Example:
      >>> from cafcor_jax import privacy
      >>> plan = privacy.PrivacyPlan(threat_model="secldp", num_workers=3, num_byzantine=1, rounds=1,
      ...                            clip_norm=1.0, delta=1e-5, sigma_ind=0.0, sigma_cor=1.0)
      >>> integer_shift_cost(plan, bits=0)
      0.75
    """
    ind, cor = _width("sigma_ind", plan.sigma_ind, bits), _width("sigma_cor", plan.sigma_cor, bits)
    own, shared = _noises_in_view(plan)
    return ((own / ind**2 if ind else 0.0) + (shared / cor**2 if cor else 0.0)) / 4


def extra_delta(plan: PrivacyPlan, bits: int, size: int, epsilon: float) -> float:
    """What must be added to delta because draws are not exactly discrete Gaussians.

        (1 + e^epsilon) T d N tau

    with N noises a coordinate in the honest messages, each within tau of its law in total variation
    (`discrete_gaussian`), given ideal random bits.

    Args:
      plan: who sees what, for how many rounds.
      bits: the step is 2^-bits.
      size: d.
      epsilon: of the promise.

    Returns:
      The amount, at most 1.

    Example:
      >>> from cafcor_jax import privacy
      >>> plan = privacy.calibrate(threat_model="secldp", epsilon=26.4, delta=1e-4, num_workers=100,
      ...                          num_byzantine=10, rounds=30, clip_norm=2.25)
      >>> extra_delta(plan, bits=17, size=431080, epsilon=26.4) < 1e-12
      True
    """
    check_int("size", size, 1)
    if not epsilon >= 0:
        raise UserError(f"epsilon must be at least 0, got {epsilon!r}.")
    error = 0.0
    for sigma, count in zip((plan.sigma_ind, plan.sigma_cor), _noises_in_view(plan), strict=True):
        sampler = _sampler(sigma, bits)
        error += count * sampler.error if sampler else 0.0
    if error == 0:
        return 0.0
    log_delta = math.log(plan.rounds * size * error) + epsilon + math.log1p(math.exp(-epsilon))
    return math.exp(min(log_delta, 0.0))


def check_plan(plan: PrivacyPlan, bits: int, size: int) -> None:
    """Raises `UserError` unless the plan's epsilon holds on this grid.

    * Only the user level: the mean of clipped gradients, rounded, can move by more than 2C/b, and the
      accountant of sampled batches uses the profile of the continuous Gaussian.
    * Not the accountant "exact", for the same reason: the discrete Gaussian has the same Renyi divergences,
      but not the same profile. "rdp" and "paper" use divergences only.
    * Without independent noise, every pair shares a secret. (With it, fewer pairs have fewer noises and
      smaller eigenvalues of the Laplacian, so that what holds for all pairs is a bound.)
    * The noise is wide enough on the grid, and messages fit into int32.
    * What inexact draws add to delta is far below it.

    Args:
      plan: the plan.
      bits: the step is 2^-bits.
      size: d.

    Example:
      >>> from cafcor_jax import privacy
      >>> check_plan(privacy.calibrate(threat_model="secldp", epsilon=26.4, delta=1e-4, num_workers=100,
      ...                              num_byzantine=10, rounds=30, clip_norm=2.25), bits=17, size=431080)
    """
    if plan.threat_model == "none":
        raise UserError("threat_model is 'none': without noise there is nothing to put on a grid.")
    if plan.level != "user":
        raise UserError(
            f"level must be 'user' on the grid, got {plan.level!r}: rounding the mean of clipped gradients "
            "raises its sensitivity above 2C/b."
        )
    if plan.accountant == "exact":
        raise UserError(
            "accountant must be 'rdp' or 'paper' on the grid, got 'exact': its formula is that of the "
            "continuous Gaussian."
        )
    if plan.graph is not None and not plan.graph.is_complete and not plan.sigma_ind:
        raise UserError(
            f"graph must be None or complete on the grid without independent noise, got a "
            f"{plan.graph.describe()}: what the grid costs there is not known."
        )
    check_range(
        bits=bits,
        sigma_ind=plan.sigma_ind,
        sigma_cor=plan.sigma_cor,
        num_workers=plan.num_workers,
        clip_norm=plan.clip_norm,
    )
    more = extra_delta(plan, bits, size, spent(plan))
    if more > _LARGEST_EXTRA * plan.delta:
        raise UserError(
            f"epsilon={spent(plan):g} is too large for the grid: that draws are not exactly discrete "
            f"Gaussians would add {more:.2g} to delta={plan.delta:g}, more than {_LARGEST_EXTRA:g} of it."
        )
    cost = divergence_cost(plan, bits, size)
    if cost > _LARGEST_COST:
        raise UserError(
            f"bits={bits} is too coarse: with sigma_ind={plan.sigma_ind:g}, sigma_cor={plan.sigma_cor:g} and "
            f"num_workers={plan.num_workers} the grid adds {cost:.2g} to the divergence, more than "
            f"{_LARGEST_COST:g}; take more bits."
        )


def example_level_sensitivity(clip_norm: float, batch_size: int, size: int, bits: int) -> float:
    """By how much one of b examples moves the mean of clipped gradients, rounded: 2C/b + sqrt(d) 2^-bits.

    Each coordinate's rounding moves by less than a step, and a change however small can move all of them.
    (The sum of gradients that are rounded one by one moves by at most 2C, without a price: on the grid, sum
    first and divide the message by b afterwards.)

    Args:
      clip_norm: C.
      batch_size: b.
      size: d.
      bits: the step is 2^-bits.

    Returns:
      The bound.

    Example:
      >>> example_level_sensitivity(1.0, batch_size=8, size=4, bits=3)
      0.5
    """
    check_int("batch_size", batch_size, 1)
    check_int("size", size, 1)
    if not (math.isfinite(clip_norm) and clip_norm > 0):
        raise UserError(f"clip_norm must be finite and positive, got {clip_norm!r}.")
    return 2 * clip_norm / batch_size + math.sqrt(size) * 2.0 ** -_check_bits(bits)


def _noises_in_view(plan: PrivacyPlan) -> tuple[int, int]:
    """How many independent and how many shared noises the honest messages contain that nobody revealed."""
    if plan.threat_model == "cdp":
        return plan.num_workers, 0
    honest = plan.num_workers - plan.num_byzantine
    return honest, honest * (honest - 1) // 2 + honest * (plan.num_byzantine - plan.num_colluding)


def _check_bits(bits: int) -> int:
    # Beyond, a step would not be a normal float32.
    if isinstance(bits, bool) or not isinstance(bits, int | np.integer) or not -60 <= bits <= 60:
        raise UserError(f"bits must be a whole number between -60 and 60, got {bits!r}.")
    return int(bits)


def _width(name: str, sigma: float, bits: int) -> float:
    """Sigma in steps; 0 for no noise."""
    _check_sigma(name, sigma)
    width = sigma * 2.0 ** _check_bits(bits)
    if width and not NARROWEST <= width <= WIDEST:
        fewest, most = (round_(math.log2(end / sigma)) for round_, end in _ENDS)
        raise UserError(
            f"{name}={sigma!r} is {width:g} steps wide at bits={bits}; it must be between {NARROWEST:g} and "
            f"{WIDEST:g} steps: bits must be between {fewest} and {most}."
        )
    return width


def _check_sigma(name: str, sigma: float) -> None:
    if not (math.isfinite(sigma) and sigma >= 0):
        raise UserError(f"{name} must be finite and at least 0, got {sigma!r}.")


def _widest(sigma_ind: float, sigma_cor: float) -> float:
    _check_sigma("sigma_ind", sigma_ind)
    _check_sigma("sigma_cor", sigma_cor)
    if not (sigma_ind or sigma_cor):
        raise UserError("sigma_ind and sigma_cor are both 0: without noise there is no grid to choose.")
    return max(sigma_ind, sigma_cor)


def _fewest_bits(sigma_ind: float, sigma_cor: float) -> int:
    """The coarsest grid on which all noise is at least a step wide."""
    widths = [math.log2(NARROWEST / sigma) for sigma in (sigma_ind, sigma_cor) if sigma]
    return math.ceil(max(widths, default=-60))
