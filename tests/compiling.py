"""Most of the tests' time is compilation, and most of what they compile runs once: it need not be fast."""

import contextlib
import functools

import jax
import pytest
from jax._src import compiler

OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
AS_USERS = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_cpu_use_fusion_emitters": True,
}
#: Like `jax.jit`, at a third of the time to compile. Where rounding is what a test looks at, use `jax.jit`.
fast_jit = functools.partial(jax.jit, compiler_options=OPTIONS)
#: Like `jax.jit` where `quickly` is not in force: wherever a test needs the program that users get.
usual_jit = functools.partial(jax.jit, compiler_options=AS_USERS)


@contextlib.contextmanager
def compiled_with(of_session):
    """For what the library compiles by itself and what is outside of `jit` too; options of a `jit` win."""
    usual = compiler.get_compile_options

    def options(*args, env_options_overrides=None, **kwargs):
        return usual(*args, env_options_overrides=of_session | (env_options_overrides or {}), **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", options)
        yield
    jax.clear_caches()  # none of these programs is left to the next test


#: Compiles all as `fast_jit` does.
quickly = functools.partial(compiled_with, OPTIONS)


@pytest.fixture(scope="module")
def compiled_quickly():
    """`quickly` for all of a file."""
    with quickly():
        yield


@pytest.fixture
def compiled_as_users():
    """Not `quickly`, for one test of such a file: where bits are the same in the programs of users alone."""
    jax.clear_caches()
    with compiled_with(AS_USERS):
        yield
