"""From a privacy budget to the least noise that keeps it."""

import dataclasses
import math
from typing import Any

import numpy as np

from cafcor_jax.errors import UserError
from cafcor_jax.privacy import mechanism
from cafcor_jax.privacy.accountant import epsilon as spent
from cafcor_jax.privacy.graphs import SecretGraph, worst_case
from cafcor_jax.privacy.plan import THREAT_MODELS, PrivacyPlan, check_choice

SPLITS = ("equal", "mean_noise", "robust")

# (sigma_ind, sigma_cor) up to one common factor, which the budget decides.
_RATIOS = {"ldp": (1.0, 0.0), "cdp": (1.0, 0.0), "secldp": (0.0, 1.0), "byzldp": (1.0, 1.0)}


def no_privacy(
    *,
    num_workers: int,
    num_byzantine: int,
    rounds: int,
    clip_norm: float = math.inf,
    delta: float = 1e-5,
    level: str = "user",
    batch_size: int | None = None,
    samples_per_worker: int | None = None,
    sampling: str | None = None,
) -> PrivacyPlan:
    """The plan without noise: threat model "none", epsilon infinite.

    Args:
      num_workers: n.
      num_byzantine: f.
      rounds: T.
      clip_norm: C; infinite for no clipping.
      delta: Without meaning here.
      level: What is clipped.
      batch_size: b.
      samples_per_worker: m.
      sampling: At the example level "without_replacement" (the default) or "poisson".

    Returns:
      The plan.

    Example:
      >>> print(no_privacy(num_workers=10, num_byzantine=2, rounds=5).describe())
      privacy: no privacy; 10 workers, 2 Byzantine, 5 rounds
    """
    return PrivacyPlan(
        threat_model="none",
        level=level,
        num_workers=num_workers,
        num_byzantine=num_byzantine,
        rounds=rounds,
        clip_norm=clip_norm,
        delta=delta,
        sigma_ind=0.0,
        sigma_cor=0.0,
        batch_size=batch_size,
        samples_per_worker=samples_per_worker,
        sampling=sampling or ("without_replacement" if level == "example" else "none"),
    )


def best_split(
    *,
    split: str,
    num_workers: int,
    num_byzantine: int,
    num_colluding: int,
    graph: SecretGraph | None = None,
) -> tuple[float, float]:
    """The ratio of independent to correlated noise that serves a purpose best at equal privacy.

    On the frontier of one eps_step the two can be traded. With h = n - f and k secrets a worker,

        equal       sigma_ind = sigma_cor, the paper's choice
        mean_noise  least noise in the honest mean: f sigma_cor^2 + sigma_ind^2 (all divided by h)
        robust      that, plus what attackers may add unseen: (f/n) (k sigma_cor^2 + sigma_ind^2)

    A spectral filter cannot tell f messages that are shifted by tau standard deviations of a message from
    noise while their part of the covariance, (f/n)(1 - f/n) tau^2 v d with v a message's variance in one
    coordinate, is below what noise has in its top direction, about v d / n. So tau^2 may be
    1 / (f (1 - f/n)), and the mean is shifted by (f/n)^2 tau^2 v = (f/n) v / h (squared, in one coordinate),
    which is the second term.

    The ratio does not depend on epsilon, delta, the rounds or the clipping.

    Args:
      split: One of `SPLITS`.
      num_workers: n.
      num_byzantine: f.
      num_colluding: q.
      graph: Who shares a secret with whom; None for everyone with everyone.

    Returns:
      (sigma_ind, sigma_cor), the squares of which sum to 1.

    Example:
      >>> sigmas = best_split(split="mean_noise", num_workers=100, num_byzantine=10, num_colluding=10)
      >>> [round(sigma, 3) for sigma in sigmas]
      [0.882, 0.471]
    """
    check_choice("split", split, SPLITS)
    if split == "equal":
        return math.sqrt(0.5), math.sqrt(0.5)
    from scipy import optimize

    n, f = num_workers, num_byzantine
    if f == 0:
        raise UserError(
            f"split must be 'equal' with num_byzantine=0, got {split!r}: without Byzantine workers all "
            "correlated noise cancels in the mean, so that more of it is always better, and nothing the best."
        )
    secrets = n - 1 if graph is None else float(graph.degrees.mean())

    def leaks(sigma_ind: float, sigma_cor: float) -> float:
        known: dict[str, Any] = {
            "sigma_ind": sigma_ind,
            "sigma_cor": sigma_cor,
            "num_byzantine": f,
            "num_colluding": num_colluding,
            "clip_norm": 1.0,
        }
        if graph is not None:
            return worst_case(graph, **known).step_divergence
        if sigma_ind == 0 and num_colluding == f:
            return math.inf
        return mechanism.step_divergence(num_workers=n, **known)

    def cost(share: float) -> float:
        """The noise of the purpose at unit privacy, if a part `share` of the variance is correlated."""
        cor, ind = share, 1 - share
        # Of a worker's secrets a part f/(n-1) is with Byzantine workers.
        noise = secrets * f / (n - 1) * cor + ind
        if split == "robust":
            noise += f / n * (secrets * cor + ind)
        return noise * leaks(math.sqrt(ind), math.sqrt(cor))

    # The share is searched on the scale of 1/n, where the complete graph has its optimum, up to near 1.
    grid = np.concatenate([[0.0], np.geomspace(1e-4, 0.5, 40), 1 - np.geomspace(0.5, 1e-6, 20)[1:], [1.0]])
    costs = [cost(share) for share in grid]
    best = int(np.argmin(costs))
    around = (grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)])
    found = optimize.minimize_scalar(cost, bounds=around, method="bounded", options={"xatol": 1e-10})
    share = float(found.x) if found.fun < costs[best] else float(grid[best])
    return math.sqrt(1 - share), math.sqrt(share)


def calibrate(
    *,
    threat_model: str,
    epsilon: float,
    delta: float,
    num_workers: int,
    num_byzantine: int,
    num_colluding: int | None = None,
    rounds: int,
    clip_norm: float,
    accountant: str = "rdp",
    level: str = "user",
    batch_size: int | None = None,
    samples_per_worker: int | None = None,
    sampling: str | None = None,
    split: str = "equal",
    graph: SecretGraph | None = None,
) -> PrivacyPlan:
    """The plan with the least noise that spends at most epsilon in all its rounds.

    How the noise is split:

        ldp      sigma_cor = 0
        cdp      sigma_cor = 0, sigma_ind = sigma_ldp / sqrt(n): together what a trusted server would add
        secldp   sigma_ind = 0, q = 0; needs f >= 1
        byzldp   by `split`; q = f unless given

    Args:
      threat_model: One of `THREAT_MODELS`; under "none" epsilon and the accountant have no effect.
      epsilon: The budget, finite and positive.
      delta: In (0, 1).
      num_workers: n.
      num_byzantine: f, with 2f < n.
      num_colluding: q; by default f under "byzldp" and 0 otherwise.
      rounds: T.
      clip_norm: C.
      accountant: "exact", "rdp" or "paper".
      level: "user" or "example".
      batch_size: b, needed at the example level.
      samples_per_worker: m, needed at the example level (of the smallest worker, if they differ).
      sampling: At the example level "without_replacement" (the default) or "poisson".
      split: Under "byzldp" one of `SPLITS` (see `best_split`): "equal" is the paper's sigma_ind = sigma_cor.
      graph: Who shares a secret with whom; None for everyone with everyone.

    Returns:
      The plan. Its epsilon is never above the budget, and within 1e-6 of it (relative).

    Raises:
      UserError: (a ValueError) if a value is out of range, or if no noise gives a finite epsilon.

    Example:
      >>> plan = calibrate(threat_model="byzldp", epsilon=27.8, delta=1e-4, num_workers=100, num_byzantine=5,
      ...                  rounds=30, clip_norm=2.25)
      >>> plan.num_colluding, round(plan.sigma_ind, 4), round(plan.sigma_cor, 4)
      (5, 0.7949, 0.7949)
    """
    check_choice("threat_model", threat_model, THREAT_MODELS)
    check_choice("split", split, SPLITS)
    if split != "equal" and threat_model != "byzldp":
        raise UserError(
            f"split must be 'equal' under {threat_model!r}, got {split!r}: only 'byzldp' has two kinds of "
            "noise."
        )
    if graph is not None and threat_model not in ("secldp", "byzldp"):
        raise UserError(f"graph must be None under {threat_model!r}: it uses no secrets.")
    if sampling is None:
        sampling = "without_replacement" if level == "example" else "none"
    if threat_model == "none":
        if num_colluding:
            raise UserError(
                f"num_colluding must be 0 under 'none', got {num_colluding}: there are no secrets."
            )
        return no_privacy(
            num_workers=num_workers,
            num_byzantine=num_byzantine,
            rounds=rounds,
            clip_norm=clip_norm,
            delta=delta,
            level=level,
            batch_size=batch_size,
            samples_per_worker=samples_per_worker,
            sampling=sampling,
        )
    if epsilon == math.inf:
        raise UserError("epsilon must be finite, got inf: a run without privacy is the threat model 'none'.")
    if num_colluding is None:
        num_colluding = num_byzantine if threat_model == "byzldp" else 0
    sigma_ind, sigma_cor = _RATIOS[threat_model]
    if threat_model == "byzldp" and split != "equal":
        mechanism.check_workers(num_workers, num_byzantine, num_colluding)
        sigma_ind, sigma_cor = best_split(
            split=split,
            num_workers=num_workers,
            num_byzantine=num_byzantine,
            num_colluding=num_colluding,
            graph=graph,
        )
    unit = PrivacyPlan(  # checks every argument
        threat_model=threat_model,
        level=level,
        num_workers=num_workers,
        num_byzantine=num_byzantine,
        num_colluding=num_colluding,
        rounds=rounds,
        clip_norm=clip_norm,
        delta=delta,
        sigma_ind=sigma_ind,
        sigma_cor=sigma_cor,
        accountant=accountant,
        epsilon=epsilon,
        batch_size=batch_size,
        samples_per_worker=samples_per_worker,
        sampling=sampling,
        graph=graph,
    )

    def scaled(log_scale: float) -> PrivacyPlan:
        scale = math.exp(log_scale)
        return dataclasses.replace(unit, sigma_ind=scale * sigma_ind, sigma_cor=scale * sigma_cor)

    def excess(log_scale: float) -> float:
        return spent(scaled(log_scale)) - epsilon

    # Start where the paper's closed form, without subsampling, spends the budget: near for every accountant.
    log_inverse_delta = math.log(1 / delta)
    root_rho = epsilon / (math.sqrt(log_inverse_delta + epsilon) + math.sqrt(log_inverse_delta))
    low = high = 0.5 * math.log(unit.step_divergence * rounds) - math.log(root_rho)
    step = 0.25
    while excess(high) > 0:
        low, high, step = high, high + step, 2 * step
    while low == high or excess(low) <= 0:
        low, high, step = low - step, low, 2 * step

    from scipy import optimize  # takes longer to import than the rest of the package

    log_scale = optimize.brentq(excess, low, high, xtol=1e-13, rtol=1e-13)
    nudge = 1e-13
    while excess(log_scale) > 0:  # the root's last digits may be on the wrong side
        log_scale += nudge
        nudge *= 2
    return scaled(log_scale)
