"""One round of CafCor as a pure function: Algorithm 1 of the paper.

Workers 0..h-1 are honest, h..n-1 malicious (h = n - f). All randomness of round t comes from fold_in(key, t),
and the pairs' secrets from the key alone, so a run is a function of its key and a resumed one is the same to
the bit.

`federation` does all of it at once. `one_worker` and `server_step` are the same round in parts, for workers
and a server that are apart.
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


class WorkerKeys(NamedTuple):
    """The workers' own randomness, a row each; a worker that is apart has its row alone."""

    batches: Array  # typed keys [h]: of the examples it draws
    own: Array  # typed keys [n]: of its independent noise
    pairs: Array  # typed keys [n, n], symmetric: of the noise it shares


class ServerState(NamedTuple):
    """What the server keeps from one round to the next."""

    params: PyTree
    opt_state: optax.OptState
    memory: PyTree  # what a rule with a memory remembers; () for others


class Worker(NamedTuple):
    """What one worker does in a round, as pure functions; `keys` is its own row."""

    gradient: Callable[[WorkerKeys, Array, PyTree, Data], clipping.Clipped]
    """(keys, round, params, own data) -> the clipped gradient of its batch; `own data` has no worker axis."""
    noise: Callable[[WorkerKeys, Array, int], Array]
    """(keys, round, size) -> its noise, [size]; on the grid in steps."""
    momentum: Callable[[WorkerKeys, Array, PyTree, PyTree], PyTree]
    """(keys, round, momentum, gradient) -> the next momentum, which is what it sends."""


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
    keys: WorkerKeys | None = None,
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
      keys: what the workers drew and agreed on for themselves; by default all of it comes from the key of the
        run.

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
    if keys is not None and noise_mode == "projected":
        raise ValueError("noise_mode is 'projected', which uses no keys of workers: use 'pairwise'.")
    if isinstance(attack, AgainstRound) and not isinstance(aggregator, StatefulRule):
        raise ValueError("An attack against the rule of a round needs a rule with a state.")
    n, f = plan.num_workers, plan.num_byzantine
    h = n - f
    # How many workers add noise and keep a momentum: malicious ones only if that is how they hide.
    senders = n if isinstance(attack, ProtocolAttack) else h
    clipped_gradient = clipping.BY_LEVEL[plan.level](loss_fn, plan.clip_norm, examples)
    raw_gradient = clipping.user_level(loss_fn, math.inf)

    def given(keys: Array) -> Array:
        # Without the barrier the compiler takes them for constants and works for minutes on what follows.
        return lax.optimization_barrier(keys)

    def batch_keys(key: Array, round_index: Array) -> Array:
        """The honest workers' keys of a round's batches, [h]."""
        if keys is not None:
            return noise.fold_in_keys(given(keys.batches), round_index)
        return jax.random.split(jax.random.fold_in(_streams(key).batches, round_index), h)

    def own_keys(key: Array) -> Array:
        return (given(keys.own) if keys is not None else jax.random.split(_streams(key).own, n))[:senders]

    def pair_keys(key: Array) -> Array:
        return given(keys.pairs) if keys is not None else secrets.key_matrix(_streams(key).pairs, n)

    def noise_rows(key: Array, round_index: Array, size: int) -> Array:
        """The noise of those who keep to the protocol in one round, [senders, d]."""
        streams = _streams(key)
        first = spread.first_column(size)
        rows = jnp.zeros((senders, size))
        if plan.sigma_ind > 0:
            rows = rows + noise.independent(own_keys(key), round_index, size, plan.sigma_ind, first=first)
        if plan.sigma_cor > 0 and noise_mode == "pairwise":
            drawn = noise.pairwise(pair_keys(key), round_index, size, plan.sigma_cor, plan.graph, first=first)
            rows = rows + drawn[:senders]
        if plan.sigma_cor > 0 and noise_mode == "projected":
            drawn = noise.projected(
                streams.pairs, n, round_index, size, plan.sigma_cor, plan.graph, first=first
            )
            rows = rows + drawn[:senders]
        return spread.without_padding(rows)

    def on_grid(key: Array, round_index: Array, gradients: Updates, bits: int) -> Updates:
        """Gradients and noise as whole multiples of 2^-bits, summed as integers."""
        flat = _flat(gradients, senders)
        size = flat.shape[1]
        first = spread.first_column(size)
        grid.check_plan(plan, bits, spread.num_coordinates(size))
        total = grid.to_grid_toward_zero(flat, bits)
        total = total + grid.independent(own_keys(key), round_index, size, plan.sigma_ind, bits, first=first)
        if plan.sigma_cor > 0:
            rows = grid.pairwise(
                pair_keys(key), round_index, size, plan.sigma_cor, bits, plan.graph, first=first
            )
            total = total + rows[:senders]
        one = jax.tree.map(lambda leaf: leaf[0], gradients)
        return noise.like(one, grid.to_float(spread.without_padding(total), bits))

    def noisy_gradients(key: Array, state: State, gradients: Updates) -> Updates:
        if grid_bits is not None:
            return on_grid(key, state.round, gradients, grid_bits)
        if not (plan.sigma_ind > 0 or plan.sigma_cor > 0):
            return gradients
        one = jax.tree.map(lambda leaf: leaf[0], gradients)
        size = sum(leaf.size for leaf in jax.tree.leaves(one))
        noises = noise.like(one, noise_rows(key, state.round, size))
        return jax.tree.map(jnp.add, gradients, noises)

    def next_momentum(key: Array, state: State, gradients: Updates) -> Updates:
        return _next_momentum(
            state.round, momentum, state.momentum, lambda: noisy_gradients(key, state, gradients)
        )

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
                batch_keys(key, state.round),
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
        server = server_init(aggregator, optimizer, params, n)
        return State(params, _zeros(params, senders), server.opt_state, server.memory, jnp.int32(0))

    def step(key: Array, state: State, data: Data) -> tuple[State, Info]:
        if plan.level == "example" and data.labels.shape[1] < (plan.samples_per_worker or 0):
            raise ValueError(
                f"the workers have at most {data.labels.shape[1]} examples, and the plan counts with at "
                f"least {plan.samples_per_worker}."
            )
        streams = _streams(key)
        clipped = layout.gradients(
            batch_keys(key, state.round),
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
        before = ServerState(state.params, state.opt_state, state.server)
        after, judged = server_step(aggregator, optimizer, before, messages, like_params=layout.like_params)
        aggregate, weights = judged.aggregate, judged.weights
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
        return State(after.params, sent, after.opt_state, after.memory, state.round + 1), info

    return Federation(init, step)


def one_worker(
    index: Array | int,
    *,
    loss_fn: clipping.LossFn,
    plan: PrivacyPlan,
    momentum: float,
    batch_size: int,
    examples: clipping.ExamplesFn | None = None,
    grid_bits: int | None = None,
    augment: Callable[[Array, Array], Array] | None = None,
) -> Worker:
    """Builds what one worker of a federation does, apart from the others.

    With the same keys it sends what the `federation` of the same arguments has that worker send: the noise is
    the same to the bit, the gradient up to rounding.

    Args:
      index: its place among the n workers.
      loss_fn: as in `federation`, and so are the other arguments.
      plan: see there.
      momentum: see there.
      batch_size: see there.
      examples: see there.
      grid_bits: see there.
      augment: see there.

    Returns:
      The functions.
    """
    draw_gradient = _gradient_of_batch(
        clipped_gradient=clipping.BY_LEVEL[plan.level](loss_fn, plan.clip_norm, examples),
        batch_size=batch_size,
        largest_batch=plan.largest_batch if plan.sampling == "poisson" else None,
        augment=augment,
    )

    def gradient(keys: WorkerKeys, round_index: Array, params: PyTree, data: Data) -> clipping.Clipped:
        return draw_gradient((noise.fold_in_keys(keys.batches, round_index), data), params)

    def noise_row(keys: WorkerKeys, round_index: Array, size: int) -> Array:
        if grid_bits is not None:
            row = grid.independent(keys.own[None], round_index, size, plan.sigma_ind, grid_bits)[0]
            if plan.sigma_cor > 0:
                row = row + grid.pairwise_row(
                    keys.pairs, index, round_index, size, plan.sigma_cor, grid_bits, plan.graph
                )
            return row
        row = jnp.zeros(size)
        if plan.sigma_ind > 0:
            row = row + noise.independent(keys.own[None], round_index, size, plan.sigma_ind)[0]
        if plan.sigma_cor > 0:
            row = row + noise.pairwise_row(keys.pairs, index, round_index, size, plan.sigma_cor, plan.graph)
        return row

    def noisy(keys: WorkerKeys, round_index: Array, gradient: PyTree) -> PyTree:
        rows = jax.tree.map(lambda leaf: leaf[None], gradient)
        flat = _flat(rows, 1)
        drawn = noise_row(keys, round_index, flat.shape[1])[None]
        if grid_bits is not None:
            grid.check_plan(plan, grid_bits, flat.shape[1])
            total = grid.to_float(grid.to_grid_toward_zero(flat, grid_bits) + drawn, grid_bits)
        else:
            total = flat + drawn
        return jax.tree.map(lambda leaf: leaf[0], noise.like(gradient, total))

    def next_momentum(keys: WorkerKeys, round_index: Array, before: PyTree, gradient: PyTree) -> PyTree:
        return _next_momentum(round_index, momentum, before, lambda: noisy(keys, round_index, gradient))

    return Worker(gradient, noise_row, next_momentum)


def attack_alone(
    attack: Attack, key: Array, round_index: Array, params: PyTree, worker: Array | int, plan: PrivacyPlan
) -> PyTree:
    """What one malicious worker sends in a round if it sees no other's message.

    Args:
      attack: one of `attacks.ALONE`, which do not look at what the honest workers send.
      key: of the run, as for `Federation.step`.
      round_index: t.
      params: for their shapes.
      worker: which, from n - f to n - 1.
      plan: says n and f.

    Returns:
      Its row of what `federation` has the malicious workers send; of a `ProtocolAttack` its row of the
      gradients, before noise and momentum.
    """
    nobody = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), params)
    attack_key = jax.random.fold_in(_streams(key).attack, round_index)
    if isinstance(attack, ProtocolAttack):
        rows = attack(attack_key, nobody, plan.num_byzantine, round_index)
    else:
        rows = attack(attack_key, nobody, plan.num_byzantine)
    return jax.tree.map(lambda leaf: leaf[worker - (plan.num_workers - plan.num_byzantine)], rows)


def server_step(
    aggregator: Aggregator | StatefulRule,
    optimizer: optax.GradientTransformation,
    state: ServerState,
    messages: Updates,
    *,
    like_params: Callable[[Aggregate], Aggregate] = lambda aggregate: aggregate,
) -> tuple[ServerState, Judged]:
    """What the server does in a round: it judges the messages, leaves [n, ...], and takes a step."""
    judged, memory = judge(aggregator, state.memory, messages)
    updates, opt_state = optimizer.update(like_params(judged.aggregate), state.opt_state, state.params)
    return ServerState(optax.apply_updates(state.params, updates), opt_state, memory), judged


def server_init(
    aggregator: Aggregator | StatefulRule,
    optimizer: optax.GradientTransformation,
    params: PyTree,
    num_workers: int,
) -> ServerState:
    """The server's state before the first round."""
    memory = aggregator.init(_zeros(params, num_workers)) if isinstance(aggregator, StatefulRule) else ()
    return ServerState(params, optimizer.init(params), memory)


def _zeros(params: PyTree, workers: int) -> Updates:
    return jax.tree.map(lambda leaf: jnp.zeros((workers, *leaf.shape), leaf.dtype), params)


def _flat(updates: Updates, workers: int) -> Array:
    """Leaves [workers, ...] as rows [workers, d]."""
    return jnp.concatenate([leaf.reshape(workers, -1) for leaf in jax.tree.leaves(updates)], axis=1)


def _next_momentum(
    round_index: Array, beta: float, before: PyTree, noisy_gradient: Callable[[], PyTree]
) -> PyTree:
    """m_0 = 0, then m_t = beta m_{t-1} + (1 - beta) (g_t + noise)."""

    def later(_: None) -> PyTree:
        return jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, before, noisy_gradient())

    return lax.cond(round_index == 0, lambda _: before, later, None)


def honest_gradients(
    keys: Array,
    params: PyTree,
    data: Data,
    *,
    clipped_gradient: Callable[..., clipping.Clipped],
    batch_size: int,
    largest_batch: int | None = None,
    augment: Callable[[Array, Array], Array] | None = None,
) -> clipping.Clipped:
    """Every honest worker's clipped gradient of its own batch, with leaves [h, ...], from its own key of [h].

    With a `largest_batch` batches are Poisson samples of that size at most, of `batch_size` on average.
    """
    one = _gradient_of_batch(
        clipped_gradient=clipped_gradient, batch_size=batch_size, largest_batch=largest_batch, augment=augment
    )

    def worker(inputs: tuple[Array, Data]) -> clipping.Clipped:
        return one(inputs, params)

    h = data.labels.shape[0]
    # On a CPU one worker after the other keeps the cores busy and its arrays in the cache.
    if jax.default_backend() == "cpu":
        return lax.map(worker, (keys, data))
    return lax.map(worker, (keys, data), batch_size=min(h, _WORKERS_AT_ONCE))


def _gradient_of_batch(
    *,
    clipped_gradient: Callable[..., clipping.Clipped],
    batch_size: int,
    largest_batch: int | None,
    augment: Callable[[Array, Array], Array] | None,
) -> Callable[[tuple[Array, Data], PyTree], clipping.Clipped]:
    """((key of the batch, one worker's data), params) -> that worker's clipped gradient."""

    def worker(inputs: tuple[Array, Data], params: PyTree) -> clipping.Clipped:
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

    return worker


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
