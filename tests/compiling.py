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
def quickly():
    """Compiles as `fast_jit` does, what the library compiles by itself and what is outside of `jit` too."""
    usual = compiler.get_compile_options

    def options(*args, env_options_overrides=None, **kwargs):
        return usual(*args, env_options_overrides=OPTIONS | (env_options_overrides or {}), **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", options)
        yield


@pytest.fixture(scope="module")
def compiled_quickly():
    """`quickly` for all of a file, and none of its programs is left to the next one."""
    with quickly():
        yield
    jax.clear_caches()
