"""Attacks that hide in the noise: malicious workers that keep to the protocol, but for their gradient.

They add the very noise that they owe, pair by pair, and keep a momentum, so their messages have the law of
honest ones; only what is under the noise is not a clipped gradient but a bias of any length. What a server
can find out is how long the bias is, against the noise. `factor` is its length for each worker, in units of
the gradient; without one the federation searches it in every round, against the rule in use
(`adaptive.best_push`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cafcor_jax import spread
from cafcor_jax.aggregators.caf import top_eigenvector
from cafcor_jax.attacks.vectors import _check_factor, honest_mean, repeat
from cafcor_jax.columns import num_workers
from cafcor_jax.float64 import in_float64
from cafcor_jax.gram import gram, mix, recentred
from cafcor_jax.types import Aggregate, Array, Updates

_Direction = Callable[[Updates], Aggregate]

# The length of a gradient that no noise can hide.
_GIVEN_UP = 1e6


class Push(NamedTuple):
    """Gradients start + factor * direction, leaves [f, ...]."""

    start: Updates
    direction: Updates

    def gradients(self, factor: float | Array) -> Updates:
        """With a factor."""
        return jax.tree.map(lambda s, u: (s + factor * u).astype(u.dtype), self.start, self.direction)


@dataclasses.dataclass(frozen=True)
class ProtocolAttack:
    """What malicious workers put in the place of their clipped gradient; all else is as the protocol says.

    The federation calls it with the honest workers' clipped gradients, before any noise.
    """

    push: Callable[[Array, Updates, int, Array], Push]
    """(key, honest gradients, f, round) -> the malicious ones, for any factor."""
    factor: float | None
    """How strong; None: as strong as does most harm, searched against the rule in every round."""

    def __post_init__(self) -> None:
        if self.factor is not None:
            _check_factor(self.factor, least=0)

    def __call__(
        self, key: Array, honest: Updates, num_byzantine: int, round_index: Array | int = 1
    ) -> Updates:
        """Maps honest gradients, leaves [h, ...], to malicious ones, leaves [f, ...]."""
        if self.factor is None:
            raise ValueError("factor is None, to be searched against a rule: only a federation has one.")
        pushed = self.push(key, honest, num_byzantine, jnp.asarray(round_index))
        return pushed.gradients(self.factor)


def bias(factor: float | None = None) -> ProtocolAttack:
    """A common bias along minus the honest mean gradient: what harms training most.

    Args:
      factor: its length, for each worker; None: searched.

    Returns:
      An attack.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> bias(10.0)(jax.random.key(0), jnp.array([[3.0, 0.0], [1.0, 0.0]]), 1).tolist()
      [[-10.0, 0.0]]
    """
    return _common(_against_gradient, factor)


def bias_fixed(factor: float | None = None) -> ProtocolAttack:
    """A common bias in one random direction, the same in all rounds: it adds up like t, noise less."""
    return _common(_fixed, factor)


def bias_top(factor: float | None = None) -> ProtocolAttack:
    """A common bias along the direction in which the honest gradients differ most, away from their mean."""
    return _common(_top, factor)


def bias_cancel(factor: float = 1.0) -> ProtocolAttack:
    """Gradients that make the sum of all gradients 0, so that nothing is left of the honest ones.

    -factor times the sum of the honest gradients over f, for each worker: that of `bias` whose length takes
    the mean to 0. The mean then shows nothing, for there is none.

    Args:
      factor: how much of the honest sum is taken away; 1 for all of it.

    Returns:
      An attack.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> bias_cancel()(jax.random.key(0), jnp.array([[3.0, 0.0], [1.0, 2.0]]), 1).tolist()
      [[-4.0, -2.0]]
    """

    def push(key: Array, honest: Updates, num_byzantine: int, round_index: Array) -> Push:
        del key, round_index
        scale = -num_workers(honest) / max(num_byzantine, 1)
        return _from_zero(
            jax.tree.map(lambda m: (scale * m).astype(m.dtype), honest_mean(honest)), num_byzantine
        )

    return ProtocolAttack(push, factor)


def bias_sacrifice(factor: float | None = None) -> ProtocolAttack:
    """`bias` by all but one, who gives itself up: it is found, and its pairs' noise stays in the mean.

    The noise of pairs cancels in the sum of all messages, and along that sum a bias shows best. One malicious
    worker whose message is far too long has to be left out; the sum of the others then has the noise that
    this one shared with them, and hides the rest.

    Args:
      factor: the bias's length, for each of the others; None: searched.

    Returns:
      An attack. With one malicious worker nobody is left to push.
    """

    def push(key: Array, honest: Updates, num_byzantine: int, round_index: Array) -> Push:
        del key, round_index
        rest = (jnp.arange(num_byzantine) > 0).astype(jnp.float32)

        def only(who: Array, leaf: Array) -> Array:
            return (who.reshape(-1, *[1] * leaf.ndim) * leaf).astype(leaf.dtype)

        away = _against_gradient(honest)
        given_up = jax.tree.map(functools.partial(only, _GIVEN_UP * (1 - rest)), away)
        return Push(given_up, jax.tree.map(functools.partial(only, rest), away))

    return ProtocolAttack(push, factor)


def bias_drift(factor: float | None = None, *, rounds: int = 10) -> ProtocolAttack:
    """`bias` whose length grows steadily and reaches `factor` after so many rounds; then it stays.

    Args:
      factor: its greatest length; None: searched, and what is found grows.
      rounds: until then.

    Returns:
      An attack.
    """
    return _common(_against_gradient, factor, lambda t: jnp.minimum(t / rounds, 1))


def bias_sleeper(factor: float | None = None, *, rounds: int = 10) -> ProtocolAttack:
    """`bias` by workers that send the honest mean gradient for so many rounds before.

    Args:
      factor: the bias's length; None: searched.
      rounds: in which they behave.

    Returns:
      An attack.
    """

    def push(key: Array, honest: Updates, num_byzantine: int, round_index: Array) -> Push:
        del key
        asleep = round_index <= rounds
        start = jax.tree.map(lambda m: jnp.where(asleep, m, 0).astype(m.dtype), honest_mean(honest))
        direction = jax.tree.map(lambda u: jnp.where(asleep, 0, u).astype(u.dtype), _against_gradient(honest))
        return Push(repeat(start, num_byzantine), repeat(direction, num_byzantine))

    return ProtocolAttack(push, factor)


def bias_spread(factor: float | None = None) -> ProtocolAttack:
    """Different vectors that add up to `bias`: no two of them are alike.

    b_j = factor (u + e_j) with random e_j of sum 0, as long as makes the inner products of different b_j
    vanish: pairs show nothing, at the price of lengths that show more, ||b_j||^2 = f factor^2.

    Args:
      factor: the length of their mean; None: searched.

    Returns:
      An attack.
    """

    def push(key: Array, honest: Updates, num_byzantine: int, round_index: Array) -> Push:
        del round_index  # the key is the round's own
        spread.refuse("attack 'bias_spread' draws whole messages at once")
        direction = _against_gradient(honest)
        leaves, structure = jax.tree.flatten(direction)
        size = sum(leaf.size for leaf in leaves)
        common = repeat(direction, num_byzantine)
        keys = jax.tree.unflatten(structure, list(jax.random.split(key, len(leaves))))

        def of_leaf(u: Array, leaf_key: Array) -> Array:
            # In high dimension random vectors are orthogonal: less their mean, each is sqrt(1 - 1/f) long and
            # the inner products are -1/f, so sqrt(f) of them brings the products to -1.
            noise = jax.random.normal(leaf_key, u.shape, u.dtype) / jnp.sqrt(size).astype(u.dtype)
            return u + jnp.sqrt(num_byzantine).astype(u.dtype) * (
                noise - noise.sum(0) / max(num_byzantine, 1)
            )

        return Push(jax.tree.map(jnp.zeros_like, common), jax.tree.map(of_leaf, common, keys))

    return ProtocolAttack(push, factor)


def _common(
    direction: _Direction, factor: float | None, grown: Callable[[Array], Array] | None = None
) -> ProtocolAttack:
    """The same for all workers, along a direction, by how much it has grown by the round."""

    def push(key: Array, honest: Updates, num_byzantine: int, round_index: Array) -> Push:
        del key
        along = direction(honest)
        if grown is not None:
            along = jax.tree.map(lambda u: (grown(round_index) * u).astype(u.dtype), along)
        return _from_zero(along, num_byzantine)

    return ProtocolAttack(push, factor)


def _from_zero(direction: Aggregate, num_byzantine: int) -> Push:
    """The same direction for all, and nothing else."""
    repeated = repeat(direction, num_byzantine)
    return Push(jax.tree.map(jnp.zeros_like, repeated), repeated)


def _against_gradient(honest: Updates) -> Aggregate:
    return _unit(jax.tree.map(jnp.negative, honest_mean(honest)))


def _fixed(honest: Updates) -> Aggregate:
    spread.refuse("attack 'bias_fixed' draws a whole message at once")
    num_workers(honest)
    leaves, structure = jax.tree.flatten(honest)
    keys = jax.random.split(jax.random.key(0), len(leaves))  # the same in every round: that is the attack
    normals = [jax.random.normal(k, leaf.shape[1:], leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
    return _unit(jax.tree.unflatten(structure, normals))


def _top(honest: Updates) -> Aggregate:
    @in_float64
    def direction(honest: Updates) -> tuple[Aggregate, Aggregate]:
        h = num_workers(honest)
        vector = top_eigenvector(recentred(gram(honest), jnp.full(h, 1 / h)))
        # The entries of the eigenvector sum to 0, so the mean drops out.
        return mix(vector - vector.mean(), honest, all_finite=True), honest_mean(honest)

    top, mean = direction(honest)
    products = jax.tree.map(lambda a, b: jnp.sum(a * b), top, mean)
    sign = jnp.where(spread.total(functools.reduce(jnp.add, jax.tree.leaves(products))) > 0, -1, 1)
    return _unit(jax.tree.map(lambda leaf: (sign * leaf).astype(leaf.dtype), top))


def _unit(vector: Aggregate) -> Aggregate:
    norm = spread.norm(vector)
    return jax.tree.map(lambda leaf: leaf / jnp.where(norm > 0, norm, 1).astype(leaf.dtype), vector)
