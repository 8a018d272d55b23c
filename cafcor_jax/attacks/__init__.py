"""What malicious workers send. `BY_NAME[name]()` is an attack: (key, honest, num_byzantine) -> updates."""

from collections.abc import Callable

from cafcor_jax.attacks.vectors import alie, none, sign_flip
from cafcor_jax.types import Attack

BY_NAME: dict[str, Callable[..., Attack]] = {
    "none": none,
    "sign_flip": sign_flip,
    "alie": alie,
}

__all__ = ["BY_NAME", "alie", "none", "sign_flip"]
