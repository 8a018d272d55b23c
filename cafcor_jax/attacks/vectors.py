"""Attacks on the messages: every malicious worker knows what all honest ones send."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cafcor_jax import spread
from cafcor_jax.columns import accumulator_dtype, num_workers
from cafcor_jax.errors import UserError
from cafcor_jax.float64 import batched_in_float64
from cafcor_jax.gram import gram, mix, squared_distances
from cafcor_jax.types import Aggregate, Array, Attack, Updates

# Variances below this have terms that are too small for float32.
_TINY = 1e-30
_LARGEST = float(np.finfo(np.float32).max)


def honest_mean(honest: Updates) -> Aggregate:
    """The mean over honest workers, as a matrix product (on a CPU much faster than `mean(0)`)."""
    h = num_workers(honest)
    return mix(jnp.full(h, 1 / h), honest, all_finite=True)


def honest_std(honest: Updates, mean: Aggregate) -> Aggregate:
    """The coordinate-wise standard deviation over honest workers (divisor h - 1; 0 for one worker)."""
    h = num_workers(honest)
    weights = jnp.full(h, 1 / max(h - 1, 1))

    def variance(rows: Array, centre: Array) -> Array:
        return mix(weights, (rows - centre) ** 2, all_finite=True)

    def scaled(rows: Array, centre: Array) -> Array:
        largest = jnp.max(jnp.abs(rows), initial=0)
        scale = jnp.where(largest > 0, largest, 1)
        return scale * jnp.sqrt(variance(rows / scale, centre / scale))

    def of_leaf(rows: Array, centre: Array) -> Array:
        dtype = accumulator_dtype(rows.dtype)  # a square overflows float16 from 256 on
        wide = rows.astype(dtype), centre.astype(dtype)
        plain = variance(*wide)
        largest = jnp.max(plain, initial=0)
        # The squares of numbers beyond 1e19 or below 1e-19 are out of float32's range.
        trusted = (largest > _TINY) & (largest < jnp.inf)
        std = lax.cond(trusted, lambda *_: jnp.sqrt(plain), scaled, *wide)
        return std.astype(centre.dtype)

    return jax.tree.map(of_leaf, honest, mean)


def repeat(update: Aggregate, num_byzantine: int) -> Updates:
    """The same message from every malicious worker."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_byzantine, *leaf.shape)), update)


def _same_for_all(message: Callable[[Updates], Aggregate]) -> Attack:
    def attack(key: Array, honest: Updates, num_byzantine: int) -> Updates:
        del key
        return repeat(message(honest), num_byzantine)

    return attack


def _widened(honest: Updates) -> Updates:
    """Half precision in float32; other leaves as they are."""
    num_workers(honest)
    arrays = jax.tree.map(jnp.asarray, honest)
    return jax.tree.map(lambda leaf: leaf.astype(accumulator_dtype(leaf.dtype)), arrays)


def _saturated(values: Array, dtype: Any) -> Array:
    """The values in another dtype; those beyond its range become the largest it has."""
    info = jnp.finfo(dtype)
    return jnp.clip(values, float(info.min), float(info.max)).astype(dtype)


def _shifted(mean: Aggregate, factor: Array | float, direction: Aggregate, honest: Updates) -> Aggregate:
    """The message mean + factor * direction, in the dtypes of the honest messages."""

    def of_leaf(m: Array, p: Array, rows: Array) -> Array:
        return _saturated(m + jnp.asarray(factor, m.dtype) * p, jnp.result_type(rows))

    return jax.tree.map(of_leaf, mean, direction, honest)


def _check_factor(factor: float, least: float = -_LARGEST) -> None:
    # A factor that is infinite in float32 would turn a coordinate of 0 into NaN.
    if not least <= factor <= _LARGEST:
        raise UserError(
            f"factor is {factor}; it must be finite, from {least:.3g} to {_LARGEST:.3g} (float32)."
        )


def none() -> Attack:
    """Malicious workers that send the honest mean: they do no harm."""
    return _same_for_all(honest_mean)


def sign_flip() -> Attack:
    """Sign flipping (SF): every malicious worker sends minus the honest mean.

    References:
      Allen-Zhu et al., Byzantine-Resilient Non-Convex Stochastic Gradient Descent, ICLR 2021.
    """
    return _same_for_all(lambda honest: jax.tree.map(jnp.negative, honest_mean(honest)))


def foe(factor: float = 2.0) -> Attack:
    """Fall of Empires (FOE, inner-product manipulation): every malicious worker sends -factor * honest mean.

    Args:
      factor: how many times the honest mean.

    Returns:
      An attack.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> foe()(jax.random.key(0), jnp.array([[1.0], [3.0]]), 1).tolist()
      [[-4.0]]

    References:
      Xie et al., Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation, UAI 2019.
    """
    _check_factor(factor)

    def message(honest: Updates) -> Aggregate:
        mean = honest_mean(_widened(honest))
        return jax.tree.map(
            lambda m, rows: _saturated(jnp.asarray(-factor, m.dtype) * m, jnp.result_type(rows)), mean, honest
        )

    return _same_for_all(message)


def alie(factor: float | None = None) -> Attack:
    """A Little Is Enough (ALIE): mean + factor * std, coordinate by coordinate, over the honest messages.

    Args:
      factor: how many standard deviations; None for 1.5, the usual choice, since the paper on CafCor does
        not give it. `alie_z_max` is the choice of the paper on ALIE.

    Returns:
      An attack.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> honest = jnp.array([[1.0], [3.0]])
      >>> print(alie(factor=2.0)(jax.random.key(0), honest, 1).round(3))
      [[4.828]]

    References:
      Baruch et al., A Little Is Enough: Circumventing Defenses for Distributed Learning, NeurIPS 2019.
    """
    deviations = 1.5 if factor is None else factor
    _check_factor(deviations)

    def message(honest: Updates) -> Aggregate:
        wide = _widened(honest)
        mean = honest_mean(wide)
        return _shifted(mean, deviations, honest_std(wide, mean), honest)

    return _same_for_all(message)


def alie_z_max(num_workers: int, num_byzantine: int) -> float:
    """The original factor of ALIE: z_max = Phi^-1((n - f - s) / (n - f)), with s = floor(n/2 + 1) - f.

    With s honest workers on their side the malicious ones are a majority. If the honest messages are normal,
    s of them are expected to lie beyond z_max standard deviations. It may be below 0 if f is small.

    Args:
      num_workers: n, the malicious workers among them.
      num_byzantine: f, with 1 <= f < n/2.

    Returns:
      z_max.

    Example:
      >>> print(f"{alie_z_max(num_workers=100, num_byzantine=5):.4f}")
      0.0396

    References:
      Baruch et al., A Little Is Enough: Circumventing Defenses for Distributed Learning, NeurIPS 2019.
    """
    n, f = num_workers, num_byzantine
    if not 1 <= f < n / 2:
        raise ValueError(f"num_byzantine is {f}; it must be at least 1 and below half of num_workers = {n}.")
    supporters = n // 2 + 1 - f
    return statistics.NormalDist().inv_cdf((n - f - supporters) / (n - f))


def mimic(worker: int = 0) -> Attack:
    """Mimic: every malicious worker sends what one honest worker sends, which thereby counts f + 1 times.

    No rule can tell the copies from honest messages; they do harm where the workers' data differ.

    Args:
      worker: the index of the honest worker.

    Returns:
      An attack.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> mimic(worker=1)(jax.random.key(0), jnp.array([[1.0], [3.0]]), 2).tolist()
      [[3.0], [3.0]]

    References:
      Karimireddy et al., Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, ICLR 2022.
    """
    if not isinstance(worker, int) or isinstance(worker, bool) or worker < 0:
        raise ValueError(f"worker is {worker!r}; it must be a whole number of at least 0.")

    def message(honest: Updates) -> Aggregate:
        h = num_workers(honest)
        if worker >= h:
            raise ValueError(f"worker is {worker}; it must be below the number of honest workers, {h}.")
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[worker], honest)

    return _same_for_all(message)


def gaussian(factor: float = 200.0) -> Attack:
    """Gaussian noise: every coordinate of every malicious message is N(0, factor^2), independently.

    Args:
      factor: the standard deviation, at least 0.

    Returns:
      An attack.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> malicious = gaussian()(jax.random.key(0), jnp.zeros((3, 10_000)), 2)
      >>> print(malicious.shape, malicious.std().round(-1))
      (2, 10000) 200.0

    References:
      Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017.
    """
    _check_factor(factor, least=0.0)

    def attack(key: Array, honest: Updates, num_byzantine: int) -> Updates:
        spread.refuse("attack 'gaussian' draws whole messages at once")
        num_workers(honest)
        leaves, structure = jax.tree.flatten(honest)

        def draw(index: int, leaf: Array) -> Array:
            dtype = jnp.result_type(leaf)
            wide = accumulator_dtype(dtype)  # drawn in half precision the tails would be cut off
            shape = (num_byzantine, *leaf.shape[1:])
            normals = jax.random.normal(jax.random.fold_in(key, index), shape, wide)
            return _saturated(jnp.asarray(factor, wide) * normals, dtype)

        return jax.tree.unflatten(structure, [draw(index, leaf) for index, leaf in enumerate(leaves)])

    return attack


def _constant(value: float) -> Attack:
    def message(honest: Updates) -> Aggregate:
        num_workers(honest)
        return jax.tree.map(lambda leaf: jnp.full(leaf.shape[1:], value, jnp.result_type(leaf)), honest)

    return _same_for_all(message)


def inf() -> Attack:
    """Every malicious worker sends Inf in every coordinate."""
    return _constant(jnp.inf)


def nan() -> Attack:
    """Every malicious worker sends NaN in every coordinate."""
    return _constant(jnp.nan)


def zero() -> Attack:
    """Every malicious worker sends zeros, as if it had crashed."""
    return _constant(0.0)


# Directions, of any length: the honest messages (in float32 at least) and their mean -> leaves [...].
_DIRECTIONS: dict[str, Callable[[Updates, Aggregate], Aggregate]] = {
    "std": lambda honest, mean: jax.tree.map(jnp.negative, honest_std(honest, mean)),
    "unit": lambda honest, mean: jax.tree.map(jnp.negative, mean),
    "sign": lambda honest, mean: jax.tree.map(lambda m: -jnp.sign(m), mean),
}


def min_max(direction: str = "std") -> Attack:
    """Min-Max: as far from the honest mean as the two farthest honest messages are from each other.

    Every malicious worker sends mean + gamma * p with the largest gamma such that

        max_i ||mean + gamma p - x_i|| <= max_ij ||x_i - x_j||.

    Every i bounds gamma by the positive root of a quadratic, whose coefficients are inner products of p and
    the x_i - mean; gamma is the smallest of these roots.

    Args:
      direction: p. "std" is minus the coordinate-wise standard deviation of the honest messages, "unit"
        minus their mean at length 1, "sign" minus the sign of their mean. Where p = 0 the mean is sent.

    Returns:
      An attack.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> honest = jnp.array([[0.0, 1.0], [2.0, 1.0], [4.0, 1.0]])
      >>> print(min_max()(jax.random.key(0), honest, 1).round(3))
      [[0. 1.]]

    References:
      Shejwalkar and Houmansadr, Manipulating the Byzantine: Optimizing Model Poisoning Attacks and Defenses
        for Federated Learning, NDSS 2021.
    """

    def gamma(square: Array, slopes: Array, constants: Array, distances: Array) -> Array:
        return jnp.min(_largest_root(square, slopes, jnp.max(distances) - constants))

    return _farthest(direction, gamma)


def min_sum(direction: str = "std") -> Attack:
    """Min-Sum: as far from all honest messages together as the farthest honest message is from them.

    Every malicious worker sends mean + gamma * p with the largest gamma such that

        sum_i ||mean + gamma p - x_i||^2 <= max_i sum_j ||x_i - x_j||^2,

    a quadratic in gamma. By both sides' expansion about the mean it is ||gamma p|| = max_i ||x_i - mean||.

    Args:
      direction: p. "std" is minus the coordinate-wise standard deviation of the honest messages, "unit"
        minus their mean at length 1, "sign" minus the sign of their mean. Where p = 0 the mean is sent.

    Returns:
      An attack.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> honest = jnp.array([[0.0, 1.0], [2.0, 1.0], [7.0, 1.0]])
      >>> print(min_sum()(jax.random.key(0), honest, 1).round(3))
      [[-1.  1.]]

    References:
      Shejwalkar and Houmansadr, Manipulating the Byzantine: Optimizing Model Poisoning Attacks and Defenses
        for Federated Learning, NDSS 2021.
    """

    def gamma(square: Array, slopes: Array, constants: Array, distances: Array) -> Array:
        slack = jnp.max(jnp.sum(distances, axis=1)) - jnp.sum(constants)
        return _largest_root(slopes.shape[0] * square, jnp.sum(slopes), slack)

    return _farthest(direction, gamma)


def _farthest(direction: str, gamma: Callable[[Array, Array, Array, Array], Array]) -> Attack:
    """The attack mean + gamma p, with gamma from inner products.

    With y_i = x_i - mean, ||mean + gamma p - x_i||^2 = gamma^2 ||p||^2 - 2 gamma <p, y_i> + ||y_i||^2. The
    function `gamma` gets ||p||^2, the -<p, y_i> [h], the ||y_i||^2 [h] and the ||x_i - x_j||^2 [h, h].
    """
    if direction not in _DIRECTIONS:
        raise ValueError(f"direction is {direction!r}; it must be one of {', '.join(_DIRECTIONS)}.")

    def message(honest: Updates) -> Aggregate:
        wide = _widened(honest)
        mean = honest_mean(wide)
        p = _with_largest_entry_1(_DIRECTIONS[direction](wide, mean))
        # About the mean nothing cancels, however far from 0 the messages are and whatever the length of p.
        rows = jax.tree.map(lambda x, m, q: jnp.concatenate([x - m, q[None]]), wide, mean, p)
        dtype = functools.reduce(jnp.promote_types, [leaf.dtype for leaf in jax.tree.leaves(wide)])

        def length(rows: Updates) -> Array:
            products = gram(rows, about_origin=True)
            square, slopes = products[-1, -1], -products[-1, :-1]
            among = products[:-1, :-1]
            found = gamma(square, slopes, jnp.diagonal(among), squared_distances(among))
            # Lengths whose squares are beyond float64 have no inner products: the mean is sent.
            found = jnp.where(jnp.isfinite(found), found, 0)
            return jnp.minimum(found, float(jnp.finfo(dtype).max)).astype(dtype)

        return _shifted(mean, batched_in_float64(length)(rows), p, honest)

    return _same_for_all(message)


def _with_largest_entry_1(p: Aggregate) -> Aggregate:
    """Returns p / max |p|. The attack does not depend on the length of p, and tiny products would be lost."""
    leaves = [jnp.max(jnp.abs(leaf), initial=0) for leaf in jax.tree.leaves(p)]
    largest = spread.largest(functools.reduce(jnp.maximum, leaves))
    scale = jnp.where(largest > 0, largest, 1)
    return jax.tree.map(lambda leaf: leaf / scale.astype(leaf.dtype), p)


def _largest_root(a: Array, b: Array, slack: Array) -> Array:
    """The largest g with a g^2 + 2 b g <= slack, for a, slack >= 0; 0 where a = 0 (then p = 0 and b = 0)."""
    slack = jnp.maximum(slack, 0)  # it is below 0 by rounding only: the mean lies among the messages
    root = jnp.sqrt(b**2 + a * slack)
    positive = b > 0
    # Of the two forms of the root the one that takes no difference.
    above = slack / jnp.where(positive, b + root, 1)
    below = (root - b) / jnp.where(a > 0, a, 1)
    return jnp.where(a > 0, jnp.where(positive, above, below), 0)
