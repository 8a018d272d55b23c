import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cafcor_jax import models


@pytest.fixture(scope="module")
def params():
    return models.cnn().init(jax.random.key(0))


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (6, 28, 28, 1), dtype=np.uint8), rng.integers(0, 10, 6).astype(np.int32)


def test_parameter_count_is_the_papers(params):
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 431_080


def test_both_convolutions_have_the_same_values_and_gradients(params, batch):
    plain, fast = models.cnn(convolution="lax"), models.cnn(convolution="patches")
    np.testing.assert_allclose(plain.log_probs(params, batch[0]), fast.log_probs(params, batch[0]), atol=1e-5)
    expected = jax.grad(plain.loss)(params, *batch)
    actual = jax.grad(fast.loss)(params, *batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), expected, actual)


def test_gradient_of_the_patch_convolution_to_its_input():
    x = jax.random.normal(jax.random.key(1), (2, 12, 12, 3))
    kernel = jax.random.normal(jax.random.key(2), (5, 5, 3, 4))

    def total(convolve):
        return jax.grad(lambda x: jnp.sum(jnp.sin(convolve(x, kernel))))(x)

    np.testing.assert_allclose(total(models._convolve_patches), total(models._convolve), atol=2e-4)


def test_log_probs_match_a_plain_numpy_network(params, batch):
    images = batch[0]
    mean, std = 0.1307, 0.3081
    x = (images / 255.0 - mean) / std
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def conv(x, layer):
        out = np.zeros((x.shape[0], x.shape[1] - 4, x.shape[2] - 4, layer["bias"].size))
        for i in range(out.shape[1]):
            for j in range(out.shape[2]):
                window = x[:, i : i + 5, j : j + 5]
                out[:, i, j] = np.tensordot(window, layer["kernel"], 3) + layer["bias"]
        return out

    def pool(x):
        b, h, w, c = x.shape
        return x.reshape(b, h // 2, 2, w // 2, 2, c).max((2, 4))

    x = pool(np.maximum(conv(x, p["_Conv_0"]), 0))
    x = pool(np.maximum(conv(x, p["_Conv_1"]), 0)).reshape(len(images), -1)
    x = np.maximum(x @ p["Dense_0"]["kernel"] + p["Dense_0"]["bias"], 0)
    x = x @ p["Dense_1"]["kernel"] + p["Dense_1"]["bias"]
    expected = x - np.log(np.exp(x).sum(1, keepdims=True))
    actual = models.cnn(mean=mean, std=std).log_probs(params, images)
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_parameters_start_within_one_over_root_fan_in(params):
    for name, fan_in in [("_Conv_0", 25), ("_Conv_1", 500), ("Dense_0", 800), ("Dense_1", 500)]:
        kernel = np.asarray(params[name]["kernel"])
        assert np.abs(kernel).max() <= fan_in**-0.5
        assert kernel.std() == pytest.approx((3 * fan_in) ** -0.5, rel=0.1)


@pytest.mark.parametrize("count", [1, 100, 230])
def test_evaluation_does_not_depend_on_the_batches(params, count):
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (count, 28, 28, 1), dtype=np.uint8)
    labels = rng.integers(0, 10, count).astype(np.int32)
    model = models.cnn()
    loss, accuracy = model.evaluate(params, images, labels)
    log_probs = np.asarray(model.log_probs(params, images))
    assert loss == pytest.approx(-log_probs[np.arange(count), labels].mean(), rel=1e-5)
    assert accuracy == pytest.approx((log_probs.argmax(1) == labels).mean())


def test_unknown_convolution_is_named():
    with pytest.raises(ValueError, match="'fft'.*patches, lax"):
        models.cnn(convolution="fft")
