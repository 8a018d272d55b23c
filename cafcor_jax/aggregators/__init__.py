"""Robust aggregation rules. `BY_NAME[name](num_byzantine=f)` builds one; it maps leaves [n, ...] to [...].

Those in `OVER_ROUNDS` know the noise of a federation's momenta, and have a state: `(init, apply)`.

Pre-aggregations are in `mixing.BY_NAME`, and `compose(nnm(f), caf(f))` puts one before a rule.
"""

from collections.abc import Callable

from cafcor_jax.aggregators import mixing
from cafcor_jax.aggregators.caf import Filtered, caf, spectral_filter
from cafcor_jax.aggregators.centres import centered_clipping, geometric_median
from cafcor_jax.aggregators.coordinatewise import CoordinatewiseRule, meamed, median, trimmed_mean
from cafcor_jax.aggregators.distances import krum, monna, multi_krum
from cafcor_jax.aggregators.linear import LinearRule, mean
from cafcor_jax.aggregators.mixing import Mixing, arc, bucketing, clipping, compose, nnm
from cafcor_jax.aggregators.noise_aware import (
    Judged,
    StatefulRule,
    caf_history,
    caf_noise_aware,
    caf_noise_aware_over_rounds,
)
from cafcor_jax.aggregators.subsets import MAX_SUBSETS, mda, smea

BY_NAME: dict[str, Callable[..., LinearRule | CoordinatewiseRule]] = {
    "mean": mean,
    "caf": caf,
    "smea": smea,
    "krum": krum,
    "multi_krum": multi_krum,
    "geometric_median": geometric_median,
    "mda": mda,
    "monna": monna,
    "centered_clipping": centered_clipping,
    "median": median,
    "trimmed_mean": trimmed_mean,
    "meamed": meamed,
}

#: Rules for a federation's rounds: made with num_byzantine, momentum, sigma_ind, sigma_cor, and more.
OVER_ROUNDS: dict[str, Callable[..., StatefulRule]] = {
    "caf_noise_aware": caf_noise_aware_over_rounds,
    "caf_history": caf_history,
}

__all__ = [
    "BY_NAME",
    "MAX_SUBSETS",
    "OVER_ROUNDS",
    "CoordinatewiseRule",
    "Filtered",
    "Judged",
    "LinearRule",
    "Mixing",
    "StatefulRule",
    "arc",
    "bucketing",
    "caf",
    "caf_history",
    "caf_noise_aware",
    "caf_noise_aware_over_rounds",
    "centered_clipping",
    "clipping",
    "compose",
    "geometric_median",
    "krum",
    "mda",
    "mean",
    "meamed",
    "median",
    "mixing",
    "monna",
    "multi_krum",
    "nnm",
    "smea",
    "spectral_filter",
    "trimmed_mean",
]
