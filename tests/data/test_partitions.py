import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from cafcor_jax import data

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 2000))


def split(kind, num_workers=10, labels=LABELS, seed=0, alpha=1.0):
    return data.partition(labels, num_workers, kind=kind, alpha=alpha, seed=seed)


def table(parts, labels=LABELS):
    return np.stack([np.bincount(labels[part], minlength=10) for part in parts])


@settings(max_examples=150, deadline=None)
@given(
    labels=st.lists(st.integers(0, 9), min_size=1, max_size=200),
    share=st.floats(0, 1),
    kind=st.sampled_from(data.PARTITIONS),
    alpha=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**32),
)
def test_every_sample_exactly_once(labels, share, kind, alpha, seed):
    labels = np.array(labels)
    num_workers = 1 + int(share * (len(labels) - 1))
    parts = data.partition(labels, num_workers, kind=kind, alpha=alpha, seed=seed)
    assert len(parts) == num_workers
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    sizes = [len(part) for part in parts]
    assert min(sizes) >= 1
    assert all(part.dtype == np.int64 for part in parts)
    if kind != "dirichlet":
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("kind", data.PARTITIONS)
def test_the_seed_decides(kind):
    one, two, other = (split(kind, seed=seed) for seed in (3, 3, 4))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)
    same = all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert same == (kind == "extreme"), "extreme has nothing random in it, the others have"


def test_homogeneous_has_the_class_mix_of_the_whole():
    def p_value(parts):
        return scipy.stats.chi2_contingency(table(parts)).pvalue

    values = [p_value(split("homogeneous", seed=seed)) for seed in range(100)]
    # The p-values of a right split are uniform: neither too far from the mix nor suspiciously close to it.
    assert scipy.stats.kstest(values, "uniform").pvalue > 1e-3
    assert p_value(split("extreme")) < 1e-12
    # At alpha = 10 a count's variance is 22 times that of a random split (at 100 only 2.2 times).
    assert p_value(split("dirichlet", alpha=10.0)) < 1e-12
    by_class = np.argsort(LABELS, kind="stable").reshape(10, 2000)
    stratified = [part.ravel() for part in np.array_split(by_class, 10, axis=1)]
    assert p_value(stratified) > 1 - 1e-12, "a stratified split is no random split, and the test can tell"


def dirichlet_z(alpha, assumed, num_workers=10, seeds=50):
    """How many standard errors the shares' squared deviations are from the closed form of Dir(assumed)."""
    shares = np.concatenate(
        [table(split("dirichlet", num_workers, seed=seed, alpha=alpha)).T / 2000 for seed in range(seeds)]
    )
    squares = ((shares - 1 / num_workers) ** 2).sum(1)
    variance = (1 / num_workers) * (1 - 1 / num_workers) / (num_workers * assumed + 1)
    spread = squares.std() / np.sqrt(len(squares))
    return shares, variance, (squares.mean() - num_workers * variance) / spread


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_shares_have_the_mean_and_variance_of_the_closed_form(alpha):
    shares, variance, z = dirichlet_z(alpha, alpha)
    assert abs(z) < 4
    # No worker is favoured, whatever its position: rounding and order leave no trace.
    error = (shares.mean(0) - 1 / 10) / np.sqrt(variance / len(shares))
    assert np.abs(error).max() < 4.5


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_shares_reject_another_alpha(alpha):
    assert abs(dirichlet_z(alpha, alpha * 1.5)[2]) > 6
    assert abs(dirichlet_z(alpha, alpha / 1.5)[2]) > 6


def test_dirichlet_classes_are_drawn_apart():
    shares = np.concatenate([table(split("dirichlet", seed=seed)).T[None] / 2000 for seed in range(50)])
    one, two = shares[:, 0].ravel(), shares[:, 1].ravel()
    assert abs(np.corrcoef(one, two)[0, 1]) < 4.5 / np.sqrt(len(one))


def test_dirichlet_leaves_no_worker_empty():
    parts = split("dirichlet", num_workers=300, alpha=1e-3)
    assert min(map(len, parts)) == 1
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))


def test_extreme_is_the_sorted_split():
    parts = split("extreme", num_workers=10)
    assert [np.unique(LABELS[part]).tolist() for part in parts] == [[label] for label in range(10)]
    distinct = [len(np.unique(LABELS[part])) for part in split("extreme", num_workers=90)]
    assert max(distinct) <= 2 and distinct.count(1) >= 80
    assert all(len(np.unique(LABELS[part])) == 10 for part in split("homogeneous", num_workers=90))
    for part, expected in zip(parts, np.array_split(np.argsort(LABELS, kind="stable"), 10), strict=True):
        np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"kind": "iid"}, "'iid'.*homogeneous, dirichlet, extreme"),
        ({"num_workers": 0}, "num_workers=0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"num_workers": 20_001}, "num_workers=20001.*20000"),
        ({"kind": "dirichlet", "alpha": None}, "alpha=None"),
        ({"kind": "dirichlet", "alpha": 0.0}, "alpha=0.0"),
        ({"kind": "dirichlet", "alpha": -1.0}, "alpha=-1.0"),
        ({"kind": "dirichlet", "alpha": float("nan")}, "alpha=nan"),
        ({"kind": "dirichlet", "alpha": float("inf")}, "alpha=inf"),
        ({"labels": LABELS / 1.0}, "float64"),
        ({"labels": LABELS[None]}, r"shape \(1, 20000\)"),
    ],
)
def test_bad_values_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        split(**({"kind": "homogeneous"} | changes))


@pytest.mark.parametrize("kind", data.PARTITIONS)
def test_federate_keeps_samples_and_pads_with_zeros(kind):
    dataset = data.load("synthetic")
    parts = split(kind, num_workers=7, labels=dataset.train_labels)
    federated = data.federate(dataset, parts)
    largest = max(map(len, parts))
    assert federated.images.shape == (7, largest, 28, 28, 1) and federated.images.dtype == np.uint8
    assert federated.labels.shape == (7, largest) and federated.labels.dtype == np.int32
    assert federated.sizes.tolist() == [len(part) for part in parts] and federated.sizes.dtype == np.int32
    for worker, part in enumerate(parts):
        size = federated.sizes[worker]
        np.testing.assert_array_equal(federated.images[worker, :size], dataset.train_images[part])
        np.testing.assert_array_equal(federated.labels[worker, :size], dataset.train_labels[part])
        assert not federated.images[worker, size:].any() and not federated.labels[worker, size:].any()


def test_federate_refuses_workers_without_samples():
    dataset = data.load("synthetic")
    with pytest.raises(ValueError, match="worker 1 has no samples"):
        data.federate(dataset, [np.arange(3), np.arange(0)])
    with pytest.raises(ValueError, match="parts is empty"):
        data.federate(dataset, [])
