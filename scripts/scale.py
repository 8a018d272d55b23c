"""What a round costs with n workers and d parameters: seconds by part, memory and bytes on the network.

Every part of a round is compiled, warmed up and timed as the best of --repeats calls. Noise is drawn in
blocks of coordinates that all cost the same, so where a draw would take long, fewer blocks are timed and the
time is scaled up (marked ~). A cost model with coefficients that are not negative is fitted to the times, by
least squares of relative errors, and says what larger federations would cost.

Examples:
  python scripts/scale.py
  python scripts/scale.py --n=10,100,1000 --dims=4e5,4e6 --max_gigabytes=4 --json=runs/scale.json
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from scipy.optimize import nnls

from cafcor_jax import cli, noise, progress, secrets
from cafcor_jax.aggregators.caf import spectral_filter
from cafcor_jax.errors import UserError
from cafcor_jax.gram import gram, mix
from cafcor_jax.privacy import graphs

# So many normals one timed call draws, or as many as are in a block, if that is less than the second number.
USUAL_DRAWS, MOST_DRAWS = 3e7, 4e8
# f: CAF's filter takes 2f + 1 steps at most, each on n x n matrices.
MALICIOUS = 3
# Bytes of a number, and of an entry of the Gram matrix.
NUMBER, ENTRY = 4, 8

TERMS: dict[str, Callable[[float, float, float], float]] = {
    "1": lambda n, d, k: 1,
    "n d": lambda n, d, k: n * d,
    "n k d": lambda n, d, k: n * k * d,
    "n^2 d": lambda n, d, k: n**2 * d,
    "n^2": lambda n, d, k: n**2,
    "n^3": lambda n, d, k: n**3,
}
# What the cost of each part is made of. k is the number of secrets of a worker.
PARTS = {
    "gradients": ("n d",),
    "own noise": ("n d",),
    "noise of all pairs": ("n^2 d",),
    "noise of k pairs": ("n k d",),
    "projected noise": ("n d",),
    "Gram matrix": ("n d", "n^2 d"),
    "CAF's weights": ("1", "n^2", "n^3"),
    "mixing": ("n d",),
}


@dataclasses.dataclass(frozen=True)
class Timed:
    """One part, measured.

    Attributes:
      part: one of PARTS.
      n: workers.
      d: parameters.
      seconds: of the whole part.
      share: of it that was timed.
      memory: temporary bytes, of what was timed.
    """

    part: str
    n: int
    d: int
    seconds: float
    share: float = 1.0
    memory: int = 0


def best_of(repeats: int, function: Callable[..., Any], *args: Any) -> tuple[float, int]:
    """Seconds of the fastest of several calls, and the temporary memory in bytes."""
    compiled = jax.jit(function).lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - begin)
    analysis = compiled.memory_analysis()
    return min(times), int(analysis.temp_size_in_bytes) if analysis else 0


def measure(n: int, d: int, secrets_each: int, batch: int, repeats: int) -> list[Timed]:
    """Times all parts of a round; of noise as much as does not take too long."""
    key = jax.random.key(0)
    found = []

    def add(part: str, share: float, function: Callable[..., Any], *args: Any, times: float = 1.0) -> None:
        seconds, memory = best_of(repeats, function, *args)
        found.append(Timed(part, n, d, seconds * times / share, share, memory))

    # A dense model of about d parameters; the workers' gradients are computed one after the other.
    width = int(np.sqrt(d / 2))
    params = jnp.full((2, width, width), 1 / width)
    batch_of_one = jnp.ones((batch, width))

    def loss(params: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params[0]) @ params[1]) ** 2)

    add("gradients", 1.0, jax.grad(loss), params, batch_of_one, times=n * d / params.size)

    def size_of(draws_a_column: float) -> int:
        blocks = max(int(USUAL_DRAWS / draws_a_column / noise.BLOCK), 1)
        return min(d, blocks * noise.BLOCK)

    own = jax.random.split(key, n)
    size = size_of(n)
    add("own noise", size / d, lambda keys: noise.independent(keys, 1, size, 1.0), own)
    add("projected noise", size / d, lambda key: noise.projected(key, n, 1, size, 1.0), key)
    pair_keys = secrets.key_matrix(key, n)
    if n**2 / 2 * noise.BLOCK <= MOST_DRAWS:
        size_of_pairs = size_of(n**2 / 2)
        share = size_of_pairs / d
        add("noise of all pairs", share, lambda keys: noise.pairwise(keys, 1, size_of_pairs, 1.0), pair_keys)
    if secrets_each < n - 1:
        graph = graphs.regular(n, secrets_each)
        few = size_of(n * secrets_each / 2)
        add("noise of k pairs", few / d, lambda keys: noise.pairwise(keys, 1, few, 1.0, graph), pair_keys)

    tile = jax.random.normal(key, (n, min(d, 2**16)))
    messages = jnp.tile(tile, (1, -(-d // tile.shape[1])))[:, :d]
    add("Gram matrix", 1.0, gram, messages)
    products = jnp.asarray(jax.jit(lambda x: gram(x).astype(jnp.float32))(tile))
    add("CAF's weights", 1.0, lambda g: spectral_filter(g, MALICIOUS).weights, products)
    add("mixing", 1.0, lambda w, x: mix(w, x, all_finite=True), jnp.full(n, 1 / n), messages)
    return found


def fit(rows: list[Timed], secrets_each: int) -> dict[str, dict[str, float]]:
    """The coefficients of every part, by least squares of relative errors; none is negative."""
    model = {}
    for part, terms in PARTS.items():
        times = [row for row in rows if row.part == part]
        if times:
            matrix = [
                [TERMS[term](row.n, row.d, secrets_each) / row.seconds for term in terms] for row in times
            ]
            # Columns of one size, or the solver takes small ones for nothing.
            scale = np.maximum(np.max(np.asarray(matrix), axis=0), 1e-300)
            coefficients, _ = nnls(np.asarray(matrix) / scale, np.ones(len(times)))
            model[part] = dict(zip(terms, (coefficients / scale).tolist(), strict=True))
    return model


def predict(
    model: dict[str, dict[str, float]], n: float, d: float, secrets_each: int, devices: int = 1
) -> dict[str, float]:
    """Seconds of every part; what grows with d is shared by the devices, the rest is done by each."""
    return {
        part: sum(
            value * TERMS[term](n, d, secrets_each) / (devices if "d" in term else 1)
            for term, value in terms.items()
        )
        for part, terms in model.items()
    }


def worst_error(model: dict[str, dict[str, float]], rows: list[Timed], secrets_each: int) -> dict[str, float]:
    """The largest factor between what the model says and what was measured, for every part."""
    errors: dict[str, float] = {}
    for row in rows:
        ratio = predict(model, row.n, row.d, secrets_each)[row.part] / row.seconds
        errors[row.part] = max(errors.get(row.part, 1.0), ratio, 1 / max(ratio, 1e-12))
    return errors


def traffic(n: int, d: int, secrets_each: int) -> str:
    """What real workers send and receive."""
    once_all, once_few = secrets.KEY_BYTES * (n - 1), secrets.KEY_BYTES * secrets_each
    return (
        f"n = {n:,}, d = {d:,}: a round is {size(NUMBER * d)} up and {size(NUMBER * d)} down for a worker, "
        f"and {size(NUMBER * n * d)} up in all; keys, once: {secrets.KEY_BYTES} B up, {size(once_all)} down "
        f"({size(once_few)} with {secrets_each} secrets each)"
    )


def on_mesh(n: int, d: float, workers: int, parameters: int) -> str:
    """What a device of a mesh holds and receives in a round."""
    devices = workers * parameters
    received = {
        "parameters": NUMBER * d * (parameters - 1) / parameters,
        "exchange of gradients": NUMBER * n * d / devices * (devices - 1) / devices,
        "Gram matrix": 2 * ENTRY * n**2 * (devices - 1) / devices,
        "aggregate": NUMBER * d / parameters * (workers - 1) / workers,
    }
    held = NUMBER * (2 * n * d / devices + d / parameters)
    parts = ", ".join(f"{name} {size(value)}" for name, value in received.items())
    return (
        f"n = {n:,}, d = {d:.3g} on {workers} x {parameters} devices: each holds {size(held)} of messages, "
        f"momenta and parameters, {size(NUMBER * d)} more while it computes gradients; it receives {parts}"
    )


def size(count: float) -> str:
    """Bytes for a person."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.3g} {unit}"
        count /= 1000
    return ""


def table(rows: list[Timed]) -> str:
    """Seconds by part, a line for every n and d."""
    settings = sorted({(row.n, row.d) for row in rows})
    lines = [f"{'n':>6} {'d':>12} {'messages':>9} " + " ".join(f"{part:>18}" for part in PARTS)]
    for n, d in settings:
        cells = []
        for part in PARTS:
            row = next((row for row in rows if (row.n, row.d, row.part) == (n, d, part)), None)
            mark = "" if row is None or row.share == 1 else "~"
            cells.append("-" if row is None else f"{mark}{row.seconds:.4g} s")
        lines.append(
            f"{n:>6} {d:>12,} {size(NUMBER * n * d):>9} " + " ".join(f"{cell:>18}" for cell in cells)
        )
    return "\n".join(lines)


def read_flags(argv: Sequence[str]) -> flags.FlagValues:
    """Reads and checks a command line; what is wrong with it is a UserError."""
    values = flags.FlagValues()

    def define(kind: Callable[..., Any], name: str, default: Any, text: str, **options: Any) -> None:
        kind(name=name, default=default, help=text, flag_values=values, **options)

    define(flags.DEFINE_list, "n", ["10", "30", "100", "300", "1000"], "Numbers of workers.")
    define(flags.DEFINE_list, "dims", ["4e5", "4e6", "1e8"], "Numbers of parameters.")
    define(flags.DEFINE_float, "max_gigabytes", 1.0, "Largest array of messages.", lower_bound=0.0)
    define(flags.DEFINE_integer, "secrets_each", 8, "k, of a sparse secret graph.", lower_bound=2)
    define(flags.DEFINE_integer, "batch_size", 8, "Examples for one gradient.", lower_bound=1)
    define(flags.DEFINE_integer, "repeats", 3, "Calls of each part; the fastest counts.", lower_bound=1)
    define(flags.DEFINE_string, "json", None, "File for the times and the model.")
    if {"--help", "-h"} & set(argv):
        lines = [
            f"  --{values[name].name}={values[name].default}\n        {values[name].help}" for name in values
        ]
        print(f"{__doc__}\nFlags and their defaults:", *lines, sep="\n")
        sys.exit(0)
    cli.read(values, argv)
    for name, least in (("n", 2 * MALICIOUS + 1), ("dims", 2)):
        texts = getattr(values, name)
        try:
            numbers = sorted({float(text) for text in texts})
        except ValueError:
            numbers = []
        if not numbers or not all(number.is_integer() and number >= least for number in numbers):
            raise UserError(f"--{name}={','.join(texts)}: it must be whole numbers of at least {least}.")
        values[name].value = [int(number) for number in numbers]
    if values.json and not Path(values.json).absolute().parent.is_dir():
        raise UserError(f"--json={values.json}: there is no such folder.")
    return values


def main(argv: Sequence[str]) -> None:
    values = read_flags(argv)
    show, k = progress.automatic(), values.secrets_each
    settings = [(n, d) for n in values.n for d in values.dims if NUMBER * n * d <= values.max_gigabytes * 1e9]
    if not settings:
        raise UserError(f"--max_gigabytes={values.max_gigabytes:g} leaves no n and d to measure: give more.")
    rows: list[Timed] = []
    for n, d in settings:
        with show.phase(f"n = {n}, d = {d:,}"):
            rows += measure(n, d, k, values.batch_size, values.repeats)
    model = fit(rows, k)
    errors = worst_error(model, rows, k)

    show.log(
        f"\n{jax.devices()[0].device_kind}, {os.cpu_count()} cores; k = {k} secrets of a worker, "
        f"f = {MALICIOUS}\n\n{table(rows)}"
    )
    n, d = max(settings, key=lambda setting: setting[0] * setting[1])
    show.log(f"\ntemporary memory at n = {n}, d = {d:,}, beside messages of {size(NUMBER * n * d)}:")
    for row in rows:
        if (row.n, row.d) == (n, d):
            drawn = "" if row.share == 1 else f", for {row.share:.2%} of the coordinates"
            show.log(f"  {row.part:<20} {size(row.memory)}{drawn}")
    show.log("\ncost model, in seconds (and the largest factor by which it is off):")
    for part, terms in model.items():
        formula = " + ".join(f"{value:.3g} {term}" for term, value in terms.items() if value)
        show.log(f"  {part:<20} {formula or '0'}  ({errors[part]:.2g})")
    show.log("\nnetwork of real workers:")
    for n, d in settings:
        show.log(f"  {traffic(n, d, k)}")
    show.log("\nwhat it says, on devices as fast as this machine:")
    for n, d, workers, parameters in ((100, 7e9, 8, 8), (10_000, 4e5, 1, 1), (10_000, 4e5, 8, 8)):
        seconds = predict(model, n, d, k, workers * parameters)
        show.log(f"  {on_mesh(n, d, workers, parameters)}")
        show.log("    " + ", ".join(f"{part} {value:.3g} s" for part, value in seconds.items()))
    if values.json:
        content = {"rows": [dataclasses.asdict(row) for row in rows], "model": model, "errors": errors}
        Path(values.json).write_text(json.dumps(content, indent=2) + "\n")
        show.log(f"wrote {values.json}")


if __name__ == "__main__":
    sys.exit(cli.status(lambda: main(sys.argv)))
