"""Flower's ServerApp: the settings are in a flagfile on the server's machine."""

# ruff: noqa: E402

import os

_PARENT = os.getppid()  # Now: what follows takes seconds to import, and the parent may end meanwhile.

import threading
import time

import httpx  # which Flower talks through
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from cafcor_jax import experiment
from cafcor_jax.errors import UserError
from cafcor_jax.flower import server, settings

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Runs the federation that the run's configuration names.

    Args:
      grid: reaches the workers.
      context: its run_config has `flagfile`, `setup-timeout` and `round-timeout`.
    """
    threading.Thread(target=_end_without, args=(_PARENT,), daemon=True).start()
    flagfile = str(context.run_config.get("flagfile", ""))
    try:
        if not flagfile:
            raise UserError("flagfile names no file: give one with --run-config 'flagfile=\"FILE\"'.")
        config = settings.read(flagfile)
        timeouts = server.Timeouts(
            setup=float(context.run_config["setup-timeout"]),
            round=float(context.run_config["round-timeout"]),
        )
        experiment.cache_compilations(config)
        server.run(grid, config, timeouts, log=lambda text: print(text, flush=True))
    except UserError as error:
        # Flower logs the exception with its traceback; the sentence alone goes before it.
        print(f"error: {error}", flush=True)
        raise
    except httpx.HTTPError as error:
        print(
            f"error: The SuperLink cannot be reached ({type(error).__name__}): the run stopped, and the same "
            "command goes on from its last checkpoint.",
            flush=True,
        )
        raise


def _end_without(parent: int) -> None:
    """Ends this process when the one that started it, which ends with its SuperLink, has ended.

    Flower tries to reach a SuperLink that was killed for ever, and as long the run's folder is locked.
    """
    while os.getppid() == parent:
        time.sleep(0.5)
    try:
        print(
            f"error: The process {parent} that started this ServerApp has ended, and so does the run: the "
            "same command goes on from its last checkpoint.",
            flush=True,
        )
    finally:  # Maybe nobody reads any more.
        os._exit(1)
