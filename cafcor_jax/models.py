"""Models. The paper's CNN has exactly 431,080 parameters.

A convolution has two forms with the same values. `lax` is the plain one, right for GPUs and TPUs. On a CPU,
gradients of many small batches through `lax.conv` fall into a slow grouped convolution; `patches` computes
the gradients, and for many channels the output, as matrix products over 5 x 5 patches, which is several times
faster there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from cafcor_jax.clipping import Examples, ExamplesFn
from cafcor_jax.types import Array, PyTree

CONVOLUTIONS = ("patches", "lax")
_LAYOUT = ("NHWC", "HWIO", "NHWC")


class Model(NamedTuple):
    """A classifier of uint8 images as pure functions."""

    init: Callable[[Array], PyTree]
    """key -> params."""
    log_probs: Callable[[PyTree, Array], Array]
    """(params, images uint8 [b, 28, 28, 1]) -> log-probabilities [b, classes]."""
    examples: ExamplesFn | None = None
    """What is needed to clip every example's gradient without forming it, if the model knows a way."""

    def loss(self, params: PyTree, images: Array, labels: Array) -> Array:
        """The mean negative log-likelihood of a batch."""
        return jnp.mean(_losses(self.log_probs(params, images), labels))

    def evaluate(self, params: PyTree, images: Array, labels: Array, batch: int = 100) -> tuple[Array, Array]:
        """Mean loss and accuracy over a data set, computed in batches; to be jitted."""
        count = labels.shape[0]
        padding = -count % batch

        def totals(chunk: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            x, y, real = chunk
            log_probs = self.log_probs(params, x)
            loss = _losses(log_probs, y)
            hit = jnp.argmax(log_probs, axis=1) == y
            return jnp.sum(jnp.where(real, loss, 0)), jnp.sum(jnp.where(real, hit, False))

        def chunks(leaf: Array) -> Array:
            padded = jnp.pad(leaf, [(0, padding)] + [(0, 0)] * (leaf.ndim - 1))
            return padded.reshape(-1, batch, *leaf.shape[1:])

        losses, hits = lax.map(totals, (chunks(images), chunks(labels), chunks(jnp.ones(count, bool))))
        return losses.sum() / count, hits.sum() / count


def cnn(
    *, mean: float = 0.0, std: float = 1.0, num_classes: int = 10, convolution: str | None = None
) -> Model:
    """Builds the paper's CNN for 28 x 28 grey images.

    conv 20@5x5, relu, max-pool 2, conv 50@5x5, relu, max-pool 2, dense 500, relu, dense 10, log-softmax.
    Parameters start uniform in +-1/sqrt(fan-in), kernels and biases, as PyTorch's default does; the paper
    does not say.

    Args:
      mean: images in [0, 1] are normalised as (x - mean) / std.
      std: see mean.
      num_classes: outputs.
      convolution: `patches` or `lax`; by default what is fast on this backend.

    Returns:
      A model.
    """
    if convolution is None:
        convolution = "patches" if jax.default_backend() == "cpu" else "lax"
    if convolution not in CONVOLUTIONS:
        raise ValueError(f"convolution is {convolution!r}; it must be one of {', '.join(CONVOLUTIONS)}.")
    on_cpu = convolution == "patches"
    network = _Cnn(num_classes=num_classes, convolve=_convolve_patches if on_cpu else _convolve)

    def init(key: Array) -> PyTree:
        return network.init(key, jnp.zeros((1, 28, 28, 1)))["params"]

    def normalised(images: Array) -> Array:
        return (images.astype(jnp.float32) * (1 / 255) - mean) / std

    def log_probs(params: PyTree, images: Array) -> Array:
        return jnp.asarray(network.apply({"params": params}, normalised(images)))

    def examples(params: PyTree, images: Array, labels: Array) -> Examples:
        x = normalised(images)

        def total(shifts: PyTree) -> tuple[Array, tuple[Array, PyTree]]:
            variables = {"params": params, "perturbations": shifts}
            outputs, seen = network.apply(variables, x, mutable=["intermediates"])
            losses = _losses(jnp.asarray(outputs), labels)
            return jnp.sum(losses), (losses, seen["intermediates"])

        shapes = jax.eval_shape(network.init, jax.random.key(0), x)["perturbations"]
        shifts = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        # The gradient by a layer's outputs, example by example: it holds the layer's part of the gradient.
        outer, (losses, inner) = jax.grad(total, has_aux=True)(shifts)
        layers = {
            name: _layer_gradients(inner[name + _INPUTS][0], outer[name + _OUTPUTS], on_cpu)
            for name in params
        }
        norms = jnp.stack([layer.norms for layer in layers.values()])
        return Examples(
            losses=losses,
            norms=_norms(norms.T),
            weighted_sum=lambda c: {name: layer.weighted_sum(c) for name, layer in layers.items()},
        )

    return Model(init, log_probs, examples)


def _losses(log_probs: Array, labels: Array) -> Array:
    """The negative log-likelihood of every example, [b]."""
    return -jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0]


# What a layer is called in the collections that `examples` reads.
_INPUTS, _OUTPUTS = "_inputs", "_outputs"


class _Cnn(nn.Module):
    num_classes: int
    convolve: Callable[[Array, Array], Array]

    @nn.compact
    def __call__(self, x: Array) -> Array:
        def apply(layer: nn.Module, x: Array) -> Array:
            self.sow("intermediates", f"{layer.name}{_INPUTS}", x)
            return self.perturb(f"{layer.name}{_OUTPUTS}", layer(x))

        x = nn.relu(_max_pool(apply(_Conv(20, self.convolve), x)))  # relu after the pool: at a quarter
        x = nn.relu(_max_pool(apply(_Conv(50, self.convolve), x)))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(apply(_dense(500, x.shape[1]), x))
        return nn.log_softmax(apply(_dense(self.num_classes, 500), x))


class _Conv(nn.Module):
    features: int
    convolve: Callable[[Array, Array], Array]

    @nn.compact
    def __call__(self, x: Array) -> Array:
        start = _uniform(25 * x.shape[-1])
        kernel = self.param("kernel", start, (5, 5, x.shape[-1], self.features))
        return self.convolve(x, kernel) + self.param("bias", start, (self.features,))


def _dense(features: int, fan_in: int) -> nn.Dense:
    return nn.Dense(features, kernel_init=_uniform(fan_in), bias_init=_uniform(fan_in))


def _uniform(fan_in: int) -> Callable[..., Array]:
    bound = 1 / math.sqrt(fan_in)

    def init(key: Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def _max_pool(x: Array) -> Array:
    b, h, w, c = x.shape
    x = x.reshape(b, h // 2, 2, w // 2, 2, c)
    x = jnp.maximum(x[:, :, 0], x[:, :, 1])
    return jnp.maximum(x[:, :, :, 0], x[:, :, :, 1])


def _convolve(x: Array, kernel: Array) -> Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=_LAYOUT)


def _patches(x: Array, size: int) -> Array:
    """All size x size patches as vectors: [b, h', w', size * size * channels]."""
    h, w = x.shape[1] - size + 1, x.shape[2] - size + 1
    shifted = [x[:, i : i + h, j : j + w, :] for i in range(size) for j in range(size)]
    return jnp.concatenate(shifted, axis=-1)


def _row_patches(x: Array, size: int) -> Array:
    """All 1 x size patches as vectors, rows first: [h, b, w', size * channels].

    Output rows i to i + h' of a convolution see the rows of this array one after the other, so a convolution
    is `size` matrix products of what lies together in memory.
    """
    w = x.shape[2] - size + 1
    rows = x.transpose(1, 0, 2, 3)
    return jnp.concatenate([rows[:, :, j : j + w] for j in range(size)], axis=-1)


def _pad_axis(x: Array, axis: int, before: int, after: int) -> Array:
    return jnp.pad(x, [(before, after) if a == axis else (0, 0) for a in range(x.ndim)])


# Which form is the fastest for one input channel and for many was measured; all have the same values.
@jax.custom_vjp
def _convolve_patches(x: Array, kernel: Array) -> Array:
    if x.shape[-1] == 1:
        return _convolve(x, kernel)
    size = kernel.shape[0]
    rows = _row_patches(x, size)
    h = rows.shape[0] - size + 1
    by_row = kernel.reshape(size, -1, kernel.shape[-1])
    out = sum(rows[i : i + h].reshape(-1, rows.shape[-1]) @ by_row[i] for i in range(size))
    return jnp.asarray(out).reshape(h, *rows.shape[1:3], -1).transpose(1, 0, 2, 3)


def _convolve_patches_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _convolve_patches(x, kernel), (x, kernel)


def _convolve_patches_backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, kernel = saved
    size, channels = kernel.shape[0], x.shape[-1]
    h, w = g.shape[1:3]
    rows_of_g = g.transpose(1, 0, 2, 3).reshape(-1, g.shape[-1])
    if channels == 1:
        shifted = jnp.stack([x[:, i : i + h, j : j + w, 0] for i in range(size) for j in range(size)])
        to_kernel = shifted.reshape(size * size, -1) @ g.reshape(-1, g.shape[-1])
    else:
        rows = _row_patches(x, size)
        to_kernel = jnp.stack(
            [rows[i : i + h].reshape(-1, rows.shape[-1]).T @ rows_of_g for i in range(size)]
        )
    # What each output gives back to its patch, added up where patches overlap: over rows, then over columns.
    to_rows = [
        (rows_of_g @ kernel_row.T).reshape(h, -1, w, size * channels)
        for kernel_row in kernel.reshape(size, size * channels, -1)
    ]
    to_rows_of_x = sum(_pad_axis(part, 0, i, size - 1 - i) for i, part in enumerate(to_rows))
    parts = jnp.split(to_rows_of_x, size, axis=-1)
    to_x = sum(_pad_axis(part, 2, j, size - 1 - j) for j, part in enumerate(parts))
    return jnp.asarray(to_x).transpose(1, 0, 2, 3), to_kernel.reshape(kernel.shape)


_convolve_patches.defvjp(_convolve_patches_forward, _convolve_patches_backward)


class _LayerGradients(NamedTuple):
    """The gradients of a layer's kernel and bias, example by example."""

    norms: Array  # [b]
    weighted_sum: Callable[[Array], PyTree]  # [b] -> {"kernel", "bias"}


def _norms(rows: Array) -> Array:
    """The norm of every row; squares neither overflow nor vanish."""
    rows = rows.reshape(rows.shape[0], -1)
    largest = jnp.max(jnp.abs(rows), axis=1)
    scale = jnp.where(largest > 0, largest, 1)
    return scale * jnp.sqrt(jnp.sum((rows / scale[:, None]) ** 2, axis=1))


def _weighted(c: Array, rows: Array) -> Array:
    """c_i times row i, and 0 where c_i is 0, whatever is in the row."""
    c = c.reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(c > 0, c * rows, 0)


def _layer_gradients(x: Array, g: Array, on_cpu: bool) -> _LayerGradients:
    """From a layer's inputs x and the gradients g by its outputs, both [b, ...]."""
    # On GPUs and TPUs products are rounded to few bits unless told: the sum must be that of which the norms
    # were taken.
    multiply = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    if x.ndim == 2:  # dense: the outer product of x and g, and g

        def dense(c: Array) -> PyTree:
            scaled = _weighted(c, g)
            return {"kernel": multiply(_weighted(jnp.sign(c), x).T, scaled), "bias": jnp.sum(scaled, axis=0)}

        ones = jnp.ones((x.shape[0], 1))
        return _LayerGradients(_norms(jnp.concatenate([x, ones], axis=1)) * _norms(g), dense)

    size = x.shape[1] - g.shape[1] + 1

    def one(pair: tuple[Array, Array]) -> tuple[Array, Array]:
        patches = _patches(pair[0][None], size)
        by_position = pair[1].reshape(-1, g.shape[-1])
        return multiply(by_position.T, patches.reshape(-1, patches.shape[-1])), jnp.sum(by_position, axis=0)

    # On a CPU small products one after the other are three times as fast as a batched one.
    kernels, biases = lax.map(one, (x, g)) if on_cpu else jax.vmap(one)((x, g))

    def convolution(c: Array) -> PyTree:
        flat = multiply(jnp.sign(c), _weighted(c, kernels).reshape(c.shape[0], -1))
        kernel = flat.reshape(kernels.shape[1:]).T
        return {
            "kernel": kernel.reshape(size, size, x.shape[-1], g.shape[-1]),
            "bias": jnp.sum(_weighted(c, biases), axis=0),
        }

    together = jnp.stack([_norms(kernels), _norms(biases)], axis=1)
    return _LayerGradients(_norms(together), convolution)
