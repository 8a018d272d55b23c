"""Messages whose columns are spread over devices: what is summed over columns is summed over devices too.

Inside `spread_over` a function that is given the columns of one device computes with all of them: the few
places that reduce over columns (Gram matrices, who is finite, lengths) call `total`, `everywhere` and
`largest` of this module, which are the identity otherwise. Rules and attacks need not know.

The reductions come before decisions (`lax.cond`), so that all devices take the same branch: a branch may hold
reductions of its own, and a device that did not come along would leave the others waiting.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from cafcor_jax.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class _Spread:
    axes: tuple[str, ...]
    coordinates: int


_spread: contextvars.ContextVar[_Spread | None] = contextvars.ContextVar("spread", default=None)


@contextlib.contextmanager
def spread_over(axes: tuple[str, ...], coordinates: int) -> Iterator[None]:
    """Says that arrays hold the columns of one device, while a function is traced inside `jax.shard_map`.

    Args:
      axes: the mesh axes over which the columns are spread. Each device has equally many, and 0 in those that
        are only there for that; where `first_column` is asked for, they are in order and the zeros last.
      coordinates: d, how many there are on all devices together, the padding not counted.
    """
    before = _spread.set(_Spread(axes, coordinates))
    try:
        yield
    finally:
        _spread.reset(before)


@contextlib.contextmanager
def on_one_device() -> Iterator[None]:
    """Undoes `spread_over` for a part in which a device holds whole messages."""
    before = _spread.set(None)
    try:
        yield
    finally:
        _spread.reset(before)


def is_spread() -> bool:
    """Whether arrays hold the columns of one device only."""
    return _spread.get() is not None


def total(value: Array) -> Array:
    """The sum over devices of what was summed over their columns."""
    spread = _spread.get()
    return value if spread is None else lax.psum(value, spread.axes)


def largest(value: Array) -> Array:
    """The maximum over devices of what was maximised over their columns."""
    spread = _spread.get()
    return value if spread is None else lax.pmax(value, spread.axes)


def everywhere(flags: Array) -> Array:
    """Where the booleans are true on all devices."""
    spread = _spread.get()
    return flags if spread is None else lax.pmin(flags.astype(jnp.int32), spread.axes) > 0


def norm(vector: PyTree) -> Array:
    """The Euclidean length of a vector without a worker axis."""
    squares = [jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(vector)]
    return jnp.sqrt(total(functools.reduce(jnp.add, squares)))


def num_coordinates(columns: int) -> int:
    """D on all devices together, of arrays with so many columns here."""
    spread = _spread.get()
    return columns if spread is None else spread.coordinates


def first_column(columns: int) -> Array | int:
    """The place among all columns of the first one here, of arrays with so many columns here."""
    spread = _spread.get()
    return 0 if spread is None else lax.axis_index(spread.axes) * columns


def without_padding(rows: Array) -> Array:
    """Rows [n, columns] with 0 in the columns that are only there to give all devices equally many."""
    spread = _spread.get()
    if spread is None:
        return rows
    columns = rows.shape[1]
    real = first_column(columns) + jnp.arange(columns) < spread.coordinates
    return jnp.where(real[None, :], rows, 0)


def refuse(what: str) -> None:
    """Raises if arrays hold the columns of one device only, for what is defined on whole messages.

    Args:
      what: begins the sentence.
    """
    if is_spread():
        raise ValueError(
            f"{what}, so it does not run where columns are spread over devices: use another attack, or "
            "mesh_workers=1 and mesh_parameters=1."
        )
