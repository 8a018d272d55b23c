"""Most of the tests' time is compilation, and most of what they compile runs once: it need not be fast."""

import functools

import jax

OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

#: Like `jax.jit`, at half the time to compile. Where rounding is what a test looks at, use `jax.jit`.
fast_jit = functools.partial(jax.jit, compiler_options=OPTIONS)
