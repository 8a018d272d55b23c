"""What malicious workers send. `BY_NAME[name]()` is an attack: (key, honest, num_byzantine) -> updates.

An adaptive attack is made with the server's rule: `BY_NAME["alie_adaptive"](aggregator=rule)`.
"""

from collections.abc import Callable

from cafcor_jax.attacks.adaptive import alie_adaptive, best_alie_factor, best_foe_factor, foe_adaptive
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
}

__all__ = [
    "BY_NAME",
    "LabelAttack",
    "alie",
    "alie_adaptive",
    "alie_z_max",
    "best_alie_factor",
    "best_foe_factor",
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
