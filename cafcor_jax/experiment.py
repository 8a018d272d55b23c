"""A run from its settings: everything built, trained in compiled chunks of rounds, evaluated and stored.

This is the only place where the names of attacks, rules and datasets become functions.

Example:
    >>> from cafcor_jax import config, experiment
    >>> cfg = config.Config(dataset="synthetic", num_workers=6, num_byzantine=1, rounds=3)
    >>> summary = experiment.run(cfg)  # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cafcor_jax import (
    aggregators,
    attacks,
    chacha,
    data,
    grid,
    hosts,
    models,
    planner,
    privacy,
    sharding,
    tensorboard,
)
from cafcor_jax.aggregators import StatefulRule
from cafcor_jax.config import Config, decisive
from cafcor_jax.data import cache
from cafcor_jax.errors import UserError
from cafcor_jax.federation import Data, Federation, Info, State, WorkerKeys, federation, random_flip
from cafcor_jax.mesh_federation import Flattening, MeshFederation, mesh_federation
from cafcor_jax.progress import Progress, Silent
from cafcor_jax.types import Aggregator, Array, Attack, PyTree
from cafcor_jax.workdir import Workdir, digest, read_metrics, versions

#: Implementations of typed keys, by the names of the setting.
GENERATORS = {"threefry2x32": "threefry2x32", "chacha20": chacha.IMPL}

# Folded into the run's key for the initial parameters.
_INIT = 0xFFFFFFFF

# At most this many rounds are one call of compiled code. On a CPU a round takes so long that calls cost
# nothing, and Ctrl-C has to wait for the call to end.
_MAX_CHUNK = {"cpu": 1}
_MAX_CHUNK_ELSEWHERE = 10

# The accountant's own rounding; a plan is calibrated closer to its budget than this.
_TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A run, built and ready; nothing in it changes.

    Attributes:
      config: the settings.
      dataset: what it trains on and is tested with.
      plan: whom it protects, and with which noise.
      key: decides all randomness of training.
      model: what is trained.
      aggregator: the server's rule.
      attack: what the malicious workers send.
      optimizer: the server's step.
      augment: of training batches, if any.
      federation: the rounds.
      data: the honest workers' data, on the device or spread over the mesh.
      sizes: how much each of them has.
      on_mesh: the federation's mesh and what gets things onto it; None on one device.
    """

    config: Config
    dataset: data.Dataset
    plan: privacy.PrivacyPlan
    key: Array
    model: models.Model
    aggregator: Aggregator | StatefulRule
    attack: Attack | attacks.adaptive.AgainstRound
    optimizer: optax.GradientTransformation
    augment: Callable[[Array, Array], Array] | None
    federation: Federation
    data: Data
    sizes: np.ndarray
    on_mesh: MeshFederation | None = None

    def init(self) -> State:
        """The state before the first round."""
        params = self.init_params()
        return jax.jit(self.federation.init)(params) if self.on_mesh is None else self.on_mesh.init(params)

    def init_params(self) -> PyTree:
        """The parameters before the first round."""
        return jax.jit(self.model.init)(jax.random.fold_in(self.key, _INIT))

    def params(self, state: State) -> PyTree:
        """The parameters of a state, on one device; on a mesh all processes have to ask for them."""
        if self.on_mesh is None:
            return state.params
        return jax.tree.map(lambda leaf: leaf.addressable_data(0), self.on_mesh.params(state))

    def chunk(self, length: int) -> Callable[[Array, State, Data], tuple[State, Info]]:
        """Several rounds as one pure function of (key, state, data), the infos stacked; not jitted yet."""

        def rounds(key: Array, state: State, data: Data) -> tuple[State, Info]:
            return jax.lax.scan(lambda carry, _: self.federation.step(key, carry, data), state, length=length)

        return rounds

    def epsilons(self) -> dict[str, float]:
        """What the whole run spends, by each accountant that covers its privacy level."""
        if self.plan.threat_model == "none":
            return {}
        names: tuple[str, ...] = privacy.ACCOUNTANTS if self.plan.level == "user" else ("rdp",)
        if self.config.precision == "grid":
            names = ("rdp", "paper")  # The exact formula is that of continuous noise.
        return {name: privacy.epsilon(self.plan, accountant=name) for name in names}

    def record(self) -> dict[str, Any]:
        """All that config.json keeps: what is run, on what, with which software."""
        return {
            "config": self.config.to_dict(),
            "plan": self.plan.to_dict(),
            "grid_bits": grid_bits(self.config, self.plan),
            "epsilon_by_accountant": self.epsilons(),
            "dataset": {
                "name": self.dataset.name,
                "source": self.dataset.source,
                "checksums": self.dataset.checksums,
            },
            "versions": versions(),
        }

    def describe(self) -> str:
        """What is run, in a few lines for a person."""
        config, sizes = self.config, self.sizes
        each = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
        lines = [
            title(config),
            f"data: {len(self.dataset.train_labels):,} training images, {config.partition}, {each} for each "
            f"of {config.num_honest} honest workers; {len(self.dataset.test_labels):,} test images",
            f"training: {config.rounds} rounds, batch {config.batch_size}, learning rate "
            f"{config.learning_rate:g} ({config.learning_rate_schedule}), momentum {config.momentum:g}, "
            f"l2 {config.weight_decay:g}, seed {config.seed}",
            self.plan.describe(),
        ]
        bits = grid_bits(config, self.plan)
        if bits is not None:
            lines.append(f"  messages are whole multiples of 2^-{bits}; noise is discrete Gaussian")
        if config.generator != "threefry2x32":
            lines.append(f"  random numbers: {config.generator}")
        epsilons = self.epsilons()
        if epsilons:
            spent = ", ".join(f"{value:.2f} ({name})" for name, value in epsilons.items())
            lines.append(f"  epsilon of the whole run, by accountant: {spent}")
        if isinstance(self.attack, attacks.ProtocolAttack) and self.plan.threat_model == "secldp":
            lines.append(
                "  these malicious workers add the noise of their pairs, so that all of it cancels in the "
                "sum: against them the budget does not hold (docs/privacy.md)"
            )
        if self.on_mesh is not None:
            lines.append(
                f"devices: {self.on_mesh.mesh.size} of {jax.process_count()} processes, "
                f"{config.mesh_workers} along workers, {config.mesh_parameters} along parameters"
            )
        lines.append(f"results: {config.workdir}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a run.

    Attributes:
      rounds: of training.
      final_accuracy: on the test data, after the last round.
      final_loss: the same.
      best_accuracy: of all evaluations.
      best_round: after which it was measured first.
      epsilon: spent, by the run's accountant; infinite without privacy.
      delta: of the privacy guarantee.
      accountant: that counted epsilon.
      seconds: of training and evaluation, over all sittings; set-up and compilation are not in it.
      honest_weight: share of the aggregate's weight on honest workers, mean over rounds; NaN for a rule
        without weights.
      honest_share: of all workers.
      rounds_beyond_f: rounds in which more messages than f were not finite, so that nothing was left to
        filter with.
      rounds_without_law: rounds in which more than f workers broke the law of honest noise, so that a rule
        that knows it did without.
      params_sha256: of the final parameters: equal for runs that are equal to the last bit.
      workdir: where everything is.
    """

    rounds: int
    final_accuracy: float
    final_loss: float
    best_accuracy: float
    best_round: int
    epsilon: float
    delta: float
    accountant: str
    seconds: float
    honest_weight: float
    honest_share: float
    rounds_beyond_f: int
    rounds_without_law: int = 0
    params_sha256: str
    workdir: str

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Summary:
        """The summary that summary.json holds."""
        try:
            kinds = {"int": int, "float": float, "str": str}  # JSON has no infinity: it is stored as text
            given = [
                f for f in dataclasses.fields(cls) if f.name in values or f.default is dataclasses.MISSING
            ]
            return cls(**{f.name: kinds[str(f.type)](values[f.name]) for f in given})
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"summary.json holds no summary of a run ({type(error).__name__}: {error}): delete it, and "
                "the same command makes it anew."
            ) from None

    def describe(self) -> str:
        """The result in a few lines for a person."""
        spent = "none (no noise was added)"
        if math.isfinite(self.epsilon):
            spent = f"epsilon {self.epsilon:.2f} at delta {self.delta:g} (accountant {self.accountant})"
        filtering = "no worker is malicious" if self.honest_share == 1 else "this rule gives no weights"
        if math.isfinite(self.honest_weight) and self.honest_share < 1:
            filtering = (
                f"malicious workers got {1 - self.honest_weight:.1%} of the weight on average "
                f"({1 - self.honest_share:.1%} of the workers are malicious)"
            )
        if self.rounds_beyond_f:
            filtering += (
                f"; in {self.rounds_beyond_f} rounds more than f messages were not finite, "
                "and the others were aggregated with no defence left"
            )
        if self.rounds_without_law:
            filtering += (
                f"; in {self.rounds_without_law} rounds more than f workers broke the law of honest noise, "
                "so its parameters were not those of the messages, and plain CAF was used"
            )
        speed = self.rounds / max(self.seconds, 1e-9)
        return "\n".join(
            [
                f"test accuracy  {self.final_accuracy:.2%} at the end, best {self.best_accuracy:.2%} after "
                f"round {self.best_round}",
                f"privacy spent  {spent}",
                f"filtering      {filtering}",
                f"time           {self.seconds:.1f} s for {self.rounds} rounds, {speed:.2f} rounds/s",
                f"files          {self.workdir}: curves.png, filtering.png (who was filtered when), "
                "metrics.csv, summary.json, config.json, weights.npy, checkpoints",
            ]
        )


def title(config: Config) -> str:
    """What a run is, in one line."""
    workers = f"{config.num_workers} workers"
    if config.num_byzantine:
        workers += f", {config.num_byzantine} malicious (attack {config.attack})"
    private = config.threat_model if config.private else "no privacy"
    rule = (
        config.aggregator
        if config.pre_aggregator == "none"
        else f"{config.pre_aggregator} + {config.aggregator}"
    )
    return f"{config.dataset}: {workers}, aggregator {rule}, {private}"


def build(config: Config, *, progress: Progress | None = None, keys: WorkerKeys | None = None) -> Experiment:
    """Builds a run: loads the data, calibrates the noise, finds the functions behind the names.

    Args:
      config: the settings.
      progress: is told what goes on; nobody unless given.
      keys: what the workers of a real federation drew and agreed on, to simulate that very one.

    Returns:
      The run.

    Raises:
      UserError: if the settings do not fit the data, or a part refuses them.
    """
    progress = progress or Silent()
    mesh = None
    if config.mesh_workers * config.mesh_parameters > 1 or jax.process_count() > 1:
        mesh = sharding.make_mesh(config.mesh_workers, config.mesh_parameters)
    with progress.phase(f"loading {config.dataset}"):
        dataset = data.load(
            config.dataset,
            data_dir=config.data_dir or None,
            idx_dir=config.idx_dir or None,
            log=progress.log,
        )
        parts = data.partition(
            dataset.train_labels,
            config.num_honest,
            kind=config.partition,
            alpha=config.alpha,
            seed=config.seed,
        )
        federated = data.federate(dataset, parts)
    _check_batch(config, federated.sizes)
    with progress.phase("calibrating the noise"), _user_errors():
        plan = _plan(config, int(federated.sizes.min()))
        model = models.cnn(mean=dataset.mean, std=dataset.std, num_classes=dataset.num_classes)
        aggregator = _aggregator(config, plan)
        attack = _attack(config, aggregator, dataset.num_classes)
        optimizer = _optimizer(config)
        augment = random_flip if dataset.flip else None
        settings: dict[str, Any] = dict(
            loss_fn=model.loss,
            plan=plan,
            aggregator=aggregator,
            attack=attack,
            optimizer=optimizer,
            momentum=config.momentum,
            batch_size=config.batch_size,
            examples=model.examples,
            noise_mode=config.noise_mode,
            grid_bits=grid_bits(config, plan),
            augment=augment,
            keys=keys,
        )
        on_mesh = None
        if mesh is not None:
            template = jax.eval_shape(model.init, jax.random.key(0))
            on_mesh = mesh_federation(mesh, template, **settings)
        rounds = federation(**settings) if on_mesh is None else on_mesh.federation
    arrays: tuple[Any, ...] = (federated.images, federated.labels, federated.sizes)
    workers = Data(*arrays)
    key = jax.random.key(config.seed, impl=GENERATORS[config.generator])
    return Experiment(
        config=config,
        dataset=dataset,
        plan=plan,
        key=key,
        model=model,
        aggregator=aggregator,
        attack=attack,
        optimizer=optimizer,
        augment=augment,
        federation=rounds,
        data=Data(*map(jnp.asarray, workers)) if on_mesh is None else on_mesh.place(workers),
        sizes=federated.sizes,
        on_mesh=on_mesh,
    )


class Programs:
    """Compiled code, kept for later runs in the same process that differ in their seed alone."""

    # The first one goes when there are more.
    _MOST = 256

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Any, Any]] = {}

    def of(self, experiment: Experiment, length: int, *args: Any) -> tuple[Any, Any]:
        """The rounds and the evaluation of an experiment, compiled.

        Args:
          experiment: the run.
          length: rounds in one call.
          *args: key, state, data, parameters, test images and test labels, of the shapes that will be used.

        Returns:
          (key, state, data) -> (state, infos), which donates the state; (params, images, labels) -> (loss,
          accuracy).
        """
        mesh = None if experiment.on_mesh is None else str(experiment.on_mesh.mesh.shape)
        settings = decisive(experiment.config) | {"seed": None, "mesh": mesh}
        # The plan too: it can hang on the seed through the sizes of the workers' data and the secret graph.
        name = json.dumps([settings, experiment.plan.to_dict(), length, str(jax.tree.map(jax.typeof, args))])
        if name not in self._kept:
            key, state, workers, params, *tests = args
            rounds = jax.jit(experiment.chunk(length), donate_argnums=1)
            if experiment.on_mesh is not None:
                rounds = experiment.on_mesh.jit(experiment.chunk(length))
            self._kept[name] = (
                rounds.lower(key, state, workers).compile(),
                jax.jit(experiment.model.evaluate).lower(params, *tests).compile(),
            )
            if len(self._kept) > self._MOST:
                del self._kept[next(iter(self._kept))]
        return self._kept[name]


def run(config: Config, *, progress: Progress | None = None, programs: Programs | None = None) -> Summary:
    """Trains, or goes on with training, and leaves everything in `config.workdir`.

    Killed at any moment and called again, it ends with the same parameters and metrics, to the bit, as if it
    had not been killed (only `seconds` in the metrics differ). A finished run is not computed again.

    Args:
      config: the settings.
      progress: is told what goes on; nobody unless given.
      programs: keeps compiled code for the next run.

    Returns:
      The result.

    Raises:
      UserError: if the settings, the data or the folder cannot be used.
      KeyboardInterrupt: after Ctrl-C, when the last round has been saved.
    """
    progress = progress or Silent()
    if config.tensorboard == "on":
        tensorboard.check_installed()  # Nobody should learn it after the data is loaded.
    with _folder(config) as folder:
        finished = folder.summary()
        if finished is not None:
            progress.log(f"The run in {config.workdir} is finished; delete the folder to run it again.")
            summary = Summary.from_dict(finished)
            if hosts.leads():
                _export_events(config)
        else:
            experiment = build(config, progress=progress)
            folder.start(experiment.record(), progress.log)
            progress.log(experiment.describe())
            summary = _finish(
                experiment, folder, _train(experiment, folder, progress, programs or Programs())
            )
    progress.log(summary.describe())
    return summary


@contextlib.contextmanager
def _folder(config: Config) -> Iterator[Workdir]:
    """The run's folder; of several processes the leader opens it first, and the others end if it cannot."""
    if hosts.leads():
        try:
            folder = Workdir(config.workdir, config)
        except UserError:
            hosts.agreed(0)
            raise
        hosts.agreed(1)
    else:
        if not hosts.agreed(1):
            raise UserError(f"The workdir {config.workdir} cannot be used: process 0 says why.")
        folder = Workdir(config.workdir, config, leads=False)
    with folder:
        yield folder


def cache_compilations(config: Config) -> None:
    """Keeps compiled code on disk, beside the datasets, so that the next start is faster.

    It changes JAX's global settings, so it is for scripts. `JAX_COMPILATION_CACHE_DIR` names another folder.

    Args:
      config: says where datasets are kept.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return  # JAX reads it itself.
    folder = cache.directory(config.data_dir) / "xla"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            jax.config.update("jax_compilation_cache_dir", str(folder))


def _check_batch(config: Config, sizes: np.ndarray) -> None:
    worker = int(sizes.argmin())
    if config.batch_size > sizes[worker]:
        ways_out = f"a batch_size of at most {sizes[worker]}, or fewer workers"
        if config.partition == "dirichlet":
            ways_out += ", or a larger alpha"
        raise UserError(
            f"batch_size={config.batch_size} is more than worker {worker} has: with "
            f"partition={config.partition!r} over {len(sizes)} honest workers it has {sizes[worker]} "
            f"examples, the fewest of all; use {ways_out}."
        )


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """The parts check their arguments with ValueErrors, and here the arguments come from the user."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error


def _plan(config: Config, smallest: int) -> privacy.PrivacyPlan:
    setting = planner.Setting(config, smallest, planner.secret_graph(config))
    if config.noise_multiplier is not None:
        return planner.from_multiplier(setting)
    return planner.calibrate(setting)


def grid_bits(config: Config, plan: privacy.PrivacyPlan) -> int | None:
    """The grid that a run's messages are on, 2^-bits; None for float32."""
    if config.precision != "grid":
        return None
    if config.grid_bits is not None:
        return config.grid_bits
    return grid.propose_bits(
        sigma_ind=plan.sigma_ind,
        sigma_cor=plan.sigma_cor,
        num_workers=plan.num_workers,
        clip_norm=plan.clip_norm,
    )


def _optimizer(config: Config) -> optax.GradientTransformation:
    schedules: dict[str, Callable[[], optax.Schedule]] = {
        "constant": lambda: optax.constant_schedule(config.learning_rate),
        "cosine": lambda: optax.cosine_decay_schedule(config.learning_rate, config.rounds),
        "linear": lambda: optax.linear_schedule(config.learning_rate, 0.0, config.rounds),
    }
    # l2 regularisation: its gradient is added before the learning rate.
    return optax.chain(
        optax.add_decayed_weights(config.weight_decay),
        optax.sgd(schedules[config.learning_rate_schedule]()),
    )


def _chunk_length(config: Config) -> int:
    """How many rounds are one call: the same number for all calls, so that one program is compiled.

    It does not depend on where a run is resumed or when it saves, or the bits might.
    """
    longest = _MAX_CHUNK.get(jax.default_backend(), _MAX_CHUNK_ELSEWHERE)
    common = math.gcd(config.rounds, config.eval_every)
    return max(length for length in range(1, longest + 1) if common % length == 0)


def _train(experiment: Experiment, folder: Workdir, progress: Progress, programs: Programs) -> PyTree:
    """Runs the rounds that are missing, and returns the final parameters."""
    config, key, workers, on_mesh = experiment.config, experiment.key, experiment.data, experiment.on_mesh
    key = key if on_mesh is None else on_mesh.everywhere(key)
    done = hosts.agreed(max(folder.rounds(), default=0))
    with progress.phase("starting"):
        state = experiment.init()
        if done == config.rounds:  # Killed between the last checkpoint and the summary.
            if hosts.leads():
                _export_events(config)
            return folder.restore(done, _on_host(_final(experiment.params(state))))["params"]
        if done:
            state = _restored(experiment, folder, done, state)
        weights = [folder.resume_metrics(done)]
    if done:
        progress.log(f"resuming after round {done}")

    length = _chunk_length(config)
    if done % length:
        raise UserError(
            f"The run in {config.workdir} stopped after round {done} on another kind of device; this one "
            f"runs {length} rounds at a time: go on there, or give another workdir."
        )
    tests = jnp.asarray(experiment.dataset.test_images), jnp.asarray(experiment.dataset.test_labels)
    with progress.phase("compiling"):
        params = experiment.params(state)
        chunk, evaluate = programs.of(experiment, length, key, state, workers, params, *tests)

    spent = privacy.epsilon_schedule(experiment.plan)
    saved = done

    def save() -> None:
        folder.write_weights(np.concatenate(weights))
        if done < config.rounds:
            folder.save(done, state, flat=on_mesh is not None)
        else:
            folder.save(done, _final(state.params if on_mesh is None else on_mesh.params(state)))

    with (
        _events(config, folder, weights[0]) as add_events,
        progress.training(done, config.rounds),
        _deferred_interrupt() as interrupted,
    ):
        while done < config.rounds:
            if hosts.anywhere(interrupted()):
                if saved < done:
                    save()
                raise KeyboardInterrupt(
                    f"interrupted after round {done} of {config.rounds}; the same command resumes"
                )
            check_budget(experiment.plan, spent, done + length)
            begin = time.monotonic()
            state, infos = chunk(key, state, workers)
            info = jax.device_get(infos)
            before, done = done, done + length
            test_loss = accuracy = None
            if done % config.eval_every == 0 or done == config.rounds:
                params = experiment.params(state)
                if hosts.leads():
                    test_loss, accuracy = map(float, evaluate(params, *tests))
            seconds = (time.monotonic() - begin) / length
            rows = [_row(before + 1 + i, info, i, spent, seconds, config.num_honest) for i in range(length)]
            rows[-1].update(test_accuracy=accuracy, test_loss=test_loss)
            folder.append_metrics(rows)
            add_events(rows, info.weights)  # before save: a checkpoint then implies its events
            weights.append(info.weights)
            if done // config.checkpoint_every > before // config.checkpoint_every or done == config.rounds:
                save()
                saved = done
            progress.update(
                done, loss=float(info.loss[-1]), accuracy=accuracy, epsilon=float(spent[done - 1])
            )
    return experiment.params(state)


def _restored(experiment: Experiment, folder: Workdir, round: int, state: State) -> State:
    """The state of a checkpoint, which may have been written on another mesh or on one device.

    Args:
      experiment: the run.
      folder: its folder.
      round: of the checkpoint.
      state: any state of the run; it is not used further.
    """
    on_mesh = experiment.on_mesh
    if on_mesh is None:
        if not folder.is_flat(round):
            return folder.restore(round, state)
        flattening = Flattening.on(sharding.make_mesh(devices=jax.devices()[:1]), state.params)
        return jax.jit(flattening.unflattened)(folder.restore(round, flattening.flat_shapes(state)))
    if folder.is_flat(round):
        return folder.restore(round, on_mesh.shapes())
    # The device that wrote it held all of it, so a host can.
    shapes = jax.eval_shape(on_mesh.flattening.unflattened, on_mesh.shapes())
    return on_mesh.spread(folder.restore(round, _on_host(shapes)))


def _on_host(tree: PyTree) -> PyTree:
    """NumPy arrays of the shapes and types of a tree's leaves, to restore into; they take no memory."""
    return jax.tree.map(lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), tree)


@contextlib.contextmanager
def _events(
    config: Config, folder: Workdir, weights: np.ndarray
) -> Iterator[Callable[[list[dict[str, float | None]], np.ndarray], None]]:
    """Event files that hold the rounds that are done, and what adds others; it does nothing if not wanted."""
    if config.tensorboard == "off" or not hosts.leads():
        yield lambda rows, weights: None
        return
    with tensorboard.writer(folder.path / "tensorboard", config.to_dict()) as events:
        done = tensorboard.rows_of(read_metrics(folder.path / "metrics.csv"))
        events.add(done, weights, config.num_honest)
        yield lambda rows, weights: events.add(rows, weights, config.num_honest)


def _export_events(config: Config) -> None:
    """Event files of a run whose rounds are all done: it may have been without them until now."""
    if config.tensorboard == "on":
        tensorboard.export(config.workdir, config.num_honest, config.to_dict())


def _final(params: PyTree) -> PyTree:
    """What the last checkpoint holds: no round follows, and the momenta are n times as large as the rest."""
    return {"params": params}


def separation(weights: np.ndarray, num_honest: int) -> float:
    """The chance that a random honest worker has more weight than a random malicious one; a tie is one half.

    Args:
      weights: of all workers in the aggregate, [n], the honest ones first.
      num_honest: how many are honest.

    Returns:
      1 if the rule told all malicious workers from all honest ones, 1/2 if it told nothing; NaN without
      weights or without malicious workers.

    Example:
      >>> separation(np.array([0.5, 0.5, 0.0, 0.5]), num_honest=2)
      0.75
    """
    honest, malicious = weights[:num_honest, None], weights[None, num_honest:]
    if not malicious.size or not np.isfinite(weights).all():
        return math.nan
    return float(np.mean((honest > malicious) + 0.5 * (honest == malicious)))


def _row(
    round: int, info: Info, index: int, spent: np.ndarray, seconds: float, num_honest: int
) -> dict[str, float | None]:
    return {
        "round": round,
        "loss": float(info.loss[index]),
        "test_accuracy": None,
        "test_loss": None,
        "epsilon": float(spent[round - 1]),
        "gradient_norm": float(info.gradient_norm[index]),
        "clipped": float(info.clipped[index]),
        "deviation": float(info.deviation[index]),
        "honest_weight": float(info.honest_weight[index]),
        "separation": separation(np.asarray(info.weights[index]), num_honest),
        "not_finite": int(info.not_finite[index]),
        "flagged": int(info.flagged[index].sum()),
        "false_alarms": int(info.flagged[index][:num_honest].sum()),
        "law_fits": int(info.law_fits[index]),
        "seconds": seconds,
    }


def _aggregator(config: Config, plan: privacy.PrivacyPlan) -> Aggregator | StatefulRule:
    n, f = config.num_workers, config.num_byzantine
    if config.aggregator in aggregators.OVER_ROUNDS:
        if config.pre_aggregator != "none":
            raise UserError(
                f"pre_aggregator={config.pre_aggregator!r} does not go with aggregator="
                f"{config.aggregator!r}, which knows the law of the workers' own messages: use 'none'."
            )
        # A Poisson batch may be larger than the size its sum is divided by.
        largest = (plan.largest_batch or 1) / (plan.batch_size or 1) if plan.level == "example" else 1.0
        return aggregators.OVER_ROUNDS[config.aggregator](
            num_byzantine=f,
            momentum=config.momentum,
            sigma_ind=plan.sigma_ind,
            sigma_cor=plan.sigma_cor,
            clip_norm=plan.clip_norm * largest if config.private else 0.0,
            false_alarm=config.false_alarm,
            graph=plan.graph,
        )
    rule: Aggregator = aggregators.BY_NAME[config.aggregator](num_byzantine=f)
    if config.pre_aggregator != "none":
        rule = aggregators.compose(aggregators.mixing.BY_NAME[config.pre_aggregator](num_byzantine=f), rule)
    # A rule knows only when it is called whether it can do with so many workers.
    jax.eval_shape(rule, jax.ShapeDtypeStruct((n, 1), np.float32))
    return rule


def _attack(
    config: Config, aggregator: Aggregator | StatefulRule, num_classes: int
) -> Attack | attacks.adaptive.AgainstRound:
    make = attacks.BY_NAME[config.attack]
    wanted = inspect.signature(make).parameters
    if isinstance(aggregator, StatefulRule) and "aggregator" in wanted:
        return attacks.adaptive.AgainstRound(make)
    known: dict[str, Any] = {"aggregator": aggregator, "num_classes": num_classes}
    if config.attack_factor is not None:
        known["factor"] = config.attack_factor
    if isinstance(aggregator, aggregators.LinearRule) and aggregator.is_slow:
        known["search"] = attacks.adaptive.DIRECT
    return make(**{name: value for name, value in known.items() if name in wanted})


def check_budget(plan: privacy.PrivacyPlan, spent: np.ndarray, round: int) -> None:
    """Refuses rounds that the budget does not pay for. A calibrated plan pays for all of its own."""
    if round > len(spent):
        raise UserError(
            f"Round {round} is beyond the {plan.rounds} rounds that the privacy plan pays for, so it is not "
            "taken."
        )
    if not spent[round - 1] <= plan.epsilon * (1 + _TOLERANCE):
        raise UserError(
            f"Round {round} would spend epsilon = {spent[round - 1]:.6g}, more than the privacy budget "
            f"{plan.epsilon:.6g}, so it is not taken."
        )


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Lets Ctrl-C wait for the end of a chunk; a second one ends the process at once.

    Python could not act on it earlier anyway, while compiled code runs, and the state of a chunk that was cut
    short is nowhere: its input buffers are donated.

    Yields:
      Whether Ctrl-C was pressed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # Only the main thread gets signals.
        return
    pressed = threading.Event()

    def handler(number: int, frame: object) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # Not print: the signal may have come in the middle of one.
        os.write(2, b"\nstopping after this round (Ctrl-C again: at once)\n")

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _finish(experiment: Experiment, folder: Workdir, params: PyTree) -> Summary:
    """Writes the results; the summary last."""
    # It takes long to import, and nobody should wait for it before the first round.
    from cafcor_jax import plotting

    if not hosts.leads():
        hosts.agreed(1)  # when the leader has written it
        return Summary.from_dict(folder.summary() or {})
    config, plan = experiment.config, experiment.plan
    metrics = read_metrics(folder.path / "metrics.csv")
    accuracy = metrics["test_accuracy"]
    best = int(np.nanargmax(accuracy))
    summary = Summary(
        rounds=config.rounds,
        final_accuracy=float(accuracy[-1]),
        final_loss=float(metrics["test_loss"][-1]),
        best_accuracy=float(accuracy[best]),
        best_round=best + 1,
        epsilon=privacy.epsilon(plan),
        delta=plan.delta,
        accountant=plan.accountant,
        seconds=float(metrics["seconds"].sum()),
        honest_weight=float(metrics["honest_weight"].mean()),
        honest_share=config.num_honest / config.num_workers,
        rounds_beyond_f=int((metrics["not_finite"] > config.num_byzantine).sum()),
        rounds_without_law=int((metrics["law_fits"] == 0).sum()),
        params_sha256=digest(params),
        workdir=config.workdir,
    )
    heading = f"{title(config)}\nseed {config.seed}"
    if config.private:
        heading += f", epsilon {summary.epsilon:.2f} at delta {plan.delta:g}"
    folder.write("curves.png", lambda path: plotting.save(plotting.curves(metrics, heading), path))
    weights = np.load(folder.path / "weights.npy")
    if np.isfinite(weights).all():  # Rules without weights have nothing to show.
        picture = plotting.filtering(weights, config.num_byzantine, heading)
        folder.write("filtering.png", lambda path: plotting.save(picture, path))
    folder.write_json("summary.json", dataclasses.asdict(summary))
    folder.prune(keep=1)
    hosts.agreed(1)
    return summary
