"""Compiled code is shared by all tests of a session: most of their time is compilation, much of it twice.

The folder is the session's own, so nothing in it comes from a run before or from another machine.
"""

import os
import shutil
import tempfile

# Before anything imports JAX, which reads it once. All processes of the session inherit it from the first.
_made = None
if "CAFCOR_TESTS_COMPILED" not in os.environ:
    _made = tempfile.mkdtemp(prefix="cafcor_jax_tests_")
    os.environ["CAFCOR_TESTS_COMPILED"] = os.environ["JAX_COMPILATION_CACHE_DIR"] = _made
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

# Their tests take longest: one begun at the end would keep one of several workers waiting for the other.
FIRST = (
    "test_processes.py",
    "test_sharding.py",
    "test_notebooks.py",
    "test_train_script.py",
    "test_profile_script.py",
)


def pytest_collection_modifyitems(items):
    """The files of `FIRST` first, all else in its order."""
    items.sort(key=lambda item: item.path.name not in FIRST)


def pytest_unconfigure():
    """Removes the folder, in the process that made it."""
    if _made is not None:
        shutil.rmtree(_made, ignore_errors=True)
