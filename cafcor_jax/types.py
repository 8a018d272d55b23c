"""Aliases and protocols shared by the package; no logic."""

from __future__ import annotations

from typing import Any, Protocol

import jax

Array = jax.Array
PyTree = Any

#: A pytree whose leaves all have a leading axis of workers: [n, ...].
Updates = PyTree
#: A pytree with the same structure as an update and no worker axis: [...].
Aggregate = PyTree


class Aggregator(Protocol):
    """Combines the messages of n workers into one."""

    def __call__(self, updates: Updates) -> Aggregate:
        """Maps leaves [n, ...] to leaves [...]."""
        ...


class Attack(Protocol):
    """What the malicious workers send, knowing everything the honest ones send."""

    def __call__(self, key: Array, honest: Updates, num_byzantine: int) -> Updates:
        """Maps honest leaves [h, ...] to malicious leaves [f, ...]."""
        ...
