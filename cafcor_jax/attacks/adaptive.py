"""Attacks that know the server's rule: the strength that moves its aggregate farthest from the honest mean.

All malicious workers send the same message z(tau), and tau >= 0 is searched to maximise

    D(tau) = || aggregate(x_1, ..., x_h, z(tau), ..., z(tau)) - mean ||,

with the honest messages x_1, ..., x_h and their mean. The aggregate is that of the very rule the server uses,
its pre-aggregation included.

For a linear rule D is computed in Gram space. With y_i = x_i - mean and z(tau) = mean + s p, every inner
product that the rule asks for is one of y_1, ..., y_h, p and the mean, times powers of s; so is the distance
of the weighted sum. The messages are read once, for all tau together. Any other rule is called for every tau;
one that treats every coordinate by itself, of very many, is searched on a sample of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cafcor_jax import spread
from cafcor_jax.aggregators.coordinatewise import CoordinatewiseRule
from cafcor_jax.aggregators.linear import (
    LinearRule,
    check_tolerance,
    gram_about_origin,
    only_validity,
    valid_workers,
    without_invalid,
)
from cafcor_jax.aggregators.noise_aware import StatefulRule
from cafcor_jax.attacks.hidden import _unit
from cafcor_jax.attacks.vectors import _shifted, _widened, honest_mean, honest_std, repeat
from cafcor_jax.columns import as_rows, common_dtype, num_coordinates, num_workers
from cafcor_jax.float64 import argmax, batched_in_float64, dot
from cafcor_jax.gram import gram
from cafcor_jax.types import Aggregate, Aggregator, Array, Attack, PyTree, Updates


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineSearch:
    """Where tau is searched: on a logarithmic grid first, whose most promising intervals are then halved.

    The grid is in units of max(1, max_i ||y_i|| / ||p||), so that it reaches beyond the honest messages also
    where p is tiny beside them. A zoom halves the two intervals around each of the highest peaks, and some
    others: those in which D would get highest, were it to grow in proportion to tau from the higher of the
    two ends. Every D that was computed counts in the end.

    A filter that sees the attack makes D jump down, and what is found is then below the jump by a last
    interval at most. It should not be much narrower than a thousandth of tau: closer to the jump the rounding
    of the message decides on which side of it the server is.

    Attributes:
      smallest: the grid's first point, above 0. (0 itself is always tried, and so are the fixed attacks'.)
      largest: the grid's last point: the answer where D grows without bound, as for the mean.
      per_decade: points of the grid for a factor of 10.
      zooms: how often.
      peaks: around how many peaks a zoom halves both intervals.
      others: how many other intervals it halves.
      coordinates: on how many coordinates a coordinate-wise rule is searched, evenly taken from all; D is of
        all of them in the end, and compared with that of the fixed attacks.
    """

    smallest: float = 1e-3
    largest: float = 1e2
    per_decade: int = 25
    zooms: int = 6
    peaks: int = 3
    others: int = 6
    coordinates: int = 2**14

    def __post_init__(self) -> None:
        if not 0 < self.smallest < self.largest <= 1e6:
            raise ValueError(
                f"smallest is {self.smallest!r} and largest is {self.largest!r}; it must be that "
                "0 < smallest < largest <= 1e6."
            )
        for name, least in (("per_decade", 1), ("zooms", 0), ("peaks", 1), ("others", 0), ("coordinates", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}.")

    def grid(self) -> np.ndarray:
        """The first points, ascending."""
        count = 1 + math.ceil(self.per_decade * math.log10(self.largest / self.smallest))
        return np.geomspace(self.smallest, self.largest, count)

    def blocks(self, num_fixed: int) -> tuple[int, int]:
        """In how many blocks the grid is tried, with 0 and so many fixed factors, and the size of a block."""
        size = 2 * self.peaks + self.others
        return -(-(1 + num_fixed + len(self.grid())) // size), size

    def num_trials(self, num_fixed: int = 1) -> int:
        """How many tau are tried: blocks of the grid, and one in each zoom.

        Example:
          >>> IN_GRAM_SPACE.num_trials(), DIRECT.num_trials()
          (204, 60)
        """
        num_blocks, size = self.blocks(num_fixed)
        return (num_blocks + self.zooms) * size


#: For linear rules: an evaluation knows nothing of the dimension.
IN_GRAM_SPACE = LineSearch()
#: For all other rules, and linear ones that are slow themselves: an evaluation is an aggregation.
DIRECT = LineSearch(smallest=1e-2, per_decade=4, zooms=6, peaks=2, others=2)
#: For biases under the noise: far shorter than the messages, which are the unit.
OF_BIASES = LineSearch(smallest=1e-4, largest=10.0, per_decade=5, zooms=3, peaks=1, others=2)


class Chosen(NamedTuple):
    """What a search found."""

    factor: Array
    """tau."""
    distance: Array
    """D(tau); NaN if no D was finite, and tau is then that of the fixed attack."""


@dataclasses.dataclass(frozen=True)
class AgainstRound:
    """An attack that searches against what a rule with a memory does in the round at hand."""

    make: Callable[[LinearRule], Attack]
    """From the rule of the round to the attack on it."""


class _Family(NamedTuple):
    """The messages start + tau * p = mean + (offset + tau) * p."""

    direction: Callable[[Updates, Aggregate], Aggregate]
    start: Callable[[Aggregate], Aggregate]
    offset: float
    fixed: tuple[float, ...]  # factors of the attacks that do not search, the usual one last


_FAMILIES = {
    "alie": _Family(honest_std, lambda mean: mean, offset=0.0, fixed=(1.5,)),
    "foe": _Family(
        lambda honest, mean: jax.tree.map(jnp.negative, mean),
        lambda mean: jax.tree.map(jnp.zeros_like, mean),
        offset=1.0,
        fixed=(1.0, 2.0),
    ),
}


def alie_adaptive(aggregator: Aggregator | None = None, *, search: LineSearch | None = None) -> Attack:
    """ALIE with the best factor against a rule: mean + tau * std, tau from a line search.

    tau = argmax D(tau), the smallest if there are several. 1.5, the factor of `alie`, is among those tried:
    in D the attack is never weaker. Against the plain mean D grows without bound, and the largest tau of the
    search is taken.

    Args:
      aggregator: the rule of the server, with its pre-aggregation.
      search: where tau is searched; None for `IN_GRAM_SPACE` if the rule is linear and `DIRECT` otherwise.

    Returns:
      An attack; it does not use its key.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from cafcor_jax.aggregators import median
      >>> honest = jnp.array([[0.0], [1.0], [2.0], [3.0]])
      >>> attack = alie_adaptive(median(num_byzantine=1))
      >>> bool(attack(jax.random.key(0), honest, 1)[0, 0] >= 2)
      True

    References:
      Baruch et al., A Little Is Enough: Circumventing Defenses for Distributed Learning, NeurIPS 2019.
      Allouah et al., Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity, AISTATS 2023.
    """
    return _adaptive("alie", aggregator, search)


def foe_adaptive(aggregator: Aggregator | None = None, *, search: LineSearch | None = None) -> Attack:
    """Fall of Empires with the best factor against a rule: -tau * mean, tau from a line search.

    tau = argmax D(tau), the smallest if there are several. 1 and 2, the factors of `sign_flip` and `foe`, are
    among those tried: in D the attack is never weaker. Against the plain mean D grows without bound, and the
    largest tau of the search is taken.

    Args:
      aggregator: the rule of the server, with its pre-aggregation.
      search: where tau is searched; None for `IN_GRAM_SPACE` if the rule is linear and `DIRECT` otherwise.

    Returns:
      An attack; it does not use its key.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from cafcor_jax.aggregators import mean
      >>> foe_adaptive(mean())(jax.random.key(0), jnp.array([[1.0], [1.0], [1.0]]), 1).tolist()
      [[-100.0]]

    References:
      Xie et al., Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation, UAI 2019.
      Allouah et al., Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity, AISTATS 2023.
    """
    return _adaptive("foe", aggregator, search)


def best_factor(
    family: str,
    aggregator: Aggregator | None,
    honest: Updates,
    num_byzantine: int,
    *,
    search: LineSearch | None = None,
) -> Chosen:
    """The factor that an adaptive attack takes, and the distance it gains.

    Args:
      family: "alie" or "foe": that of `alie_adaptive` or of `foe_adaptive`.
      aggregator: the rule of the server, with its pre-aggregation.
      honest: leaves [h, ...].
      num_byzantine: f.
      search: as for the attack.

    Returns:
      tau and D(tau).

    Example:
      >>> import jax.numpy as jnp
      >>> from cafcor_jax.aggregators import mean, median
      >>> honest = jnp.array([[0.0], [1.0], [2.0], [3.0]])
      >>> print(best_factor("alie", median(num_byzantine=1), honest, 1).distance)
      0.5
      >>> found = best_factor("foe", mean(), jnp.array([[1.0], [1.0], [1.0]]), 1)
      >>> print(found.factor, found.distance)
      100.0 25.25
    """
    if family not in _FAMILIES:
        raise ValueError(f"family is {family!r}; it must be one of {', '.join(_FAMILIES)}.")
    return _best(_FAMILIES[family], _checked(aggregator), honest, num_byzantine, search)[0]


def best_push(
    aggregator: Aggregator | StatefulRule,
    state: PyTree,
    messages: Updates,
    direction: Updates,
    *,
    search: LineSearch = OF_BIASES,
) -> Chosen:
    r"""How far to push the last f messages along directions of their own, so that the aggregate follows most.

    With u the unit vector along the sum of the directions,

        tau = argmax < aggregate(x_1, ..., x_h, x_{h+1} + tau p_1, ..., x_n + tau p_f), u >,

    the smallest if there are several, and 0 among those tried. It is the component along u that counts, and
    not the distance from the honest mean: an aggregate without workers whose noise would cancel is far off
    too, but in no direction that anyone chose.

    For linear rules the search is in Gram space, and for a rule with a state on all that the rule itself
    looks at. Any other rule is called for every tau; a coordinate-wise one on a sample of its coordinates.
    Where a rule starts to see the push, what is found is below that by a tenth at most.

    Args:
      aggregator: the rule of the server.
      state: its state, if it has one.
      messages: of all workers, leaves [n, ...], the malicious ones last and without their push.
      direction: leaves [f, ...].
      search: where tau is searched, in units of max_i ||x_i|| / max_j ||p_j||, i <= h.

    Returns:
      tau, and the component along u; NaN and a tau of 0 if none was finite.

    Example:
      >>> import jax.numpy as jnp
      >>> from cafcor_jax.aggregators import median
      >>> found = best_push(median(1), (), jnp.array([[0.0], [2.0], [1.0]]), jnp.array([[1.0]]))
      >>> print(found.distance)
      2.0
    """
    f = num_workers(direction)
    if isinstance(aggregator, LinearRule | StatefulRule):
        find = functools.partial(_push_in_gram_space, aggregator, search)
        return batched_in_float64(find)(state, messages, direction)
    step = 1
    if isinstance(aggregator, CoordinatewiseRule):
        step = -(-num_coordinates(messages) // search.coordinates)
    if step > 1:
        spread.refuse("A search against a coordinate-wise rule samples the coordinates")

    def some(leaf: Array) -> Array:
        return leaf if step == 1 else as_rows(leaf)[:, ::step]

    seen, along = (jax.tree.map(some, tree) for tree in (messages, direction))
    wide = _widened(along)
    unit = _unit(jax.tree.map(lambda leaf: leaf.sum(axis=0), wide))

    def scale_of(*trees: Updates) -> Array:
        lengths = [jnp.sqrt(jnp.diagonal(gram(rows, about_origin=True))) for rows in trees]
        return _push_scale(*lengths).astype(common_dtype(seen))

    scale = batched_in_float64(scale_of)(_widened(seen), wide)

    def component(tau: Array) -> Array:
        sent = jax.tree.map(lambda x, p: x.at[-f:].add((tau * p).astype(x.dtype)), seen, along)
        products = jax.tree.map(lambda a, u: jnp.sum(a * u), aggregator(sent), unit)
        return spread.total(functools.reduce(jnp.add, jax.tree.leaves(products))).astype(tau.dtype)

    return _furthest(component, scale, search, scale.dtype)


def _furthest(component: Callable[[Array], Array], scale: Array, search: LineSearch, dtype: Any) -> Chosen:
    """The search for a push: on what it gains, since a line search takes values for distances, 0 at least."""
    without = component(jnp.zeros((), scale.dtype))
    chosen = _line_search(lambda tau: component(tau) - without, scale, (0.0,), search, dtype)
    return chosen._replace(distance=chosen.distance + without)


def _push_scale(lengths: Array, of_directions: Array) -> Array:
    """max_i ||x_i|| / max_j ||p_j|| over the honest i; 1 if that is 0 or not finite."""
    longest = jnp.max(of_directions)
    honest = lengths[: lengths.shape[0] - of_directions.shape[0]]
    scale = jnp.nanmax(honest) / jnp.where(longest > 0, longest, 1)
    return jnp.where((scale > 0) & jnp.isfinite(scale) & (longest > 0), scale, 1)


def _push_in_gram_space(
    rule: LinearRule | StatefulRule, search: LineSearch, state: PyTree, messages: Updates, direction: Updates
) -> Chosen:
    """The search on matrices of the workers' size; inside `in_float64`."""
    n, f, d = num_workers(messages), num_workers(direction), num_coordinates(messages)
    if isinstance(rule, LinearRule):
        weigh_round = rule.for_messages(messages).weigh
        seen, pushes = [messages], [direction]
    else:
        moves = jax.tree.map(
            lambda x, p: jnp.zeros_like(x).at[-f:].set(p.astype(x.dtype)), messages, direction
        )
        seen, moved = jax.jvp(functools.partial(rule.views, state), (messages,), (moves,))
        pushes = [jax.tree.map(lambda leaf: leaf[-f:], view) for view in moved]

    def products_of_all(view: Updates, push: Updates) -> Array:
        rows = jax.tree.map(lambda x, p: jnp.concatenate([x, p.astype(x.dtype)]), view, push)
        return gram(rows, about_origin=True)

    bases = [products_of_all(view, push) for view, push in zip(seen, pushes, strict=True)]
    pushed = jnp.zeros((n, f), np.float64).at[n - f + np.arange(f), np.arange(f)].set(1)
    lengths = jnp.sqrt(jnp.diagonal(bases[0]))
    along = jnp.concatenate([jnp.zeros(n), jnp.ones(f)])
    norm = jnp.sqrt(jnp.maximum(dot(along, dot(bases[0], along)), 0))

    # A message that is not finite stays so whatever the push, and has no part in the others' products.
    valid = [valid_workers(base)[:n] for base in bases]
    bases = [without_invalid(base) for base in bases]

    def component(tau: Array) -> Array:
        sent = jnp.concatenate([jnp.eye(n, dtype=np.float64), tau * pushed], axis=1)
        products = [
            jnp.where(there[:, None] & there[None, :], dot(dot(sent, base), sent.T), jnp.nan)
            for base, there in zip(bases, valid, strict=True)
        ]
        weights = weigh_round(products[0]) if isinstance(rule, LinearRule) else rule.weigh(state, products, d)
        coefficients = dot(weights, sent)
        return dot(coefficients, dot(bases[0], along)) / jnp.where(norm > 0, norm, 1)

    dtype = common_dtype(messages)
    chosen = _furthest(component, _push_scale(lengths[:n], lengths[n:]), search, dtype)
    return Chosen(chosen.factor.astype(dtype), chosen.distance.astype(dtype))


def _checked(aggregator: Aggregator | None) -> Aggregator:
    if not callable(aggregator):
        raise ValueError(
            f"aggregator is {aggregator!r}; an adaptive attack needs the rule of the server, a function from "
            "leaves [n, ...] to [...]."
        )
    return aggregator


def _adaptive(family: str, aggregator: Aggregator | None, search: LineSearch | None) -> Attack:
    rule = _checked(aggregator)

    def attack(key: Array, honest: Updates, num_byzantine: int) -> Updates:
        del key
        return repeat(_best(_FAMILIES[family], rule, honest, num_byzantine, search)[1], num_byzantine)

    return attack


def _best(
    family: _Family, rule: Aggregator, honest: Updates, num_byzantine: int, search: LineSearch | None
) -> tuple[Chosen, Aggregate]:
    """The best factor, and the message it makes."""
    if isinstance(rule, LinearRule):
        rule = rule.for_messages(honest)
    wide = _widened(honest)
    mean = honest_mean(wide)
    p = family.direction(wide, mean)
    start = family.start(mean)

    def message(tau: Array) -> Aggregate:
        return _shifted(start, tau, p, honest)

    leaves = jax.tree.leaves(wide)
    dtype = functools.reduce(jnp.promote_types, [leaf.dtype for leaf in leaves])
    largest = functools.reduce(
        jnp.maximum, [jnp.max(jnp.abs(leaf), initial=0) for leaf in jax.tree.leaves(p)]
    )
    largest = spread.largest(largest).astype(dtype)
    rows = jax.tree.map(functools.partial(_basis, largest), wide, mean, p)
    # Gram space needs to know that G is made of inner products, and about which centre.
    if isinstance(rule, LinearRule) and rule.inner_products in (gram, gram_about_origin, only_validity):
        check_tolerance(num_workers(honest) + num_byzantine, rule.num_byzantine)
        find = functools.partial(_in_gram_space, family, rule, num_byzantine, search or IN_GRAM_SPACE)
        chosen = batched_in_float64(find)(rows, largest)
    else:
        scale = batched_in_float64(_scale_of)(rows, largest)
        search = search or DIRECT
        size = num_coordinates(honest)

        def deviation(step: int) -> Callable[[Array], Array]:
            def some(leaf: Array) -> Array:
                return leaf if step == 1 else leaf.reshape(-1)[::step]

            def some_of_all(leaf: Array) -> Array:
                return leaf if step == 1 else as_rows(jnp.asarray(leaf))[:, ::step]

            seen = jax.tree.map(some_of_all, honest)
            mean_seen, start_seen, p_seen = (jax.tree.map(some, tree) for tree in (mean, start, p))
            send = functools.partial(_shifted, start_seen, direction=p_seen, honest=seen)
            return functools.partial(_half_deviation, rule, num_byzantine, seen, mean_seen, send)

        step = -(-size // search.coordinates) if isinstance(rule, CoordinatewiseRule) else 1
        if step > 1:
            spread.refuse(f"An adaptive attack on a coordinate-wise rule samples the {size} coordinates")
        chosen = _line_search(deviation(step), scale, family.fixed, search, dtype)
        if step > 1:
            factors = jnp.stack([chosen.factor, *(_like(factor, scale) for factor in family.fixed)])
            distances = lax.map(deviation(1), factors)
            best = argmax(jnp.where(jnp.isfinite(distances), distances, -jnp.inf))
            chosen = Chosen(factors[best], distances[best])
        chosen = chosen._replace(distance=_in_range(chosen.distance * (2 * math.sqrt(size)), dtype))
    return chosen, message(chosen.factor)


def _basis(largest: Array, honest: Array, mean: Array, p: Array) -> Array:
    """The rows y_1, ..., y_h, p / largest and mean of one leaf, halved: y_i may be twice the largest float.

    p has its largest entry brought to 1, since its square may be too small for float32.
    """
    unit = jnp.where(largest > 0, largest, 1).astype(p.dtype)
    return jnp.concatenate([honest / 2 - mean / 2, (p / unit)[None] / 2, mean[None] / 2])


def _products(rows: Updates) -> Array:
    """The inner products of the basis, [h + 2, h + 2] in float64."""
    return 4 * gram(rows, about_origin=True)


def _scale(products: Array, largest: Array) -> Array:
    """max(1, max_i ||y_i|| / ||p||); 1 if p = 0."""
    h = products.shape[0] - 2
    length = largest * jnp.sqrt(products[h, h])
    radius = jnp.sqrt(jnp.max(jnp.diagonal(products)[:h]))
    scale = jnp.where(length > 0, radius / jnp.where(length > 0, length, 1), 1)
    # A comparison with NaN, of messages that are not finite, is false.
    return jnp.where(scale > 1, scale, 1)


def _scale_of(rows: Updates, largest: Array) -> Array:
    return _in_range(_scale(_products(rows), largest.astype(np.float64)), largest.dtype)


def _in_gram_space(
    family: _Family, rule: LinearRule, num_byzantine: int, search: LineSearch, rows: Updates, largest: Array
) -> Chosen:
    """The search for a linear rule, on matrices of the workers' size; inside `in_float64`."""
    products = _products(rows)
    dtype, largest = largest.dtype, largest.astype(np.float64)
    h = products.shape[0] - 2
    p, mean = h, h + 1
    if rule.inner_products is gram_about_origin:
        # x_i = y_i + mean.
        centred = jnp.eye(h + 2, dtype=np.float64).at[:h, mean].set(1)
        about = dot(dot(centred, products), centred.T)
    else:
        # The centre is free: with the mean as origin nothing cancels.
        about = products.at[mean, :].set(0).at[:, mean].set(0)
    sender = np.minimum(np.arange(h + num_byzantine), h)

    def distance(tau: Array) -> Array:
        s = (family.offset + tau) * largest
        cross = s * about[p, :h] + about[mean, :h]
        square = s**2 * about[p, p] + 2 * s * about[p, mean] + about[mean, mean]
        of_senders = jnp.block([[about[:h, :h], cross[:, None]], [cross[None, :], square[None, None]]])
        weights = rule.weigh(of_senders[sender[:, None], sender[None, :]])
        # The aggregate less the mean: sum_i w_i y_i + (sum of malicious w) s p + (sum of all w - 1) mean.
        ends = jnp.stack([s * jnp.sum(weights[h:]), jnp.sum(weights) - 1])
        coefficients = jnp.concatenate([weights[:h], ends])
        return jnp.sqrt(jnp.maximum(dot(coefficients, dot(products, coefficients)), 0))

    chosen = _line_search(distance, _scale(products, largest), family.fixed, search, dtype)
    return Chosen(chosen.factor.astype(dtype), _in_range(chosen.distance, dtype))


def _half_deviation(
    rule: Aggregator,
    num_byzantine: int,
    honest: Updates,
    mean: Aggregate,
    message: Callable[[Array], Aggregate],
    tau: Array,
) -> Array:
    """D(tau) / (2 sqrt(d)), by a call of the rule: in the range of float32 whatever the messages are."""
    malicious = repeat(message(tau), num_byzantine)
    messages = jax.tree.map(lambda x, z: jnp.concatenate([jnp.asarray(x), z]), honest, malicious)

    def root_mean_square(aggregate: Aggregate, mean: Aggregate) -> Array:
        def squares(a: Array, m: Array) -> Array:
            return jnp.sum((a.astype(np.float64) / 2 - m.astype(np.float64) / 2) ** 2)

        size = spread.num_coordinates(sum(leaf.size for leaf in jax.tree.leaves(mean)))
        total = functools.reduce(jnp.add, jax.tree.leaves(jax.tree.map(squares, aggregate, mean)))
        return jnp.sqrt(spread.total(total) / max(size, 1)).astype(tau.dtype)

    return batched_in_float64(root_mean_square)(rule(messages), mean)


def _line_search(
    distance: Callable[[Array], Array],
    scale: Array,
    fixed: tuple[float, ...],
    search: LineSearch,
    dtype: Any,
) -> Chosen:
    """The tau of the largest distance, in the dtype of `scale`; what is tried are numbers of `dtype`.

    One tau after the other: the rule is at work long enough, and all together would take more memory.
    """

    def factors(values: Array) -> Array:
        # What is evaluated is what is sent.
        return _in_range(values, dtype).astype(scale.dtype)

    usual = _like(np.array([0.0, *fixed]), scale)
    grid = factors(jnp.concatenate([usual, scale * _like(search.grid(), scale)]))
    # The grid goes block by block, as the zooms do: the rule is then compiled once.
    num_blocks, block = search.blocks(len(fixed))
    blocks = jnp.pad(grid, (0, num_blocks * block - grid.shape[0]), mode="edge").reshape(num_blocks, block)
    num_steps = num_blocks + search.zooms

    def step(index: Array, found: _Points) -> _Points:
        zoom = factors(found.ascending().halfway(search.peaks, block))
        taus = jnp.where(index < num_blocks, blocks[jnp.minimum(index, num_blocks - 1)], zoom)
        values = lax.map(distance, taus)
        values = jnp.where(jnp.isfinite(values), values, -jnp.inf)
        return _Points(found.taus.at[index].set(taus), found.values.at[index].set(values))

    nothing = jnp.full((num_steps, block), jnp.inf, scale.dtype)
    found = lax.fori_loop(0, num_steps, step, _Points(nothing, -nothing)).ascending()
    best = argmax(found.values)
    any_finite = found.values[best] > -jnp.inf
    return Chosen(
        jnp.where(any_finite, found.taus[best], _like(fixed[-1], scale)),
        jnp.where(any_finite, found.values[best], jnp.nan),
    )


class _Points(NamedTuple):
    """Factors and their distances: -inf for one that is not finite, and beside an infinite factor."""

    taus: Array
    values: Array

    def ascending(self) -> _Points:
        """In order of the factors, [k], the infinite ones last. Of equal factors one is left."""
        taus, values = self.taus.ravel(), self.values.ravel()
        order = jnp.argsort(taus, stable=True)
        taus, values = taus[order], values[order]
        again = jnp.concatenate([jnp.zeros(1, bool), taus[1:] == taus[:-1]])
        taus, values = jnp.where(again, jnp.inf, taus), jnp.where(again, -jnp.inf, values)
        order = jnp.argsort(taus, stable=True)
        return _Points(taus[order], values[order])

    def halfway(self, num_peaks: int, count: int) -> Array:
        """Of points in order, the middles of the `count` most promising intervals: around peaks, then others.

        Of a plateau the first point is the peak. If there are too few intervals, the first point comes again.
        """
        taus, values = self
        nothing = jnp.full(1, -jnp.inf, values.dtype)
        before, after = jnp.concatenate([nothing, values[:-1]]), jnp.concatenate([values[1:], nothing])
        heights, top = lax.top_k(
            jnp.where((values > before) & (values >= after), values, -jnp.inf), num_peaks
        )
        peak = jnp.zeros(taus.shape, bool).at[top].max(heights > -jnp.inf)
        left, right = taus[:-1], taus[1:]
        ratio = jnp.where(left > 0, right / jnp.where(left > 0, left, 1), 2)
        promise = jnp.where(peak[:-1] | peak[1:], jnp.inf, jnp.maximum(values[:-1], values[1:]) * ratio)
        # Beyond the largest factor there is nothing.
        promise, chosen = lax.top_k(jnp.where(jnp.isfinite(right), promise, -jnp.inf), count)
        middle = left[chosen] + (right[chosen] - left[chosen]) / 2
        return jnp.where(promise > -jnp.inf, middle, taus[0])


def _in_range(values: Array, dtype: Any) -> Array:
    """The values, at least 0 or NaN, in another dtype; those beyond its range become the largest it has."""
    return jnp.minimum(values, float(jnp.finfo(dtype).max)).astype(dtype)


def _like(values: Any, other: Array) -> Array:
    return jnp.asarray(values, other.dtype)
