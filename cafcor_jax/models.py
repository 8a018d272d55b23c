"""Models. The paper's CNN has exactly 431,080 parameters.

A convolution has two forms with the same values. `lax` is the plain one, right for GPUs and TPUs. On a CPU,
gradients of many small batches through `lax.conv` fall into a slow grouped convolution; `patches` computes
the kernel's gradient, and for many channels the output, as matrix products over 5 x 5 patches, which is
several times faster there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from cafcor_jax.clipping import Examples
from cafcor_jax.types import Array, PyTree

CONVOLUTIONS = ("patches", "lax")
_LAYOUT = ("NHWC", "HWIO", "NHWC")


class Model(NamedTuple):
    """A classifier of uint8 images as pure functions."""

    init: Callable[[Array], PyTree]
    """key -> params."""
    log_probs: Callable[[PyTree, Array], Array]
    """(params, images uint8 [b, 28, 28, 1]) -> log-probabilities [b, classes]."""
    examples: Examples | None = None
    """How to clip the gradient of every example without computing it, if the model knows a way."""

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
    network = _Cnn(
        num_classes=num_classes,
        convolve=_convolve_patches if on_cpu else _convolve,
        watch=_watch_one_by_one if on_cpu else _watch_at_once,
    )

    def init(key: Array) -> PyTree:
        return network.init(key, jnp.zeros((1, 28, 28, 1)))["params"]

    def log_probs(params: PyTree, images: Array, **options: Any) -> Array:
        x = (images.astype(jnp.float32) * (1 / 255) - mean) / std
        return jnp.asarray(network.apply({"params": params}, x, **options))

    def squared_norms(params: PyTree, images: Array, labels: Array) -> Array:
        def total(probe: Array) -> Array:
            return jnp.sum(_losses(log_probs(params, images, probe=probe), labels))

        return jax.grad(total)(jnp.zeros(labels.shape[0]))

    def losses(params: PyTree, images: Array, labels: Array, keep: Array) -> Array:
        return _losses(log_probs(params, images, keep=keep), labels)

    return Model(init, log_probs, Examples(squared_norms, losses))


def _losses(log_probs: Array, labels: Array) -> Array:
    """The negative log-likelihood of every example, [b]."""
    return -jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0]


class _Cnn(nn.Module):
    num_classes: int
    convolve: Callable[[Array, Array], Array]
    watch: Callable[[Array, Array, Array], Array]

    @nn.compact
    def __call__(self, x: Array, probe: Array | None = None, keep: Array | None = None) -> Array:
        """Log-probabilities [b, classes].

        Args:
          x: images [b, 28, 28, 1].
          probe: zeros [b]. The derivative by it is not that of the outputs: it is the squared norm of every
            example's gradient by the parameters, if the outputs are differentiated example by example.
          keep: booleans [b]. Of other examples nothing reaches the outputs or the gradient, not even NaN.
        """

        def layer(apply: Callable[[Array], Array], x: Array) -> Array:
            y = apply(x)
            if probe is not None:
                y = self.watch(y, x, probe)
            if keep is not None:
                y = jnp.where(keep.reshape(-1, *[1] * (y.ndim - 1)), y, 0)
            return y

        x = nn.relu(_max_pool(layer(_Conv(20, self.convolve), x)))  # relu after the pool: at a quarter
        x = nn.relu(_max_pool(layer(_Conv(50, self.convolve), x)))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(layer(_dense(500, x.shape[1]), x))
        return nn.log_softmax(layer(_dense(self.num_classes, 500), x))


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


# Which form is the fastest for one input channel and for many was measured; all have the same values.
@jax.custom_vjp
def _convolve_patches(x: Array, kernel: Array) -> Array:
    if x.shape[-1] == 1:
        return _convolve(x, kernel)
    return _patches(x, kernel.shape[0]) @ kernel.reshape(-1, kernel.shape[-1])


def _convolve_patches_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _convolve_patches(x, kernel), (x, kernel)


def _convolve_patches_backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, kernel = saved
    size = kernel.shape[0]
    flat_g = g.reshape(-1, g.shape[-1])
    if x.shape[-1] == 1:
        h, w = g.shape[1:3]
        shifted = jnp.stack([x[:, i : i + h, j : j + w, 0] for i in range(size) for j in range(size)])
        to_kernel = shifted.reshape(size * size, -1) @ flat_g
    else:
        patches = _patches(x, size)
        to_kernel = (flat_g.T @ patches.reshape(-1, patches.shape[-1])).T
    turned = kernel[::-1, ::-1].transpose(0, 1, 3, 2)
    edges = [(size - 1, size - 1)] * 2
    to_x = lax.conv_general_dilated(g, turned, (1, 1), edges, dimension_numbers=_LAYOUT)
    return to_x, to_kernel.reshape(kernel.shape)


_convolve_patches.defvjp(_convolve_patches_forward, _convolve_patches_backward)


def _watcher(per_example: Callable[[Callable[..., Array], Array, Array], Array]) -> Callable[..., Array]:
    """Makes (y, x, probe) -> y, for the outputs y and inputs x of a layer with a kernel and a bias.

    Backwards, with the gradient g of y, it adds to the gradient of the probe [b] the squared norm of what
    every example gives to the gradient of the layer's parameters. For a dense layer, where that is the outer
    product of x and g, this is (||x||^2 + 1) ||g||^2. The probe is the same in all layers, so the layers add
    up.

    Args:
      per_example: how a function of one example's x and g is applied to all of them.
    """

    def of_convolution(x: Array, g: Array) -> Array:
        size = x.shape[0] - g.shape[0] + 1
        patches = _patches(x[None], size)
        by_position = g.reshape(-1, g.shape[-1])
        kernel = by_position.T @ patches.reshape(-1, patches.shape[-1])
        return jnp.sum(kernel**2) + jnp.sum(jnp.sum(by_position, axis=0) ** 2)

    def backward(x: Array, g: Array) -> tuple[Array, Array, Array]:
        if x.ndim == 2:
            squares = (jnp.sum(x**2, axis=1) + 1) * jnp.sum(g**2, axis=1)
        else:
            squares = per_example(of_convolution, x, g)
        return g, jnp.zeros_like(x), squares

    @jax.custom_vjp
    def watch(y: Array, x: Array, probe: Array) -> Array:
        del x, probe
        return y

    watch.defvjp(lambda y, x, probe: (y, x), backward)
    return watch


_watch_at_once = _watcher(lambda function, x, g: jax.vmap(function)(x, g))
# On a CPU small products one after the other are three times as fast as a batched one.
_watch_one_by_one = _watcher(lambda function, x, g: lax.map(lambda pair: function(*pair), (x, g)))
