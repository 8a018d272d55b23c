"""Measures the rules that know the noise: false alarms, the largest bias that stays hidden, and their cost.

Honest rounds are drawn as Gram matrices (Bartlett's decomposition of a Wishart matrix), which have the law of
messages of any dimension without ever forming one; the rules see nothing else of messages. Where messages are
short, caf_history is run itself, on honest runs of 30 rounds.

Parts:
  alarms  how often honest workers are flagged, over --rounds honest rounds, at several (n, d, sigma)
  hidden  the longest common bias of f workers in one round of gradients, or, with --summed=29, in the sums of
          the momenta of 29 rounds: that of random-matrix theory, those of the rule's limits (in a group,
          along the mean), and the measured one, at which half of --draws rounds are flagged
  advice  what such a bias moves the mean by, against the clipping norm, at equal privacy over n, d and f;
          with --plot also as a picture
  cost    seconds of CAF and of both rules on messages of 431,080 coordinates, in turns
  matrix  final accuracies of every defence under every attack, from --results: the results.csv of a sweep
          (configs/sweeps/defence.cfg), or docs/data/defence.csv, which is what was run; with --plot also as a
          picture

Examples:
  python scripts/defence.py --part=alarms
  python scripts/defence.py --part=hidden
  python scripts/defence.py --part=hidden --summed=29
  python scripts/defence.py --part=advice --plot=runs/hidden_bias.png
  python scripts/defence.py --part=cost
  python scripts/defence.py --part=matrix --results=runs/defence/results.csv --plot=runs/defence.png
"""

import csv
import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from matplotlib.figure import Figure

from cafcor_jax import aggregators, cli, plotting, privacy, progress
from cafcor_jax.aggregators import noise_law
from cafcor_jax.errors import UserError
from cafcor_jax.float64 import in_float64
from cafcor_jax.types import Array

# (n, f, d, sigma_ind, sigma_cor): the paper's settings, and smaller ones.
SETTINGS = (
    (100, 5, 431_080, 0.0, 0.6),
    (100, 10, 431_080, 0.6, 0.6),
    (100, 10, 10_000, 0.0, 0.6),
    (30, 3, 100_000, 1.0, 0.2),
    (15, 5, 1_000, 0.0, 1.0),
    (10, 2, 200, 1.0, 0.0),
)
PARAMETERS = 431_080
# Of Figure 1.
MOMENTUM, RUN = 0.85, 30
# Over which rules are timed: in one of them caf_history judges sums.
ROUNDS = 10
# Numbers in the messages of a round up to which honest runs are simulated as they are.
SHORT = 100_000


def read_flags(argv: Sequence[str]) -> Any:
    values = flags.FlagValues()
    flags.DEFINE_enum("part", None, list(PARTS), "What to measure.", flag_values=values)
    flags.DEFINE_integer("rounds", 10_000, "Honest rounds.", lower_bound=1, flag_values=values)
    flags.DEFINE_integer(
        "draws", 20, "Rounds for each bias that is tried.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer(
        "summed", 0, "Momenta in a sum; 0 for one gradient.", lower_bound=0, flag_values=values
    )
    flags.DEFINE_float("false_alarm", 1e-3, "The stated chance.", 1e-12, 0.5, flag_values=values)
    flags.DEFINE_float("clip_norm", 2.25, "The greatest length of a signal.", 0.0, flag_values=values)
    flags.DEFINE_integer("repeats", 7, "Timed calls of each rule.", lower_bound=1, flag_values=values)
    flags.DEFINE_string(
        "plot", None, "Where the picture of --part=advice or matrix goes.", flag_values=values
    )
    flags.DEFINE_string("results", "docs/data/defence.csv", "Table of --part=matrix.", flag_values=values)
    flags.DEFINE_integer("seed", 1, "Of the draws.", flag_values=values)
    if any(arg in cli.HELP for arg in argv[1:]):
        print(__doc__)
        sys.exit(0)
    try:
        rest = values(argv)
    except flags.Error as error:
        raise UserError(str(error)) from None
    if rest[1:]:
        raise UserError(f"{rest[1]!r} is not a flag: see --help.")
    if values.part is None:
        raise UserError(f"--part is not given: say one of {', '.join(PARTS)}.")
    return values


def wishart(rng: np.random.Generator, root: np.ndarray, dimension: int, rounds: int) -> np.ndarray:
    """Gram matrices [rounds, n, n] of honest noise, given a root of its covariance."""
    n = len(root)
    lower = np.tril(rng.normal(size=(rounds, n, n)), -1)
    lower[:, np.arange(n), np.arange(n)] = np.sqrt(rng.chisquare(dimension - np.arange(n), (rounds, n)))
    x = root @ lower
    return x @ x.transpose(0, 2, 1)


def root_of(covariance: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(covariance)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


@functools.cache
def judge_of(n: int, f: int, d: int, sigma_ind: float, sigma_cor: float, false_alarm: float) -> Callable:
    law = noise_law.limits(noise_law.covariance(n, sigma_ind, sigma_cor), d, f, false_alarm)
    one = in_float64(lambda gram, signal: noise_law.judge([noise_law.Evidence(gram, signal)], law, f))
    return jax.jit(lambda grams, signal: jax.lax.map(lambda gram: one(gram, signal), grams))


def verdicts(grams: np.ndarray, signal: float, *law: Any) -> tuple[np.ndarray, np.ndarray]:
    """Who was flagged, [rounds, n], and whether the law fitted, [rounds]."""
    with jax.enable_x64(True):
        found = jax.device_get(judge_of(*law)(jnp.asarray(grams), signal))
    return np.asarray(found.flagged), np.asarray(found.fits)


def alarms(values: Any, show: progress.Progress) -> str:
    lines = [
        f"  alarms in {values.rounds:,} rounds",
        f"  {'n':>4} {'f':>3} {'d':>8} {'sigma_ind':>9} {'sigma_cor':>9}   {'one round':>15}   "
        f"{f'caf_history, {RUN} rounds':>23}",
    ]

    def share(count: int) -> str:
        return f"{count} ({count / values.rounds:.2g})"

    for n, f, d, ind, cor in SETTINGS:
        rng = np.random.default_rng(values.seed)
        root, count, left = root_of(noise_law.covariance(n, ind, cor)), 0, values.rounds
        with show.phase(f"n = {n}, d = {d:,}"):
            while left:
                batch = min(left, 500)
                flagged, fits = verdicts(
                    wishart(rng, root, d, batch), 0.0, n, f, d, ind, cor, values.false_alarm
                )
                count += int((flagged.any(axis=1) | ~fits).sum())
                left -= batch
            in_runs = share(alarms_in_runs(values, n, f, d, ind, cor)) if n * d <= SHORT else "not simulated"
        lines.append(f"  {n:>4} {f:>3} {d:>8,} {ind:>9g} {cor:>9g}   {share(count):>15}   {in_runs:>23}")
    return "\n".join([*lines, f"  stated: at most {values.false_alarm:g} in a round"])


def alarms_in_runs(values: Any, n: int, f: int, d: int, ind: float, cor: float) -> int:
    """In how many rounds caf_history takes weight from honest workers that send noise alone."""
    rule = aggregators.caf_history(
        f, momentum=MOMENTUM, sigma_ind=ind, sigma_cor=cor, false_alarm=values.false_alarm
    )
    # Round 0 has no momentum, and nothing is judged in it.
    runs = math.ceil(values.rounds / (RUN - 1))

    def one_round(carry: tuple[Any, Array], key: Array) -> tuple[tuple[Any, Array], Array]:
        state, m = carry
        shared, own = jax.random.normal(key, (2, n, d))
        noise = ind * own + cor * math.sqrt(n) * (shared - shared.mean(0))
        judged, state = rule.apply(state, m)
        alarm = judged.flagged.any() | ~judged.law_fits
        return (state, MOMENTUM * m + (1 - MOMENTUM) * noise), alarm

    def run(key: Array) -> Array:
        nothing = jnp.zeros((n, d))
        start = rule.init(nothing), nothing
        return jax.lax.scan(one_round, start, jax.random.split(key, RUN))[1]

    keys = jax.random.split(jax.random.key(values.seed), runs)
    found = np.asarray(jax.jit(lambda keys: jax.lax.map(run, keys))(keys))
    return int(found[:, 1:].ravel()[: values.rounds].sum())


def looked_at(values: Any) -> tuple[noise_law.Multiple, float]:
    """What --part=hidden looks at, and the chance of a false alarm there."""
    if values.summed:
        return noise_law.of_sum_of_momenta(MOMENTUM, values.summed), values.false_alarm / 2
    return noise_law.ONE_GRADIENT, values.false_alarm


def measured_bias(values: Any, n: int, f: int, d: int, ind: float, cor: float) -> float:
    """The length at which half of the draws are flagged, by bisection; draws are the same for all lengths."""
    rng = np.random.default_rng(values.seed)
    root = root_of(noise_law.covariance(n, ind, cor))
    multiple, false_alarm = looked_at(values)
    # Everything is in units in which the noise is that of one gradient.
    unit = multiple.signal / math.sqrt(multiple.variance)
    # All of the bias is in one coordinate: that one is drawn by itself.
    others = wishart(rng, root, d - 1, values.draws)
    first = rng.normal(size=(values.draws, n)) @ root
    who = np.arange(n) >= n - f

    def caught(length: float) -> float:
        y = first + unit * length * who
        grams = others + y[:, :, None] * y[:, None, :]
        flagged, _ = verdicts(grams, unit * values.clip_norm, n, f, d, ind, cor, false_alarm)
        return float(flagged[:, n - f :].any(axis=1).mean())

    nu = ind**2 + n * cor**2
    low, high = 0.0, 10 * math.sqrt(nu * math.sqrt(n * d) / f) / unit
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (low, middle) if caught(middle) >= 0.5 else (middle, high)
    return high


def hidden(values: Any, show: progress.Progress) -> str:
    multiple, false_alarm = looked_at(values)
    lines = [
        f"  {'n':>4} {'f':>3} {'d':>8} {'sigma_ind':>9} {'sigma_cor':>9}   "
        f"{'spectral':>8} {'in group':>8} {'along mean':>10} {'measured':>8}   moves the mean by"
    ]
    for n, f, d, ind, cor in SETTINGS:
        predicted = noise_law.hidden_bias(
            num_workers=n,
            num_byzantine=f,
            dimension=d,
            sigma_ind=ind,
            sigma_cor=cor,
            clip_norm=values.clip_norm,
            false_alarm=false_alarm,
            multiple=multiple,
        )
        with show.phase(f"n = {n}, d = {d:,}"):
            found = measured_bias(values, n, f, d, ind, cor)
        lines.append(
            f"  {n:>4} {f:>3} {d:>8,} {ind:>9g} {cor:>9g}   {predicted.spectral:>8.1f} "
            f"{predicted.in_group:>8.1f} {predicted.along_mean:>10.1f} {found:>8.1f}   {f * found / n:.2f}"
        )
    return "\n".join(lines)


def moves_the_mean(values: Any, threat_model: str, n: int, f: int, d: int) -> dict[str, float]:
    """What hidden biases move the mean by, at the end of a run with the paper's budget and momentum."""
    plan = privacy.calibrate(
        threat_model=threat_model,
        epsilon=27.8,
        delta=1e-4,
        num_workers=n,
        num_byzantine=f,
        rounds=RUN,
        clip_norm=values.clip_norm,
        accountant="rdp",
    )
    common: dict[str, Any] = {
        "num_workers": n,
        "num_byzantine": f,
        "dimension": d,
        "clip_norm": values.clip_norm,
        "sigma_ind": plan.sigma_ind,
        "sigma_cor": plan.sigma_cor,
    }
    # Round 0 sends nothing, so there are 29 gradients.
    in_round = noise_law.hidden_bias(
        **common, false_alarm=values.false_alarm, multiple=noise_law.of_momentum(MOMENTUM, RUN - 1)
    )
    in_sum = noise_law.hidden_bias(
        **common, false_alarm=values.false_alarm / 2, multiple=noise_law.of_sum_of_momenta(MOMENTUM, RUN - 1)
    )
    return {
        "caf_noise_aware": f / n * in_round.detected,
        "caf_history": f / n * min(in_round.detected, in_sum.detected),
        "spectral": f / n * in_sum.spectral,
    }


def advice(values: Any, show: progress.Progress) -> str:
    lines = [
        f"  epsilon 27.8, {RUN} rounds, momentum {MOMENTUM:g}, C = {values.clip_norm:g}: a hidden bias moves",
        "  the mean by (length; training is safe well below C)",
        f"  {'n':>5} {'f':>4} {'d':>11}   {'SecLDP: aware':>13} {'history':>8} {'spectral':>8}   "
        f"{'ByzLDP: aware':>13} {'history':>8} {'spectral':>8}",
    ]
    for n in (30, 100, 1000):
        for f in (n // 20, n // 10):
            for d in (10_000, PARAMETERS, 10_000_000):
                both = [moves_the_mean(values, threat, n, f, d) for threat in ("secldp", "byzldp")]
                figures = "   ".join(
                    f"{one['caf_noise_aware']:>13.2f} {one['caf_history']:>8.2f} {one['spectral']:>8.2f}"
                    for one in both
                )
                lines.append(f"  {n:>5} {f:>4} {d:>11,}   {figures}")
    if values.plot:
        path = Path(values.plot)
        path.parent.mkdir(parents=True, exist_ok=True)
        with show.phase("drawing"):
            plotting.save(picture(values), path)
        lines.append(f"  picture: {path}")
    return "\n".join(lines)


def picture(values: Any) -> Figure:
    """What the longest hidden bias moves the mean by over d, under both threat models."""
    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    styles = {
        "caf_noise_aware": ("#0072B2", "-", "caf_noise_aware"),
        "caf_history": ("#D55E00", "--", "caf_history"),
        "spectral": ("#555555", ":", "spectral threshold, sums of a run"),
    }
    dims = np.geomspace(1e3, 1e7, 40)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (title, threat) in zip(panels, (("SecLDP", "secldp"), ("ByzLDP", "byzldp")), strict=True):
        found = [moves_the_mean(values, threat, 100, 5, int(d)) for d in dims]
        for name, (colour, style, label) in styles.items():
            axes.plot(dims, [one[name] for one in found], style, color=colour, label=label)
        if values.clip_norm:
            axes.axhline(values.clip_norm, color="black", linewidth=1)
            axes.text(1.1e3, 1.06 * values.clip_norm, f"C = {values.clip_norm:g}", fontsize=8, va="bottom")
        axes.set(xscale="log", yscale="log", title=f"{title}, n = 100, f = 5")
        axes.set_xlabel("parameters of the model, d")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("a hidden bias moves the mean by (length)")
    panels[0].legend(fontsize=8)
    return figure


def cost(values: Any, show: progress.Progress) -> str:
    n, f = 100, 5
    noise: dict[str, Any] = {"sigma_ind": 0.0, "sigma_cor": 0.6, "clip_norm": 2.25}
    rng = np.random.default_rng(values.seed)
    momenta: list[Array] = []
    with show.phase("drawing messages"):
        for _ in range(ROUNDS):
            z = rng.standard_normal((n, PARAMETERS), np.float32)
            raw = jnp.asarray(0.6 * math.sqrt(n) * (z - z.mean(0)))
            momenta.append((1 - MOMENTUM) * raw + (MOMENTUM * momenta[-1] if momenta else 0))

    def rounds(apply: Callable[[Any, Array], Any], state: Any) -> float:
        """Seconds of a round, the mean of all."""
        start = time.perf_counter()
        for messages in momenta:
            judged, state = jax.block_until_ready(apply(state, messages))
        took = time.perf_counter() - start
        if isinstance(judged, aggregators.Judged) and (not judged.law_fits or judged.flagged.any()):
            raise RuntimeError("honest messages broke the law: another path would be timed")
        return took / ROUNDS

    plain = jax.jit(aggregators.caf(f))
    calls: dict[str, Callable[[], float]] = {"caf": lambda: rounds(lambda _, x: (plain(x), ()), ())}
    for name, make in aggregators.OVER_ROUNDS.items():
        rule = make(f, momentum=MOMENTUM, **noise)
        apply = jax.jit(rule.apply, donate_argnums=0)

        def call(rule: aggregators.StatefulRule = rule, apply: Callable[..., Any] = apply) -> float:
            start = rule.init(momenta[0])._replace(round=jnp.int32(1))
            return rounds(apply, jax.block_until_ready(start))

        calls[name] = call
    best = dict.fromkeys(calls, math.inf)
    with show.phase("timing"):
        for repeat in range(1 + values.repeats):  # the first one compiles
            took = {name: call() for name, call in calls.items()}
            best = {name: min(best[name], took[name]) for name in calls} if repeat else best
    lines = [f"  n = {n}, f = {f}, d = {PARAMETERS:,}; best of {values.repeats}, in turns"]
    return "\n".join(
        lines
        + [f"  {name:<16} {took:.3f} s  {took / best['caf']:.2f} times CAF" for name, took in best.items()]
    )


def finals(path: str) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Final accuracies in percent, by panel, attack and defence."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise UserError(f"results={path} cannot be read: {error.strerror}.") from None
    lacking = {"panel", "curve", "attack", "seed", "final_accuracy"} - set(rows[0] if rows else [])
    if lacking:
        raise UserError(
            f"results={path} has no column {', '.join(sorted(lacking))}: it must be the results.csv of a "
            "sweep with panels and curves over attacks and seeds."
        )
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for row in rows:
        of_attack = found.setdefault(row["panel"], {}).setdefault(row["attack"], {})
        accuracies = of_attack.setdefault(row["curve"], [])
        if row["final_accuracy"]:
            accuracies.append(100 * float(row["final_accuracy"]))
    return found


def matrix(values: Any, show: progress.Progress) -> str:
    found = finals(values.results)
    lines = ["  final test accuracy (%), mean +- standard deviation over (seeds)"]
    for panel, of_attacks in found.items():
        attacks = [attack for attack, cells in of_attacks.items() if any(cells.values())]
        lines += ["", f"| {panel} | " + " | ".join(attacks) + " |", "|---" * (len(attacks) + 1) + "|"]
        for defence in next(iter(of_attacks.values())):
            cells = [cell(of_attacks[attack].get(defence, [])) for attack in attacks]
            lines.append(f"| {defence} | " + " | ".join(cells) + " |")
    if values.plot:
        path = Path(values.plot)
        path.parent.mkdir(parents=True, exist_ok=True)
        with show.phase("drawing"):
            plotting.save(matrix_picture(found), path)
        lines += ["", f"  picture: {path}"]
    return "\n".join(lines)


def cell(accuracies: Sequence[float]) -> str:
    if not accuracies:
        return ""
    spread = f" +- {np.std(accuracies, ddof=1):.1f}" if len(accuracies) > 1 else ""
    return f"{np.mean(accuracies):.1f}{spread} ({len(accuracies)})"


def matrix_picture(found: dict[str, dict[str, dict[str, list[float]]]]) -> Figure:
    """One map for each panel: defences down, attacks across."""
    attacks = list(
        dict.fromkeys(
            name for panel in found.values() for name, cells in panel.items() if any(cells.values())
        )
    )
    defences = list(
        dict.fromkeys(name for panel in found.values() for cells in panel.values() for name in cells)
    )
    figure = Figure(
        figsize=(2.2 + 2 * (0.6 + 0.75 * len(attacks)), 1.6 + 2 * 0.32 * len(defences)), layout="constrained"
    )
    panels = figure.subplots(2, -(-len(found) // 2), sharex=True, sharey=True, squeeze=False)
    for axes in panels.flat[len(found) :]:
        axes.set_visible(False)
    for axes, (title, of_attacks) in zip(panels.flat, found.items(), strict=False):
        means = np.full((len(defences), len(attacks)), np.nan)
        for i, j in np.ndindex(*means.shape):
            accuracies = of_attacks.get(attacks[j], {}).get(defences[i], [])
            if accuracies:
                means[i, j] = np.mean(accuracies)
                colour = "white" if means[i, j] < 55 else "black"
                axes.text(j, i, f"{means[i, j]:.0f}", ha="center", va="center", color=colour, fontsize=8)
            else:
                axes.text(j, i, "not run", ha="center", va="center", color="#777777", fontsize=6)
        mesh = axes.imshow(means, cmap="cividis", vmin=0, vmax=100, aspect="auto")
        axes.set_title(title, fontsize=10)
        axes.set_xticks(range(len(attacks)), attacks, rotation=35, ha="right", fontsize=8)
        axes.set_yticks(range(len(defences)), defences, fontsize=8)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    figure.colorbar(mesh, ax=panels, shrink=0.8).set_label(
        "final test accuracy (%), mean over seeds", fontsize=8
    )
    return figure


# Parts, by name.
PARTS: dict[str, Callable[[Any, progress.Progress], str]] = {
    "alarms": alarms,
    "hidden": hidden,
    "advice": advice,
    "cost": cost,
    "matrix": matrix,
}


def main(argv: Sequence[str]) -> None:
    values = read_flags(argv)
    show = progress.automatic()
    show.log("\n" + PARTS[values.part](values, show))


if __name__ == "__main__":
    sys.exit(cli.status(lambda: main(sys.argv)))
