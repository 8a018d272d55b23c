"""Discrete Gaussians drawn from tables of whole numbers, so that the law drawn is known exactly.

P(x) is proportional to exp(-x^2 / (2 sigma^2)) on the integers. Up to 256 steps wide it is one table, beyond
that the sum K h + l of a coarse and a fine one, which is a discrete Gaussian but for a factor 1 +- 2^-126
(Micciancio and Walter). A table is an alias table: a few bits pick a bin, a 128-bit number decides between
its two values. Of the 128 bits the first 32 nearly always decide; where they are equal to the table's (2^-32
a draw), the rest is looked at.

References:
  Canonne, Kamath and Steinke, The Discrete Gaussian for Differential Privacy, NeurIPS 2020.
  Micciancio and Walter, Gaussian Sampling over the Integers: Efficient, Generic, Constant-Time, CRYPTO 2017.
  Walker, An Efficient Method for Generating Discrete Random Variables with General Distributions, 1977.
"""

from __future__ import annotations

import decimal
import functools
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cafcor_jax.errors import UserError
from cafcor_jax.noise import BLOCK
from cafcor_jax.threefry import is_threefry, over_keys, threefry
from cafcor_jax.types import Array

# The noise may be this many steps wide: below, the grid is coarser than the noise; above, the tables of the
# two parts leave the cache.
NARROWEST, WIDEST = 1.0, 2.0**19

# Digits of the host's arithmetic: 10^-60 is far below 2^-128.
_DIGITS = 60
# Tables end here, in standard deviations: the mass beyond is below 2^-131.
_REACH = 13.3
_WORDS = 4  # 32-bit words of an alias table's threshold
_THRESHOLD_BITS = 32 * _WORDS
# One table for noise up to so many steps wide.
_ONE_TABLE = 256.0
# (sigma_h sigma_l / sigma)^2 of the two parts: their sum is a discrete Gaussian up to 2 exp(-2 pi^2 4.5).
_SMOOTH = 4.5


class Table(NamedTuple):
    """An alias table: bin i holds the value i - reach up to its threshold and `alias[i]` above it."""

    thresholds: np.ndarray  # uint32 [words, bins], most significant word first
    alias: np.ndarray  # int32 [bins]
    reach: int


class Sampler(NamedTuple):
    """A discrete Gaussian as scale * coarse + fine; without a coarse part if it is narrow."""

    fine: Table
    coarse: Table | None
    scale: int
    error: float
    """Bound of the total-variation distance between a draw's law and the discrete Gaussian."""


# Drawing from tables.


def draw(sampler: Sampler, keys: Array) -> tuple[Array, ...]:
    """A block of discrete Gaussians for every key, as two halves int32 [rows, BLOCK / 2]."""
    parts = 1 if sampler.coarse is None else 2
    per_draw = 1 + parts

    def look(words: Sequence[Array], rest: Sequence[Array]) -> list[Array]:
        extra = len(rest) // 2
        halves = ((words[:per_draw], rest[:extra]), (words[per_draw:], rest[extra:]))
        return [_from_words(sampler, first, more) for first, more in halves]

    words = _words(keys, 0, 2 * per_draw)
    # The value and, in its lowest bit, whether a threshold was met: one array, which XLA stores once.
    low, high = lax.optimization_barrier(look(words, ()))

    def settle(_: None) -> tuple[Array, ...]:
        """All draws again, with all bits. Where the first 32 decided, the outcome is the same."""
        again = look(_words(keys, 0, 2 * per_draw), _words(keys, per_draw, 2 * parts * (_WORDS - 1)))
        return tuple(half >> 1 for half in again)

    return lax.cond(jnp.any(((low | high) & 1) == 1), settle, lambda _: (low >> 1, high >> 1), None)


def _from_words(sampler: Sampler, words: Sequence[Array], rest: Sequence[Array]) -> Array:
    """2 x + tie: a draw x from random words, and whether they left it open.

    Args:
      sampler: the tables.
      words: one that picks the bins, then the first word to compare with the threshold for every table.
      rest: the three words that follow, for every table, or nothing.
    """
    chosen, first_words = words[0], words[1:]
    more = [rest[:3], rest[3:]]
    fine_bits = (sampler.fine.alias.size - 1).bit_length()
    fine_bin = chosen & np.uint32(sampler.fine.alias.size - 1)
    value, tie = _look_up(sampler.fine, fine_bin, [first_words[0], *more[0]])
    if sampler.coarse is not None:
        # Both have at most 2^15 bins: their numbers are different bits of one word.
        coarse_bin = (chosen >> fine_bits) & np.uint32(sampler.coarse.alias.size - 1)
        coarse, coarse_tie = _look_up(sampler.coarse, coarse_bin, [first_words[1], *more[1]])
        value, tie = value + np.int32(sampler.scale) * coarse, tie | coarse_tie
    return 2 * value + tie.astype(jnp.int32)


def _look_up(table: Table, index: Array, words: Sequence[Array]) -> tuple[Array, Array]:
    """The value in a bin, by comparing words with its threshold; and whether all of them were equal."""
    less = jnp.zeros(index.shape, bool)
    equal = jnp.ones(index.shape, bool)
    # The threshold has four words; the first one is often all there is to compare.
    for word, row in zip(words, table.thresholds, strict=False):
        threshold = jnp.take(jnp.asarray(row), index, mode="clip")
        less = less | (equal & (word < threshold))
        equal = equal & (word == threshold)
    alias = jnp.take(jnp.asarray(table.alias), index, mode="clip")
    return jnp.where(less, index.astype(jnp.int32) - np.int32(table.reach), alias), equal


def _words(keys: Array, first: int, count: int) -> list[Array]:
    """`count` (even) random words for every position of half a block, uint32 [rows, BLOCK / 2] each.

    Different `first` give independent words, if at least count / 2 lie between them.
    """
    shape = (*keys.shape, BLOCK // 2)
    if is_threefry(keys):
        data = jax.random.key_data(keys)[..., None, :]
        position = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
        pairs = [
            threefry(data, position, jnp.full(shape, first + call, jnp.uint32)) for call in range(count // 2)
        ]
        return [word for pair in pairs for word in pair]

    def bits(key: Array) -> Array:
        return jax.random.bits(jax.random.fold_in(key, first), (count, BLOCK // 2), jnp.uint32)

    drawn = over_keys(bits, keys)(keys.reshape(-1))
    return [drawn[:, word].reshape(shape) for word in range(count)]


# Tables, made on the host in whole numbers.


@functools.lru_cache(maxsize=16)
def discrete_gaussian(sigma: float) -> Sampler:
    """The tables of a discrete Gaussian: P(x) = exp(-x^2 / (2 sigma^2)) / sum_k exp(-k^2 / (2 sigma^2)).

    Up to 256 it is one table. Beyond, x = K h + l with discrete Gaussians h and l, sigma^2 = K^2 sigma_h^2 +
    sigma_l^2. By Poisson summation x is then a discrete Gaussian but for a factor between (1 - e)/(1 + e) and
    its inverse, e = 2 sum_{k >= 1} exp(-2 pi^2 k^2 t^2), t = sigma_h sigma_l / sigma, here t^2 = 4.5.

    Args:
      sigma: the standard deviation in steps.

    Returns:
      The tables, and a bound of the distance in total variation.

    Example:
      >>> sampler = discrete_gaussian(1000.0)
      >>> sampler.scale, sampler.error < 2.0**-125
      (16, True)
    """
    if not NARROWEST <= sigma <= WIDEST:
        raise UserError(
            f"sigma must be between {NARROWEST:g} and {WIDEST:g} steps of the grid, got {sigma!r}."
        )
    with decimal.localcontext(prec=_DIGITS):
        scale, fine_variance, coarse_variance = _split(sigma)
        fine, error = _table(fine_variance)
        if not scale:
            return Sampler(fine, None, 0, error)
        coarse, coarse_error = _table(coarse_variance)
        smooth = float(coarse_variance) * float(fine_variance) / sigma**2
    # Of two laws whose ratio is within (1 +- e) / (1 -+ e), e small, the distance is below 2 e.
    return Sampler(fine, coarse, scale, error + coarse_error + 2 * theta(smooth))


def reach(sigma: float) -> int:
    """The largest value that can be drawn, for noise `sigma` steps wide."""
    # With the digits of `discrete_gaussian`, so that the two cannot differ by a rounding.
    with decimal.localcontext(prec=_DIGITS):
        scale, fine, coarse = _split(sigma)
    return _table_reach(fine) + (scale * _table_reach(coarse) if scale else 0)


def _split(sigma: float) -> tuple[int, Decimal, Decimal]:
    """K and the variances of l and h; K = 0 and the variance for one table."""
    variance = Decimal(sigma) ** 2
    if sigma <= _ONE_TABLE:
        return 0, variance, Decimal(0)
    scale = 2 ** round(math.log2(math.sqrt(sigma / math.sqrt(_SMOOTH))))
    # sigma_l^2 (1 - sigma_l^2 / sigma^2) = 4.5 K^2; the smaller root, about 4.5 K^2.
    root = (1 - 4 * Decimal(_SMOOTH) * scale**2 / variance).sqrt()
    fine = variance * (1 - root) / 2
    return scale, fine, (variance - fine) / scale**2


def _table_reach(variance: Decimal) -> int:
    return math.ceil(_REACH * math.sqrt(float(variance))) + 1


def _table(variance: Decimal) -> tuple[Table, float]:
    """The alias table of a discrete Gaussian and the distance of its law."""
    weights, error = _weights(variance)
    return _alias_table(weights), error


def _weights(variance: Decimal) -> tuple[list[int], float]:
    """The law of a table: whole numbers for -reach, ..., reach that add up to bins 2^128.

    Probabilities are rounded down, and what is left over goes to 0: the distance from the discrete Gaussian
    is that and what lies beyond the table.
    """
    reach = _table_reach(variance)
    bins = 2 ** (2 * reach).bit_length()
    total = bins << _THRESHOLD_BITS
    # exp(-(x + 1)^2 / 2v) = exp(-x^2 / 2v) q^(2x + 1), q = exp(-1 / 2v).
    ratio = (-1 / (2 * variance)).exp()
    square = ratio * ratio
    masses = [Decimal(1)]
    for _ in range(reach):
        masses.append(masses[-1] * ratio)
        ratio *= square
    # Beyond the table the masses fall faster than the geometric series with the last ratio.
    beyond = 2 * masses[-1] * ratio / (1 - ratio)
    mass = 2 * sum(masses) - 1 + beyond
    half = [int(value / mass * total) for value in masses]
    left = total - (2 * sum(half) - half[0])
    weights = half[:0:-1] + [half[0] + left] + half[1:]
    return weights, left / total + float(beyond / mass)


def _alias_table(weights: list[int]) -> Table:
    """Walker's alias method in whole numbers: the law is weights / sum, exactly.

    Args:
      weights: of -reach, ..., reach; they add up to bins 2^128, with a power of two of bins.
    """
    capacity = 1 << _THRESHOLD_BITS
    bins = sum(weights) // capacity
    reach = len(weights) // 2
    left = weights + [0] * (bins - len(weights))
    # A bin that is full has itself as alias, and its threshold is never needed.
    alias = list(range(bins))
    thresholds = [0] * bins
    small = [i for i in range(bins) if left[i] < capacity]
    large = [i for i in range(bins) if left[i] >= capacity]
    while small and large:
        poor, rich = small.pop(), large[-1]
        thresholds[poor], alias[poor] = left[poor], rich
        left[rich] -= capacity - left[poor]
        if left[rich] < capacity:
            small.append(large.pop())
    words = [
        [(t >> (_THRESHOLD_BITS - 32 * (w + 1))) & 0xFFFFFFFF for t in thresholds] for w in range(_WORDS)
    ]
    return Table(np.array(words, np.uint32), np.array(alias, np.int32) - np.int32(reach), reach)


def theta(smooth: float) -> float:
    """2 sum_{k >= 1} exp(-2 pi^2 k^2 smooth)."""
    term = math.exp(-2 * math.pi**2 * smooth)
    # exp(-2 pi^2 k^2 s) <= term^k: a bound, and equal to many digits unless the noise is narrow.
    return 2 * term / (1 - term) if smooth < 1e-3 else 2 * sum(term ** (k * k) for k in range(1, 200))
