"""Workers of Flower's own simulation: virtual nodes, which have no worker's process beside them.

Flower hands a virtual node's messages to any process of a pool. The worker of its place is then there, where
the message is, and its folder goes from process to process: what it answers is on disk before it is sent.
Its keys are drawn and agreed on as over a network. But server and workers are one user's processes on one
machine, and a ClientApp has the secrets: it is a rehearsal, and keeps nothing from whoever runs it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cafcor_jax import experiment
from cafcor_jax.config import Config
from cafcor_jax.errors import InUseError, UserError
from cafcor_jax.flower import messages, settings
from cafcor_jax.flower.worker import Worker

# Data and compiled code of those that were in this process, by flagfile and place; their folders are closed.
_known: dict[tuple[str, int], Worker] = {}


def folder(config: Config, worker: int) -> Path:
    """Where a virtual worker keeps its keys and its momentum."""
    run = Path(config.workdir)
    return run.with_name(run.name + "_workers") / str(worker)


def is_virtual(node_config: Mapping[str, Any]) -> bool:
    """Whether a node is one of Flower's simulation.

    A SuperNode may have a partition-id too, and its worker must stay out of the process that a server's code
    runs in: only simulations have Ray.
    """
    ray = sys.modules.get("ray")
    return "partition-id" in node_config and ray is not None and ray.is_initialized()


def answer(flagfile: str, worker: int, content: bytes) -> bytes:
    """What the worker of a place answers.

    Args:
      flagfile: with the settings of the run.
      worker: its place.
      content: the server's message.

    Returns:
      The answer; a worker that cannot be is a refusal.

    Raises:
      InUseError: if another process still answers an earlier message. It is no refusal: it passes.
    """
    try:
        with _opened(flagfile, worker) as opened:
            return opened.handle(content)
    except InUseError:
        raise
    except UserError as error:
        return messages.encode({"kind": "refused", "worker": worker, "why": str(error)})


def _opened(flagfile: str, worker: int) -> Worker:
    place = flagfile, worker
    if place in _known:
        _known[place].open()
    else:
        config = settings.read(flagfile)
        experiment.cache_compilations(config)
        malicious = worker >= config.num_honest
        _known[place] = Worker(config, worker, folder(config, worker), malicious=malicious)
    return _known[place]
