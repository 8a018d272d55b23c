"""The CNN against its definition, in both forms of convolution."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cafcor_jax import clipping, models
from tests.compiling import fast_jit


@pytest.fixture(scope="module")
def params():
    return fast_jit(models.cnn().init)(jax.random.key(0))


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (6, 28, 28, 1), dtype=np.uint8), rng.integers(0, 10, 6).astype(np.int32)


@functools.cache
def norms(convolution="patches"):
    """(mean, std, params, images, labels) -> the norms of the examples' gradients."""

    def of_examples(mean, std, *args):
        return models.cnn(convolution=convolution, mean=mean, std=std).examples(*args).norms

    return fast_jit(of_examples)


@functools.cache
def log_probs():
    return fast_jit(lambda mean, std, *args: models.cnn(mean=mean, std=std).log_probs(*args))


@functools.cache
def clipped(convolution, clip_norm):
    model = models.cnn(convolution=convolution)
    return fast_jit(clipping.example_level(model.loss, clip_norm, model.examples), static_argnums=4)


def median_norm(params, batch, convolution="patches"):
    """So that half of the examples are clipped."""
    return float(np.median(norms(convolution)(0.0, 1.0, params, *batch)))


def test_parameter_count_is_the_papers(params):
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 431_080


def test_both_convolutions_have_the_same_values_and_gradients(params, batch):
    def log_probs_and_gradient(convolution):
        model = models.cnn(convolution=convolution)

        def loss(params, images, labels):
            log_probs = model.log_probs(params, images)
            return model._replace(log_probs=lambda *_: log_probs).loss(params, images, labels), log_probs

        gradient, log_probs = fast_jit(jax.grad(loss, has_aux=True))(params, *batch)
        return log_probs, gradient

    plain, fast = log_probs_and_gradient("lax"), log_probs_and_gradient("patches")
    np.testing.assert_allclose(plain[0], fast[0], atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), plain[1], fast[1])


def test_gradient_of_the_patch_convolution_to_its_input():
    x = jax.random.normal(jax.random.key(1), (2, 12, 12, 3))
    kernel = jax.random.normal(jax.random.key(2), (5, 5, 3, 4))

    def total(convolve):
        return fast_jit(jax.grad(lambda x, kernel: jnp.sum(jnp.sin(convolve(x, kernel)))))(x, kernel)

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
    actual = log_probs()(mean, std, params, images)
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_parameters_start_within_one_over_root_fan_in(params):
    for name, fan_in in [("_Conv_0", 25), ("_Conv_1", 500), ("Dense_0", 800), ("Dense_1", 500)]:
        kernel = np.asarray(params[name]["kernel"])
        assert np.abs(kernel).max() <= fan_in**-0.5
        assert kernel.std() == pytest.approx((3 * fan_in) ** -0.5, rel=0.1)


@pytest.mark.parametrize("count", [1, 100, 230])
def test_evaluation_does_not_depend_on_the_batches(params, count):
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (230, 28, 28, 1), dtype=np.uint8)
    labels = rng.integers(0, 10, 230).astype(np.int32)
    expected = np.asarray(log_probs()(0.0, 1.0, params, images))[:count]
    images, labels = images[:count], labels[:count]
    loss, accuracy = fast_jit(models.cnn().evaluate)(params, images, labels)
    assert loss == pytest.approx(-expected[np.arange(count), labels].mean(), rel=1e-5)
    assert accuracy == pytest.approx((expected.argmax(1) == labels).mean())


def test_unknown_convolution_is_named():
    with pytest.raises(ValueError, match="'fft'.*patches, lax"):
        models.cnn(convolution="fft")


@pytest.mark.parametrize("convolution", models.CONVOLUTIONS)
def test_norms_are_those_of_the_examples_gradients(params, batch, convolution):
    model = models.cnn(convolution=convolution, mean=0.3, std=0.5)
    one = jax.grad(lambda p, x, y: model.loss(p, x[None], y[None]))
    each = fast_jit(jax.vmap(one, (None, 0, 0)))(params, *batch)
    squares = sum(
        np.sum(np.square(leaf, dtype=np.float64).reshape(6, -1), 1) for leaf in jax.tree.leaves(each)
    )
    found = norms(convolution)(0.3, 0.5, params, *batch)
    np.testing.assert_allclose(found, np.sqrt(squares), rtol=2e-5)
    # Each layer counts: without the smallest part the sums would be off by more than that.
    parts = [np.sum(np.square(leaf).reshape(6, -1), 1) / squares for leaf in jax.tree.leaves(each)]
    assert min(part.max() for part in parts) > 1e-4


@pytest.mark.parametrize("convolution", models.CONVOLUTIONS)
def test_examples_are_clipped_as_one_by_one(params, batch, convolution):
    model = models.cnn(convolution=convolution)
    clip_norm = median_norm(params, batch, convolution)
    slow = fast_jit(clipping.example_level(model.loss, clip_norm), static_argnums=4)
    fast = clipped(convolution, clip_norm)
    present = jnp.array([True, False, True, True, False, True])
    for options in ((), (present, 5)):
        expected, found = slow(params, *batch, *options), fast(params, *batch, *options)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), expected, found)
        assert 0 < found.clipped < 1


def test_places_without_an_example_give_nothing(params, batch):
    gradient = clipped("patches", median_norm(params, batch))
    images, labels = (jnp.concatenate([jnp.asarray(leaf)] * 5) for leaf in batch)
    some = gradient(params, images, labels, jnp.arange(30) < 6, 6).gradient
    expected = gradient(params, *batch).gradient
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), some, expected)
    empty = gradient(params, images, labels, jnp.zeros(30, bool), 6)
    assert optax.global_norm(empty.gradient) == 0 and empty.loss == 0


def test_an_example_that_overflows_gives_nothing(params, batch):
    """A white image overflows, a black one does not: the others' sum must stay as it is, to the digit."""
    gradient = clipped("patches", median_norm(params, batch))
    huge = jax.tree.map(lambda leaf: 1e15 * leaf if leaf.ndim > 1 else 0 * leaf, params)
    images, labels = np.zeros((6, 28, 28, 1), np.uint8), np.array([1, 2, 3, 4, 5, 6], np.int32)
    finite = np.array([True, False, True] * 2)
    images[~finite] = 255
    np.testing.assert_array_equal(np.isfinite(norms()(0.0, 1.0, huge, images, labels)), finite)
    found = gradient(huge, images, labels).gradient
    others = gradient(huge, images[finite], labels[finite]).gradient
    jax.tree.map(lambda a, b: np.testing.assert_allclose(6 * a, 4 * b, rtol=1e-6), found, others)
    assert optax.global_norm(found) > 0
    spoilt = jax.tree.map(lambda leaf: leaf * jnp.nan, params)
    assert optax.global_norm(gradient(spoilt, images, labels).gradient) == 0


def spoil(params, how):
    """Parameters with which the backward pass cancels, so that its rounding is all there is."""
    kernel = params["Dense_1"]["kernel"]
    if how == "equal rows":  # then W (p - e_y) is 0 but for rounding
        changed = {"kernel": jnp.broadcast_to(kernel[:, :1], kernel.shape), "bias": params["Dense_1"]["bias"]}
        return params | {"Dense_1": changed}
    if how == "saturated":  # p_y is 1 but for rounding
        return params | {"Dense_0": jax.tree.map(lambda leaf: 1e4 * leaf, params["Dense_0"])}
    if how == "tiny and huge":  # squares of g vanish while x g does not
        first = jax.tree.map(lambda leaf: 1e15 * leaf, params["Dense_0"])
        return params | {
            "Dense_0": first,
            "Dense_1": jax.tree.map(lambda leaf: 1e-22 * leaf, params["Dense_1"]),
        }
    return params


@pytest.mark.parametrize("how", ["", "equal rows", "saturated", "tiny and huge"])
def test_clipped_examples_stay_in_the_ball(params, how):
    """In float64, from the gradient of one example alone, over many examples and hostile parameters."""
    model, params = models.cnn(), spoil(params, how)
    rng = np.random.default_rng(3)
    images = rng.integers(0, 256, (40, 28, 28, 1), dtype=np.uint8)
    labels = rng.integers(0, 10, 40).astype(np.int32)
    clip_norm = {"": 0.7, "equal rows": 1e-7, "saturated": 1e-3, "tiny and huge": 1e-8}[how]
    gradient = jax.jit(clipping.example_level(model.loss, clip_norm, model.examples))
    clipped = 0
    for image, label in zip(images, labels, strict=True):
        found = gradient(params, image[None], label[None])
        leaves = jax.tree.leaves(found.gradient)
        norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in leaves))
        assert norm <= clip_norm
        clipped += int(found.clipped)
        if found.clipped:
            assert norm >= clip_norm * (1 - 3e-5)
    assert clipped >= 20
