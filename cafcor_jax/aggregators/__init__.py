"""Robust aggregation rules. `BY_NAME[name](num_byzantine=f)` builds one; it maps leaves [n, ...] to [...].

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

__all__ = [
    "BY_NAME",
    "MAX_SUBSETS",
    "CoordinatewiseRule",
    "Filtered",
    "LinearRule",
    "Mixing",
    "arc",
    "bucketing",
    "caf",
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
