"""The correlated Gaussian mechanism of one round: what the server sees, and how much that tells it."""

import math
import numbers

import numpy as np

from cafcor_jax.errors import UserError


def check_int(name: str, value: object, minimum: int) -> None:
    """Raises `UserError` unless `value` is a whole number of at least `minimum`."""
    # bool is an Integral, but `rounds=True` is a mistake.
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise UserError(f"{name} must be a whole number of at least {minimum}, got {value!r}.")


def check_workers(num_workers: int, num_byzantine: int, num_colluding: int) -> None:
    """Raises `UserError` unless 0 <= q <= f and 2f < n."""
    check_int("num_workers", num_workers, 1)
    check_int("num_byzantine", num_byzantine, 0)
    check_int("num_colluding", num_colluding, 0)
    if 2 * num_byzantine >= num_workers:
        raise UserError(
            f"num_byzantine must be less than half of num_workers, got num_byzantine={num_byzantine} of "
            f"num_workers={num_workers}: no aggregation is robust to a Byzantine half."
        )
    if num_colluding > num_byzantine:
        raise UserError(
            f"num_colluding must be at most num_byzantine={num_byzantine}, got {num_colluding}: only "
            "Byzantine workers hand their secrets to the server."
        )


def check_noise(sigma_ind: float, sigma_cor: float, num_byzantine: int, num_colluding: int) -> None:
    """Raises `UserError` unless the noise gives a finite epsilon.

    The sum of the honest messages carries noise of variance (n-f) [(f-q) sigma_cor^2 + sigma_ind^2] that the
    server cannot remove. If that is zero then the sum of the honest gradients is public.
    """
    for name, value in (("sigma_ind", sigma_ind), ("sigma_cor", sigma_cor)):
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"{name} must be finite and at least 0, got {value!r}.")
    if sigma_ind == 0 and sigma_cor == 0:
        raise UserError("sigma_ind and sigma_cor are both 0: without noise epsilon is infinite.")
    if sigma_ind == 0 and num_colluding == num_byzantine:
        raise UserError(
            f"sigma_ind is 0 and all num_byzantine={num_byzantine} Byzantine workers collude "
            f"(num_colluding={num_colluding}): the correlated noise cancels in the sum of the honest "
            "messages, so epsilon is infinite. Use sigma_ind > 0, or num_colluding < num_byzantine."
        )


def step_divergence(
    *,
    sigma_ind: float,
    sigma_cor: float,
    num_workers: int,
    num_byzantine: int,
    num_colluding: int,
    clip_norm: float,
) -> float:
    """Exact Renyi divergence of one round, divided by its order (the paper's lemma).

    With n workers, f Byzantine, q <= f of them colluding with the server, and gradients clipped at C, one
    round is (alpha, alpha eps_step)-SecRDP for every alpha > 1, with

        eps_step = 2 C^2 / ((n-q) sigma_cor^2 + sigma_ind^2)
                   * [1 + sigma_cor^2 / ((f-q) sigma_cor^2 + sigma_ind^2)].

    The round is a Gaussian mechanism of parameter mu = sqrt(2 eps_step), and nothing is lost: two gradients
    at distance 2C attain it.

    Args:
      sigma_ind: Standard deviation of each worker's independent noise.
      sigma_cor: Standard deviation of the noise that each pair of workers shares.
      num_workers: n.
      num_byzantine: f, with 2f < n.
      num_colluding: q, with 0 <= q <= f.
      clip_norm: C, half the distance by which one worker's input can move.

    Returns:
      eps_step, positive and finite.

    Raises:
      UserError: (a ValueError) if a value is out of range, or if no finite epsilon exists.

    Example:
      >>> rho = 30 * step_divergence(sigma_ind=0, sigma_cor=0.6, num_workers=100, num_byzantine=10,
      ...                            num_colluding=0, clip_norm=2.25)
      >>> round(rho, 2)  # MNIST in Figure 1
      9.28

    References:
      Allouah, Guerraoui and Stephan, Towards Trustworthy Federated Learning with Untrusted Participants,
        ICML 2025.
    """
    check_workers(num_workers, num_byzantine, num_colluding)
    check_noise(sigma_ind, sigma_cor, num_byzantine, num_colluding)
    if not (math.isfinite(clip_norm) and clip_norm > 0):
        raise UserError(f"clip_norm must be finite and positive, got {clip_norm!r}.")
    # In units of the larger sigma: squares of very small sigmas would underflow.
    unit = max(sigma_ind, sigma_cor)
    ind, cor = (sigma_ind / unit) ** 2, (sigma_cor / unit) ** 2
    uncancelled = (num_byzantine - num_colluding) * cor + ind
    if uncancelled == 0:
        raise UserError(
            f"sigma_ind={sigma_ind} is too small against sigma_cor={sigma_cor}: with "
            f"num_colluding={num_colluding} of num_byzantine={num_byzantine} the noise that does not cancel "
            "rounds to 0, and epsilon is infinite."
        )
    per_message = (num_workers - num_colluding) * cor + ind
    return 2 * (clip_norm / unit) ** 2 / per_message * (1 + cor / uncancelled)


def honest_covariance(
    *, sigma_ind: float, sigma_cor: float, num_workers: int, num_byzantine: int, num_colluding: int
) -> np.ndarray:
    """Covariance of the honest workers' noise, given the secrets that the server knows.

        Sigma = sigma_cor^2 L + ((f-q) sigma_cor^2 + sigma_ind^2) I,    L = (n-f) I - 1 1^T,

    where L is the Laplacian of the complete graph over the n-f honest workers. (The paper once writes
    I_{n-q}; it is I_{n-f}.) Other secret graphs have another L.

    Args:
      sigma_ind: Standard deviation of the independent noise.
      sigma_cor: Standard deviation of the pairwise noise.
      num_workers: n.
      num_byzantine: f.
      num_colluding: q.

    Returns:
      Array [n-f, n-f].

    Example:
      >>> honest_covariance(sigma_ind=1, sigma_cor=1, num_workers=3, num_byzantine=1, num_colluding=0)
      array([[ 3., -1.],
             [-1.,  3.]])
    """
    check_workers(num_workers, num_byzantine, num_colluding)
    honest = num_workers - num_byzantine
    laplacian = honest * np.eye(honest) - np.ones((honest, honest))
    uncancelled = (num_byzantine - num_colluding) * sigma_cor**2 + sigma_ind**2
    return sigma_cor**2 * laplacian + uncancelled * np.eye(honest)


def step_divergence_of_covariance(covariance: np.ndarray, clip_norm: float) -> float:
    """eps_step of any jointly Gaussian view, for its worst worker.

        eps_step = max_i 1/2 (2C)^2 (Sigma^-1)_ii

    This is the definition that `step_divergence` has in closed form for the complete graph.

    Args:
      covariance: Sigma, the noise of the honest messages [h, h], given all that the server knows.
      clip_norm: C.

    Returns:
      eps_step.

    Example:
      >>> step_divergence_of_covariance(np.eye(2), clip_norm=1.0)
      2.0
    """
    if not np.linalg.eigvalsh(covariance)[0] > 0:
        raise UserError(
            "covariance must be positive definite: some sum of messages has no noise, epsilon is infinite."
        )
    return float(2 * clip_norm**2 * np.max(np.diag(np.linalg.inv(covariance))))


def honest_mean_std(*, sigma_ind: float, sigma_cor: float, num_workers: int, num_byzantine: int) -> float:
    """Standard deviation, per coordinate, of the noise left in the mean of the honest messages.

        sqrt((f sigma_cor^2 + sigma_ind^2) / (n-f))

    Noise shared by two honest workers cancels; what an honest worker shares with a Byzantine one does not.

    Args:
      sigma_ind: Standard deviation of the independent noise.
      sigma_cor: Standard deviation of the pairwise noise.
      num_workers: n.
      num_byzantine: f.

    Returns:
      The standard deviation.

    Example:
      >>> honest_mean_std(sigma_ind=2.0, sigma_cor=0.0, num_workers=4, num_byzantine=0)
      1.0
    """
    check_workers(num_workers, num_byzantine, 0)
    return math.sqrt((num_byzantine * sigma_cor**2 + sigma_ind**2) / (num_workers - num_byzantine))
