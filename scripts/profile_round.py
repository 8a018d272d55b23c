"""Times one round by part: gradients, noise, momentum, attack, aggregation, evaluation.

Each part is compiled on its own, warmed up, and timed as the best of --repeats calls. Where PyTorch is
installed, the gradients are also timed as a plain PyTorch loop over the workers, on the same images.

Examples:
  python scripts/profile_round.py --flagfile=configs/mnist_byzldp.cfg
  python scripts/profile_round.py --flagfile=configs/mnist_byzldp.cfg --noise_mode=projected
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from cafcor_jax import attacks, cli, clipping, config, experiment, grid, noise, progress, secrets
from cafcor_jax.errors import UserError
from cafcor_jax.federation import honest_gradients, judge

REPEATS = flags.DEFINE_integer("repeats", 3, "Calls of each part; the fastest counts.", lower_bound=1)


def best_of(call: Callable[..., Any], *args: Any) -> float:
    """Seconds of the fastest warm call."""
    compiled = jax.jit(call).lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(REPEATS.value):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - start)
    return min(times)


def main(cfg: config.Config) -> None:
    experiment.cache_compilations(cfg)
    if cfg.mesh_workers * cfg.mesh_parameters > 1:
        raise UserError(
            "mesh_workers and mesh_parameters must be 1: the parts of a round are timed on one device."
        )
    run = experiment.build(cfg, progress=progress.automatic())
    plan, key = run.plan, run.key
    n, f = cfg.num_workers, cfg.num_byzantine
    state = run.init()
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))

    clipped_gradient = clipping.BY_LEVEL[plan.level](run.model.loss, plan.clip_norm, run.model.examples)

    def gradients(params, workers):
        return honest_gradients(
            jax.random.split(key, cfg.num_honest),
            params,
            workers,
            clipped_gradient=clipped_gradient,
            batch_size=cfg.batch_size,
            largest_batch=plan.largest_batch if plan.sampling == "poisson" else None,
            augment=run.augment,
        )

    pair_keys = secrets.key_matrix(key, n)
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(n, size)), jnp.float32)
    messages = noise.like(state.params, rows)
    honest = jax.tree.map(lambda leaf: leaf[: n - f], messages)

    parts = {"gradients": best_of(gradients, state.params, run.data)}
    draws: Any = noise
    more = {}
    if cfg.precision == "grid":
        draws, more = grid, {"bits": experiment.grid_bits(cfg, plan)}
    if plan.sigma_ind > 0:
        parts["noise, independent"] = best_of(
            lambda k: draws.independent(k, 1, size, plan.sigma_ind, **more), pair_keys[0, f:]
        )
    if plan.sigma_cor > 0 and cfg.noise_mode == "pairwise":
        parts["noise, pairwise"] = best_of(
            lambda k: draws.pairwise(k, 1, size, plan.sigma_cor, **more, graph=plan.graph), pair_keys
        )
    if plan.sigma_cor > 0 and cfg.noise_mode == "projected":
        parts["noise, projected"] = best_of(
            lambda k: noise.projected(k, n, 1, size, plan.sigma_cor, plan.graph), key
        )
    parts["momentum"] = best_of(
        lambda m, g, r: jax.tree.map(
            lambda a, b, c: 0.9 * a + 0.1 * (b + c), m, g, noise.like(state.params, r)
        ),
        honest,
        honest,
        rows[: n - f],
    )
    later = state._replace(round=jnp.int32(1))
    # Those that know the server's memory, or hide under noise, are timed with the round only.
    if f and not isinstance(run.attack, attacks.adaptive.AgainstRound | attacks.ProtocolAttack):
        parts["attack"] = best_of(functools.partial(run.attack, key, num_byzantine=f), honest)
    parts["aggregation"] = best_of(lambda s, m: judge(run.aggregator, s, m), later.server, messages)

    whole = best_of(run.federation.step, key, later, run.data)
    tests = jnp.asarray(run.dataset.test_images), jnp.asarray(run.dataset.test_labels)
    print(f"\n{experiment.title(cfg)}; {size:,} parameters, {jax.devices()[0].device_kind}")
    for name, seconds in parts.items():
        print(f"  {name:<20} {seconds:8.4f} s  {seconds / whole:6.1%}")
    print(f"  {'a whole round':<20} {whole:8.4f} s")
    print(f"  {'evaluation':<20} {best_of(run.model.evaluate, state.params, *tests):8.4f} s")
    compare_with_torch(run, parts["gradients"])


def compare_with_torch(run: experiment.Experiment, ours: float) -> None:
    """The same gradients as a PyTorch loop over workers, if it is installed."""
    try:
        import torch
        from torch import nn
    except ImportError:
        print("  PyTorch is not installed: no comparison (pip install -e .[bench])")
        return
    cfg = run.config
    network = nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10), nn.LogSoftmax(1),
    )  # fmt: skip
    loss_fn = nn.NLLLoss()
    images = np.asarray(run.data.images[:, : cfg.batch_size, ..., 0], np.float32)[:, :, None] / 255
    labels = np.asarray(run.data.labels[:, : cfg.batch_size], np.int64)
    batches = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in zip(images, labels, strict=True)]

    def loop() -> list[Any]:
        return [torch.autograd.grad(loss_fn(network(x), y), tuple(network.parameters())) for x, y in batches]

    loop()
    times = []
    for _ in range(REPEATS.value):
        start = time.perf_counter()
        loop()
        times.append(time.perf_counter() - start)
    theirs = min(times)
    print(
        f"  gradients as a PyTorch loop ({torch.get_num_threads()} threads): {theirs:.3f} s; "
        f"ours take {ours / theirs:.2f} times as long"
    )


if __name__ == "__main__":
    cli.run(main, doc=__doc__)
