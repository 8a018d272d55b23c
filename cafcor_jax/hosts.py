"""Several processes that compute one run together, each with its own devices, on one host or on many.

All of them run the same program. Process 0 leads: it alone writes files and tells a person what goes on. The
others need the same datasets, and see the leader's folder where checkpoints are read or written.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils

from cafcor_jax.errors import UserError

# Seconds to wait for the others to start.
_PATIENCE = 120


def join(coordinator: str, num_processes: int, process_id: int) -> None:
    """Makes this process one of several; to be called before JAX is used.

    Args:
      coordinator: "host:port" of process 0, which listens there.
      num_processes: how many there are.
      process_id: which one this is, from 0.

    Raises:
      UserError: if a value is not allowed, or the others are not found.
    """
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(
            f"coordinator={coordinator!r} must be host:port, the address at which process 0 listens."
        )
    if num_processes < 1:
        raise UserError(f"num_processes={num_processes} must be at least 1.")
    if not 0 <= process_id < num_processes:
        raise UserError(
            f"process_id={process_id} must be from 0 to {num_processes - 1}, "
            f"for num_processes={num_processes}."
        )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id, initialization_timeout=_PATIENCE)
    except Exception as error:  # JAX has several, some of them its runtime's own.
        raise UserError(
            f"The {num_processes} processes did not find one another at coordinator={coordinator!r} "
            f"({str(error).strip().splitlines()[0][:200].rstrip('.')}): start all of them with the same "
            "coordinator and num_processes."
        ) from None


def leads() -> bool:
    """Whether this process writes files and talks; a single one does."""
    return jax.process_index() == 0


def agreed(number: int) -> int:
    """The leader's number, on all processes; all wait until it is there."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def anywhere(flag: bool) -> bool:
    """Whether it is true on any process."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))
