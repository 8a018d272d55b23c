"""Times the aggregation rules against the fastest plain averaging of the same messages.

Every rule is compiled, warmed up, and timed as the best of --repeats calls, in turn with the others. Its
ratio is that time over the time of the fastest of several ways to average. Where byzfl is installed, its
rules are timed on the same numbers (with its defaults: its geometric median takes 3 steps, ours runs until it
stands still). Memory is the peak during a call over the size of the messages, in a process of its own, at
the largest n, f and d.

Examples:
  python scripts/benchmark.py --json=runs/benchmark.json --plots=runs/plots
  python scripts/benchmark.py --n=10,30,100 --f=3 --dims=1e6 --rules=caf,nnm+caf,median --nopeers
"""

import contextlib
import csv
import datetime
import functools
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from cafcor_jax import aggregators, cli, plotting, progress, workdir
from cafcor_jax.errors import UserError
from cafcor_jax.types import Aggregator, Array

# The paper's runtime table: d -> rule -> time over that of averaging, for n = 30 and f = 3.
PAPER = {
    2_500_000: {"smea": 30_251, "caf": 28, "meamed": 112, "geometric_median": 62},
    5_000_000: {"smea": 61_142, "caf": 51, "meamed": 197, "geometric_median": 78},
    10_000_000: {"smea": 117_255, "caf": 100, "meamed": 378, "geometric_median": 126},
}
# The counterparts in byzfl; those with an f are given it, and the others' defaults are ours too.
PEERS = {
    "mean": "Average", "caf": "CAF", "smea": "SMEA", "krum": "Krum", "multi_krum": "MultiKrum",
    "geometric_median": "GeometricMedian", "mda": "MDA", "monna": "MoNNA", "median": "Median",
    "centered_clipping": "CenteredClipping", "trimmed_mean": "TrMean", "meamed": "Meamed",
    "nnm": "NNM", "bucketing": "Bucketing", "clipping": "Clipping", "arc": "ARC",
}  # fmt: skip
MUTATING = {"clipping", "arc"}  # in byzfl, these write into what they are given
PEER_BUDGET = 30.0  # seconds, beyond which a peer's calls are not repeated
COLUMNS = (
    "rule n f d dtype seconds ratio averaging averaging_seconds paper_ratio peer_seconds peer_over_ours "
    "peer_note memory note"
).split()
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

Setting = tuple[int, int, int]  # n, f, d
Row = dict[str, Any]  # one rule in one setting: COLUMNS


def read_flags(argv: Sequence[str]) -> flags.FlagValues:
    """Reads and checks a command line; what is wrong with it is a UserError."""
    values = flags.FlagValues()  # Not the global one: tests call main more than once.

    def define(kind: Callable[..., Any], name: str, default: Any, text: str, **options: Any) -> None:
        kind(name=name, default=default, help=text, flag_values=values, **options)

    define(flags.DEFINE_list, "n", ["30"], "Numbers of workers.")
    define(flags.DEFINE_list, "f", ["3"], "Numbers of malicious workers.")
    define(flags.DEFINE_list, "dims", ["2500000", "5000000", "10000000"], "Dimensions; also as 1e7.")
    define(flags.DEFINE_list, "rules", list(aggregators.BY_NAME), "Rules; also compositions like nnm+caf.")
    define(flags.DEFINE_enum, "dtype", "float32", "Of the messages.", enum_values=["float32", "bfloat16"])
    define(flags.DEFINE_integer, "repeats", 5, "Calls of each rule; the fastest counts.", lower_bound=1)
    define(flags.DEFINE_bool, "peers", True, "Whether byzfl is timed, where it is installed.")
    define(flags.DEFINE_float, "peer_limit", 120.0, "Seconds a peer's call may take.", lower_bound=0.0)
    define(flags.DEFINE_bool, "memory", True, "Whether the peak memory is measured, in the largest setting.")
    define(flags.DEFINE_string, "json", None, "File for results, machine and versions.")
    define(flags.DEFINE_string, "csv", None, "File for one line a rule and setting.")
    define(flags.DEFINE_string, "plots", None, "Folder for plots over d, n and f, each if it has two values.")
    listed = [values[name] for name in values]
    define(flags.DEFINE_string, "memory_of", None, "The rule that a child process measures.")
    if {"--help", "-h"} & set(argv):
        defaults = [(flag, (flag.default_as_str or "").strip("'")) for flag in listed]
        lines = [f"  --{flag.name}={default}\n        {flag.help}" for flag, default in defaults]
        print(f"{__doc__}\nFlags and their defaults:", *lines, sep="\n")
        sys.exit(0)
    cli.read(values, argv)
    for name, least in (("n", 1), ("f", 0), ("dims", 1)):
        values[name].value = whole_numbers(name, getattr(values, name), least)
    for n, f in itertools.product(values.n, values.f):
        if 2 * f >= n:
            raise UserError(f"--f={f} of --n={n}: fewer than half of the workers may be malicious.")
    check_rules(values.rules)
    for name in ("json", "csv", "plots"):
        check_writable(name, values[name].value)
    return values


def whole_numbers(flag: str, texts: Sequence[str], least: int) -> list[int]:
    try:
        numbers = sorted({float(text) for text in texts})
    except ValueError:
        numbers = []
    if not numbers or not all(number.is_integer() and number >= least for number in numbers):
        raise UserError(f"--{flag}={','.join(texts)}: it must be whole numbers of at least {least}.")
    return [int(number) for number in numbers]


def check_rules(names: Sequence[str]) -> None:
    mixings = aggregators.mixing.BY_NAME
    for name in names or [""]:
        *before, rule = name.split("+")
        if rule not in aggregators.BY_NAME or not set(before) <= set(mixings):
            allowed = f"{', '.join(aggregators.BY_NAME)}, alone or after {', '.join(mixings)} and a +"
            raise UserError(f"--rules has {name!r}; rules are {allowed}.")


def check_writable(flag: str, path: str | None) -> None:
    """Finds out before the work whether results can be written after it."""
    if path is None:
        return
    file = Path(path, ".writable") if flag == "plots" else Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        open(file, "a").close()  # leaves older results as they are
        if flag == "plots":
            file.unlink()
    except OSError as error:
        raise UserError(f"--{flag}={path} cannot be written: {error.strerror}.") from None


def make_rule(name: str, f: int) -> Aggregator:
    """Builds a rule, or a composition such as nnm+caf, by its name."""
    *before, last = name.split("+")
    rule: Aggregator = aggregators.BY_NAME[last](num_byzantine=f)
    for mixing in reversed(before):
        rule = aggregators.compose(aggregators.mixing.BY_NAME[mixing](num_byzantine=f), rule)
    return rule


def make_messages(n: int, f: int, d: int, dtype: str) -> Array:
    """Standard Gaussian messages [n, d]; the last f are shifted by 3 in all coordinates, signs at random."""

    @jax.jit
    def make(keys: Array) -> Array:
        shift = jnp.where(jax.random.bernoulli(keys[n], shape=(d,)), 3.0, -3.0)

        def row(worker: Array) -> Array:
            message = jax.random.normal(keys[worker], (d,)) + jnp.where(worker >= n - f, shift, 0)
            return message.astype(dtype)

        # Row by row: the random bits of all rows at once would take as much memory as the rows.
        return jax.lax.map(row, jnp.arange(n))

    return jax.block_until_ready(make(jax.random.split(jax.random.key(0), n + 1)))


def fastest(
    call: Callable[[Any], Any], make_input: Callable[[], Any], repeats: int, budget: float = math.inf
) -> float:
    """Seconds of the fastest call; making the input is not counted."""
    times: list[float] = []
    while len(times) < repeats and sum(times) < budget:
        given = make_input()
        start = time.perf_counter()
        jax.block_until_ready(call(given))
        times.append(time.perf_counter() - start)
    return min(times)


def compiled(call: Callable[[Array], Array], x: Array) -> Callable[[], Array]:
    """The call on x, compiled and warm."""
    ready = jax.jit(call).lower(x).compile()
    jax.block_until_ready(ready(x))
    return lambda: ready(x)


def time_in_turns(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Seconds of every call's fastest run. They take turns, so that a slow spell of the machine hits all."""
    seconds = dict.fromkeys(calls, math.inf)
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def ways_to_average(x: Array) -> dict[str, Callable[[], Any]]:
    """Plain averaging in all ways that may be the fastest."""
    n, d = x.shape
    calls: dict[str, Callable[[], Any]] = {
        "matmul": compiled(lambda x: jnp.full(n, 1 / n, x.dtype) @ x, x),
        "row by row": compiled(lambda x: functools.reduce(jnp.add, x) / n, x),
    }
    if jax.default_backend() != "cpu" or d <= 1e6:  # On a CPU it goes column by column, far slower.
        calls["x.mean(0)"] = compiled(lambda x: x.mean(0), x)
    if jax.default_backend() == "cpu" and importlib.util.find_spec("torch"):
        import torch

        tensor = torch.from_dlpack(x)  # the same memory
        calls["torch.mean(0)"] = lambda: tensor.mean(0)
        calls["torch.mean(0)"]()
    return calls


def load_byzfl() -> Any | None:
    """The rules of byzfl, or None if it is not installed.

    The package imports its training framework with torchvision, whose usual build does not load beside a CPU
    build of torch. The rules need neither, so only their part of the package is imported.
    """
    if "byzfl" not in sys.modules:
        found = importlib.util.find_spec("byzfl")
        if found is None:
            return None
        package = types.ModuleType("byzfl")
        package.__path__ = list(found.submodule_search_locations or [])
        sys.modules["byzfl"] = package
    try:
        return importlib.import_module("byzfl.aggregators")
    except ImportError:
        return None


def make_peer(byzfl: Any, name: str, f: int) -> Callable[[Any], Any]:
    """Builds byzfl's counterpart of a rule or pre-aggregation."""
    kind = getattr(byzfl, PEERS[name])
    options = {"f": f} if "f" in inspect.signature(kind).parameters else {}
    return kind(**options, **({"s": 2} if name == "bucketing" else {}))


def time_peer(
    byzfl: Any, name: str, f: int, x: Array, repeats: int, limit: float
) -> tuple[float | None, str | None]:
    """Seconds of byzfl's fastest call, or None and why."""
    import torch

    d, tensor, parts = x.shape[1], torch.from_dlpack(x), name.split("+")

    def call(vectors: Any) -> Any:
        for part in parts:
            vectors = make_peer(byzfl, part, f)(vectors)  # a new one, since some remember the last call
        if vectors is None:
            raise ValueError("it returned nothing")
        return vectors

    def at(columns: int) -> float:
        return fastest(call, tensor[:, :columns].clone, 1)

    try:
        with bounded(3 * limit):
            if d >= 100_000:
                few, many = at(d // 1000), at(d // 100)
                # Linear in d; what does not depend on d (much, for rules over subsets) is not scaled up.
                estimate = many + 110 * max(many - few, 0)
                if estimate > limit:
                    return None, f"skipped, about {estimate:,.0f} s"
            make_input = tensor.clone if MUTATING & set(parts) else lambda: tensor
            return fastest(call, make_input, repeats, min(PEER_BUDGET, limit)), None
    except TimeoutError:
        return None, f"stopped after {3 * limit:,.0f} s"
    except (RuntimeError, MemoryError, ValueError) as error:
        return None, f"failed: {(str(error) or 'out of memory').splitlines()[0]}"


@contextlib.contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Turns into exceptions what would go on for ever, and what would use up the memory and end the process.

    byzfl's CAF never ends where all messages that still have weight are equal, as they often are after NNM.
    """

    def stop(*_: object) -> None:
        raise TimeoutError

    with contextlib.ExitStack() as undo:
        if hasattr(signal, "SIGALRM"):
            undo.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, stop))
            signal.setitimer(signal.ITIMER_REAL, seconds)
            undo.callback(signal.setitimer, signal.ITIMER_REAL, 0)
        if Path("/proc/meminfo").exists():
            import resource

            before = resource.getrlimit(resource.RLIMIT_AS)
            most = proc_bytes("/proc/self/status", "VmSize") + proc_bytes("/proc/meminfo", "MemAvailable")
            resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
            undo.callback(resource.setrlimit, resource.RLIMIT_AS, before)
        yield


def proc_bytes(file: str, name: str) -> int:
    """A line such as "VmHWM:  1234 kB" of a file in /proc, in bytes."""
    found = re.search(rf"^{name}:\s*(\d+) kB", Path(file).read_text(), re.MULTILINE)
    assert found, f"{file} has no {name}"
    return int(found[1]) * 1024


def measure_memory(name: str, setting: Setting, dtype: str) -> float:
    """Peak memory while a rule runs, over the size of its input; to be called in a process of its own."""
    x = make_messages(*setting, dtype)
    compiled = jax.jit(make_rule(name, setting[1])).lower(x).compile()
    base = proc_bytes("/proc/self/status", "VmRSS")
    with contextlib.suppress(OSError):  # Without the reset, the peak may be from before: an upper bound.
        Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        jax.block_until_ready(compiled(x))
    return 1 + max(proc_bytes("/proc/self/status", "VmHWM") - base, 0) / x.nbytes


def memory_in_child(name: str, setting: Setting, dtype: str) -> float | None:
    """Calls `measure_memory` in a new process; None if that fails."""
    numbers = [f"--{flag}={value}" for flag, value in zip(("n", "f", "dims"), setting, strict=True)]
    command = [sys.executable, __file__, f"--memory_of={name}", f"--dtype={dtype}", *numbers]
    # The child is to find the package where this process did.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def time_setting(
    setting: Setting, values: flags.FlagValues, byzfl: Any | None, phase: Callable[[str], Any]
) -> tuple[list[Row], dict[str, float]]:
    """Times everything in one setting: a row for every rule, and the ways to average."""
    n, f, d = setting
    with phase("plain averaging"):
        x = make_messages(n, f, d, values.dtype)
        averages = ways_to_average(x)
    rows, calls = [], {}
    for name in values.rules:
        row: Row = dict.fromkeys(COLUMNS) | {"rule": name, "n": n, "f": f, "d": d, "dtype": values.dtype}
        row["paper_ratio"] = PAPER.get(d, {}).get(name) if (n, f) == (30, 3) else None
        rows.append(row)
        with phase(name):
            try:
                calls[name] = compiled(make_rule(name, f), x)
            except ValueError as error:  # Such as too many subsets: the other rules go on.
                row["note"] = str(error)
                continue
            if byzfl is not None:
                limit = values.peer_limit
                row["peer_seconds"], row["peer_note"] = time_peer(byzfl, name, f, x, values.repeats, limit)
    with phase("all in turn"):
        # A space keeps a way to average apart from a rule of the same name.
        seconds = time_in_turns({f" {way}": call for way, call in averages.items()} | calls, values.repeats)
    averaging = dict(sorted(((way, seconds[f" {way}"]) for way in averages), key=lambda item: item[1]))
    way, averaging_seconds = next(iter(averaging.items()))
    for row in rows:
        row |= {"averaging": way, "averaging_seconds": averaging_seconds}
        if row["rule"] in calls:
            row["seconds"] = seconds[row["rule"]]
            row["ratio"] = row["seconds"] / averaging_seconds
            row["peer_over_ours"] = row["peer_seconds"] and row["peer_seconds"] / row["seconds"]
    return rows, averaging


def table(rows: list[Row], averaging: dict[str, float]) -> str:
    """One setting as text, the fastest rule first."""

    def cell(value: float | None, otherwise: str | None = None) -> str:
        return otherwise or "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    first = rows[0]
    lines = [
        f"\nn = {first['n']}, f = {first['f']}, d = {first['d']:,}, {first['dtype']}",
        f"averaging, the first counts: {', '.join(f'{way} {time:.4g} s' for way, time in averaging.items())}",
        f"  {'rule':<24}{'seconds':>10}{'ratio':>9}{'paper':>9}{'memory':>9}  byzfl/ours",
    ]
    for row in sorted(rows, key=lambda row: row["ratio"] or math.inf):
        if row["note"]:
            lines.append(f"  {row['rule']:<24}{row['note']}")
            continue
        numbers = f"{row['seconds']:>10.4g}{cell(row['ratio']):>9}{cell(row['paper_ratio']):>9}"
        peer = cell(row["peer_over_ours"], row["peer_note"])
        lines.append(f"  {row['rule']:<24}{numbers}{cell(row['memory']):>9}  {peer}")
    return "\n".join(lines)


def describe_machine() -> dict[str, Any]:
    """The processor, its cores and the memory, as far as the system tells."""
    about = {"cpu": platform.processor(), "cores": os.cpu_count(), "memory_bytes": None}
    with contextlib.suppress(OSError):
        model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        about |= {"cpu": model[1]} if model else {}
        about["memory_bytes"] = proc_bytes("/proc/meminfo", "MemTotal")
    return about


def save(values: flags.FlagValues, argv: Sequence[str], rows: list[Row], averagings: list[Row]) -> None:
    """Writes the JSON and the CSV file."""
    if values.json:
        installed = {found.name: found.version for found in importlib.metadata.distributions()}
        packages = {name: installed.get(name) for name in ("jax", "jaxlib", "numpy", "torch", "byzfl")}
        report = {
            "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": shlex.join(["python", *argv]),
            "machine": describe_machine(),
            "versions": {"python": platform.python_version(), **packages},
            "averaging": averagings,
            "results": rows,
        }
        Path(values.json).write_text(json.dumps(workdir.strict(report), indent=2) + "\n")
    if values.csv:
        with open(values.csv, "w", newline="") as stream:
            writer = csv.DictWriter(stream, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


def plot(rows: list[Row], axis: str, fixed: dict[str, int]) -> Figure:
    """The ratios over d, n or f, with the other two fixed."""
    shown = [row for row in rows if all(row[name] == value for name, value in fixed.items())]
    ticks = sorted({row[axis] for row in shown})
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for index, rule in enumerate(dict.fromkeys(row["rule"] for row in shown)):
        again = index // len(COLOURS)  # Colours come again with another line and marker.
        axes.plot(
            *zip(*[(row[axis], row["ratio"]) for row in shown if row["rule"] == rule], strict=True),
            color=COLOURS[index % len(COLOURS)],
            linestyle=("-", "--", ":")[again % 3],
            marker="osD"[again % 3],
            label=rule,
        )
    axes.set_xscale("log" if ticks[0] else "symlog")  # A logarithm has no place for f = 0.
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.yaxis.minorticks_off()
    axes.set_ylabel("Time over that of averaging")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.minorticks_off()
    axes.set_xlabel({"d": "Dimension d", "n": "Workers n", "f": "Malicious workers f"}[axis])
    others = ", ".join(f"{name} = {value:,}" for name, value in fixed.items())
    axes.set_title(others, fontsize=10)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def save_plots(rows: list[Row], folder: str) -> list[Path]:
    """A plot for each of d, n and f that has two values, the others at their largest."""
    rows = [row for row in rows if row["ratio"] is not None]
    files = []
    for axis in "dnf":
        if len({row[axis] for row in rows}) > 1:
            fixed = {name: max(row[name] for row in rows) for name in "nfd" if name != axis}
            files.append(Path(folder) / f"ratio_over_{axis}.png")
            plotting.save(plot(rows, axis, fixed), files[-1])
    return files


def main(argv: Sequence[str]) -> None:
    values = read_flags(argv)
    settings: list[Setting] = list(itertools.product(values.n, values.f, values.dims))
    if values.memory_of:
        print(measure_memory(values.memory_of, settings[0], values.dtype))
        return
    show = progress.automatic()
    on_cpu = jax.default_backend() == "cpu"
    byzfl = load_byzfl() if values.peers and on_cpu else None
    if values.peers and byzfl is None:
        show.log("byzfl is not compared: it is not installed (pip install -e .[bench]), or this is no CPU.")
    memory = values.memory and on_cpu and Path("/proc/self/status").exists()
    if values.memory and not memory:
        show.log("Memory is skipped: it is read from /proc, and on a CPU only.")

    rows: list[Row] = []
    averagings: list[Row] = []
    tables = []
    steps = len(settings) * (len(values.rules) + 2) + memory * len(values.rules)
    count = itertools.count(1)

    def phase(text: str) -> Any:
        return show.phase(f"{next(count)}/{steps}  n = {n}, f = {f}, d = {d:,}: {text}")

    for n, f, d in settings:
        new, averaging = time_setting((n, f, d), values, byzfl, phase)
        for row in new if memory and (n, f, d) == settings[-1] else []:
            with phase(f"memory of {row['rule']}"):
                row["memory"] = None if row["note"] else memory_in_child(row["rule"], (n, f, d), values.dtype)
        rows += new
        averagings.append({"n": n, "f": f, "d": d, "seconds": averaging})
        tables.append(table(new, averaging))
        save(values, argv, rows, averagings)  # A run that is stopped leaves what it has.
    show.log("\n".join(tables))
    written = [values.json, values.csv, *(save_plots(rows, values.plots) if values.plots else [])]
    for path in filter(None, written):
        show.log(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(cli.status(lambda: main(sys.argv)))
