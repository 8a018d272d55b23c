import numpy as np

from cafcor_jax import data
from cafcor_jax.data import idx, synthetic


def test_shapes_and_determinism():
    one, two = data.load("synthetic"), data.load("synthetic")
    assert one.train_images.shape == (10_000, 28, 28, 1) and one.train_images.dtype == np.uint8
    assert one.test_images.shape == (2_000, 28, 28, 1) and one.test_labels.dtype == np.int32
    assert np.bincount(one.train_labels).tolist() == [1000] * 10
    assert one.checksums == two.checksums and set(one.checksums) == set(idx.KEYS)
    np.testing.assert_array_equal(one.train_images, two.train_images)
    other = synthetic.generate(seed=1, num_train=100, num_test=10)
    assert other.train_images.shape[0] == 100
    assert other.checksums["t10k-images"] != one.checksums["t10k-images"]


def test_normalisation_is_that_of_the_data():
    dataset = data.load("synthetic")
    images = dataset.train_images / 255
    assert abs(images.mean() - dataset.mean) < 1e-3 and abs(images.std() - dataset.std) < 1e-3


def test_it_is_learnable_but_not_trivial():
    dataset = data.load("synthetic")
    train = dataset.train_images.reshape(10_000, -1) / 255 - dataset.mean
    test = dataset.test_images.reshape(2_000, -1) / 255 - dataset.mean
    means = np.stack([train[dataset.train_labels == label].mean(0) for label in range(10)])
    scores = test @ means.T - (means**2).sum(1) / 2
    accuracy = np.mean(scores.argmax(1) == dataset.test_labels)
    assert 0.8 < accuracy < 0.97
    # Test and training images are different draws.
    assert not np.array_equal(dataset.test_images[:100], dataset.train_images[:100])
