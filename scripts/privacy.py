"""Plans the privacy of a run before it is trained: what a budget costs in noise, and what else it would buy.

Takes the flags and flagfiles of train.py; those on data, attack, aggregation and training have no effect but
where the privacy needs them. Reads no data and compiles nothing. Noise is the standard deviation in one
coordinate; a message is what one worker sends, the honest mean is what training uses at best.

Examples:
  python scripts/privacy.py --flagfile=configs/mnist_byzldp.cfg --plots=runs/plan --json=runs/plan.json
  python scripts/privacy.py --num_workers=50 --num_byzantine=4 --epsilon=8 --delta=1e-5 --accountant=exact
  python scripts/privacy.py --secret_graph=regular:20 --noise_split=robust
  python scripts/privacy.py --privacy_level=example --batch_size=100 --samples_per_worker=6000 --rounds=400
  python scripts/privacy.py --paper_table
"""

import dataclasses
import json
import math
import shlex
import signal
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

import cafcor_jax
from cafcor_jax import cli, config, planner, plotting, privacy
from cafcor_jax.errors import UserError
from cafcor_jax.planner import THREAT_MODELS, Row, Setting

WIDTH = 108
# Told apart by colour (of the palette of Okabe and Ito), by dashes and by markers: also in grey.
STYLES: dict[str, dict[str, Any]] = {
    "ldp": {"color": plotting.VERMILION, "linestyle": "-", "marker": "s"},
    "byzldp": {"color": plotting.BLUE, "linestyle": "-", "marker": "o"},
    "secldp": {"color": plotting.GREEN, "linestyle": "--", "marker": "^"},
    "cdp": {"color": "#000000", "linestyle": ":", "marker": "D"},
}
SPLITS = {
    "equal": "the paper's",
    "mean_noise": "least in the honest mean",
    "robust": "least, hidden attacks included",
}


def read_flags(argv: Sequence[str]) -> tuple[config.Config, flags.FlagValues]:
    """Reads and checks a command line; what is wrong with it is a UserError."""
    values = flags.FlagValues()  # Not the global one: tests call main more than once.
    # absl defines this flag for the global one only; its own name keeps it out of the script's flags.
    flags.DEFINE(
        flags.ArgumentParser(), "flagfile", "", "", values, module_name="absl.flags",
        serializer=flags.ArgumentSerializer(),
    )  # fmt: skip
    config.define_flags(values)
    # A plan needs no attack, and f = 0 allows none; the flag is there for the flagfiles of train.py.
    values.set_default("attack", "none")
    flags.DEFINE_integer(
        "samples_per_worker",
        None,
        "Training examples of the smallest honest worker, at privacy level 'example'. None: the dataset's, "
        "spread evenly.",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_string("plots", None, "Folder for pictures of the noise over epsilon, q and f.", values)
    flags.DEFINE_string("json", None, "File for all numbers and plans.", values)
    flags.DEFINE_bool(
        "paper_table", False, "Only prints the noise in every setting of the paper's Figure 1.", values
    )
    for name in ("samples_per_worker", "plots", "json", "paper_table"):
        values.register_key_flag_for_module(argv[0], values[name])
    if {"--help", "-help", "-h", "--helpshort"} & set(argv):
        print(cli.help_text(argv[0], __doc__, values))
        sys.exit(0)
    cfg = cli.parse_flags(argv, values)
    if values.paper_table:
        for name in [*(field.name for field in dataclasses.fields(cfg)), "samples_per_worker", "plots"]:
            if values[name].present:
                raise UserError(f"--{name} has no effect on --paper_table, whose settings are the paper's.")
    for name in ("plots", "json"):
        if values[name].value == "":
            raise UserError(f"--{name} is empty: it must name a {'folder' if name == 'plots' else 'file'}.")
    return cfg, values


def number(value: float) -> str:
    """Five significant digits, and no sign of zeros that say nothing."""
    return f"{value:.5g}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of aligned columns: the first to the left, the others to the right.

    A row that is shorter than the head ends in a sentence, which may be as long as it likes.
    """
    rows = list(rows)
    whole = [head, *(row for row in rows if len(row) == len(head))]
    widths = [max(len(row[column]) for row in whole) for column in range(len(head))]
    widths[0] = max([widths[0], *(len(row[0]) for row in rows)])
    lines = []
    for row in [head, *rows]:
        first = f"  {row[0]:<{widths[0]}}"
        if len(row) == len(head):
            cells = (f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
            lines.append("  ".join([first, *cells]).rstrip())
        else:
            indent = " " * (widths[0] + 4)
            wrapped = textwrap.wrap(row[1], WIDTH - len(indent))
            lines += [f"{first}  {wrapped[0]}", *(indent + line for line in wrapped[1:])]
    return lines


def paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def report(of: Setting) -> Row:
    """All numbers, by section."""
    plan = planner.calibrate(of)
    samplings = planner.samplings(of)
    poisson = samplings[1]["plan"] if samplings else None
    return {
        "plan": plan,
        "epsilon": privacy.epsilon(plan),
        "threat_models": planner.threat_models(of),
        "accountants": planner.accountants(of),
        "splits": planner.splits(of),
        "graph": planner.graph(of),
        "dropouts": planner.dropouts(of),
        "samplings": samplings,
        "pld_epsilon": planner.pld_epsilon(poisson) if poisson else None,
    }


def text(of: Setting, found: Row) -> str:
    """The report for a person."""
    sections = [
        found["plan"].describe().splitlines(),
        threat_model_lines(of, found["threat_models"]),
        accountant_lines(found),
        split_lines(of, found["splits"]),
        graph_lines(found["graph"]),
        dropout_lines(found),
        sampling_lines(of, found),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def noise_cells(row: Row) -> list[str]:
    return [number(row[name]) for name in ("sigma_ind", "sigma_cor", "message", "mean")]


def threat_model_lines(of: Setting, rows: list[Row]) -> list[str]:
    ratios = ("message_over_cdp", "message_over_ldp", "mean_over_cdp", "mean_over_ldp")

    def line(row: Row) -> list[str]:
        name = THREAT_MODELS[row["threat_model"]]
        if row["threat_model"] == of.config.threat_model:
            name += " (chosen)"
        if "why" in row:
            return [name, row["why"]]
        ind, cor, message, mean = noise_cells(row)
        over = [f"{row[ratio]:.3f}" for ratio in ratios]
        return [name, ind, cor, message, *over[:2], mean, *over[2:]]

    head = ["threat model", "sigma_ind", "sigma_cor"]
    head += ["one message", "/ CDP", "/ LDP", "honest mean", "/ CDP", "/ LDP"]
    return ["Noise under each threat model, at equal (epsilon, delta)", *table(head, map(line, rows))]


def accountant_lines(found: Row) -> list[str]:
    rows = found["accountants"]
    if found["plan"].level == "example":
        return [
            "Accountants",
            *paragraph(
                f"Only 'rdp' covers the example level: the plan spends epsilon = {number(found['epsilon'])}. "
                "'exact' and 'paper' are formulas for one Gaussian, and a sampled batch makes a mixture."
            ),
        ]
    head = ["accountant", "plan spends", "sigma_ind", "sigma_cor", "one message", "honest mean", "/ paper"]
    cells = [
        [row["accountant"], number(row["epsilon"]), *noise_cells(row), f"{row['over_paper']:.4f}"]
        for row in rows
    ]
    return [
        "Accountants: the epsilon that each gives to the plan, and the noise that each needs for the budget",
        *table(head, cells),
    ]


def split_lines(of: Setting, rows: list[Row]) -> list[str]:
    def line(row: Row) -> list[str]:
        if "why" in row:
            return [row["split"], row["why"]]
        ind, cor, message, mean = noise_cells(row)
        over = [
            f"{row[name]:.3f}" if name in row else "-" for name in ("message_over_equal", "mean_over_equal")
        ]
        return [row["split"], ind, cor, message, over[0], mean, over[1], SPLITS[row["split"]]]

    head = ["split", "sigma_ind", "sigma_cor", "one message", "/ equal", "honest mean", "/ equal", ""]
    cells = [line(row) for row in rows]
    width = max([len(cell[-1]) for cell in cells if len(cell) == len(head)], default=0)
    cells = [[*cell[:-1], f"{cell[-1]:<{width}}"] if len(cell) == len(head) else cell for cell in cells]
    plan = next((row["plan"] for row in rows if "plan" in row), None)
    q = f" with q = {plan.num_colluding}" if plan else ""
    return [f"ByzLDP{q}: ways to split its noise (--noise_split)", *table(head, cells)]


def graph_lines(row: Row | None) -> list[str]:
    if row is None:
        return []
    pairs = row["pairs"] / row["pairs_complete"]
    head = ["", "sigma_ind", "sigma_cor", "one message", "/ complete", "honest mean", "/ complete"]
    ind, cor, message, mean = noise_cells(row)
    over = [f"{row[f'{what}_over_complete']:.3f}" for what in ("message", "mean")]
    complete = row["complete"]
    other = noise_cells(complete)
    return [
        "Secret graph (--secret_graph)",
        *paragraph(f"{row['graph'].capitalize()}: {pairs:.1%} of all {row['pairs_complete']:,} pairs."),
        *paragraph(f"Epsilon is {privacy.HOW[row['how']]}. The noise in the honest mean is at most:"),
        *table(
            head,
            [
                ["this graph", ind, cor, message, over[0], mean, over[1]],
                ["complete graph", *other[:3], "1.000", other[3], "1.000"],
            ],
        ),
    ]


def dropout_lines(found: Row) -> list[str]:
    plan, rows = found["plan"], found["dropouts"]
    title = "Dropouts: honest workers that vanish after the noise was planned"
    if len(rows) == 1:
        return [title, *paragraph("There is one honest worker only: nobody can vanish.")]
    cdp = plan.threat_model == "cdp"
    head = ["vanished", "honest mean", "/ all there", *(["epsilon"] if cdp else [])]
    cells = [
        [str(row["vanished"]), number(row["mean"]), f"{row['over_all']:.3f}"]
        + ([number(row["epsilon"])] if cdp else [])
        for row in rows
    ]
    if cdp:
        words = (
            "Privacy suffers: the noise of CDP is in the mean of all n messages, and those who vanish take "
            "their part of it away. Plan with the number of workers that are sure to stay."
        )
    else:
        words = (
            "Privacy holds: the server sees a part of what it would have seen, with noise of the same law, "
            "so epsilon is not above the plan's."
        )
    if plan.graph is not None:
        words += " On this graph the noise is at most what is shown."
    return [title, *table(head, cells), *paragraph(words)]


def sampling_lines(of: Setting, found: Row) -> list[str]:
    rows = found["samplings"]
    if rows is None:
        return []
    m, b = of.samples_per_worker, of.config.batch_size
    head = ["sampling", "neighbours", "sensitivity", "sigma_ind", "sigma_cor", "one message", "honest mean"]
    cells = [
        [row["sampling"], row["neighbours"], number(row["sensitivity"]), *noise_cells(row)] for row in rows
    ]
    lines = [
        f"Example level: batches of {b} of {m:,} examples a worker, by the rdp accountant (--sampling)",
        *table(head, cells),
        *paragraph(
            "The two promise different things, since they differ in their neighbours. A Poisson batch has at "
            f"most {rows[1]['largest_batch']} examples (the chance of more is counted in delta)."
        ),
    ]
    if of.config.partition == "dirichlet":
        lines += paragraph(
            "With --partition=dirichlet the workers have different numbers of examples, and a run plans for "
            "the smallest: give its number as --samples_per_worker."
        )
    if found["pld_epsilon"] is None:
        lines += paragraph("PLD: not known, since the package dp-accounting is not installed.")
    else:
        lines += paragraph(
            f"PLD (dp-accounting) gives the Poisson plan epsilon = {number(found['pld_epsilon'])}, rdp "
            f"{number(rows[1]['epsilon'])}; it does not cover sampling without replacement."
        )
    return lines


def paper_text(rows: list[Row]) -> str:
    """The table of Figure 1's settings, in Markdown."""
    names = ("paper", "rdp", "exact")
    head = ["setting", "threat model", *(f"sigma, {name}" for name in names)]
    head += [*(f"honest mean, {name}" for name in names), "rdp / paper", "exact / paper", "exact / rdp"]
    lines = [
        "Noise that the budgets of the paper's Figure 1 need by its closed form (paper), by rdp, which gives",
        "its numbers, and by exact accounting (n = 100, T = 30, delta = 1e-4, user level). sigma is",
        "sigma_ind under LDP and CDP, sigma_cor under SecLDP (q = 0), and both, equal, under ByzLDP (q = f).",
        "",
        "| " + " | ".join(head) + " |",
        "| --- | --- |" + " ---: |" * (len(head) - 2),
    ]
    for row in rows:
        over = row["over_paper"]
        cells = [
            f"{row['dataset']}, C = {row['clip_norm']:g}, f = {row['num_byzantine']}, "
            f"epsilon = {row['epsilon']:g}",
            THREAT_MODELS[row["threat_model"]],
            *(f"{row['sigma'][name]:.4f}" for name in names),
            *(f"{row['mean'][name]:.4f}" for name in names),
            *(f"{ratio:.4f}" for ratio in (over["rdp"], over["exact"], over["exact"] / over["rdp"])),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figures(of: Setting) -> tuple[dict[str, Figure], list[str]]:
    """The pictures by file name, and what is to be said about those that lack something."""
    cfg = of.config
    n, f = cfg.num_workers, cfg.num_byzantine
    q = f if cfg.num_colluding is None else cfg.num_colluding
    limited = "q = f" if cfg.num_colluding is None else f"q = min({q}, f)"
    run = f"T = {cfg.rounds}, C = {cfg.clip_norm:g}, {cfg.privacy_level} level, {cfg.accountant}"
    if of.graph is not None:
        run += f", {of.graph.name} graph with {len(of.graph.edges):,} pairs"
    pictures, notes = {}, []

    axes = new_axes(f"n = {n}, f = {f}, delta = {cfg.delta:g}, {run}")
    draw(axes, planner.over_epsilon(of), f"ByzLDP (q = {q})")
    axes.set_xscale("log")
    log_ticks(axes, "x")
    mark(axes, cfg.epsilon, f"budget {cfg.epsilon:g}")
    pictures["noise_over_epsilon.png"] = finish(axes, "Privacy budget epsilon")

    budget = f"epsilon = {cfg.epsilon:g}, delta = {cfg.delta:g}"
    for symbol, words, curves, workers, label, value in (
        ("q", "Colluding", planner.over_colluding(of), f"n = {n}, f = {f}", "q colluding", q),
        ("f", "Malicious", planner.over_byzantine(of), f"n = {n}", limited, f),
    ):
        if len(curves.x) < 2:
            notes.append(f"No picture over {symbol}: with n = {n} and f = {f} it can only be 0.")
            continue
        axes = new_axes(f"{workers}, {budget}, {run}")
        draw(axes, curves, f"ByzLDP ({label})")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        mark(axes, value, f"{symbol} = {value}")
        pictures[f"noise_over_{symbol}.png"] = finish(axes, f"{words} workers {symbol}")
    return pictures, notes


def new_axes(settings: str) -> Axes:
    figure = Figure(figsize=(6.4, 4.6), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    lines = textwrap.wrap(settings, 85)
    axes.set_title("Noise in the honest mean (standard deviation)", fontsize=11, pad=8 + 12 * len(lines))
    axes.annotate(
        "\n".join(lines), (0.5, 1.02), xycoords="axes fraction", ha="center", fontsize=8.5, color="0.3"
    )
    return axes


def mark(axes: Axes, x: float, text: str) -> None:
    """A line for what was chosen, with words beside it that stay inside."""
    axes.axvline(x, color="0.6", linewidth=1, zorder=0)
    to_axes = axes.transData + axes.transAxes.inverted()
    right = to_axes.transform((x, axes.get_ylim()[0]))[0] > 0.5
    axes.annotate(
        text,
        (x, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-4 if right else 4, -2),
        textcoords="offset points",
        ha="right" if right else "left",
        va="top",
        color="0.4",
        fontsize=8,
    )


def draw(axes: Axes, curves: planner.Curves, byzldp: str) -> None:
    """Draws all curves that have points; `byzldp` says which ByzLDP is meant."""
    labels = THREAT_MODELS | {"byzldp": byzldp}
    for model, style in STYLES.items():
        y = curves.mean[model]
        if np.isfinite(y).any():  # Where there is no number, the line has a gap.
            every = max(1, len(y) // 10)
            axes.plot(
                curves.x, y, label=labels[model], linewidth=1.8, markersize=4.5, markevery=every, **style
            )
    axes.set_yscale("log")
    log_ticks(axes, "y")


def log_ticks(axes: Axes, which: str) -> None:
    """Plain numbers on a logarithmic axis, close enough to be read and no closer."""
    low, high = axes.get_ylim() if which == "y" else axes.get_xlim()
    decades = math.log10(high / low)
    axis = axes.yaxis if which == "y" else axes.xaxis
    subs = (1.0,) if decades > 3 else (1.0, 2.0, 5.0) if decades > 0.8 else tuple(map(float, range(1, 10)))
    axis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def finish(axes: Axes, words: str) -> Figure:
    axes.set_xlabel(words)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)  # room for the words of `mark`
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return figure


def plain(value: Any) -> Any:
    """The same for JSON: a plan as its fields."""
    if isinstance(value, privacy.PrivacyPlan):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def write(file: str | None, found: Row, folder: str | None, pictures: dict[str, Figure]) -> None:
    """Writes what was asked for, after it is clear that the folders are there."""
    path = folder
    try:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
        path = file
        if file:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(json.dumps(plain(found), indent=2, allow_nan=False) + "\n")
        path = folder
        for name, figure in pictures.items():
            plotting.save(figure, Path(str(folder), name))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None


def main(argv: Sequence[str]) -> None:
    cfg, values = read_flags(argv)
    head = {"command": shlex.join(["python", *argv]), "cafcor_jax": cafcor_jax.__version__}
    if values.paper_table:
        rows = planner.paper_table()
        write(values.json, head | {"paper_table": rows}, None, {})
        print(paper_text(rows))
        return
    of = planner.setting(cfg, values.samples_per_worker)
    found = report(of)
    pictures, notes = figures(of) if values.plots else ({}, [])
    settings = {"config": cfg.to_dict(), "samples_per_worker": of.samples_per_worker}
    write(values.json, head | settings | found, values.plots, pictures)
    print(text(of, found))
    for line in notes:
        print(f"\n{line}")
    if values.json or pictures:
        print(
            "\nWritten:", *filter(None, [values.json]), *(str(Path(values.plots, name)) for name in pictures)
        )


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # A reader that has seen enough, such as head, is no error.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(cli.status(lambda: main(sys.argv)))
