"""The examples in the docstrings hold."""

import doctest
import importlib
import pkgutil

import pytest

import cafcor_jax
from tests.compiling import compiled_quickly  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("compiled_quickly")

MODULES = [
    info.name for info in pkgutil.walk_packages(cafcor_jax.__path__, "cafcor_jax.") if "tfds" not in info.name
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    tests = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(tests) >= 8
