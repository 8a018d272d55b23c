"""Flower's ServerApp: the settings are in a flagfile on the server's machine."""

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
