"""One round of CafCor as a pure function: Algorithm 1 of the paper.

Workers 0..h-1 are honest, h..n-1 malicious (h = n - f). All randomness of round t comes from fold_in(key, t),
and the pairs' secrets from the key alone, so a run is a function of its key and a resumed one is the same to
the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from cafcor_jax import clipping, grid, noise, secrets, spread
from cafcor_jax.aggregators import Judged, LinearRule, StatefulRule
from cafcor_jax.attacks.adaptive import AgainstRound, best_push
from cafcor_jax.attacks.hidden import ProtocolAttack, Push
from cafcor_jax.attacks.labels import LabelAttack
from cafcor_jax.attacks.vectors import honest_mean
from cafcor_jax.columns import finite_workers, num_coordinates, num_workers
from cafcor_jax.privacy import PrivacyPlan
from cafcor_jax.types import Aggregate, Aggregator, Array, Attack, PyTree, Updates

# Honest workers whose gradients are computed together on an accelerator: bounds the memory.
_WORKERS_AT_ONCE = 32


class Data(NamedTuple):
    """The honest workers' data, padded to the largest worker's size m."""

    images: Array  # uint8 [h, m, ...]
    labels: Array  # int32 [h, m]
    sizes: Array  # int32 [h]


class State(NamedTuple):
    """What the next round needs."""

    params: PyTree
    momentum: PyTree  # leaves [h, ...]; [n, ...] if the malicious workers keep to the protocol too
    opt_state: optax.OptState
    server: PyTree  # what a rule with a memory remembers; () for others
    round: Array  # int32: the round to come


class Info(NamedTuple):
    """What is worth knowing of a round."""

    loss: Array  # mean over honest workers' batches
    gradient_norm: Array  # mean before clipping
    clipped: Array  # fraction of gradients that clipping changed
    deviation: Array  # distance of the aggregate from the mean of the honest messages
    honest_weight: Array  # total weight of honest workers in the aggregate; NaN for rules without weights
    weights: Array  # [n]; NaN for rules without weights
    not_finite: Array  # how many messages were not finite; with more than f the result is not robust
    flagged: Array  # [n] booleans: who broke the law of honest noise; nobody for rules that know none
    law_fits: Array  # whether the messages can follow that law; if not, it was not used


class Federation(NamedTuple):
    """A federation as a pair of pure functions."""

    init: Callable[[PyTree], State]
    """params -> state."""
    step: Callable[[Array, State, Data], tuple[State, Info]]
    """(key, state, data) -> (state, info): one round."""


class Layout(NamedTuple):
    """How a round on many devices gets from workers to columns, and back to parameters."""

    gradients: Callable[..., clipping.Clipped]
    """As `honest_gradients`: every honest worker's gradient, or the columns of it that are at hand."""
    like_params: Callable[[Aggregate], Aggregate]
    """From the aggregate to what the optimizer adds to `State.params`."""


class _Streams(NamedTuple):
    """Independent streams of randomness of a run."""

    batches: Array
    pairs: Array
    own: Array
    attack: Array


def _streams(key: Array) -> _Streams:
    # With Threefry split(key, k)[i] is fold_in(key, i): nothing else may fold small numbers into the key.
    return _Streams(*jax.random.split(key, len(_Streams._fields)))


def federation(
    *,
    loss_fn: clipping.LossFn,
    plan: PrivacyPlan,
    aggregator: Aggregator | StatefulRule,
    attack: Attack | AgainstRound,
    optimizer: optax.GradientTransformation,
    momentum: float,
    batch_size: int,
    examples: clipping.ExamplesFn | None = None,
    noise_mode: str = "pairwise",
    grid_bits: int | None = None,
    augment: Callable[[Array, Array], Array] | None = None,
    layout: Layout | None = None,
) -> Federation:
    """Builds a federation.

    Args:
      loss_fn: (params, images, labels) -> mean loss of a batch.
      plan: the privacy plan; the noise is drawn from it, and the accountant reads the same object.
      aggregator: the server's rule; one with a state is applied round after round.
      attack: what the malicious workers send.
      optimizer: the server's step, on the aggregate as if it were a gradient.
      momentum: beta of the workers' momentum.
      batch_size: b, drawn by every honest worker in every round as the plan says; at the example level it
        must be the plan's.
      examples: what the model knows of single examples, which makes the example level much faster.
      noise_mode: one of `noise.MODES`: how correlated noise is drawn.
      grid_bits: put gradients and noise on the grid of step 2^-bits (`grid.py`); None for float32.
      augment: (key, images [b, ...]) -> images, on training batches.
      layout: where gradients and parameters are; None for whole ones, on one device.

    Returns:
      The functions init and step.
    """
    layout = layout or Layout(honest_gradients, lambda aggregate: aggregate)
    if noise_mode not in noise.MODES:
        raise ValueError(f"noise_mode is {noise_mode!r}; it must be one of {', '.join(noise.MODES)}.")
    if noise_mode == "independent" and plan.sigma_cor > 0:
        raise ValueError(
            "noise_mode is 'independent', but the plan needs correlated noise "
            f"(sigma_cor = {plan.sigma_cor:g}): use 'pairwise' or 'projected'."
        )
    if plan.level == "example" and batch_size != plan.batch_size:
        raise ValueError(
            f"batch_size is {batch_size}, and the plan counts with batches of {plan.batch_size}: it must be "
            "the same."
        )
    if grid_bits is not None and noise_mode == "projected":
        raise ValueError("noise_mode is 'projected', which has no grid: use 'pairwise'.")
    if isinstance(attack, AgainstRound) and not isinstance(aggregator, StatefulRule):
        raise ValueError("An attack against the rule of a round needs a rule with a state.")
    n, f = plan.num_workers, plan.num_byzantine
    h = n - f
    # How many workers add noise and keep a momentum: malicious ones only if that is how they hide.
    senders = n if isinstance(attack, ProtocolAttack) else h
    clipped_gradient = clipping.BY_LEVEL[plan.level](loss_fn, plan.clip_norm, examples)
    raw_gradient = clipping.user_level(loss_fn, math.inf)

    def noise_rows(key: Array, round_index: Array, size: int) -> Array:
        """The noise of those who keep to the protocol in one round, [senders, d]."""
        streams = _streams(key)
        first = spread.first_column(size)
        rows = jnp.zeros((senders, size))
        if plan.sigma_ind > 0:
            own_keys = jax.random.split(streams.own, n)[:senders]
            rows = rows + noise.independent(own_keys, round_index, size, plan.sigma_ind, first=first)
        if plan.sigma_cor > 0 and noise_mode == "pairwise":
            pair_keys = secrets.key_matrix(streams.pairs, n)
            drawn = noise.pairwise(pair_keys, round_index, size, plan.sigma_cor, plan.graph, first=first)
            rows = rows + drawn[:senders]
        if plan.sigma_cor > 0 and noise_mode == "projected":
            drawn = noise.projected(
                streams.pairs, n, round_index, size, plan.sigma_cor, plan.graph, first=first
            )
            rows = rows + drawn[:senders]
        return spread.without_padding(rows)

    def on_grid(key: Array, round_index: Array, gradients: Updates, bits: int) -> Updates:
        """Gradients and noise as whole multiples of 2^-bits, summed as integers."""
        streams = _streams(key)
        flat = jnp.concatenate([leaf.reshape(senders, -1) for leaf in jax.tree.leaves(gradients)], axis=1)
        size = flat.shape[1]
        first = spread.first_column(size)
        grid.check_plan(plan, bits, spread.num_coordinates(size))
        total = grid.to_grid_toward_zero(flat, bits)
        own_keys = jax.random.split(streams.own, n)[:senders]
        total = total + grid.independent(own_keys, round_index, size, plan.sigma_ind, bits, first=first)
        if plan.sigma_cor > 0:
            pair_keys = secrets.key_matrix(streams.pairs, n)
            rows = grid.pairwise(pair_keys, round_index, size, plan.sigma_cor, bits, plan.graph, first=first)
            total = total + rows[:senders]
        one = jax.tree.map(lambda leaf: leaf[0], gradients)
        return noise.like(one, grid.to_float(spread.without_padding(total), bits))

    def next_momentum(key: Array, state: State, gradients: Updates) -> Updates:
        """m_0 = 0, then m_t = beta m_{t-1} + (1 - beta) (g_t + noise)."""

        def later(_: None) -> Updates:
            noisy = gradients
            if grid_bits is not None:
                noisy = on_grid(key, state.round, gradients, grid_bits)
            elif plan.sigma_ind > 0 or plan.sigma_cor > 0:
                one = jax.tree.map(lambda leaf: leaf[0], gradients)
                size = sum(leaf.size for leaf in jax.tree.leaves(one))
                noises = noise.like(one, noise_rows(key, state.round, size))
                noisy = jax.tree.map(jnp.add, gradients, noises)
            return jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, state.momentum, noisy)

        return lax.cond(state.round == 0, lambda _: state.momentum, later, None)

    def pushed_messages(key: Array, state: State, gradients: Updates, push: Push) -> Updates:
        """What all workers send, leaves [n, ...], where malicious ones do as they should but for a push."""
        assert isinstance(attack, ProtocolAttack)
        if attack.factor is not None:
            return next_momentum(key, state, _joined(gradients, push.gradients(attack.factor)))
        messages = next_momentum(key, state, _joined(gradients, push.start))
        # Round 0 sends no gradient.
        scale = jnp.where(state.round == 0, 0, 1 - momentum)
        direction = jax.tree.map(lambda leaf: (scale * leaf).astype(leaf.dtype), push.direction)
        factor = best_push(aggregator, state.server, messages, direction).factor
        return jax.tree.map(lambda m, u: m.at[h:].add((factor * u).astype(m.dtype)), messages, direction)

    def malicious_messages(key: Array, state: State, data: Data, honest: Updates) -> Updates:
        """What the malicious workers send, leaves [f, ...]."""
        streams = _streams(key)
        seen = honest
        if isinstance(attack, LabelAttack):
            seen = layout.gradients(
                # The very batches of the honest workers, unless those are Poisson samples.
                jax.random.fold_in(streams.batches, state.round),
                state.params,
                data._replace(labels=attack.poison(data.labels)),
                clipped_gradient=raw_gradient,
                batch_size=batch_size,
                augment=augment,
            ).gradient
        attack_key = jax.random.fold_in(streams.attack, state.round)
        if not isinstance(attack, AgainstRound):
            return attack(attack_key, seen, f)
        assert isinstance(aggregator, StatefulRule)  # checked above
        rule = aggregator.this_round(state.server, num_coordinates(seen))
        return attack.make(rule)(attack_key, seen, f)

    def init(params: PyTree) -> State:
        def zeros(workers: int) -> Updates:
            return jax.tree.map(lambda leaf: jnp.zeros((workers, *leaf.shape), leaf.dtype), params)

        server = aggregator.init(zeros(n)) if isinstance(aggregator, StatefulRule) else ()
        return State(params, zeros(senders), optimizer.init(params), server, jnp.int32(0))

    def step(key: Array, state: State, data: Data) -> tuple[State, Info]:
        if plan.level == "example" and data.labels.shape[1] < (plan.samples_per_worker or 0):
            raise ValueError(
                f"the workers have at most {data.labels.shape[1]} examples, and the plan counts with at "
                f"least {plan.samples_per_worker}."
            )
        streams = _streams(key)
        clipped = layout.gradients(
            jax.random.fold_in(streams.batches, state.round),
            state.params,
            data,
            clipped_gradient=clipped_gradient,
            batch_size=batch_size,
            largest_batch=plan.largest_batch if plan.sampling == "poisson" else None,
            augment=augment,
        )
        gradients = clipped.gradient
        if f and isinstance(attack, ProtocolAttack):
            attack_key = jax.random.fold_in(streams.attack, state.round)
            sent = pushed_messages(key, state, gradients, attack.push(attack_key, gradients, f, state.round))
        else:
            sent = next_momentum(key, state, gradients)
        honest = jax.tree.map(lambda leaf: leaf[:h], sent)
        messages = sent
        if f and senders < n:
            messages = _joined(sent, malicious_messages(key, state, data, honest))
        judged, server = judge(aggregator, state.server, messages)
        aggregate, weights = judged.aggregate, judged.weights
        for_params = layout.like_params(aggregate)
        updates, opt_state = optimizer.update(for_params, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        info = Info(
            loss=clipped.loss.mean(),
            gradient_norm=clipped.norm.mean(),
            clipped=clipped.clipped.mean(),
            deviation=spread.norm(jax.tree.map(jnp.subtract, aggregate, honest_mean(honest))),
            honest_weight=weights[:h].sum(),
            weights=weights,
            not_finite=jnp.sum(~finite_workers(messages), dtype=jnp.int32),
            flagged=judged.flagged,
            law_fits=judged.law_fits,
        )
        return State(params, sent, opt_state, server, state.round + 1), info

    return Federation(init, step)


def honest_gradients(
    key: Array,
    params: PyTree,
    data: Data,
    *,
    clipped_gradient: Callable[..., clipping.Clipped],
    batch_size: int,
    largest_batch: int | None = None,
    augment: Callable[[Array, Array], Array] | None = None,
) -> clipping.Clipped:
    """Every honest worker's clipped gradient of its own batch, with leaves [h, ...].

    With a `largest_batch` batches are Poisson samples of that size at most, of `batch_size` on average.
    """
    return gradients_of(
        jax.random.split(key, data.labels.shape[0]),
        params,
        data,
        clipped_gradient=clipped_gradient,
        batch_size=batch_size,
        largest_batch=largest_batch,
        augment=augment,
    )


def gradients_of(
    worker_keys: Array,
    params: PyTree,
    data: Data,
    *,
    clipped_gradient: Callable[..., clipping.Clipped],
    batch_size: int,
    largest_batch: int | None = None,
    augment: Callable[[Array, Array], Array] | None = None,
) -> clipping.Clipped:
    """`honest_gradients` of the workers whose keys and data are given, [rows]."""

    def worker(inputs: tuple[Array, Data]) -> clipping.Clipped:
        worker_key, own = inputs
        batch_key, augment_key = jax.random.split(worker_key)
        capacity = own.labels.shape[0]
        if largest_batch is None:
            chosen = sample_without_replacement(batch_key, capacity, own.sizes, batch_size)
            poisson = {}
        else:
            chosen, present = sample_poisson(batch_key, capacity, own.sizes, batch_size, largest_batch)
            poisson = {"present": present, "expected_size": batch_size}
        images = own.images[chosen]
        if augment is not None:
            images = augment(augment_key, images)
        return clipped_gradient(params, images, own.labels[chosen], **poisson)

    inputs = (worker_keys, data)
    # On a CPU one worker after the other keeps the cores busy and its arrays in the cache.
    if jax.default_backend() == "cpu":
        return lax.map(worker, inputs)
    return lax.map(worker, inputs, batch_size=min(worker_keys.shape[0], _WORKERS_AT_ONCE))


def _joined(first: Updates, last: Updates) -> Updates:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, last)


def judge(aggregator: Aggregator | StatefulRule, state: PyTree, messages: Updates) -> tuple[Judged, PyTree]:
    """Applies a rule; a rule that is not linear has weights of NaN.

    Returns:
      The aggregate with every worker's weight, and the state for the next round.
    """
    if isinstance(aggregator, StatefulRule):
        return aggregator.apply(state, messages)
    n = num_workers(messages)
    if isinstance(aggregator, LinearRule):
        aggregate, weights = aggregator.with_weights(messages)
    else:
        aggregate, weights = aggregator(messages), jnp.full(n, jnp.nan)
    return Judged(aggregate, weights, jnp.zeros(n, bool), jnp.asarray(True)), state


def sample_without_replacement(key: Array, capacity: int, size: Array, batch_size: int) -> Array:
    """Draws `batch_size` different indices below `size`, uniformly.

    Args:
      key: a typed key.
      capacity: the static upper bound of size.
      size: how many items there are; at least batch_size.
      batch_size: b.

    Returns:
      [b] indices.
    """
    # The items with the b smallest of i.i.d. random numbers are a uniform sample.
    scores = jax.random.bits(key, (capacity,), jnp.uint32) >> 1
    scores = jnp.where(jnp.arange(capacity) < size, scores, jnp.uint32(0xFFFFFFFF))
    return jnp.argsort(scores)[:batch_size]


def sample_poisson(
    key: Array, capacity: int, size: Array, batch_size: int, largest_batch: int
) -> tuple[Array, Array]:
    """Takes each index below `size` with chance batch_size / size, by itself.

    Args:
      key: a typed key.
      capacity: the static upper bound of size.
      size: how many items there are; at least batch_size.
      batch_size: b, the expected number of items.
      largest_batch: the most items that are returned; further ones are dropped.

    Returns:
      Indices, and which of them are really in the batch, both [places]; places is largest_batch, or somewhat
      more to be a multiple of what is computed at once, or capacity.
    """
    step = clipping.EXAMPLES_AT_ONCE
    places = min(-(-largest_batch // step) * step, capacity)
    # A hair less than the chance that the accountant counts with: float32 may round up.
    chance = batch_size / size.astype(jnp.float32) * (1 - 1e-6)
    below = (chance * 2.0**32).astype(jnp.uint32)
    taken = (jax.random.bits(key, (capacity,), jnp.uint32) < below) | (batch_size >= size)
    taken = taken & (jnp.arange(capacity) < size)
    chosen = jnp.argsort(~taken, stable=True)[:places]
    return chosen, taken[chosen]


def random_flip(key: Array, images: Array) -> Array:
    """Flips each image [b, h, w, c] left to right with probability one half."""
    flip = jax.random.bernoulli(key, shape=(images.shape[0], 1, 1, 1))
    return jnp.where(flip, images[:, :, ::-1], images)
