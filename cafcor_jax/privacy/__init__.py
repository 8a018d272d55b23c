"""Privacy of CafCor: threat models, accountants and calibration. Host code in float64, never JAX.

One frozen `PrivacyPlan` feeds both the noise and the accountant, so that the two cannot disagree:

>>> from cafcor_jax import privacy
>>> plan = privacy.calibrate(threat_model="secldp", epsilon=26.39, delta=1e-4, num_workers=100,
...                          num_byzantine=10, rounds=30, clip_norm=2.25)
>>> round(plan.sigma_cor, 3), round(privacy.epsilon(plan), 4)
(0.6, 26.39)
"""

from cafcor_jax.privacy import graphs
from cafcor_jax.privacy.accountant import (
    OPACUS_ORDERS,
    ORDERS,
    epsilon,
    epsilon_schedule,
    gaussian_epsilon,
    gaussian_log_delta,
    paper_epsilon,
    poisson_gaussian_rdp,
    rdp_epsilon,
    subsampled_gaussian_rdp,
)
from cafcor_jax.privacy.calibration import SPLITS, best_split, calibrate, no_privacy
from cafcor_jax.privacy.graphs import SecretGraph, WorstCase, worst_case
from cafcor_jax.privacy.mechanism import (
    honest_covariance,
    honest_mean_std,
    step_divergence,
    step_divergence_of_covariance,
)
from cafcor_jax.privacy.plan import ACCOUNTANTS, HOW, LEVELS, SAMPLINGS, THREAT_MODELS, PrivacyPlan

__all__ = [
    "ACCOUNTANTS",
    "HOW",
    "LEVELS",
    "OPACUS_ORDERS",
    "ORDERS",
    "SAMPLINGS",
    "SPLITS",
    "THREAT_MODELS",
    "PrivacyPlan",
    "SecretGraph",
    "WorstCase",
    "best_split",
    "calibrate",
    "epsilon",
    "epsilon_schedule",
    "gaussian_epsilon",
    "gaussian_log_delta",
    "graphs",
    "honest_covariance",
    "honest_mean_std",
    "no_privacy",
    "paper_epsilon",
    "poisson_gaussian_rdp",
    "rdp_epsilon",
    "step_divergence",
    "step_divergence_of_covariance",
    "subsampled_gaussian_rdp",
    "worst_case",
]
