"""Attacks on the labels: the malicious workers compute gradients, on data that they have poisoned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from cafcor_jax.attacks.vectors import none
from cafcor_jax.errors import UserError
from cafcor_jax.types import Array, Attack, Updates


@dataclasses.dataclass(frozen=True)
class LabelAttack:
    """An attack that does not look at the honest messages but at gradients on poisoned labels.

    The federation calls it with the gradients of batches of the honest workers' data with the labels
    `poison(labels)`: neither clipped nor noisy, and without momentum, for malicious workers keep to no rule.
    They are the batches that the honest workers use themselves, unless those are Poisson samples.
    """

    poison: Callable[[Array], Array]
    """Labels [...] -> labels [...]."""
    message: Attack
    """What the malicious workers send, given the poisoned gradients."""

    def __call__(self, key: Array, honest: Updates, num_byzantine: int) -> Updates:
        """Maps poisoned gradients of honest batches, leaves [h, ...], to malicious leaves [f, ...]."""
        return self.message(key, honest, num_byzantine)


def label_flip(num_classes: int = 10) -> LabelAttack:
    """Label flipping (LF): the mean gradient of the honest batches with labels y -> num_classes - 1 - y.

    Args:
      num_classes: of the data; labels are 0 to num_classes - 1.

    Returns:
      An attack.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> attack = label_flip()
      >>> attack.poison(jnp.array([0, 3])).tolist()
      [9, 6]
      >>> attack(jax.random.key(0), jnp.array([[1.0], [3.0]]), 1).tolist()
      [[2.0]]

    References:
      Allen-Zhu et al., Byzantine-Resilient Non-Convex Stochastic Gradient Descent, ICLR 2021.
    """
    if not isinstance(num_classes, int) or isinstance(num_classes, bool) or num_classes < 2:
        raise UserError(f"num_classes is {num_classes!r}; it must be a whole number of at least 2.")
    return LabelAttack(poison=lambda labels: num_classes - 1 - labels, message=none())
