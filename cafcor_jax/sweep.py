"""Many runs from one description: which settings vary, which of the runs are done, and one table of them all.

A sweep is a product: every panel x every curve x every value of every axis, on top of the settings that all
runs share. Panels and curves carry the labels of figures; either may be missing. Each run lives in a folder
of a pool, named by the settings that decide its results, so sweeps that share a pool share runs.

    <sweep_dir>/sweep.json      what belongs to the sweep; written first
    <sweep_dir>/results.csv     one row a run, rewritten after each
    <sweep_dir>/failures.json   why runs failed, the last time they were tried
    <pool>/<run>/               a run's own files, see `workdir`
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import itertools
import json
import math
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cafcor_jax import aggregators, attacks, experiment
from cafcor_jax import config as config_lib
from cafcor_jax.attacks import adaptive
from cafcor_jax.config import Config
from cafcor_jax.errors import InUseError, UserError
from cafcor_jax.progress import Progress, Silent
from cafcor_jax.workdir import strict, write_whole

# Of the paper's CNN on 2 CPU cores, for an estimate before anything has been timed: seconds for the gradient
# of one example by the privacy level, for one number of noise, of a pair's noise, and of the rest of a round
# (momentum, attack, aggregation), for one test image, and to compile.
_GRADIENT = {"user": 1.5e-4, "example": 2.4e-4}
_NOISE, _PAIR_NOISE, _REST, _TEST_IMAGE, _COMPILATION = 7e-9, 2.6e-9, 7e-9, 6e-5, 15.0
# For one trial of an adaptive attack: for a number of the messages under a coordinate-wise rule (up to 64
# workers, and more), and n^-3 of what a linear rule does with G, or a slow one with each subset.
_SORTED, _SORTED_IN_LOOP, _WEIGHED = 9e-10, 8.5e-9, 2e-9
# By how much the search for groups that break the law of noise makes that longer.
_GROUPS = 4
_PARAMETERS, _TEST_IMAGES = 431_080, 10_000

_RESULTS = (
    "final_accuracy",
    "best_accuracy",
    "best_round",
    "final_loss",
    "epsilon",
    "delta",
    "accountant",
    "honest_weight",
    "rounds_beyond_f",
    "rounds_without_law",
    "seconds",
    "params_sha256",
)


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
      folder: its workdir, in the pool.
      panel: the label of the figure's panel it belongs to.
      curve: the label of its curve.
      config: its settings.
    """

    folder: Path
    panel: str | None
    curve: str | None
    config: Config


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep; nothing in it changes.

    Attributes:
      name: of the sweep.
      command: that makes it.
      pool: the folder of the runs' folders.
      panels: labels in order; empty without panels.
      curves: labels in order; empty without curves.
      varied: the names of the settings that differ between runs.
      runs: in the order in which they are run.
    """

    name: str
    command: str
    pool: Path
    panels: tuple[str, ...]
    curves: tuple[str, ...]
    varied: tuple[str, ...]
    runs: tuple[Run, ...]

    def distinct(self) -> tuple[Run, ...]:
        """The runs without those that an earlier one already is: panels may share a baseline."""
        first: dict[Path, Run] = {}
        for run in self.runs:
            first.setdefault(run.folder, run)
        return tuple(first.values())


class Outcome(NamedTuple):
    """What has become of a run."""

    status: str
    """"done", "failed", "unfinished", "missing", or "elsewhere" if another process runs it."""
    summary: experiment.Summary | None
    error: str


def parse_axis(text: str) -> tuple[str, tuple[Any, ...]]:
    """Reads an axis, such as "seed=1,2,3".

    Returns:
      The setting's name, and its values.

    Raises:
      UserError: if it is no axis, or names a setting that cannot be swept.

    Example:
      >>> parse_axis("num_byzantine=5,10")
      ('num_byzantine', (5, 10))
    """
    name, equals, values = (part.strip() for part in text.partition("="))
    if not equals or not name:
        raise UserError(f"--sweep={text!r} is not an axis: write --sweep name=value,value.")
    _check_decides_results(name, f"--sweep={text!r}")
    parsed = tuple(config_lib.parse(name, value) for value in values.split(",") if value.strip())
    if not parsed:
        raise UserError(f"--sweep={text!r} has no values, so there is nothing to run: give at least one.")
    if len(set(parsed)) < len(parsed):
        raise UserError(f"--sweep={text!r} has a value twice: give each once.")
    return name, parsed


def parse_variant(text: str, flag: str) -> tuple[str, dict[str, Any]]:
    """Reads a panel or a curve, such as "DSGD-CDP: aggregator=mean threat_model=cdp".

    Args:
      text: a label, a colon, and settings with spaces between.
      flag: "panel" or "curve", for messages.

    Returns:
      The label, and the settings.

    Raises:
      UserError: if it is none, or a setting is wrong.

    Example:
      >>> parse_variant("MNIST, f = 5: dataset=mnist num_byzantine=5", "panel")
      ('MNIST, f = 5', {'dataset': 'mnist', 'num_byzantine': 5})
    """
    label, colon, rest = (part.strip() for part in text.partition(":"))
    settings = {}
    for word in rest.split():
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"--{flag}={text!r}: {word!r} is not name=value.")
        _check_decides_results(name, f"--{flag}={text!r}")
        settings[name] = config_lib.parse(name, value)
    if not colon or not label or not settings:
        raise UserError(f"--{flag}={text!r} is not a {flag}: write --{flag}=LABEL: name=value name=value.")
    return label, settings


def parse_variants(texts: Sequence[str], flag: str) -> dict[str, dict[str, Any]]:
    """Reads several panels or curves: their settings by label."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        label, settings = parse_variant(text, flag)
        if label in found:
            raise UserError(f"There are two of --{flag}={label!r}: give each {flag} a label of its own.")
        found[label] = settings
    return found


def _check_decides_results(name: str, what: str) -> None:
    if not config_lib.field_of(name).metadata["result"]:
        raise UserError(f"{what} varies {name}, which changes no result: give it once, as a flag.")


def plan(
    *,
    name: str,
    command: str,
    pool: str | os.PathLike[str],
    base: Mapping[str, Any],
    panels: Mapping[str, Mapping[str, Any]],
    curves: Mapping[str, Mapping[str, Any]],
    axes: Mapping[str, Sequence[Any]],
) -> Sweep:
    """All runs of a sweep. A curve wins over panels and axes, and these over the base.

    Args:
      name: of the sweep.
      command: that makes it.
      pool: the folder for the runs' folders.
      base: the settings of all runs, by name.
      panels: settings by label.
      curves: settings by label.
      axes: values by setting. The seed varies slowest, so that a sweep cut short has all curves of few seeds.

    Returns:
      The sweep.

    Raises:
      UserError: if there is nothing to run, an axis contradicts a panel, or a combination is not allowed.
    """
    for axis in axes:
        if any(axis in settings for settings in panels.values()):
            raise UserError(
                f"{axis} is an axis, and panels set it too, so their labels would not be true: vary it in "
                "one of the two."
            )
    if not (panels or curves or axes):
        raise UserError("Nothing varies in this sweep: give --sweep name=value,value, --panel or --curve.")
    order = sorted(axes, key=lambda axis: axis != "seed")
    runs = []
    for values in itertools.product(*(axes[axis] for axis in order)):
        for panel, in_panel in panels.items() or [(None, {})]:
            for curve, of_curve in curves.items() or [(None, {})]:
                settings = {**base, **in_panel, **dict(zip(order, values, strict=True)), **of_curve}
                try:
                    config = Config.from_dict(settings)
                except UserError as error:
                    where = ", ".join(filter(None, [panel, curve, *map("{}={}".format, order, values)]))
                    raise UserError(f"The sweep cannot run [{where}]: {error}") from None
                folder = Path(pool) / folder_name(config)
                runs.append(Run(folder, panel, curve, dataclasses.replace(config, workdir=str(folder))))
    return Sweep(name, command, Path(pool), tuple(panels), tuple(curves), _varied(runs), tuple(runs))


def _varied(runs: Sequence[Run]) -> tuple[str, ...]:
    settings = [config_lib.decisive(run.config) for run in runs]
    return tuple(name for name in settings[0] if len({one[name] for one in settings}) > 1)


def folder_name(config: Config) -> str:
    """A name that only runs with the same results share."""
    # Of settings at their defaults nothing is hashed: a setting that is added later renames no folder.
    defaults = config_lib.decisive(Config())
    chosen = {name: value for name, value in config_lib.decisive(config).items() if value != defaults[name]}
    digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:10]
    return (
        f"{config.dataset}_{config.threat_model}_{config.aggregator}_{config.attack}_"
        f"f{config.num_byzantine}_seed{config.seed}_{digest}"
    )


def save(sweep: Sweep, sweep_dir: str | os.PathLike[str]) -> None:
    """Writes sweep.json.

    Raises:
      UserError: if the folder holds other files and no sweep, or cannot be written.
    """
    folder = Path(sweep_dir)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "sweep.json").exists():
        raise UserError(f"The folder {folder} holds other files and no sweep: give another --sweep_dir.")
    if (folder / "sweep.json").exists():
        try:
            before = load(folder).runs
        except UserError:  # It is damaged: this makes it anew.
            before = ()
        lost = {run.folder.name for run in before} - {run.folder.name for run in sweep.runs}
        if lost:
            raise UserError(
                f"The folder {folder} holds a sweep with {len(lost)} runs that this one does not have: give "
                "this one a --name or --sweep_dir of its own (runs that both have are done once)."
            )
    stored = {
        "name": sweep.name,
        "command": sweep.command,
        "pool": os.path.relpath(sweep.pool, folder),
        "panels": list(sweep.panels),
        "curves": list(sweep.curves),
        "varied": list(sweep.varied),
        "runs": [
            {
                "folder": run.folder.name,
                "panel": run.panel,
                "curve": run.curve,
                "config": {key: value for key, value in run.config.to_dict().items() if key != "workdir"},
            }
            for run in sweep.runs
        ],
    }
    write_whole(folder / "sweep.json", (json.dumps(strict(stored), indent=1) + "\n").encode())


def load(sweep_dir: str | os.PathLike[str]) -> Sweep:
    """Reads what `save` wrote.

    Raises:
      UserError: if the folder is missing, is not that of a sweep, or is damaged.
    """
    folder = Path(sweep_dir)
    path = folder / "sweep.json"
    if not folder.is_dir():
        raise UserError(f"The folder {folder} does not exist: give the --sweep_dir of a sweep that was run.")
    if not path.exists():
        raise UserError(f"The folder {folder} holds no sweep (no sweep.json): give that of a sweep.")
    try:
        stored = json.loads(path.read_text())
        pool = Path(os.path.normpath(folder / stored["pool"]))
        runs = tuple(
            Run(
                pool / run["folder"],
                run["panel"],
                run["curve"],
                Config.from_dict(run["config"] | {"workdir": str(pool / run["folder"])}),
            )
            for run in stored["runs"]
        )
        panels, curves, varied = (tuple(map(str, stored[key])) for key in ("panels", "curves", "varied"))
        return Sweep(str(stored["name"]), str(stored["command"]), pool, panels, curves, varied, runs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is damaged ({type(error).__name__}: {error}): the command of the sweep makes it anew, "
            "and finished runs are kept."
        ) from None


def failures(sweep_dir: str | os.PathLike[str]) -> dict[str, str]:
    """Why runs failed, by the names of their folders; nothing is known if the file is damaged."""
    try:
        stored = json.loads((Path(sweep_dir) / "failures.json").read_text())
        return {str(key): str(value) for key, value in stored.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def outcome(run: Run, failed: Mapping[str, str] | None = None) -> Outcome:
    """What has become of a run.

    Args:
      run: of a sweep.
      failed: what `failures` gave.

    Returns:
      Its state; a summary that cannot be read counts as a failure.
    """
    error = (failed or {}).get(run.folder.name, "")
    path = run.folder / "summary.json"
    try:
        summary = experiment.Summary.from_dict(json.loads(path.read_text()))
        stored = Config.from_dict(json.loads((run.folder / "config.json").read_text())["config"])
        other = config_lib.differences(stored, run.config)
        if other:
            return Outcome("failed", None, f"{run.folder} holds a run with another {', '.join(other)}.")
        return Outcome("done", summary, "")
    except FileNotFoundError:
        if error:
            return Outcome("failed", None, error)
        return Outcome("unfinished" if (run.folder / "config.json").exists() else "missing", None, "")
    except (OSError, ValueError, KeyError, TypeError) as damage:
        return Outcome("failed", None, f"{run.folder} is damaged ({damage}): delete it to run it again.")


def write_table(sweep: Sweep, sweep_dir: str | os.PathLike[str]) -> None:
    """Writes results.csv: a row a run, with its labels, what varies, its state and its results."""
    failed = failures(sweep_dir)
    names = ["panel", "curve", *sweep.varied, "status", *_RESULTS, "error", "folder"]
    rows = []
    for run in sweep.runs:
        status, summary, error = outcome(run, failed)
        settings = {name: getattr(run.config, name) for name in sweep.varied}
        results = {name: getattr(summary, name) if summary else "" for name in _RESULTS}
        labels = {"panel": run.panel or "", "curve": run.curve or ""}
        rows.append(
            {**labels, **settings, "status": status, **results, "error": error, "folder": run.folder.name}
        )
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    # A baseline that a panel shares with itself, under several values of an axis, is one result.
    writer.writerows(dict(row) for row in dict.fromkeys(tuple(row.items()) for row in rows))
    write_whole(Path(sweep_dir) / "results.csv", text.getvalue().encode())


def run_all(
    sweep: Sweep,
    sweep_dir: str | os.PathLike[str],
    *,
    progress_of: Callable[[Run], Progress],
    finished: Callable[[Run, Outcome], None],
) -> dict[str, str]:
    """Runs what is not done, one run after the other; compiled code is kept between them.

    A run that another process works on is left to it, and looked at once more after all others: that process
    may have been stopped.

    Args:
      sweep: the sweep.
      sweep_dir: its folder.
      progress_of: makes whom a run tells what it does.
      finished: is told of each run that came to an end, or was first found to run elsewhere.

    Returns:
      Why runs failed, by the names of their folders. Runs that are neither here nor done are still running in
      another process.
    """
    programs = experiment.Programs()
    failed = failures(sweep_dir)
    elsewhere: list[Run] = []

    def store() -> None:
        write_whole(Path(sweep_dir) / "failures.json", (json.dumps(failed, indent=1) + "\n").encode())
        write_table(sweep, sweep_dir)

    def attempt(run: Run) -> None:
        failed.pop(run.folder.name, None)
        trace = Path(sweep_dir) / f"failure_{run.folder.name}.txt"
        trace.unlink(missing_ok=True)
        done = outcome(run).status == "done"
        if done and run.config.tensorboard == "off":
            return
        try:
            # What is done is not computed again, but may have been without event files until now.
            experiment.run(run.config, progress=Silent() if done else progress_of(run), programs=programs)
        except InUseError:
            if not done and run not in elsewhere:
                elsewhere.append(run)
                finished(run, Outcome("elsewhere", None, ""))
            return
        except UserError as error:
            failed[run.folder.name] = str(error)
        except Exception as error:  # A bug or the machine: the other runs go on, and the trace is kept.
            write_whole(trace, traceback.format_exc().encode())
            first = (str(error).strip() or "no message").splitlines()[0]
            failed[run.folder.name] = f"{type(error).__name__}: {first} (the whole trace: {trace.name})"
        if not done:
            store()
            finished(run, outcome(run, failed))

    for run in sweep.distinct():
        attempt(run)
    for run in tuple(elsewhere):
        attempt(run)
    store()
    names = {run.folder.name for run in sweep.runs}
    return {name: why for name, why in failed.items() if name in names}


def estimated_seconds(config: Config) -> float:
    """About how long the rounds of a run take on 2 CPU cores; compiling comes on top, once a program."""
    n, h = config.num_workers, config.num_honest
    gradients = h * config.batch_size * _GRADIENT[config.privacy_level]
    if config.attack == "label_flip" and config.num_byzantine:
        gradients += h * config.batch_size * _GRADIENT["user"]
    numbers = n * _PARAMETERS
    noise = numbers * _NOISE if config.private else 0.0
    if config.threat_model in config_lib.CORRELATED:
        pairwise = config.noise_mode == "pairwise"
        noise += n * numbers / 2 * _PAIR_NOISE if pairwise else numbers * _NOISE
    evaluations = config.rounds / config.eval_every * _TEST_IMAGES * _TEST_IMAGE
    return config.rounds * (gradients + noise + numbers * _REST + _search_seconds(config)) + evaluations


def _search_seconds(config: Config) -> float:
    """What an adaptive attack adds to a round: the trials of its line search."""
    n, f = config.num_workers, config.num_byzantine
    if config.attack in ("alie_adaptive", "foe_adaptive"):
        searches = adaptive.IN_GRAM_SPACE, adaptive.DIRECT
    elif config.attack in attacks.SEARCHED and config.attack_factor is None:
        searches = adaptive.OF_BIASES, adaptive.OF_BIASES
    else:
        return 0.0
    in_gram_space = searches[0].num_trials() * n**3 * _WEIGHED
    if config.aggregator in aggregators.OVER_ROUNDS:
        return _GROUPS * in_gram_space
    rule = aggregators.BY_NAME[config.aggregator](num_byzantine=f)
    if not isinstance(rule, aggregators.LinearRule):
        number = _SORTED if n <= 64 else _SORTED_IN_LOOP
        search = searches[1]
        # On a sample of the coordinates; what it finds and the fixed attacks on all of them.
        coordinates = search.num_trials() * min(_PARAMETERS, search.coordinates) + 3 * _PARAMETERS
        return coordinates * n * number
    if rule.is_slow:
        return searches[1].num_trials() * math.comb(n, f) * n**3 * _WEIGHED
    return in_gram_space


def estimate(sweep: Sweep) -> tuple[float, float]:
    """The seconds that the runs still to do will take, and by how much the done ones here were slower.

    Returns:
      The seconds, and the factor by which runs of this pool took longer than `estimated_seconds` says (1 if
      none is done).
    """
    outcomes = {run.folder: outcome(run) for run in sweep.distinct()}
    done = [(run, found) for run in sweep.distinct() if (found := outcomes[run.folder]).summary]
    factor = 1.0
    if done:
        took = sum(found.summary.seconds for _, found in done if found.summary)
        factor = took / sum(estimated_seconds(run.config) for run, _ in done)
    missing = [run for run in sweep.distinct() if outcomes[run.folder].status != "done"]
    programs = {json.dumps(run.config.to_dict() | {"seed": 0, "workdir": ""}) for run in missing}
    seconds = factor * sum(estimated_seconds(run.config) for run in missing)
    return seconds + len(programs) * _COMPILATION, factor
