"""A federation on a mesh of devices: the rounds of `federation.py`, with all messages on no one device.

Between rounds a device at (w, p) of the mesh (`sharding.py`) holds

    parameters, optimizer state   part p of mesh_parameters, so mesh_workers copies of everything
    momenta, a rule's memory      [n, d / devices]: its own columns of all workers
    data                          of its own workers, one of as many parts as there are devices

and in a round it gathers the parameters (d), computes its own workers' gradients, exchanges them for its
own columns of all workers' gradients (all-to-all, n d / devices numbers), adds the noise of these columns,
attacks and aggregates them (all-reduces of n x n numbers), and gathers the aggregate of its part of the
parameters.

All arrays of the state are flat: what is shaped like the parameters is [d] and what is of all workers [n, d],
with zeros at the end that give all devices equally much.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from cafcor_jax.aggregators import CoordinatewiseRule, StatefulRule
from cafcor_jax.attacks.adaptive import AgainstRound
from cafcor_jax.attacks.hidden import ProtocolAttack
from cafcor_jax.clipping import Clipped
from cafcor_jax.federation import Data, Federation, Info, Layout, State, federation, honest_gradients
from cafcor_jax.privacy import PrivacyPlan
from cafcor_jax.sharding import ALL, PARAMETERS, WORKERS, exchange
from cafcor_jax.spread import on_one_device, spread_over
from cafcor_jax.types import Aggregator, Array, PyTree, Updates

_FLAT, _ROWS = P(PARAMETERS), P(None, ALL)


@dataclasses.dataclass(frozen=True)
class Flattening:
    """How parameters become one row of numbers, with zeros at the end, and come back.

    Attributes:
      template: shapes and types of the parameters.
      padded: the length of the row.
    """

    template: PyTree
    padded: int

    @classmethod
    def on(cls, mesh: Mesh, template: PyTree) -> Flattening:
        """For a mesh: the row is long enough for all devices to hold equally much of it.

        Raises:
          ValueError: if the parameters are of several types.
        """
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), template)
        dtypes = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(shapes)})
        if len(dtypes) != 1:
            raise ValueError(
                f"the parameters are of the types {', '.join(dtypes)}; on a mesh they must be of one."
            )
        count = _count(shapes)
        return cls(shapes, count + -count % mesh.size)

    @property
    def coordinates(self) -> int:
        """D."""
        return _count(self.template)

    def flat(self, tree: PyTree, axes: int = 0) -> Array:
        """From leaves [..., *shape], with so many axes before, to [..., padded]."""
        leaves = jax.tree.leaves(tree)
        joined = jnp.concatenate([leaf.reshape(*leaf.shape[:axes], -1) for leaf in leaves], axis=-1)
        return jnp.pad(joined, (*((0, 0) for _ in range(axes)), (0, self.padded - joined.shape[-1])))

    def tree(self, flat: Array) -> PyTree:
        """From [..., padded] to leaves [..., *shape]."""
        leaves, structure = jax.tree.flatten(self.template)
        ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
        parts = jnp.split(flat[..., : self.coordinates], ends, axis=-1)
        shaped = [
            part.reshape(*part.shape[:-1], *leaf.shape) for part, leaf in zip(parts, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, shaped)

    def is_like_params(self, tree: PyTree) -> bool:
        """Whether a part of a state is shaped as the parameters, perhaps with a worker axis before."""
        leaves = jax.tree.leaves(self.template)
        if str(jax.tree.structure(tree)) != str(jax.tree.structure(self.template)):
            return False
        shapes = zip((np.shape(leaf) for leaf in jax.tree.leaves(tree)), leaves, strict=True)
        return all(shape[len(shape) - leaf.ndim :] == leaf.shape for shape, leaf in shapes)

    def flat_shapes(self, state: PyTree) -> PyTree:
        """The shapes of a state's flat form on one device, from the state in the parameters' own shapes."""
        here = SingleDeviceSharding(jax.devices()[0])
        extra = jax.tree.leaves(self.template)[0].ndim

        def shape(part: PyTree) -> jax.ShapeDtypeStruct:
            first = jax.tree.leaves(part)[0]
            if not self.is_like_params(part):
                return jax.ShapeDtypeStruct(first.shape, first.dtype, sharding=here)
            rows = first.shape[: first.ndim - extra]
            return jax.ShapeDtypeStruct((*rows, self.padded), first.dtype, sharding=here)

        return jax.tree.map(shape, state, is_leaf=self.is_like_params)

    def unflattened(self, state: PyTree) -> PyTree:
        """A flat state in the parameters' own shapes."""

        def part(leaf: Array) -> PyTree:
            return self.tree(leaf) if leaf.ndim and leaf.shape[-1] == self.padded else leaf

        return jax.tree.map(part, state)


def _count(template: PyTree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(template))


@dataclasses.dataclass(frozen=True)
class MeshFederation:
    """A federation on a mesh, and how to get things onto it and off it.

    Attributes:
      mesh: the devices.
      federation: init from whole parameters, and step; under `jax.jit` both.
      flattening: of the parameters.
      shardings: of the state, like the state.
    """

    mesh: Mesh
    federation: Federation
    flattening: Flattening
    shardings: State

    def init(self, params: PyTree) -> State:
        """The state before the first round; every device makes its own part."""
        on_hosts = jax.tree.map(np.asarray, params)
        return jax.jit(self.federation.init, out_shardings=self.shardings)(on_hosts)

    def place(self, data: Data) -> Data:
        """The workers' data on the mesh, each device with its own workers' only.

        Args:
          data: NumPy arrays [h, ...], of all workers on every host.

        Returns:
          Arrays [rows, ...] on the mesh, where rows is the next multiple of the number of devices: the last
          workers come again, and what they compute is not used.
        """
        h = data.labels.shape[0]
        rows = h + -h % self.mesh.size
        sharding = NamedSharding(self.mesh, P(ALL))

        def put(values: Any) -> Array:
            array = np.asarray(values)

            def part(index: Any) -> np.ndarray:
                return array[np.minimum(np.arange(rows)[index[0]], h - 1)]

            return jax.make_array_from_callback((rows, *array.shape[1:]), sharding, part)

        return Data(*map(put, data))

    def everywhere(self, key: Array) -> Array:
        """A key on every device."""
        words = np.asarray(jax.random.key_data(key))
        whole = NamedSharding(self.mesh, P())
        placed = jax.make_array_from_callback(words.shape, whole, lambda index: words[index])
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(key))

    def shapes(self) -> State:
        """The shapes of the state, with its shardings."""
        shapes = jax.eval_shape(self.federation.init, self.flattening.template)
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            self.shardings,
        )

    def spread(self, state: State) -> State:
        """A state in the parameters' own shapes, NumPy arrays on every host, on the mesh."""
        targets: list[jax.ShapeDtypeStruct]
        structure: Any
        targets, structure = jax.tree.flatten(self.shapes())

        def put(part: PyTree, target: jax.ShapeDtypeStruct) -> Array:
            array = np.asarray(jax.tree.leaves(part)[0])
            if target.ndim:
                rows = [np.asarray(leaf).reshape(*target.shape[:-1], -1) for leaf in jax.tree.leaves(part)]
                missing = target.shape[-1] - sum(row.shape[-1] for row in rows)
                rows.append(np.zeros((*target.shape[:-1], missing), target.dtype))
                array = np.concatenate(rows, axis=-1)
            return jax.make_array_from_callback(target.shape, target.sharding, lambda index: array[index])

        return structure.unflatten(
            [put(part, target) for part, target in zip(structure.flatten_up_to(state), targets, strict=True)]
        )

    def params(self, state: State) -> PyTree:
        """The parameters in their own shapes, all of them on every device."""
        whole = NamedSharding(self.mesh, P())
        return jax.jit(self.flattening.tree, out_shardings=whole)(state.params)

    def jit(self, rounds: Callable[..., tuple[State, Info]]) -> Any:
        """Like `jax.jit` of (key, state, data) -> (state, info); the state is donated, and stays spread."""
        whole = NamedSharding(self.mesh, P())
        return jax.jit(rounds, donate_argnums=1, out_shardings=(self.shardings, whole))

    def check(self, attack: Any, aggregator: Any, num_honest: int, num_byzantine: int) -> None:
        """Raises a ValueError if an attack does not run on a mesh; it is traced for a few columns."""
        if isinstance(attack, AgainstRound) or not num_byzantine:
            return
        searched = isinstance(attack, ProtocolAttack) and attack.factor is None
        if searched and isinstance(aggregator, CoordinatewiseRule):
            raise ValueError(
                "On a mesh the strength of an attack is not searched against a coordinate-wise rule: give an "
                "attack_factor, or mesh_workers=1 and mesh_parameters=1."
            )

        def message(key: Array, honest: Updates) -> Any:
            with spread_over(ALL, self.flattening.coordinates):
                if isinstance(attack, ProtocolAttack):
                    return attack.push(key, honest, num_byzantine, jnp.int32(1))
                return attack(key, honest, num_byzantine)

        spread = jax.shard_map(
            message, mesh=self.mesh, in_specs=(P(), _ROWS), out_specs=_ROWS, check_vma=False
        )
        honest = jax.ShapeDtypeStruct((num_honest, self.mesh.size), np.float32)
        jax.eval_shape(spread, jax.random.key(0), honest)


def mesh_federation(
    mesh: Mesh,
    template: PyTree,
    *,
    plan: PrivacyPlan,
    aggregator: Aggregator | StatefulRule,
    attack: Any,
    optimizer: optax.GradientTransformation,
    **settings: Any,
) -> MeshFederation:
    """Builds a federation on a mesh: the same numbers as `federation.federation`, up to rounding.

    The noise is the same to the bit.

    Args:
      mesh: the devices (`sharding.make_mesh`).
      template: parameters, or their shapes and types.
      plan: as for `federation.federation`.
      aggregator: likewise.
      attack: likewise; one that draws whole messages at once is refused.
      optimizer: the server's step; it must treat every parameter alone, as SGD and Adam do, since a device
        applies it to its own part.
      **settings: the others of `federation.federation`.

    Returns:
      The federation.

    Example:
      >>> import jax, optax
      >>> import jax.numpy as jnp
      >>> from cafcor_jax import aggregators, attacks, privacy, sharding
      >>> from cafcor_jax.federation import Data
      >>> plan = privacy.calibrate(threat_model="byzldp", epsilon=50.0, delta=1e-4, num_workers=4,
      ...                          num_byzantine=1, rounds=3, clip_norm=1.0)
      >>> params = {"w": jnp.zeros((4, 2))}
      >>> fed = mesh_federation(
      ...     sharding.make_mesh(1, 1), params, plan=plan, aggregator=aggregators.caf(1),
      ...     attack=attacks.alie(), optimizer=optax.sgd(0.1), momentum=0.9, batch_size=2,
      ...     loss_fn=lambda p, x, y: optax.softmax_cross_entropy_with_integer_labels(x @ p["w"], y).mean())
      >>> data = fed.place(Data(jnp.ones((3, 5, 4)), jnp.zeros((3, 5), int), jnp.full(3, 5)))
      >>> state, info = jax.jit(fed.federation.step)(jax.random.key(0), fed.init(params), data)
      >>> jax.tree.map(jnp.shape, fed.params(state)), int(state.round)
      ({'w': (4, 2)}, 1)
    """
    flattening = Flattening.on(mesh, template)
    n, h = plan.num_workers, plan.num_workers - plan.num_byzantine
    layout = Layout(
        functools.partial(_gradients, flattening, h),
        lambda aggregate: lax.all_gather(aggregate, WORKERS, tiled=True),
    )
    on_device = federation(
        plan=plan, aggregator=aggregator, attack=attack, optimizer=optimizer, layout=layout, **settings
    )

    def init(params: PyTree) -> State:
        flat = flattening.flat(params)
        senders = n if isinstance(attack, ProtocolAttack) else h

        def zeros(workers: int) -> Updates:
            return jnp.zeros((workers, flattening.padded), flat.dtype)

        server = aggregator.init(zeros(n)) if isinstance(aggregator, StatefulRule) else ()
        return State(flat, zeros(senders), optimizer.init(flat), server, jnp.int32(0))

    specs = _specs(jax.eval_shape(init, flattening.template), flattening.padded)
    if isinstance(aggregator, StatefulRule):
        specs = specs._replace(server=_server_specs(aggregator.init, n, flattening.padded))

    def step_of_device(key: Array, state: State, data: Data) -> tuple[State, Info]:
        with spread_over(ALL, flattening.coordinates):
            return on_device.step(key, state, data)

    step: Callable[[Array, State, Data], tuple[State, Info]] = jax.shard_map(
        step_of_device, mesh=mesh, in_specs=(P(), specs, P(ALL)), out_specs=(specs, P()), check_vma=False
    )
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    result = MeshFederation(mesh, Federation(init, step), flattening, shardings)
    result.check(attack, aggregator, h, plan.num_byzantine)
    return result


def _specs(shapes: State, padded: int) -> State:
    """How a state is spread: what is as long as the parameters over devices, numbers everywhere."""

    def spec(leaf: jax.ShapeDtypeStruct) -> P:
        if leaf.ndim and leaf.shape[-1] == padded:
            return _FLAT if leaf.ndim == 1 else _ROWS
        return P()

    return jax.tree.map(spec, shapes)


def _server_specs(init: Callable[[Updates], PyTree], n: int, padded: int) -> PyTree:
    """How the server's memory is spread: what grows with the messages is spread like them."""

    def of_width(width: int) -> PyTree:
        return jax.eval_shape(init, jax.ShapeDtypeStruct((n, width), jnp.float32))

    def spec(leaf: jax.ShapeDtypeStruct, wider: jax.ShapeDtypeStruct) -> P:
        if leaf.shape == wider.shape:
            return P()
        return _FLAT if leaf.ndim == 1 else _ROWS

    return jax.tree.map(spec, of_width(padded), of_width(padded + 1))


def _gradients(flattening: Flattening, h: int, keys: Array, params: Array, data: Data, **how: Any) -> Clipped:
    """This device's columns of all honest workers' gradients, [h, columns], inside `jax.shard_map`."""
    rows = data.labels.shape[0]
    # The last devices may have workers that are only there to fill up.
    own = jnp.minimum(lax.axis_index(ALL) * rows + jnp.arange(rows), h - 1)
    with on_one_device():
        whole = flattening.tree(lax.all_gather(params, PARAMETERS, tiled=True))
        clipped = honest_gradients(keys[own], whole, data, **how)
    columns = exchange(flattening.flat(clipped.gradient, axes=1), ALL)[:h]

    def of_all(values: Array) -> Array:
        return lax.all_gather(values, ALL, tiled=True)[:h]

    return Clipped(columns, of_all(clipped.loss), of_all(clipped.norm), of_all(clipped.clipped))
