"""Aggregation on many devices: messages that are spread over a mesh, and never on one device as a whole.

A mesh has the axes of `AXES`. Whatever way messages [n, ...] are spread over it, every device gets columns of
its own, of all workers: [n, d / devices]. A rule then works as on one device, but for the sums over columns
(`spread.py`): a linear rule all-reduces its n x n matrix, a coordinate-wise one only who is finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cafcor_jax.columns import as_rows, num_coordinates, num_workers
from cafcor_jax.errors import UserError
from cafcor_jax.spread import spread_over
from cafcor_jax.types import Aggregate, Aggregator, Array, PyTree, Updates

WORKERS, PARAMETERS = "workers", "parameters"
AXES = (WORKERS, PARAMETERS)
#: The order in which columns (and workers) are spread over all devices: what lies on the devices of one place
#: of the axis of parameters is together, so that parameters that are cut along it alone are cut there.
ALL = (PARAMETERS, WORKERS)


def make_mesh(workers: int = 1, parameters: int = 1, *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of the first workers * parameters devices, of all hosts.

    Args:
      workers: devices along the axis of workers: so many copies of the parameters are there between rounds.
      parameters: devices along the axis of parameters: into so many parts each copy is cut.
      devices: which; those that JAX knows unless given.

    Returns:
      The mesh, with axes "workers" and "parameters".

    Raises:
      UserError: if there are too few devices.

    Example:
      >>> dict(make_mesh(1, 1).shape)
      {'workers': 1, 'parameters': 1}
    """
    devices = jax.devices() if devices is None else list(devices)
    for name, value in ((WORKERS, workers), (PARAMETERS, parameters)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"mesh_{name}={value!r} must be a whole number of at least 1.")
    count = workers * parameters
    if count > len(devices):
        raise UserError(
            f"mesh_workers={workers} times mesh_parameters={parameters} is a mesh of {count} devices, and "
            f"there are {len(devices)}: take fewer (on a CPU, "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count} makes more)."
        )
    used = {device.process_index for device in devices[:count]}
    missing = {device.process_index for device in devices} - used
    if missing:
        raise UserError(
            f"mesh_workers={workers} times mesh_parameters={parameters} is a mesh of {count} of "
            f"{len(devices)} devices, which leaves process {min(missing)} without any: take more, or fewer "
            "processes."
        )
    return Mesh(np.asarray(devices[:count]).reshape(workers, parameters), AXES)


def aggregate(rule: Aggregator, mesh: Mesh, *, specs: PyTree | None = None) -> Callable[[Updates], Aggregate]:
    """A rule for messages that are spread over a mesh; no device ever holds them as a whole.

    The axes of a leaf [n, ...] may be spread in any way, the workers' axis too. Columns that several devices
    hold are shared among them, and where devices hold different workers, one all-to-all gives them different
    columns of all workers instead. The rest of the traffic is the rule's: an n x n matrix for a linear rule.

    Args:
      rule: any aggregator, linear or coordinate-wise, with or without a pre-aggregation.
      mesh: with any axes.
      specs: how the messages are spread, a PartitionSpec for every leaf; None to take it from the arrays,
        which is not possible inside `jax.jit`.

    Returns:
      From messages, leaves [n, ...], to the aggregate, leaves [...] that are spread as the messages are.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> from cafcor_jax import aggregators
      >>> mesh = make_mesh(workers=1, parameters=1)  # on a machine with eight devices, 2 and 4
      >>> x = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [100.0, -100.0]])
      >>> x = jax.device_put(x, NamedSharding(mesh, P(None, ("workers", "parameters"))))
      >>> print(aggregate(aggregators.caf(num_byzantine=1), mesh)(x).round(2))
      [0.5 0.5]
    """
    compiled: dict[Any, Callable[[Updates], Aggregate]] = {}

    def run(updates: Updates) -> Aggregate:
        num_workers(updates)
        leaves: list[Array]
        structure: Any
        leaves, structure = jax.tree.flatten(updates)
        given = (
            structure.flatten_up_to(specs) if specs is not None else [_spec(leaf, mesh) for leaf in leaves]
        )
        key = (structure, tuple(given))
        if key not in compiled:
            compiled[key] = jax.jit(_aggregate_with_specs(rule, mesh, structure, given))
        return compiled[key](updates)

    return run


def _spec(leaf: Array, mesh: Mesh) -> P:
    sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
        raise ValueError(
            f"updates has a leaf with the sharding {sharding}; it must be a NamedSharding on the mesh, or "
            "specs must be given."
        )
    return sharding.spec


def _axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes that an entry of a PartitionSpec names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _aggregate_with_specs(
    rule: Aggregator, mesh: Mesh, structure: Any, specs: list[P]
) -> Callable[[Updates], Aggregate]:
    everything = tuple(mesh.axis_names)

    def shares_of(spec: P) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes that hold different workers, and those that hold the same as one another."""
        workers = _axes(spec[0]) if len(spec) else ()
        used = [name for entry in spec for name in _axes(entry)]
        return workers, tuple(name for name in everything if name not in used)

    def to_columns(leaf: Array, spec: P) -> Array:
        workers, same = shares_of(spec)
        rows = _padded(as_rows(leaf), _size(mesh, same) * _size(mesh, workers))
        if same:
            part = rows.shape[1] // _size(mesh, same)
            rows = lax.dynamic_slice_in_dim(rows, lax.axis_index(same) * part, part, axis=1)
        return exchange(rows, workers)

    def to_leaf(columns: Array, leaf: Array, spec: P) -> Array:
        workers, same = shares_of(spec)
        for axes in (workers, same):
            if axes:
                columns = lax.all_gather(columns, axes, tiled=True)
        shape = leaf.shape[1:]
        return columns[: math.prod(shape)].reshape(shape)

    def of_device(coordinates: int, updates: Updates) -> Aggregate:
        leaves = structure.flatten_up_to(updates)
        columns = [to_columns(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)]
        with spread_over(everything, coordinates):
            combined = rule(columns)
        parts = zip(combined, leaves, specs, strict=True)
        return structure.unflatten([to_leaf(*part) for part in parts])

    def run(updates: Updates) -> Aggregate:
        coordinates = num_coordinates(updates)
        return jax.shard_map(
            lambda updates: of_device(coordinates, updates),
            mesh=mesh,
            in_specs=(structure.unflatten(specs),),
            out_specs=structure.unflatten([P(*spec[1:]) for spec in specs]),
            check_vma=False,
        )(updates)

    return run


def exchange(rows: Array, axes: tuple[str, ...]) -> Array:
    """From some workers and all columns to all workers and some columns, inside `jax.shard_map`.

    Args:
      rows: [workers of this device, columns]; the number of columns is a multiple of that of the devices.
      axes: of the mesh, over which the workers are spread.

    Returns:
      [all workers, columns of this device].
    """
    return lax.all_to_all(rows, axes, split_axis=1, concat_axis=0, tiled=True) if axes else rows


def _size(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in axes)


def _padded(rows: Array, multiple: int) -> Array:
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % multiple)))
