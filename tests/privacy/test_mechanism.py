"""The lemma against the matrices it comes from."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cafcor_jax import privacy

SIGMAS = st.floats(0.01, 100)


@st.composite
def federations(draw):
    n = draw(st.integers(1, 24))
    f = draw(st.integers(0, (n - 1) // 2))
    return dict(num_workers=n, num_byzantine=f, sigma_ind=draw(SIGMAS), sigma_cor=draw(SIGMAS))


def incidence_covariance(*, sigma_ind, sigma_cor, num_workers, num_byzantine, num_colluding):
    """From the messages themselves: one column per noise source that the server does not know."""
    n, honest = num_workers, range(num_workers - num_byzantine)
    known = range(num_workers - num_colluding, num_workers)
    columns = [sigma_ind * np.eye(n)[i] for i in honest]
    for i in range(n):
        for j in range(i + 1, n):
            if i not in known and j not in known:
                columns.append(sigma_cor * (np.eye(n)[i] - np.eye(n)[j]))
    a = np.array(columns)[:, : len(honest)]
    return a.T @ a


@settings(max_examples=60, deadline=None)
@given(federations(), st.floats(0.1, 10))
def test_lemma_is_the_matrix_definition_for_every_q(federation, clip):
    for q in range(federation["num_byzantine"] + 1):
        covariance = privacy.honest_covariance(num_colluding=q, **federation)
        np.testing.assert_allclose(
            covariance,
            incidence_covariance(num_colluding=q, **federation),
            rtol=1e-12,
            atol=1e-12 * covariance.max(),
        )
        lemma = privacy.step_divergence(num_colluding=q, clip_norm=clip, **federation)
        # Sigma's condition number is at most 1 + n sigma_cor^2 / sigma_ind^2, up to 1e9 here.
        assert privacy.step_divergence_of_covariance(covariance, clip) == pytest.approx(lemma, rel=1e-6)


def test_lemma_without_independent_noise():
    for q in range(3):
        federation = dict(sigma_ind=0.0, sigma_cor=0.7, num_workers=9, num_byzantine=3, num_colluding=q)
        expected = privacy.step_divergence_of_covariance(privacy.honest_covariance(**federation), 2.0)
        assert privacy.step_divergence(clip_norm=2.0, **federation) == pytest.approx(expected, rel=1e-12)


def test_limits():
    base = dict(num_workers=50, num_byzantine=7, clip_norm=1.5)
    ldp = 2 * 1.5**2 / 0.3**2
    for q in (0, 3, 7):
        # No correlated noise: each message alone is protected, as in LDP.
        assert privacy.step_divergence(
            sigma_ind=0.3, sigma_cor=0.0, num_colluding=q, **base
        ) == pytest.approx(ldp)
        assert privacy.step_divergence(
            sigma_ind=0.3, sigma_cor=1e-6, num_colluding=q, **base
        ) == pytest.approx(ldp)
    # Everyone colludes and sigma_cor is huge: only the honest sum is visible, as in CDP over n-f workers.
    huge = privacy.step_divergence(sigma_ind=0.3, sigma_cor=1e5, num_colluding=7, **base)
    assert huge == pytest.approx(ldp / (50 - 7), rel=1e-6)
    # One silent Byzantine worker less than all: then no independent noise is needed.
    assert np.isfinite(privacy.step_divergence(sigma_ind=0.0, sigma_cor=0.3, num_colluding=6, **base))


def test_divergence_is_monotone():
    base = dict(
        sigma_ind=0.5, sigma_cor=0.5, num_workers=40, num_byzantine=10, num_colluding=4, clip_norm=1.0
    )

    def over(name, values):
        return np.diff([privacy.step_divergence(**{**base, name: value}) for value in values])

    assert (over("sigma_ind", [0.1, 0.2, 0.5, 1, 5]) < 0).all()
    assert (over("sigma_cor", [0, 0.1, 0.2, 0.5, 1, 5]) < 0).all()
    assert (over("num_workers", range(21, 60)) < 0).all()
    assert (over("num_byzantine", range(4, 20)) < 0).all()  # more silent secrets that nobody reveals
    assert (over("num_colluding", range(0, 11)) > 0).all()
    assert (over("clip_norm", [0.1, 1, 10]) > 0).all()


def test_very_small_and_large_sigmas_do_not_underflow():
    base = dict(num_workers=10, num_byzantine=2, num_colluding=2)
    reference = privacy.step_divergence(sigma_ind=1.0, sigma_cor=2.0, clip_norm=1.0, **base)
    for scale in (1e-200, 1e200):
        scaled = privacy.step_divergence(sigma_ind=scale, sigma_cor=2 * scale, clip_norm=scale, **base)
        assert scaled == pytest.approx(reference, rel=1e-12)


def test_honest_mean_std_is_the_covariance_of_the_mean():
    federation = dict(sigma_ind=0.4, sigma_cor=0.9, num_workers=12, num_byzantine=4)
    covariance = incidence_covariance(num_colluding=0, **federation)
    assert privacy.honest_mean_std(**federation) == pytest.approx(np.sqrt(covariance.mean()))


def test_singular_covariance_is_refused():
    with pytest.raises(ValueError, match="epsilon is infinite"):
        privacy.step_divergence_of_covariance(np.array([[1.0, -1.0], [-1.0, 1.0]]), 1.0)
