"""What a privacy budget costs, before a run: noise under every threat model, accountant and split.

Everything here follows from an experiment's settings: no data are read, and nothing is compiled. One fact
makes the curves cheap. Level, sampling, delta and the rounds decide which eps_step a budget allows; the
threat model, the graph and the split decide which noise reaches it. Noise scales like 1 / sqrt(eps_step), so
one calibration serves a whole curve.

Example:
    >>> from cafcor_jax import config, planner
    >>> rows = planner.threat_models(planner.setting(config.Config()))
    >>> {row["threat_model"]: round(row["mean_over_cdp"], 2) for row in rows}
    {'ldp': 10.0, 'cdp': 1.0, 'secldp': 3.32, 'byzldp': 4.92}
"""

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from cafcor_jax import privacy
from cafcor_jax.config import CORRELATED, Config
from cafcor_jax.errors import UserError

#: Training examples of each dataset: known without loading it.
TRAINING_SIZES = {"mnist": 60_000, "fashion_mnist": 60_000, "synthetic": 10_000}

#: The threat models that have a budget, and their names for people.
THREAT_MODELS = {"ldp": "LDP", "cdp": "CDP", "secldp": "SecLDP", "byzldp": "ByzLDP"}

#: Figure 1 of the paper: dataset, C, f, epsilon. All have n = 100, T = 30 and delta = 1e-4.
PAPER_SETTINGS = (
    ("MNIST", 2.25, 5, 27.8),
    ("MNIST", 2.25, 10, 26.4),
    ("Fashion-MNIST", 1.0, 5, 39.6),
    ("Fashion-MNIST", 1.0, 10, 39.6),
)

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is planned for.

    Attributes:
      config: The experiment's settings, with a threat model that has a budget.
      samples_per_worker: m at the example level, else None.
      graph: Who shares a secret with whom; None for everyone with everyone.
    """

    config: Config
    samples_per_worker: int | None
    graph: privacy.SecretGraph | None


def setting(config: Config, samples_per_worker: int | None = None) -> Setting:
    """Checks settings and adds what follows from them.

    Args:
      config: The experiment's settings.
      samples_per_worker: m, at the example level only; by default the training set's size over the honest
        workers, which is what the smallest worker of an even partition has.

    Returns:
      What the other functions take.

    Raises:
      UserError: if there is no budget to plan for, or m does not go with the settings.

    Example:
      >>> setting(Config(privacy_level="example")).samples_per_worker
      666
    """
    if not config.private:
        raise UserError(
            f"threat_model='none' has no budget to plan for: choose one of {', '.join(THREAT_MODELS)}."
        )
    if config.noise_multiplier is not None:
        raise UserError(
            f"noise_multiplier={config.noise_multiplier:g} sets the noise, so there is no budget to plan "
            "for: leave it unset."
        )
    if config.privacy_level != "example":
        if samples_per_worker is not None:
            raise UserError(
                f"samples_per_worker={samples_per_worker} belongs to privacy_level='example': at the user "
                "level the number of examples does not count."
            )
    elif samples_per_worker is None:
        samples_per_worker = TRAINING_SIZES[config.dataset] // config.num_honest
        if config.batch_size > samples_per_worker:
            raise UserError(
                f"batch_size={config.batch_size} is more than the {samples_per_worker} examples that each of "
                f"{config.num_honest} honest workers has of {config.dataset!r}: at most that many."
            )
    return Setting(config, samples_per_worker, secret_graph(config))


def secret_graph(config: Config) -> privacy.SecretGraph | None:
    """The graph that the settings name; None for everyone with everyone."""
    if config.secret_graph == "complete":
        return None
    return privacy.graphs.parse(config.secret_graph, config.num_workers, config.seed)


def calibrate(of: Setting, **changes: Any) -> privacy.PrivacyPlan:
    """The plan that a training run with these settings uses, or one that differs in a few arguments.

    Args:
      of: The settings. What another threat model has no use for (the graph, the split, q) is left out.
      **changes: Arguments of `privacy.calibrate` that are to differ.

    Returns:
      The plan.

    Example:
      >>> round(calibrate(setting(Config()), threat_model="secldp").sigma_cor, 3)
      0.6
    """
    config = of.config
    model = changes.get("threat_model", config.threat_model)
    example = config.privacy_level == "example"
    arguments: dict[str, Any] = {
        "threat_model": model,
        "epsilon": config.epsilon,
        "delta": config.delta,
        "num_workers": config.num_workers,
        "num_byzantine": config.num_byzantine,
        "num_colluding": config.num_colluding if model == "byzldp" else None,
        "rounds": config.rounds,
        "clip_norm": config.clip_norm or math.inf,  # 0 means none, and is refused where privacy needs it
        "accountant": config.accountant,
        "level": config.privacy_level,
        "batch_size": config.batch_size,
        "samples_per_worker": of.samples_per_worker,
        "sampling": config.sampling if example else None,
        "split": config.noise_split if model == "byzldp" else "equal",
        "graph": of.graph if model in CORRELATED else None,
    }
    return _calibrate(tuple((arguments | changes).items()))


def from_multiplier(of: Setting) -> privacy.PrivacyPlan:
    """The plan of a run whose noise is given, under "ldp" and "cdp": no budget, and epsilon is counted.

    Args:
      of: The settings, with a `noise_multiplier` z: sigma_ind = z C under "ldp" and z C / sqrt(n) under
        "cdp", where at the example level C / batch_size stands for C.

    Returns:
      The plan.

    Example:
      >>> config = Config(threat_model="cdp", noise_multiplier=2.0, clip_norm=5.0)
      >>> from_multiplier(Setting(config, None, None)).sigma_ind
      1.0
    """
    config, multiplier = of.config, of.config.noise_multiplier
    if multiplier is None or config.threat_model not in ("ldp", "cdp"):
        raise ValueError(f"noise_multiplier is {multiplier!r} under {config.threat_model!r}.")
    example = config.privacy_level == "example"
    sigma = multiplier * config.clip_norm / (config.batch_size if example else 1)
    return privacy.PrivacyPlan(
        threat_model=config.threat_model,
        level=config.privacy_level,
        num_workers=config.num_workers,
        num_byzantine=config.num_byzantine,
        rounds=config.rounds,
        clip_norm=config.clip_norm,
        delta=config.delta,
        sigma_ind=sigma / (math.sqrt(config.num_workers) if config.threat_model == "cdp" else 1),
        sigma_cor=0.0,
        accountant=config.accountant,
        batch_size=config.batch_size,
        samples_per_worker=of.samples_per_worker,
        sampling=config.sampling if example else "none",
    )


@functools.lru_cache(maxsize=256)
def _calibrate(arguments: tuple[tuple[str, Any], ...]) -> privacy.PrivacyPlan:
    """Several tables show the same plans, and at the example level one takes about half a second."""
    return privacy.calibrate(**dict(arguments))


def noise(plan: privacy.PrivacyPlan) -> Row:
    """A plan's noise per coordinate: of its two kinds, in one message, and in the honest mean."""
    return {
        "sigma_ind": plan.sigma_ind,
        "sigma_cor": plan.sigma_cor,
        "message": plan.message_std,
        "mean": plan.honest_mean_std,
    }


def threat_models(of: Setting) -> list[Row]:
    """The noise under all four threat models at equal (epsilon, delta).

    Args:
      of: The settings.

    Returns:
      A row for each: "threat_model", its noise (`noise`), "message" and "mean" as ratios to CDP's and LDP's,
      and the "plan" itself; "why" instead of these where no noise keeps the budget.

    Example:
      >>> alone = Config(num_byzantine=0, attack="none")
      >>> [row["threat_model"] for row in threat_models(setting(alone)) if "why" in row]
      ['secldp']
    """
    rows = []
    for model in THREAT_MODELS:
        row = _attempt(of, threat_model=model)
        rows.append({"threat_model": model, **row})
    of_model = {row["threat_model"]: row for row in rows}
    for row in rows:
        for other in ("cdp", "ldp"):
            for what in ("message", "mean"):
                if "why" not in row:
                    row[f"{what}_over_{other}"] = row[what] / of_model[other][what]
    return rows


def accountants(of: Setting) -> list[Row]:
    """The accountants side by side.

    Args:
      of: The settings.

    Returns:
      A row for each: the "epsilon" that it gives to the settings' own plan, the noise that the budget needs
      under it, and "over_paper", that noise over what the paper's closed form needs. Only "rdp", without
      that ratio, at the example level.
    """
    plan = calibrate(of)
    names = privacy.ACCOUNTANTS if plan.level == "user" else ("rdp",)
    rows = [
        {
            "accountant": name,
            "epsilon": privacy.epsilon(plan, name),
            **noise(calibrate(of, accountant=name)),
        }
        for name in names
    ]
    if plan.level == "user":
        paper = next(row["mean"] for row in rows if row["accountant"] == "paper")
        rows = [row | {"over_paper": row["mean"] / paper} for row in rows]
    return rows


def splits(of: Setting) -> list[Row]:
    """ByzLDP's ways to split its noise, at equal (epsilon, delta).

    Args:
      of: The settings.

    Returns:
      A row for each of `privacy.SPLITS`: "split", its noise, "message" and "mean" as ratios to "equal", and
      the "plan"; "why" instead where there is none.
    """
    rows: list[Row] = []
    for split in privacy.SPLITS:
        row = {"split": split, **_attempt(of, threat_model="byzldp", split=split)}
        if "why" not in row and "why" not in (equal := rows[0] if rows else row):
            row |= {f"{what}_over_equal": row[what] / equal[what] for what in ("message", "mean")}
        rows.append(row)
    return rows


def graph(of: Setting) -> Row | None:
    """What a sparse secret graph costs against the complete one, at equal (epsilon, delta).

    Args:
      of: The settings.

    Returns:
      None for the complete graph. Otherwise the graph in words, how epsilon was found (see
      `privacy.WorstCase`), the pairs of both graphs, and the noise on both.
    """
    if of.graph is None:
        return None
    plan, complete = calibrate(of), calibrate(of, graph=None)
    return {
        "graph": of.graph.describe(),
        "how": plan.worst_case.how,
        "pairs": len(of.graph.edges),
        "pairs_complete": math.comb(of.graph.num_workers, 2),
        **noise(plan),
        "complete": noise(complete),
        "message_over_complete": plan.message_std / complete.message_std,
        "mean_over_complete": plan.honest_mean_std / complete.honest_mean_std,
    }


def dropouts(of: Setting) -> list[Row]:
    """What happens if honest workers vanish after the noise was planned.

    Noise that they shared with others no longer cancels. Under LDP, SecLDP and ByzLDP the server sees a part
    of what it would have seen, and epsilon is as promised. CDP shows only the mean, which then lacks the
    noise of those who vanished: with v of n gone, eps_step is n / (n - v) times what it was.

    Args:
      of: The settings.

    Returns:
      A row for nobody, 1, f and n/10 workers, as far as somebody stays: "vanished", the noise in the "mean"
      of the rest, the ratio "over_all", and "epsilon".
    """
    plan = calibrate(of)
    n = plan.num_workers
    counts = sorted({0, 1, plan.num_byzantine, n // 10})
    return [
        {
            "vanished": count,
            "mean": plan.mean_std_without(count),
            "over_all": plan.mean_std_without(count) / plan.honest_mean_std,
            "epsilon": privacy.epsilon(_with_less_noise(plan, (n - count) / n)),
        }
        for count in counts
        if count < n - plan.num_byzantine
    ]


def _with_less_noise(plan: privacy.PrivacyPlan, part: float) -> privacy.PrivacyPlan:
    """Under CDP the plan with this part of its noise variance in the mean; any other plan as it is."""
    if plan.threat_model != "cdp":
        return plan
    return dataclasses.replace(plan, sigma_ind=plan.sigma_ind * math.sqrt(part))


def samplings(of: Setting) -> list[Row] | None:
    """The settings' plan under both ways to draw a batch.

    Args:
      of: The settings.

    Returns:
      None at the user level. Otherwise a row for each: "sampling", "neighbours" (what the promise is about),
      "sensitivity", "largest_batch", the noise, "epsilon" and the "plan".
    """
    if of.config.privacy_level != "example":
        return None
    rows = []
    for sampling, neighbours in (
        ("without_replacement", "an example replaced"),
        ("poisson", "an example added or removed"),
    ):
        plan = calibrate(of, sampling=sampling)
        rows.append(
            {
                "sampling": sampling,
                "neighbours": neighbours,
                "sensitivity": plan.sensitivity,
                "largest_batch": plan.largest_batch,
                **noise(plan),
                "epsilon": privacy.epsilon(plan),
                "plan": plan,
            }
        )
    return rows


def pld_epsilon(plan: privacy.PrivacyPlan) -> float | None:
    """Epsilon of a Poisson plan by privacy loss distributions, with the package dp-accounting.

    Args:
      plan: At the example level, with Poisson sampling (the only one of ours that the package covers).

    Returns:
      epsilon, an upper bound that is tight up to its grid; None if the package is not installed.

    References:
      Doroshenko, Ghazi, Kamath, Kumar and Manurangsi, Connect the Dots: Tighter Discrete Approximations of
        Privacy Loss Distributions, PoPETs 2022.
    """
    if plan.sampling != "poisson":
        raise UserError(f"PLD covers Poisson sampling only, got a plan with sampling={plan.sampling!r}.")
    try:
        import dp_accounting
        from dp_accounting import pld
    except ImportError:
        return None
    # The grid grows with epsilon, or the distribution of a large budget would not fit into memory.
    accountant = pld.PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        value_discretization_interval=max(1e-4, 1e-5 * privacy.epsilon(plan)),
    )
    gaussian = dp_accounting.GaussianDpEvent(1 / math.sqrt(2 * plan.step_divergence))
    accountant.compose(dp_accounting.PoissonSampledDpEvent(plan.sampling_rate, gaussian), plan.rounds)
    return float(accountant.get_epsilon(plan.delta))


def paper_table() -> list[Row]:
    """The noise of every setting of the paper's Figure 1 under every threat model, by every accountant.

    Returns:
      A row for each setting and threat model: "dataset", "clip_norm", "num_byzantine", "epsilon",
      "threat_model"; "sigma" and "mean" by accountant; "over_paper", the noise by each accountant over that
      by the paper's closed form.

    Example:
      >>> row = paper_table()[6]
      >>> row["dataset"], row["num_byzantine"], row["threat_model"], round(row["sigma"]["rdp"], 3)
      ('MNIST', 10, 'secldp', 0.6)
    """
    rows = []
    for dataset, clip_norm, f, epsilon in PAPER_SETTINGS:
        for model in THREAT_MODELS:
            plans = {
                name: privacy.calibrate(
                    threat_model=model,
                    epsilon=epsilon,
                    delta=1e-4,
                    num_workers=100,
                    num_byzantine=f,
                    rounds=30,
                    clip_norm=clip_norm,
                    accountant=name,
                )
                for name in ("paper", "rdp", "exact")
            }
            mean = {name: plan.honest_mean_std for name, plan in plans.items()}
            rows.append(
                {
                    "dataset": dataset,
                    "clip_norm": clip_norm,
                    "num_byzantine": f,
                    "epsilon": epsilon,
                    "threat_model": model,
                    # One of the two is 0, or they are equal.
                    "sigma": {name: max(plan.sigma_ind, plan.sigma_cor) for name, plan in plans.items()},
                    "mean": mean,
                    "over_paper": {name: value / mean["paper"] for name, value in mean.items()},
                }
            )
    return rows


@dataclasses.dataclass(frozen=True)
class Curves:
    """The noise in the honest mean over something, under every threat model.

    Attributes:
      x: What it is over, [points].
      mean: By threat model, [points]; NaN where no noise keeps the budget.
    """

    x: np.ndarray
    mean: dict[str, np.ndarray]


def over_epsilon(of: Setting, points: int = 41) -> Curves:
    """The noise in the honest mean for budgets from a fiftieth of the settings' epsilon to four times it.

    Args:
      of: The settings.
      points: How many budgets.

    Returns:
      The curves; x is epsilon.
    """
    plan = calibrate(of, threat_model="ldp")
    most, least = (calibrate(of, threat_model="ldp", epsilon=of.config.epsilon * x) for x in (1 / 50, 4))
    # From noise to epsilon is one call of the accountant; the other way would be a calibration a point.
    sigmas = np.geomspace(most.sigma_ind, least.sigma_ind, points)
    plans = [dataclasses.replace(plan, sigma_ind=sigma, epsilon=math.inf) for sigma in sigmas.tolist()]
    scales = sigmas / plan.sigma_ind
    mean = {row["threat_model"]: row.get("mean", math.nan) * scales for row in threat_models(of)}
    return Curves(np.array([privacy.epsilon(plan) for plan in plans]), mean)


def over_colluding(of: Setting) -> Curves:
    """The noise in the honest mean for q = 0, ..., f colluding workers, at the settings' budget.

    Args:
      of: The settings.

    Returns:
      The curves; x is q, which ByzLDP alone depends on.
    """
    f = of.config.num_byzantine
    return _sweep(of, [(f, q) for q in range(f + 1)], x=1)


def over_byzantine(of: Setting) -> Curves:
    """The noise in the honest mean for f = 0, ..., (n-1)/2 malicious workers, at the settings' budget.

    Args:
      of: The settings; a given q is kept where f allows it, otherwise q = f. Also m is kept.

    Returns:
      The curves; x is f.
    """
    q = of.config.num_colluding
    largest = (of.config.num_workers - 1) // 2
    return _sweep(of, [(f, f if q is None else min(q, f)) for f in range(largest + 1)], x=0)


def _sweep(of: Setting, workers: list[tuple[int, int]], x: int) -> Curves:
    """The curves over pairs (f, q); `x` says which of the two."""
    allowed = calibrate(of, threat_model="ldp")
    mean: dict[str, np.ndarray] = {model: np.full(len(workers), math.nan) for model in THREAT_MODELS}
    for index, (f, q) in enumerate(workers):
        for model in THREAT_MODELS:
            colluding = q if model == "byzldp" else 0
            try:
                # At the user level and by the closed form: all that is needed are ratios.
                plan = calibrate(
                    of,
                    threat_model=model,
                    num_byzantine=f,
                    num_colluding=colluding,
                    level="user",
                    sampling=None,
                    accountant="paper",
                )
            except UserError:
                continue
            scale = math.sqrt(plan.step_divergence / allowed.step_divergence)
            mean[model][index] = plan.honest_mean_std * scale * allowed.sensitivity / plan.sensitivity
    return Curves(np.array([pair[x] for pair in workers]), mean)


def _attempt(of: Setting, **changes: Any) -> Row:
    """The plan and its noise, or the sentence that says why there is none."""
    try:
        plan = calibrate(of, **changes)
    except UserError as error:
        return {"why": str(error).partition(". ")[0].rstrip(".") + "."}
    return noise(plan) | {"plan": plan}
