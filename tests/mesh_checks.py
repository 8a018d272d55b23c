"""What `test_sharding.py` runs in a process of its own, with eight devices, all compiled quickly."""

import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cafcor_jax import (
    aggregators,
    attacks,
    experiment,
    federation,
    grid,
    noise,
    plotting,
    privacy,
    secrets,
    sharding,
)
from cafcor_jax.config import Config
from cafcor_jax.errors import UserError
from cafcor_jax.mesh_federation import mesh_federation
from cafcor_jax.progress import Silent
from cafcor_jax.spread import first_column, spread_over
from cafcor_jax.workdir import read_metrics
from tests import tiny
from tests.aggregators.test_conformance import RULES
from tests.compiling import fast_jit, usual_jit

N, F = 12, 2


@pytest.fixture(scope="module")
def mesh():
    return sharding.make_mesh(2, 4)


# Aggregation.


@pytest.mark.parametrize("name", RULES)
def test_rule_is_its_definition_where_columns_are_spread(name, mesh):
    options = {key: N - 1 if value == -1 else value for key, value in RULES[name].options.items()}
    rule = sharding.aggregate(aggregators.BY_NAME[name](num_byzantine=F, **options), mesh)
    x = np.random.default_rng(0).normal(size=(N, 40)).astype(np.float32)
    x[-F:] += 3
    result = rule(jax.device_put(x, NamedSharding(mesh, P(None, sharding.ALL))))
    assert {shard.data.shape for shard in result.addressable_shards} == {(5,)}
    np.testing.assert_allclose(result, RULES[name].definition(x.astype(np.float64), F), rtol=0, atol=2e-6)


# Spread over both axes, over one, over none; over workers.
SPECS = {
    "kernel": P(None, "workers", "parameters"),
    "bias": P(None, "parameters"),
    "scale": P(),
    "table": P("workers", "parameters"),
}


@pytest.mark.parametrize(
    "rule",
    [aggregators.krum(F), aggregators.compose(aggregators.nnm(F), aggregators.trimmed_mean(F))],
    ids=["krum", "nnm, then trimmed_mean"],
)
def test_any_layout_gives_what_one_device_gives(rule, mesh):
    rng = np.random.default_rng(0)
    shapes = {"kernel": (4, 12), "bias": (8,), "scale": (7,), "table": (8, 3)}
    usual = {name: rng.normal(size=(N, *shape)).astype(np.float32) for name, shape in shapes.items()}
    broken = jax.tree.map(np.copy, usual)
    broken["bias"][3, 2] = np.nan  # of one device alone
    one, many = fast_jit(rule), sharding.aggregate(rule, mesh)
    # Far from 0 the matrix is taken about the median, in a second pass.
    for updates in (usual, broken, jax.tree.map(lambda x: x + 300, usual)):
        result = many({k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in updates.items()})
        assert result["kernel"].sharding.spec == P("workers", "parameters")
        for leaf, expected in zip(jax.tree.leaves(result), jax.tree.leaves(one(updates)), strict=True):
            np.testing.assert_allclose(leaf, expected, rtol=0, atol=4e-7 * np.abs(expected).max())


def test_aggregate_says_what_is_wrong(mesh):
    rule = sharding.aggregate(aggregators.mean(), mesh)
    with pytest.raises(ValueError, match="NamedSharding on the mesh, or specs must be given"):
        rule(jnp.ones((3, 8)))
    with pytest.raises(UserError, match="mesh of 9 devices, and there are 8"):
        sharding.make_mesh(3, 3)
    with pytest.raises(UserError, match=r"mesh_workers=0 must be a whole number of at least 1"):
        sharding.make_mesh(0, 3)


# Noise.


def test_noise_of_columns_is_the_same_to_the_bit(mesh):
    d, n = 20_000, 5
    columns = d // mesh.size
    key = jax.random.key(1)
    pair_keys, own = secrets.key_matrix(key, n), jax.random.split(key, n)

    def draw(size, first):
        return {
            "pairwise": noise.pairwise(pair_keys, 3, size, 0.7, first=first),
            "projected": noise.projected(key, n, 3, size, 0.7, first=first),
            "independent": noise.independent(own, 3, size, 0.7, first=first),
            "on grid": grid.pairwise(pair_keys, 3, size, 0.7, 10, first=first),
        }

    def of_device():
        with spread_over(sharding.ALL, d):
            return draw(columns, first_column(columns))

    spread = jax.shard_map(
        of_device, mesh=mesh, in_specs=(), out_specs=P(None, sharding.ALL), check_vma=False
    )
    many, one = usual_jit(spread)(), usual_jit(functools.partial(draw, d, 0))()
    for name, rows in one.items():
        np.testing.assert_array_equal(many[name], rows, err_msg=name)


# Rounds.

WORKERS, HONEST, SIZE = 7, 5, 9
PLAN = privacy.calibrate(
    threat_model="byzldp",
    epsilon=50.0,
    delta=1e-4,
    num_workers=WORKERS,
    num_byzantine=WORKERS - HONEST,
    rounds=10,
    clip_norm=0.5,
)


def loss_fn(params, x, y):
    scores = x.reshape(x.shape[0], -1).astype(jnp.float32) @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()


def both(mesh, **changes):
    settings = {
        "loss_fn": loss_fn,
        "plan": PLAN,
        "aggregator": aggregators.caf(2),
        "attack": attacks.alie(),
        "optimizer": optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.1, momentum=0.5)),
        "momentum": 0.8,
        "batch_size": 5,
    } | changes
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(80, 33)).astype(np.float32), "b": np.zeros(33, np.float32)}
    data = federation.Data(
        rng.integers(0, 3, (HONEST, SIZE, 8, 10)).astype(np.uint8),
        rng.integers(0, 33, (HONEST, SIZE)).astype(np.int32),
        np.full(HONEST, SIZE, np.int32),
    )
    one, many = federation.federation(**settings), mesh_federation(mesh, params, **settings)
    return params, data, one, many


@pytest.mark.parametrize(
    "changes",
    [
        {"aggregator": aggregators.multi_krum(2), "attack": attacks.label_flip(33)},
        {
            "aggregator": aggregators.caf_history(
                2, momentum=0.8, sigma_ind=PLAN.sigma_ind, sigma_cor=PLAN.sigma_cor, clip_norm=0.5, every=2
            ),
            "attack": attacks.bias(3.0),
            "noise_mode": "projected",
        },
    ],
    ids=["multi_krum, label_flip", "caf_history, bias"],
)
def test_rounds_are_those_of_one_device_and_no_device_holds_all_messages(changes, mesh):
    params, data, one, many = both(mesh, **changes)
    key = jax.random.key(3)
    state, spread = jax.jit(one.init)(params), many.init(params)
    placed = many.place(data)
    step = fast_jit(one.step)
    compiled = many.jit(many.federation.step).lower(key, spread, placed).compile()
    for _ in range(3):
        state, info = step(key, state, data)
        spread, info_of_mesh = compiled(key, spread, placed)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(many.params(spread)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-7)
    for name, value in info._asdict().items():
        np.testing.assert_allclose(value, getattr(info_of_mesh, name), rtol=1e-5, atol=1e-6, err_msg=name)

    d = 80 * 33 + 33
    padded = many.flattening.padded
    assert {shard.data.shape[1] for shard in spread.momentum.addressable_shards} == {padded // 8}
    assert {shard.data.shape for shard in spread.params.addressable_shards} == {(padded // 4,)}
    # Per device: noise is drawn in blocks of 8192 coordinates, more than this small model has, for each row.
    largest = largest_array(compiled.as_text(), without=(noise.BLOCK, noise.BLOCK // 2))
    assert largest < HONEST * d / 2, largest


def largest_array(hlo, without):
    """The numbers in the largest array of a compiled program, but for those with an axis of such a length."""
    shapes = [list(map(int, shape.split(","))) for shape in re.findall(r"f(?:32|64)\[([\d,]+)\]", hlo)]
    blocks = {length * k for length in without for k in (1, 2)}
    return max(int(np.prod(shape)) for shape in shapes if not blocks & set(shape))


def test_attack_by_inner_products_is_that_of_one_device(mesh):
    honest = np.random.default_rng(0).normal(size=(HONEST, 40)).astype(np.float32)
    attack, key = attacks.min_max(), jax.random.key(0)

    def of_device(columns):
        with spread_over(sharding.ALL, 40):
            return attack(key, columns, 2)

    spec = P(None, sharding.ALL)
    spread = jax.shard_map(of_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    expected = fast_jit(lambda honest: attack(key, honest, 2))(honest)
    np.testing.assert_allclose(fast_jit(spread)(honest), expected, rtol=2e-6)


def test_attack_that_draws_whole_messages_is_refused(mesh):
    for attack in (attacks.gaussian(), attacks.bias_fixed(), attacks.bias_spread()):
        with pytest.raises(
            ValueError, match=r"at once, so it does not run where columns are spread.*mesh_workers=1"
        ):
            both(mesh, attack=attack)
    aggregator = aggregators.median(2)
    both(mesh, attack=attacks.alie_adaptive(aggregator), aggregator=aggregator)  # of few coordinates
    with pytest.raises(ValueError, match="samples the 2673 coordinates"):
        search = attacks.adaptive.LineSearch(coordinates=100)
        both(mesh, attack=attacks.alie_adaptive(aggregator, search=search), aggregator=aggregator)


# Whole runs.


class Crash(Exception):
    pass


class Crashing(Silent):
    def __init__(self, round):
        self.round = round

    def update(self, round, **values):
        if round == self.round:
            raise Crash


def without_pictures(write):
    return lambda self, name, writer: None if name.endswith(".png") else write(self, name, writer)


def test_run_goes_on_on_another_mesh(tmp_path, monkeypatch):
    tiny.use(monkeypatch)
    for name in ("curves", "filtering", "save"):
        monkeypatch.setattr(plotting, name, lambda *args: None)
    monkeypatch.setattr(experiment.Workdir, "write", without_pictures(experiment.Workdir.write))
    programs = experiment.Programs()

    def run(folder, workers, parameters, crash=None):
        config = Config(
            dataset="synthetic",
            num_workers=6,
            num_byzantine=1,
            epsilon=500.0,
            rounds=3,
            batch_size=8,
            learning_rate=0.5,
            noise_mode="projected",
            aggregator="multi_krum",
            checkpoint_every=1,
            workdir=str(tmp_path / folder),
            mesh_workers=workers,
            mesh_parameters=parameters,
        )
        return experiment.run(config, progress=Crashing(crash), programs=programs)

    expected = run("whole", 1, 1)
    metrics = read_metrics(tmp_path / "whole/metrics.csv")
    for first, second in [((4, 2), (3, 1)), ((3, 1), (1, 1)), ((1, 1), (4, 2))]:
        folder = f"{first} {second}"
        with pytest.raises(Crash):
            run(folder, *first, crash=2)
        assert (tmp_path / folder / "checkpoints/1").exists()
        shutil.copytree(tmp_path / folder, tmp_path / f"{folder} copy")
        summary = run(folder, *second)
        assert summary.final_loss == pytest.approx(expected.final_loss, rel=1e-5)
        for name, values in read_metrics(tmp_path / folder / "metrics.csv").items():
            if name != "seconds":
                np.testing.assert_allclose(values, metrics[name], rtol=1e-4, atol=1e-6, err_msg=name)
        stored = json.loads((tmp_path / folder / "config.json").read_text())["config"]
        assert (stored["mesh_workers"], stored["mesh_parameters"]) == first

    # A number of a flat checkpoint that changed is noticed.
    path = tmp_path / "(4, 2) (3, 1) copy"
    digest = next(path.glob("checkpoints/2/flat*"))
    digest.write_text("0" * 64 + "\n")
    with pytest.raises(UserError, match="does not match its checksum"):
        run(path.name, 4, 2)

    with pytest.raises(UserError, match="mesh of 10 devices, and there are 8"):
        run("too large", 5, 2)
