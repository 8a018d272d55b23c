"""A model and data so small that a run takes a second."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from cafcor_jax import experiment, models
from cafcor_jax.data import synthetic
from tests.compiling import quickly

DATASET = synthetic.generate(num_train=400, num_test=100)


def model(*, mean=0.0, std=1.0, num_classes=10):
    """A linear classifier of images averaged to 7 x 7."""

    def init(key):
        return {"kernel": 0.1 * jax.random.normal(key, (49, num_classes)), "bias": jnp.zeros(num_classes)}

    def log_probs(params, images):
        x = (images.reshape(-1, 7, 4, 7, 4).mean((2, 4)).reshape(-1, 49) / 255 - mean) / std
        return jax.nn.log_softmax(x @ params["kernel"] + params["bias"])

    return models.Model(init, log_probs)


def use(monkeypatch):
    """Puts them in the place of the CNN and of every dataset."""
    monkeypatch.setattr(experiment.models, "cnn", model)
    monkeypatch.setattr(experiment.data, "load", lambda *args, **kwargs: DATASET)


def configure(settings):
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # or it keeps to what it found at its first use


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """Nearly all runs of a file are the same program: later ones take it from the cache, as a user's do.

    It is compiled quickly: these tests are of what is around the program.
    """
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("xla")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: jax.config.values[name] for name in settings}
    configure(settings)
    with quickly():
        yield
    configure(before)
