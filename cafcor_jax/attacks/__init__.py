"""What malicious workers send. `BY_NAME[name]()` is an attack: (key, honest, num_byzantine) -> updates.

An adaptive attack is made with the server's rule: `BY_NAME["alie_adaptive"](aggregator=rule)`.
"""

from collections.abc import Callable

from cafcor_jax.attacks.adaptive import alie_adaptive, best_factor, best_push, foe_adaptive
from cafcor_jax.attacks.hidden import (
    ProtocolAttack,
    Push,
    bias,
    bias_cancel,
    bias_drift,
    bias_fixed,
    bias_sacrifice,
    bias_sleeper,
    bias_spread,
    bias_top,
)
from cafcor_jax.attacks.labels import LabelAttack, label_flip
from cafcor_jax.attacks.vectors import (
    alie,
    alie_z_max,
    foe,
    gaussian,
    inf,
    mimic,
    min_max,
    min_sum,
    nan,
    none,
    sign_flip,
    zero,
)
from cafcor_jax.types import Attack

BY_NAME: dict[str, Callable[..., Attack]] = {
    "none": none,
    "sign_flip": sign_flip,
    "foe": foe,
    "alie": alie,
    "label_flip": label_flip,
    "mimic": mimic,
    "gaussian": gaussian,
    "inf": inf,
    "nan": nan,
    "zero": zero,
    "min_max": min_max,
    "min_sum": min_sum,
    "alie_adaptive": alie_adaptive,
    "foe_adaptive": foe_adaptive,
    "bias": bias,
    "bias_cancel": bias_cancel,
    "bias_fixed": bias_fixed,
    "bias_sacrifice": bias_sacrifice,
    "bias_top": bias_top,
    "bias_spread": bias_spread,
    "bias_drift": bias_drift,
    "bias_sleeper": bias_sleeper,
}

#: Attacks whose strength a federation searches against its rule in every round, unless it is given.
SEARCHED = frozenset(
    {"bias", "bias_fixed", "bias_sacrifice", "bias_top", "bias_spread", "bias_drift", "bias_sleeper"}
)
#: Attacks that look at nothing the honest workers send: all that malicious workers can do in a real
#: federation, where the others' messages go to the server alone.
ALONE = ("gaussian", "inf", "nan", "zero", "bias_fixed")

__all__ = [
    "ALONE",
    "BY_NAME",
    "LabelAttack",
    "ProtocolAttack",
    "Push",
    "SEARCHED",
    "alie",
    "alie_adaptive",
    "alie_z_max",
    "best_factor",
    "best_push",
    "bias",
    "bias_cancel",
    "bias_drift",
    "bias_fixed",
    "bias_sacrifice",
    "bias_sleeper",
    "bias_spread",
    "bias_top",
    "foe",
    "foe_adaptive",
    "gaussian",
    "inf",
    "label_flip",
    "mimic",
    "min_max",
    "min_sum",
    "nan",
    "none",
    "sign_flip",
    "zero",
]
