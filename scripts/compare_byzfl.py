"""Compares the rules with those of byzfl, on random messages.

Where byzfl computes what a rule is defined to be, the two must agree to within --tolerance, or the exit
status is not zero. Where it does not (CAF, SMEA), the distances of both to the definition are shown.
Bucketing is left out: the two draw different buckets.

Example:
  python scripts/compare_byzfl.py
"""

import itertools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from benchmark import load_byzfl

from cafcor_jax import aggregators, cli, progress
from cafcor_jax.errors import UserError

SHAPES = ((15, 3, 1000), (11, 5, 50), (30, 3, 5000))  # n, f, d
SUBSET_SHAPES = ((15, 3, 1000), (11, 5, 50))  # for SMEA, which is slow in byzfl

Rule = Callable[[np.ndarray], Any]
Result = np.ndarray | None


def pairs(byzfl: Any, f: int, d: int) -> dict[str, tuple[Rule, Rule]]:
    """Our rule and byzfl's, by name. Those of byzfl are to be called once: some keep a state."""
    radius = 0.5 * d**0.5  # half of a typical length, so that something is clipped
    return {
        "mean": (aggregators.mean(f), byzfl.Average()),
        "median": (aggregators.median(f), byzfl.Median()),
        "trimmed_mean": (aggregators.trimmed_mean(f), byzfl.TrMean(f)),
        "meamed": (aggregators.meamed(f), byzfl.Meamed(f)),
        "krum": (aggregators.krum(f), byzfl.Krum(f)),
        "multi_krum": (aggregators.multi_krum(f), byzfl.MultiKrum(f)),
        "monna": (aggregators.monna(f, trusted=1), byzfl.MoNNA(f, idx=1)),
        "mda": (aggregators.mda(f), byzfl.MDA(f)),
        "geometric_median": (
            aggregators.geometric_median(f, iterations=3, smoothing=0.1),
            byzfl.GeometricMedian(nu=0.1, T=3),
        ),
        "centered_clipping": (
            aggregators.centered_clipping(f, radius=radius, iterations=3),
            byzfl.CenteredClipping(L=3, tau=radius),
        ),
        "nnm": (aggregators.nnm(f), byzfl.NNM(f)),
        "clipping": (aggregators.clipping(f, radius=radius), byzfl.Clipping(radius)),
        "arc": (aggregators.arc(f), byzfl.ARC(f)),
    }


def make_messages(n: int, f: int, d: int, seed: int) -> np.ndarray:
    """Gaussian messages [n, d] in float32 with f that are shifted and longer, at the end."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, d)) + random.normal(size=d)
    x[n - f :] += 1.5 * random.choice([-1, 1], size=d)
    return x.astype(np.float32)


def caf(x: np.ndarray, f: int) -> np.ndarray:
    """CAF by its definition, in float64."""
    x = np.asarray(x, np.float64)
    n = len(x)
    c, best, best_value = np.ones(n), x.mean(axis=0), np.inf
    while c.sum() >= max(n - 2 * f, np.finfo(float).tiny):
        mean = c @ x / c.sum()
        _, singular, right = np.linalg.svd(np.sqrt(c / c.sum())[:, None] * (x - mean), full_matrices=False)
        if singular[0] <= best_value:
            best, best_value = mean, singular[0]
        scores = ((x - mean) @ right[0]) ** 2
        highest = scores[c > 0].max()
        if highest == 0:
            break
        c = np.where(c > 0, c * np.maximum(1 - scores / highest, 0), 0)
    return best


def smea(x: np.ndarray, f: int) -> np.ndarray:
    """SMEA by its definition, in float64."""
    x = np.asarray(x, np.float64)
    subsets = [x[list(subset)] for subset in itertools.combinations(range(len(x)), len(x) - f)]
    return min(subsets, key=lambda rows: np.linalg.norm(rows - rows.mean(axis=0), ord=2)).mean(axis=0)


def difference(a: Any, b: Any) -> float:
    """The largest difference over the largest number."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())


def compare_rules(byzfl: Any, seeds: int, show: progress.Progress) -> dict[str, float]:
    """The largest difference of every rule that is to agree."""
    largest: dict[str, float] = {}
    for n, f, d in SHAPES:
        compiled = {name: jax.jit(ours) for name, (ours, _) in pairs(byzfl, f, d).items()}
        for seed in range(seeds):
            x = make_messages(n, f, d, seed)
            with show.phase(f"n = {n}, f = {f}, d = {d}, draw {seed + 1}/{seeds}"):
                for name, (_, theirs) in pairs(byzfl, f, d).items():
                    # A copy, since byzfl's clipping writes into what it is given.
                    found = difference(compiled[name](x), theirs(x.copy()))
                    largest[name] = max(largest.get(name, 0.0), found)
    return largest


def compare_with_definition(
    name: str, shapes: Sequence[tuple[int, int, int]], theirs: Callable[[int], Rule], exact: Callable
) -> None:
    """Prints how far both are from a definition, and byzfl from itself in a second call."""
    for n, f, d in shapes:
        x = make_messages(n, f, d, seed=0)
        truth = exact(x, f)
        ours = difference(jax.jit(aggregators.BY_NAME[name](num_byzantine=f))(x), truth)
        first, second = theirs(f)(x), theirs(f)(x)
        case = f"{name.upper():<6}n = {n}, f = {f}, d = {d}"
        print(
            f"  {case:<32}ours {ours:.1e}  byzfl {difference(first, truth):.1e}  "
            f"byzfl's second call to its first {difference(second, first):.1e}"
        )


def describe(result: Result, x: np.ndarray) -> str:
    if result is None:
        return "nothing (None)"
    if np.shape(result) != x.shape[1:]:
        return f"an array of shape {np.shape(result)} instead of {x.shape[1:]}"
    return "the mean" if difference(result, x.mean(axis=0)) < 1e-5 else "something else than the mean"


def compare_special_cases(byzfl: Any) -> None:
    """Prints what comes back where nothing has to be decided and the answer is the mean."""
    x = make_messages(7, 2, 20, seed=0)
    for case, given, f in (("f = 0", x, 0), ("all messages equal, f = 2", np.repeat(x[:1], 7, axis=0), 2)):
        for name, theirs in (("caf", byzfl.CAF(f)), ("smea", byzfl.SMEA(f))):
            ours = np.asarray(jax.jit(aggregators.BY_NAME[name](num_byzantine=f))(given))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # It divides by 0.
                result = theirs(given.copy())
            print(f"  {name.upper()}, {case}: ours {describe(ours, given)}, byzfl {describe(result, given)}")


def main(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    flags.DEFINE_integer("seeds", 5, "Draws of the messages.", lower_bound=1, flag_values=values)
    flags.DEFINE_float("tolerance", 1e-5, "Allowed difference.", lower_bound=0.0, flag_values=values)
    if {"--help", "-h"} & set(argv):
        print(f"{__doc__}\nFlags: --seeds=5 (draws of the messages), --tolerance=1e-5")
        return 0
    cli.read(values, argv)
    byzfl = load_byzfl()
    if byzfl is None:
        raise UserError("byzfl is not installed, so there is nothing to compare: pip install -e .[bench].")

    np.random.seed(0)  # byzfl draws from the global generator.
    largest = compare_rules(byzfl, values.seeds, progress.automatic())
    print("\nWhere byzfl follows the definition:")
    print(f"  {'rule':<20}{'largest relative difference':>28}  verdict")
    for name, value in largest.items():
        print(f"  {name:<20}{value:>28.1e}  {'agrees' if value <= values.tolerance else 'DIFFERS'}")
    print("\nWhere it does not (one power step from a random vector); relative distance to the definition:")
    compare_with_definition("caf", SHAPES, byzfl.CAF, caf)
    compare_with_definition("smea", SUBSET_SHAPES, byzfl.SMEA, smea)
    print("\nSpecial cases:")
    compare_special_cases(byzfl)
    wrong = [name for name, value in largest.items() if not value <= values.tolerance]
    if wrong:
        print(f"error: {', '.join(wrong)}: more than {values.tolerance:g} from byzfl.", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(cli.status(lambda: sys.exit(main(sys.argv))))
