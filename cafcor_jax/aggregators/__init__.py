"""Robust aggregation rules. `BY_NAME[name](num_byzantine=f)` builds one; it maps leaves [n, ...] to [...]."""

from collections.abc import Callable

from cafcor_jax.aggregators.caf import Filtered, caf, spectral_filter
from cafcor_jax.aggregators.linear import LinearRule, mean

BY_NAME: dict[str, Callable[..., LinearRule]] = {
    "mean": mean,
    "caf": caf,
}

__all__ = ["BY_NAME", "Filtered", "LinearRule", "caf", "mean", "spectral_filter"]
