"""Attacks the project's own privacy claims, and mechanisms that are broken on purpose.

Every line is a mechanism, run with the real noise. A curious server sees what its threat model lets it see,
takes off the noise whose keys it was told, and guesses which of two worlds it is in: one worker's clipped
gradient is +C or -C. How often it is wrong gives a lower bound on epsilon.

  claimed   epsilon by the exact accountant
  audited   epsilon that the attack has shown; a claim above it holds, one below it is refuted
  ratio     audited / claimed: near 1 means that neither the accountant nor the attack gives much away
  own       audited, for a server that looks at the worker's own messages only
  trials    in each world; half of them pick the server's threshold, the other half judge it

All bounds of a table hold at once with --confidence. The exit status is 1 if a claim is refuted or if a
broken mechanism is not caught. An audit finds faults; it does not prove that there are none.

Examples:
  python scripts/audit.py
  python scripts/audit.py --lines=byzldp,no_independent --trials=10000000 --seed=7 --json=runs/audit.json
  python scripts/audit.py --canary
"""

import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from cafcor_jax import aggregators, attacks, audit, cli, data, privacy, progress, workdir
from cafcor_jax.audit import Faults
from cafcor_jax.data import synthetic
from cafcor_jax.errors import UserError
from cafcor_jax.federation import Data, federation
from cafcor_jax.types import Array, PyTree

SMALL: dict[str, Any] = {"num_workers": 8, "num_byzantine": 2, "rounds": 1, "epsilon": 2.0, "delta": 0.01}
CANARY: dict[str, Any] = {"threat_model": "byzldp", "num_workers": 6, "num_byzantine": 1, "rounds": 5}
CANARY |= {"epsilon": 4.0, "delta": 0.01}


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the table: a mechanism, and what it means in few words."""

    meaning: str
    settings: dict[str, Any]
    noise_mode: str = "pairwise"
    faults: Faults | None = None
    share: float = 1.0  # of --trials: a gross fault is seen in few

    def plan(self) -> privacy.PrivacyPlan:
        return privacy.calibrate(clip_norm=1.0, accountant="exact", **(SMALL | self.settings))


BYZLDP, SECLDP = {"threat_model": "byzldp"}, {"threat_model": "secldp"}
# With 3 honest workers a single pair matters enough to be seen: its fault moves epsilon by a tenth.
FEW = SECLDP | {"num_workers": 5}
LINES = {
    "ldp": Line("independent noise; nobody is trusted", {"threat_model": "ldp"}),
    "cdp": Line("independent noise; only the mean of the messages is seen", {"threat_model": "cdp"}),
    "secldp": Line("noise cancels between pairs; no worker tells its secrets", SECLDP),
    "secldp_projected": Line("the same law, drawn the fast way", SECLDP, "projected"),
    "byzldp": Line("both kinds of noise; all Byzantine workers tell their secrets", BYZLDP),
    "byzldp_partial": Line(
        "1 of 3 Byzantine workers tells its secrets, at delta = 0.001",
        BYZLDP | {"num_workers": 10, "num_byzantine": 3, "num_colluding": 1, "delta": 1e-3},
    ),
    "byzldp_rounds": Line(
        "4 rounds, their scores added up, at delta = 0.001",
        BYZLDP | {"rounds": 4, "epsilon": 4.0, "delta": 1e-3},
    ),
    "byzldp_ring": Line(
        "secrets between neighbours on a ring; one neighbour tells its secrets",
        BYZLDP | {"num_byzantine": 1, "graph": privacy.graphs.ring(8)},
    ),
    "reused_round": Line(
        "4 rounds with the same noise: it goes away in differences",
        BYZLDP | {"rounds": 4},
        faults=Faults(reused_round=True),
        share=0.1,
    ),
    "no_independent": Line(
        "sigma_ind forgotten: the sum of honest messages has no noise",
        BYZLDP,
        faults=Faults(no_independent=True),
        share=0.1,
    ),
    "forgotten_end": Line(
        "one worker leaves out the noise of one of its pairs", FEW, faults=Faults(forgotten_end=(0, 1))
    ),
    "public_pair": Line(
        "the key of one pair is a constant that the server knows", FEW, faults=Faults(public_pair=(0, 1))
    ),
    "half_noise": Line(
        "noise made for a distance of C, not 2C", BYZLDP, faults=Faults(noise_scale=0.5), share=0.1
    ),
    "no_clipping": Line(
        "clipping forgotten: a gradient of norm 3C", BYZLDP, faults=Faults(gradient_scale=3.0), share=0.1
    ),
}
SEEN = {
    "messages": "the server, from all messages and the colluding workers' keys",
    "final_parameters": "somebody who gets the trained model only",
}
Row = dict[str, Any]


def read_flags(argv: Sequence[str]) -> flags.FlagValues:
    """Reads and checks a command line; what is wrong with it is a UserError."""
    values = flags.FlagValues()  # Not the global one: tests call main more than once.

    def define(kind: Callable[..., Any], name: str, default: Any, text: str, **options: Any) -> None:
        kind(name=name, default=default, help=text, flag_values=values, **options)

    define(flags.DEFINE_list, "lines", list(LINES), "Lines of the table.")
    define(
        flags.DEFINE_integer,
        "trials",
        1_500_000,
        "Trials of a line in each world; gross faults get a tenth.",
        lower_bound=4,
    )
    define(flags.DEFINE_integer, "seed", 0, "Of the attack.", lower_bound=0, upper_bound=2**32 - 1)
    define(flags.DEFINE_float, "confidence", 0.95, "That all bounds of the table hold.")
    define(
        flags.DEFINE_bool, "canary", False, "Attack whole training runs instead of the table's mechanisms."
    )
    define(flags.DEFINE_integer, "runs", 4000, "With --canary: runs in each world.", lower_bound=4)
    define(flags.DEFINE_string, "json", None, "File for all numbers.")
    if {"--help", "-h"} & set(argv):
        listed = [(values[name], (values[name].default_as_str or "").strip("'")) for name in values]
        lines = [f"  --{flag.name}={default}\n        {flag.help}" for flag, default in listed]
        print(f"{__doc__}\nFlags and their defaults:", *lines, sep="\n")
        sys.exit(0)
    cli.read(values, argv)
    for name in values.lines or [""]:
        if name not in LINES:
            raise UserError(f"--lines has {name!r}; lines are {', '.join(LINES)}.")
    if len(set(values.lines)) < len(values.lines):
        raise UserError(f"--lines={','.join(values.lines)}: each line may be named once.")
    if not 0 < values.confidence < 1:
        raise UserError(f"--confidence={values.confidence:g}: it must be strictly between 0 and 1.")
    table_flags = [name for name in ("lines", "trials") if values[name].present]
    if values.canary and table_flags:
        raise UserError(f"--{table_flags[0]} is for the table, and --canary does not make it.")
    if values["runs"].present and not values.canary:
        raise UserError("--runs is for training runs: it needs --canary.")
    check_writable(values.json)
    return values


def check_writable(path: str | None) -> None:
    """Finds out before the work whether results can be written after it."""
    if path is None:
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        open(path, "a").close()  # leaves older results as they are
    except OSError as error:
        raise UserError(f"--json={path} cannot be written: {error.strerror}.") from None


def judged(row: Row, faulty: bool) -> Row:
    """The row with what came out in a word, and whether it is as it should be."""
    broken = row["lower_bound"] > row["claimed"]
    word = ("caught" if broken else "MISSED") if faulty else ("REFUTED" if broken else "holds")
    ratio = row["lower_bound"] / row["claimed"]
    return row | {"ratio": ratio, "verdict": word, "as_it_should_be": broken == faulty}


def table_row(name: str, values: flags.FlagValues) -> Row:
    """Audits one line of the table."""
    line = LINES[name]
    # The risk of being wrong is shared by all lines.
    confidence = 1 - (1 - values.confidence) / len(values.lines)
    found = audit.audit(
        line.plan(),
        trials=max(math.ceil(line.share * values.trials), 4),
        seed=values.seed,
        confidence=confidence,
        noise_mode=line.noise_mode,
        faults=line.faults or audit.NO_FAULTS,
    )
    row = {"mechanism": name, "meaning": line.meaning} | dataclasses.asdict(found)
    return judged(row, line.faults is not None)


def table(rows: list[Row]) -> str:
    """The lines as text, right mechanisms first."""
    columns = f"{'claimed':>8}{'audited':>9}{'ratio':>7}{'own':>7}{'trials':>12}"
    head = f"  {'mechanism':<18}{columns}  verdict  meaning"

    def text(row: Row) -> str:
        epsilons = f"{row['claimed']:>8.3f}{row['lower_bound']:>9.3f}{row['ratio']:>7.2f}"
        numbers = f"{epsilons}{row['own_message']:>7.3f}{row['trials']:>12,}"
        return f"  {row['mechanism']:<18}{numbers}  {row['verdict']:<9}{row['meaning']}"

    lines = []
    for faulty, title in (
        (False, "What is claimed (it should hold: audited at most claimed):"),
        (True, "Broken on purpose, by a server that knows how (it should be caught: audited above claimed):"),
    ):
        part = [text(row) for row in rows if (LINES[row["mechanism"]].faults is not None) == faulty]
        lines += [title, head, *part, ""] if part else []
    return "\n".join(lines)


def logistic_loss(params: PyTree, images: Array, labels: Array) -> Array:
    """Logistic regression on 28 x 28 grey images: with the canary, just below one block of noise."""
    inputs = images.reshape(len(images), -1).astype(jnp.float32) / 255 - 0.5
    logits = inputs @ params["kernel"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def canary_rows(values: flags.FlagValues, show: progress.Progress) -> tuple[privacy.PrivacyPlan, list[Row]]:
    """Trains --runs short runs in each world and audits what their server saw."""
    plan = privacy.calibrate(clip_norm=1.0, accountant="exact", **CANARY)
    momentum, batch_size = 0.85, 20
    with show.phase("building the federation"):
        dataset = synthetic.generate(num_train=1200, num_test=10)
        honest = plan.num_workers - plan.num_byzantine
        parts = data.partition(dataset.train_labels, honest, kind="homogeneous", alpha=1.0, seed=0)
        federated = data.federate(dataset, parts)
        workers = Data(*map(jnp.asarray, (federated.images, federated.labels, federated.sizes)))
        rounds = federation(
            loss_fn=audit.with_canary(logistic_loss),
            plan=plan,
            aggregator=aggregators.BY_NAME["caf"](num_byzantine=plan.num_byzantine),
            attack=attacks.BY_NAME["alie"](),
            optimizer=optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.4)),
            momentum=momentum,
            batch_size=batch_size,
        )
        run = audit.canary_run(rounds, plan, momentum=momentum)
        model = {"kernel": jnp.zeros((784, 10)), "bias": jnp.zeros(10)}
        params = {"canary": jnp.zeros(1), "model": model}

        @jax.jit
        def scores(keys: Array, workers: Data) -> tuple[Array, Array]:
            return jax.lax.map(lambda key: run(key, params, workers), keys)

    def world(sign: int) -> np.ndarray:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(values.seed), int(sign > 0)), values.runs)
        with show.phase(f"{values.runs:,} runs in world {sign:+d}"):
            return np.stack([np.asarray(part) for part in scores(keys, audit.canary_data(workers, sign))])

    minus, plus = world(-1), world(1)
    confidence = 1 - (1 - values.confidence) / len(SEEN)
    common = {"claimed": privacy.epsilon(plan, "exact"), "delta": plan.delta, "confidence": confidence}
    rows = []
    for (name, meaning), low, high in zip(SEEN.items(), minus, plus, strict=True):
        detail = audit.bound(low, high, delta=plan.delta, confidence=confidence)
        row = {"mechanism": name, "meaning": meaning, **common, "lower_bound": detail.epsilon}
        row |= {"trials": values.runs, "detail": dataclasses.asdict(detail)}
        rows.append(judged(row, faulty=False))
    return plan, rows


def canary_table(plan: privacy.PrivacyPlan, rows: list[Row]) -> str:
    first, spent = rows[0], privacy.epsilon(plan, "exact", rounds=plan.rounds - 1)
    lines = [
        f"A canary in whole training runs: {plan.num_workers} workers, {plan.num_byzantine} Byzantine "
        f"(ALIE), all colluding; CAF, {plan.rounds} rounds.",
        f"  {'seen by':<18}{'claimed':>8}{'audited':>9}{'ratio':>7}{'runs':>8}  verdict  meaning",
    ]
    lines += [
        f"  {row['mechanism']:<18}{row['claimed']:>8.3f}{row['lower_bound']:>9.3f}{row['ratio']:>7.2f}"
        f"{row['trials']:>8,}  {row['verdict']:<9}{row['meaning']}"
        for row in rows
    ]
    lines += [
        "",
        "One worker's data are replaced by a canary: a gradient of +C or -C in a parameter of its own. A run",
        "is one trial, since many canaries in one run would have to share C. So trials are few and the bound",
        f"is weak: without a single error, {first['trials']:,} runs in each world would show epsilon = "
        f"{largest_bound(first):.2f}.",
        f"The first round sends no data: no attack can show more than {spent:.3f} of the "
        f"{first['claimed']:.3f} claimed.",
        "",
    ]
    return "\n".join(lines)


def largest_bound(row: Row) -> float:
    """What the bound would be without a single error."""
    trials = row["detail"]["trials"]
    return float(audit.epsilon_lower_bound(0, 0, trials, row["delta"], row["confidence"]))


def save(values: flags.FlagValues, argv: Sequence[str], rows: list[Row]) -> None:
    if values.json:
        report = {
            "command": shlex.join(["python", *argv]),
            "seed": values.seed,
            "confidence": values.confidence,
            "versions": workdir.versions(),
            "results": rows,
        }
        Path(values.json).write_text(json.dumps(workdir.strict(report), indent=2) + "\n")


def main(argv: Sequence[str]) -> None:
    values = read_flags(argv)
    show = progress.automatic()
    if values.canary:
        plan, rows = canary_rows(values, show)
        text = canary_table(plan, rows)
    else:
        rows = []
        for number, name in enumerate(values.lines, 1):
            with show.phase(f"{number}/{len(values.lines)}  {name}"):
                rows.append(table_row(name, values))
        text = table(rows)
    show.log("\n" + text)
    save(values, argv, rows)
    wrong = [row["mechanism"] for row in rows if not row["as_it_should_be"]]
    if wrong:
        show.log(f"Not as it should be: {', '.join(wrong)}.")
        sys.exit(1)
    show.log(f"All {len(rows)} as they should be, at a joint confidence of {values.confidence:g}.")


if __name__ == "__main__":
    sys.exit(cli.status(lambda: main(sys.argv)))
