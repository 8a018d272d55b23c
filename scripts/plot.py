"""Draws the figures of a sweep and writes its report, from the runs that are finished.

Into SWEEP_DIR/figures: figure.png and figure.pdf (test accuracy, mean and standard deviation over seeds),
heatmap_DATASET.png and .pdf (worst case over attacks, for a sweep over attacks and over f or alpha), and
report.html, one file with everything in it. What is missing is said in the figures.

Examples:
  python scripts/plot.py --sweep_dir=runs/figure1
  python scripts/plot.py --sweep_dir=runs/sweep --curves_by=attack --x=epsilon --columns=3
"""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from cafcor_jax import cli, figures, report, sweep
from cafcor_jax.errors import UserError
from cafcor_jax.workdir import write_whole


def read_flags(argv: Sequence[str]) -> flags.FlagValues:
    """Reads a command line; what is wrong with it is a UserError."""
    values = flags.FlagValues()  # Not the global one: tests call main more than once.
    flags.DEFINE_string("sweep_dir", "", "Folder of the sweep, as given to scripts/sweep.py.", values)
    flags.DEFINE_string(
        "curves_by",
        "",
        "Setting whose values are the curves. Empty: the labels of the sweep, or without any the first of "
        "aggregator, threat_model and attack that varies.",
        values,
    )
    flags.DEFINE_enum("x", "round", list(figures.X), "What the horizontal axis is.", values)
    flags.DEFINE_integer("columns", 2, "Panels beside one another.", lower_bound=1, flag_values=values)
    flags.DEFINE_bool(
        "heatmap",
        None,
        "Whether to draw heat maps of the worst case over attacks. Not given: if the sweep has what they "
        "need.",
        values,
    )
    if any(arg in cli.HELP for arg in argv[1:]):
        lines = [
            f"  --{flag.name}={flag.default or ''}\n        {flag.help}"
            for flag in map(values.__getitem__, values)
        ]
        print(f"{__doc__}\nFlags and their defaults:", *lines, sep="\n")
        sys.exit(0)
    cli.read(values, argv)
    if not values.sweep_dir:
        raise UserError("--sweep_dir is not given: it must be the folder of a sweep, such as runs/figure1.")
    return values


def draw(results: figures.Results, values: flags.FlagValues, argv: Sequence[str]) -> dict[str, bytes]:
    """The content of all files, by name."""
    pictures = {"figure": figures.curves(results, x=values.x, columns=values.columns)}
    maps = {} if values.heatmap is False else figures.heat_maps(results)
    for dataset, of_rules in maps.items():
        pictures[f"heatmap_{dataset}"] = figures.heat_map(of_rules, results, dataset)
    files = {
        f"{name}.{kind}": figures.render(figure, kind)
        for name, figure in pictures.items()
        for kind in ("png", "pdf")
    }
    page = report.page(
        results,
        command=shlex.join(["python", *argv]),
        figure=files["figure.png"],
        heat_maps={dataset: files[f"heatmap_{dataset}.png"] for dataset in maps},
    )
    return files | {"report.html": page.encode()}


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Writes files such that readers see the old ones or whole new ones."""
    for name, content in files.items():
        write_whole(folder / name, content)
        print(folder / name)


def main(argv: Sequence[str]) -> None:
    values = read_flags(argv)
    folder = Path(os.path.expanduser(values.sweep_dir))
    results = figures.collect(sweep.load(folder), values.curves_by, sweep.failures(folder))
    for run in results.runs:
        if run.status == "corrupt":
            print(f"warning: left out: {run.error}", file=sys.stderr)
    if results.missing == len(results.runs):
        raise UserError(
            f"The sweep in {folder} has no finished run yet ({len(results.runs)} planned), so there is "
            f"nothing to draw: run it first ({results.sweep.command})."
        )
    write(folder / "figures", draw(results, values, argv))
    if results.missing:
        print(f"{results.partial()}; the figures say so")
    if values.heatmap and (reason := figures.why_no_heat_map(results)):
        print(reason)


if __name__ == "__main__":
    sys.exit(cli.status(lambda: main(sys.argv)))
