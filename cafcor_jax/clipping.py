"""Clipped gradients of one worker's batch, at user level and at example level.

Clip(g; C) = g min(1, C / ||g||). At user level the mean gradient of the batch is clipped (Algorithm 1 of the
paper): one worker's whole data set moves it by at most 2C. At example level every example's gradient is
clipped before the mean: one example moves it by at most 2C/b.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from cafcor_jax.types import Array, PyTree

#: (params, images [b, ...], labels [b]) -> mean loss of the batch.
LossFn = Callable[[PyTree, Array, Array], Array]

# Gradients of so many examples are in memory at a time: batches of a multiple of it are the fastest.
EXAMPLES_AT_ONCE = 10


class Clipped(NamedTuple):
    """A clipped gradient and what it was before."""

    gradient: PyTree
    loss: Array
    """Mean loss of the batch."""
    norm: Array
    """Norm before clipping: of the mean gradient, or the mean of the examples' norms."""
    clipped: Array
    """1 if clipping changed it, or the fraction of examples where it did."""


class Examples(NamedTuple):
    """The gradients of a batch's examples, as a model knows them without forming each.

    What example i adds to `weighted_sum(c)` must have a norm of c_i norms_i at most, up to rounding and
    whatever the inputs: the sensitivity rests on it, not on the gradients being right.

    References:
      Goodfellow, Efficient Per-Example Gradient Computations, 2015; Bu et al., Differentially Private
        Optimization on Large Model at Small Cost, ICML 2023 (book-keeping).
    """

    losses: Array
    """Of every example, [b]."""
    norms: Array
    """Of the gradient of every example's loss, [b]; not finite where they overflow."""
    weighted_sum: Callable[[Array], PyTree]
    """c [b] -> sum_i c_i g_i, like the parameters. Of examples with c_i = 0 nothing gets in, not even NaN."""


#: (params, images [b, ...], labels [b]) -> what is known of each example.
ExamplesFn = Callable[[PyTree, Array, Array], Examples]


def _factor(norm: Array, clip_norm: float) -> Array:
    # A hair inside the ball, so that rounding cannot push the norm above C.
    limit = clip_norm * (1 - 1e-5) if math.isfinite(clip_norm) else clip_norm
    return jnp.minimum(1, limit / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))


def clip(gradient: PyTree, norm: Array, clip_norm: float) -> PyTree:
    """Scales a gradient of known norm down to at most clip_norm; a gradient that is not finite becomes 0."""
    finite = jnp.isfinite(norm)
    factor = _factor(norm, clip_norm)
    # The sensitivity bound must hold whatever the data: an overflow must not reach the message.
    return jax.tree.map(lambda leaf: jnp.where(finite, leaf * factor, 0), gradient)


def user_level(
    loss_fn: LossFn, clip_norm: float, examples: ExamplesFn | None = None
) -> Callable[[PyTree, Array, Array], Clipped]:
    """Clips the mean gradient of the batch; it has no use for `examples`."""
    del examples

    def gradient(params: PyTree, images: Array, labels: Array) -> Clipped:
        loss, mean = jax.value_and_grad(loss_fn)(params, images, labels)
        norm = optax.global_norm(mean)
        return Clipped(clip(mean, norm, clip_norm), loss, norm, (norm > clip_norm).astype(jnp.float32))

    return gradient


def example_level(
    loss_fn: LossFn, clip_norm: float, examples: ExamplesFn | None = None
) -> Callable[..., Clipped]:
    """Clips every example's gradient and returns the mean.

    The function it returns also takes batches that are not full (Poisson sampling): `present` [b] says which
    places hold an example, and the gradient is the sum over those, divided by `expected_size`.

    Args:
      loss_fn: the loss of a batch.
      clip_norm: C.
      examples: what the model knows of single examples. Without it their gradients are computed, a few at a
        time, which takes many times as long.

    Returns:
      (params, images, labels, present=None, expected_size=None) -> the clipped mean.
    """
    if examples is not None:
        return _weighted_examples(examples, clip_norm)

    def one(params: PyTree, image: Array, label: Array) -> Clipped:
        return user_level(loss_fn, clip_norm)(params, image[None], label[None])

    def gradient(
        params: PyTree,
        images: Array,
        labels: Array,
        present: Array | None = None,
        expected_size: int | None = None,
    ) -> Clipped:
        batch = labels.shape[0]
        chunk = max(k for k in range(1, EXAMPLES_AT_ONCE + 1) if batch % k == 0)

        def add(total: Clipped, part: tuple[Array, Array, Array | None]) -> tuple[Clipped, None]:
            images, labels, present = part
            clipped = jax.vmap(one, in_axes=(None, 0, 0))(params, images, labels)
            if present is not None:
                absent = ~present
                clipped = jax.tree.map(
                    lambda leaf: jnp.where(absent.reshape(-1, *[1] * (leaf.ndim - 1)), 0, leaf), clipped
                )
            return jax.tree.map(lambda t, leaf: t + leaf.sum(0), total, clipped), None

        zero = jnp.zeros(())
        start = Clipped(jax.tree.map(jnp.zeros_like, params), zero, zero, zero)
        parts = jax.tree.map(lambda leaf: leaf.reshape(-1, chunk, *leaf.shape[1:]), (images, labels, present))
        total, _ = lax.scan(add, start, parts)
        count = batch if present is None else jnp.maximum(jnp.sum(present), 1)
        mean = jax.tree.map(lambda leaf: leaf / count, total)
        size = expected_size or batch
        return mean._replace(gradient=jax.tree.map(lambda leaf: leaf / size, total.gradient))

    return gradient


def _weighted_examples(examples: ExamplesFn, clip_norm: float) -> Callable[..., Clipped]:
    def sums(params: PyTree, images: Array, labels: Array, counted: Array) -> Clipped:
        """Sums over the examples that count."""
        known = examples(params, images, labels)
        factors = jnp.where(counted & jnp.isfinite(known.norms), _factor(known.norms, clip_norm), 0)

        def over_counted(values: Array) -> Array:
            return jnp.sum(jnp.where(counted, values, 0), dtype=jnp.float32)

        values = (known.losses, known.norms, known.norms > clip_norm)
        return Clipped(known.weighted_sum(factors), *map(over_counted, values))

    def gradient(
        params: PyTree,
        images: Array,
        labels: Array,
        present: Array | None = None,
        expected_size: int | None = None,
    ) -> Clipped:
        batch = labels.shape[0]
        if present is None:
            total, count = sums(params, images, labels, jnp.ones(batch, bool)), jnp.asarray(batch)
        else:
            total, count = _over_present(sums, params, images, labels, present), jnp.sum(present)
        mean = jax.tree.map(lambda leaf: leaf / jnp.maximum(count, 1), total)
        size = expected_size or batch
        return mean._replace(gradient=jax.tree.map(lambda leaf: leaf / size, total.gradient))

    return gradient


def _over_present(
    sums: Callable[..., Clipped], params: PyTree, images: Array, labels: Array, present: Array
) -> Clipped:
    """Sums over a batch of which only the first places may hold examples: the empty rest is not computed."""
    batch = labels.shape[0]
    if jax.default_backend() != "cpu":
        return sums(params, images, labels, present)  # There one large step is better than many small ones.
    chunk = max(k for k in range(1, EXAMPLES_AT_ONCE + 1) if batch % k == 0)
    parts = jax.tree.map(lambda leaf: leaf.reshape(-1, chunk, *leaf.shape[1:]), (images, labels, present))
    last = jnp.max(jnp.where(present, jnp.arange(1, batch + 1), 0))

    def add(index: Array, total: Clipped) -> Clipped:
        part = jax.tree.map(lambda leaf: leaf[index], parts)
        return jax.tree.map(jnp.add, total, sums(params, *part))

    zero = jnp.zeros(())
    start = Clipped(jax.tree.map(jnp.zeros_like, params), zero, zero, zero)
    return lax.fori_loop(0, -(-last // chunk), add, start)


BY_LEVEL: dict[str, Callable[[LossFn, float, ExamplesFn | None], Callable[..., Clipped]]] = {
    "user": user_level,
    "example": example_level,
}
