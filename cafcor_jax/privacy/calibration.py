"""From a privacy budget to the least noise that keeps it."""

import dataclasses
import math

from cafcor_jax.errors import UserError
from cafcor_jax.privacy.accountant import epsilon as spent
from cafcor_jax.privacy.plan import THREAT_MODELS, PrivacyPlan, check_choice

# (sigma_ind, sigma_cor) up to one common factor, which the budget decides.
_SPLITS = {"ldp": (1.0, 0.0), "cdp": (1.0, 0.0), "secldp": (0.0, 1.0), "byzldp": (1.0, 1.0)}


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
        sampling="without_replacement" if level == "example" else "none",
    )


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
) -> PrivacyPlan:
    """The plan with the least noise that spends at most epsilon in all its rounds.

    How the noise is split:

        ldp      sigma_cor = 0
        cdp      sigma_cor = 0, sigma_ind = sigma_ldp / sqrt(n): together what a trusted server would add
        secldp   sigma_ind = 0, q = 0; needs f >= 1
        byzldp   sigma_ind = sigma_cor, q = f unless given (the paper's corollary)

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
        )
    if epsilon == math.inf:
        raise UserError("epsilon must be finite, got inf: a run without privacy is the threat model 'none'.")
    if num_colluding is None:
        num_colluding = num_byzantine if threat_model == "byzldp" else 0
    sigma_ind, sigma_cor = _SPLITS[threat_model]
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
        sampling="without_replacement" if level == "example" else "none",
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
