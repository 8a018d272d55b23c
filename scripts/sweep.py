"""Runs many experiments: every panel x every curve x every value of every axis.

Runs that are done are skipped, so the same command goes on where a stopped sweep was; a run that fails does
not stop the others. Each run has a folder of its own in the pool, so --workdir is not used; sweeps that share
a pool share runs. The same command in two terminals uses two cores: each process skips what the other runs.
scripts/plot.py draws the figures and the report.

Examples:
  python scripts/sweep.py --flagfile=configs/sweeps/figure1.cfg
  python scripts/sweep.py --flagfile=configs/sweeps/figure1.cfg --sweep seed=1 --list
  python scripts/sweep.py --dataset=synthetic --num_workers=10 --num_byzantine=2 --batch_size=20 \\
      --sweep aggregator=caf,median --sweep attack=alie,sign_flip --sweep seed=1,2,3
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags, logging

from cafcor_jax import cli, config, experiment, sweep
from cafcor_jax.errors import UserError
from cafcor_jax.progress import SweepProgress, duration


def read_flags(argv: Sequence[str]) -> flags.FlagValues:
    """The flags of a sweep, read and not yet made into settings: a panel may mend what the base lacks."""
    values = flags.FlagValues()
    config.define_flags(values)
    flags.DEFINE_multi_string(
        "sweep",
        [],
        "An axis, name=value,value,...: repeat it for more. A later one of the same name replaces an earlier "
        "one, so the command line can narrow a sweep file.",
        values,
    )
    flags.DEFINE_multi_string(
        "panel", [], "A panel of the figure, 'LABEL: name=value ...': repeat it for more.", values
    )
    flags.DEFINE_multi_string(
        "curve", [], "A curve in every panel, 'LABEL: name=value ...': repeat it for more.", values
    )
    flags.DEFINE_string("sweep_dir", "", "Folder for the table and figures. Empty: runs/NAME.", values)
    flags.DEFINE_string("pool", "runs/pool", "Folder of the runs' own folders.", values)
    flags.DEFINE_string(
        "name", "", "Of the sweep. Empty: the name of the flagfile, or 'sweep' without one.", values
    )
    flags.DEFINE_bool("list", False, "Only list the runs, their state and the time they will take.", values)
    if any(arg in cli.HELP for arg in argv[1:]):
        for flag in ("sweep", "panel", "curve", "sweep_dir", "pool", "name", "list"):
            values.register_key_flag_for_module(argv[0], values[flag])
        print(cli.help_text(argv[0], __doc__, values))
        sys.exit(0)
    cli.read(values, argv)
    return values


def describe_sweep(values: flags.FlagValues, argv: Sequence[str]) -> tuple[sweep.Sweep, Path]:
    """The sweep that the flags say, and its folder."""
    names = {name for name in values if name in config.Config.__dataclass_fields__}
    base = {name: values[name].value for name in names if name != "workdir"}
    files, _ = cli.split_flagfiles(argv[1:])
    name = values.name or (Path(files[-1]).stem if files else "sweep")
    panels = sweep.parse_variants(values.panel, "panel")
    for setting in sorted({setting for settings in panels.values() for setting in settings}):
        if values[setting].present:
            raise UserError(f"--{setting} is given, and panels set it too: change the panels.")
    found = sweep.plan(
        name=name,
        command=shlex.join(["python", *argv]),
        pool=os.path.expanduser(values.pool),
        base=base,
        panels=panels,
        curves=sweep.parse_variants(values.curve, "curve"),
        axes=dict(map(sweep.parse_axis, values.sweep)),
    )
    return found, Path(os.path.expanduser(values.sweep_dir or f"runs/{name}"))


def main(argv: Sequence[str]) -> int:
    logging.set_verbosity(logging.WARNING)
    values = read_flags(argv)
    found, folder = describe_sweep(values, argv)
    runs = found.distinct()
    done = sum(sweep.outcome(run).status == "done" for run in runs)
    seconds, factor = sweep.estimate(found)
    basis = f"{factor:.1f} times as slow as 2 quiet CPU cores" if done else "on 2 quiet CPU cores"
    print(
        f"sweep {found.name}: {len(runs)} runs, {done} done, {len(runs) - done} to do; about "
        f"{duration(seconds)} ({basis})",
        flush=True,
    )
    if values.list:
        failed = sweep.failures(folder)
        for run in runs:
            status, summary, error = sweep.outcome(run, failed)
            left = f"about {duration(factor * sweep.estimated_seconds(run.config))}"
            result = f"{summary.final_accuracy:.2%}" if summary else error or left
            print(f"  {status:<10}  {run.folder.name}  {result}")
        return 0
    sweep.save(found, folder)
    if done < len(runs):
        experiment.cache_compilations(runs[0].config)
    work = {run.folder.name: sweep.estimated_seconds(run.config) for run in runs}
    of_name = {run.folder.name: run for run in runs}
    with SweepProgress(work, lambda name: sweep.outcome(of_name[name]).status == "done") as progress:
        failed = sweep.run_all(
            found,
            folder,
            progress_of=lambda run: progress.begin(run.folder.name),
            finished=lambda run, outcome: progress.end(
                f"{outcome.summary.final_accuracy:.2%}"
                if outcome.summary
                else f"{outcome.status}: {outcome.error or 'another process runs it'}",
                failed=outcome.status == "failed",
            ),
        )
    missing = [name for name, run in of_name.items() if sweep.outcome(run).status != "done"]
    print(f"{len(runs) - len(missing)} of {len(runs)} runs are done; table: {folder / 'results.csv'}")
    elsewhere = [name for name in missing if name not in failed]
    if elsewhere:
        print(
            f"still running in another process: {', '.join(elsewhere)}; when that has ended, give the "
            "command again"
        )
    for name, why in failed.items():
        print(f"failed: {name}: {why}", file=sys.stderr)
    if len(missing) < len(runs):
        print(f"figures: python scripts/plot.py --sweep_dir={folder}")
    return 1 if failed else 0


if __name__ == "__main__":
    if "--list" in sys.argv and hasattr(signal, "SIGPIPE"):  # A reader that has seen enough is no error.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(cli.status(lambda: sys.exit(main(sys.argv))))
