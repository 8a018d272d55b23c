"""Float64 inside a function, whether or not JAX is set to have it.

JAX keeps float64 behind a switch, which `in_float64` turns on for the length of a call. Code inside takes
`dot` and `argmax` from here, since JAX's own lose the type under `vmap` or when they are compiled outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cafcor_jax.types import Array

_P = ParamSpec("_P")
_R = TypeVar("_R")


def in_float64(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Lets a function compute in float64, whether or not JAX is set to."""

    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with jax.enable_x64(True):
            return function(*args, **kwargs)

    return wrapped


def float64_inside(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Like `in_float64`, and returns the results in what is float for the caller."""

    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        dtype = jax.dtypes.canonicalize_dtype(float)
        with jax.enable_x64(True):
            result = function(*args, **kwargs)
            return jax.tree.map(lambda x: x.astype(dtype) if x.dtype == np.float64 else x, result)

    return wrapped


def batched_in_float64(function: Callable[..., _R]) -> Callable[..., _R]:
    """Like `in_float64`, also where `vmap` comes after the function was traced, as in vmap(jit(f))."""
    batchable = jax.custom_batching.custom_vmap(in_float64(function))

    @batchable.def_vmap
    def batch(size: int, batched: list[Any], *args: Any) -> tuple[_R, Any]:
        del size
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(batched))
        result = in_float64(jax.vmap(function, in_axes=axes))(*args)
        return result, jax.tree.map(lambda _: True, result)

    return batchable


def differentiated_in_float64(function: Callable[..., _R]) -> Callable[..., _R]:
    """Like `batched_in_float64`, also for derivatives in forward mode, as in jvp(jit(f))."""
    differentiable = jax.custom_jvp(batched_in_float64(function))

    @differentiable.defjvp
    def jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[_R, _R]:
        return in_float64(jax.jvp)(function, primals, tangents)

    return differentiable


def matmul(a: Array, b: Array) -> Array:
    """The matrix product at full precision; a TPU's default is bfloat16, which wrecks a Gram matrix."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


@jax.custom_batching.custom_vmap
def _dot(a: Array, b: Array) -> Array:
    return in_float64(matmul)(a, b)


@_dot.def_vmap
@in_float64
def _dot_of_batches(size: int, batched: list[bool], a: Array, b: Array) -> tuple[Array, bool]:
    a, b = (
        x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_batched in zip((a, b), batched, strict=True)
    )
    return jax.vmap(matmul)(a, b), True


def dot(a: Array, b: Array) -> Array:
    """Like `matmul`, and it keeps float64 under `vmap`, which JAX's own does not."""
    return _dot(a, b) if a.dtype == np.float64 else matmul(a, b)


def argmax(values: Array) -> Array:
    """The first index of the largest of `values` [n], as int32."""
    index = lax.iota(np.int32, values.shape[0])
    return jnp.min(jnp.where(values == jnp.max(values), index, values.shape[0] - 1))


def argmin(values: Array) -> Array:
    """The first index of the smallest of `values` [n], as int32."""
    return argmax(-values)
