"""Runs in this process, on little data and a model small enough to compile at once."""

import dataclasses
import json
import math
import random
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cafcor_jax import aggregators, attacks, experiment, privacy
from cafcor_jax.config import Config
from cafcor_jax.errors import UserError
from cafcor_jax.progress import Silent
from cafcor_jax.workdir import Workdir, read_metrics
from tests import tiny
from tests.test_tensorboard import scalars
from tests.tiny import compile_once  # noqa: F401 (a fixture)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    tiny.use(monkeypatch)


def make(workdir, **changes):
    values = dict(
        dataset="synthetic",
        num_workers=6,
        num_byzantine=1,
        epsilon=500.0,
        rounds=7,
        batch_size=8,
        learning_rate=0.5,
        noise_mode="projected",
        checkpoint_every=2,
        workdir=str(workdir),
    )
    return Config(**(values | changes))


class Crash(Exception):
    pass


class Stopper(Silent):
    """Does something at one round, and keeps the lines."""

    def __init__(self, round=None, action=None):
        self.round, self.action, self.lines, self.seen = round, action, [], []

    def log(self, text):
        self.lines.append(text)

    def update(self, round, **values):
        self.seen.append(round)
        if round == self.round:
            self.action()


def crash():
    raise Crash


def result(workdir):
    """All that must be the same in runs that are equal to the bit."""
    summary = json.loads((workdir / "summary.json").read_text())
    for name in ("seconds", "workdir"):
        del summary[name]
    rows = [line.rsplit(",", 1)[0] for line in (workdir / "metrics.csv").read_text().splitlines()]
    return summary, rows, (workdir / "weights.npy").read_bytes()


def final_params(workdir, config):
    like = experiment.build(config).init().params
    with Workdir(workdir, config) as folder:
        return folder.restore(config.rounds, {"params": like})["params"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        tiny.use(patch)
        experiment.run(make(workdir))
    return workdir


def test_a_run_leaves_everything_behind(uninterrupted):
    names = {path.name for path in uninterrupted.iterdir()} - {".cafcor.lock"}
    files = {"config.json", "metrics.csv", "weights.npy", "summary.json", "curves.png", "filtering.png"}
    assert names == files | {"checkpoints"}
    for name in ("curves.png", "filtering.png"):
        assert (uninterrupted / name).read_bytes().startswith(b"\x89PNG")

    metrics = read_metrics(uninterrupted / "metrics.csv")
    assert metrics["round"].tolist() == list(range(1, 8))
    assert np.isfinite(metrics["test_accuracy"]).all()
    assert (np.diff(metrics["epsilon"]) > 0).all() and metrics["epsilon"][-1] == pytest.approx(500, rel=1e-5)
    weights = np.load(uninterrupted / "weights.npy")
    assert weights.shape == (7, 6)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(weights[:, :5].sum(1), metrics["honest_weight"], rtol=1e-5)

    record = json.loads((uninterrupted / "config.json").read_text())
    assert Config.from_dict(record["config"]) == make(uninterrupted)
    assert privacy.PrivacyPlan.from_dict(record["plan"]).sigma_ind > 0
    assert set(record["epsilon_by_accountant"]) == set(privacy.ACCOUNTANTS)
    assert record["dataset"]["checksums"] == tiny.DATASET.checksums
    assert {"python", "jax", "jaxlib", "numpy", "flax", "optax", "cafcor_jax", "commit", "device"} <= set(
        record["versions"]
    )
    # The momenta, which only a further round would need, are not kept.
    assert [path.name for path in (uninterrupted / "checkpoints").iterdir()] == ["7"]


# One before the first checkpoint, one at a checkpoint, one after it, and one at random.
@pytest.mark.parametrize("killed", [1, 2, 5, random.Random(7).randint(1, 6)])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, uninterrupted, killed):
    workdir = tmp_path / "run"
    with pytest.raises(Crash):
        experiment.run(make(workdir), progress=Stopper(killed, crash))
    (workdir / "metrics.csv").open("a").write("9,0.1")  # a line that was being written
    progress = Stopper()
    experiment.run(make(workdir), progress=progress)

    saved = killed - killed % 2
    assert progress.seen == list(range(saved + 1, 8))
    assert result(workdir) == result(uninterrupted)
    expected = final_params(uninterrupted, make(uninterrupted))
    for a, b in zip(
        jax.tree.leaves(final_params(workdir, make(workdir))), jax.tree.leaves(expected), strict=True
    ):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_chunks_of_several_rounds_resume_too(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "_MAX_CHUNK", {"cpu": 3})
    changes = dict(rounds=9, eval_every=3, checkpoint_every=4)
    experiment.run(make(tmp_path / "a", **changes))
    stopper = Stopper(9, crash)
    with pytest.raises(Crash):
        experiment.run(make(tmp_path / "b", **changes), progress=stopper)
    assert stopper.seen == [3, 6, 9]
    # Killed in the last moments: the result is made of what is there.
    again = Stopper()
    experiment.run(make(tmp_path / "b", **changes), progress=again)
    assert again.seen == []
    assert result(tmp_path / "a") == result(tmp_path / "b")
    measured = np.isfinite(read_metrics(tmp_path / "a" / "metrics.csv")["test_accuracy"])
    assert (np.flatnonzero(measured) + 1).tolist() == [3, 6, 9]


def test_how_often_it_saves_does_not_change_the_bits(tmp_path, uninterrupted):
    experiment.run(make(tmp_path / "run", checkpoint_every=100))
    assert result(tmp_path / "run") == result(uninterrupted)


def test_ctrl_c_saves_and_resumes(tmp_path, uninterrupted):
    handler = signal.getsignal(signal.SIGINT)
    stopper = Stopper(3, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match="interrupted after round 3 of 7; the same command resumes"):
        experiment.run(make(tmp_path / "run"), progress=stopper)
    assert signal.getsignal(signal.SIGINT) is handler
    resumed = Stopper()
    experiment.run(make(tmp_path / "run"), progress=resumed)
    assert resumed.seen == [4, 5, 6, 7]
    assert result(tmp_path / "run") == result(uninterrupted)


def test_a_finished_run_is_not_computed_again(uninterrupted, monkeypatch):
    monkeypatch.setattr(experiment, "build", lambda *args, **kwargs: pytest.fail("it was built again"))
    progress = Stopper()
    summary = experiment.run(make(uninterrupted), progress=progress)
    assert "is finished" in progress.lines[0] and "test accuracy" in progress.lines[1]
    assert summary.params_sha256 == result(uninterrupted)[0]["params_sha256"]


def test_another_config_is_refused_and_nothing_changes(uninterrupted):
    before = result(uninterrupted)
    with pytest.raises(UserError, match=r"learning_rate \(0.5 there, 0.25 now\), seed \(1 there, 2 now\)"):
        experiment.run(make(uninterrupted, seed=2, learning_rate=0.25))
    assert result(uninterrupted) == before


def test_without_privacy_it_learns_and_the_files_are_strict_json(tmp_path):
    workdir = tmp_path / "run"
    alone = dict(num_byzantine=0, attack="none", aggregator="mean")
    config = make(
        workdir, threat_model="none", clip_norm=0.0, rounds=30, eval_every=20, momentum=0.5, **alone
    )
    summary = experiment.run(config)
    assert summary.final_accuracy > 0.4
    assert math.isinf(summary.epsilon) and "no noise" in summary.describe()
    assert "no worker is malicious" in summary.describe()
    for name in ("config.json", "summary.json"):
        json.loads((workdir / name).read_text(), parse_constant=lambda name: pytest.fail(name))
    assert json.loads((workdir / "config.json").read_text())["plan"]["clip_norm"] == "inf"
    metrics = read_metrics(workdir / "metrics.csv")
    assert (metrics["clipped"] == 0).all()
    assert (np.flatnonzero(np.isfinite(metrics["test_accuracy"])) + 1).tolist() == [20, 30]
    assert math.isinf(experiment.run(config).epsilon)  # read back


def test_a_step_beyond_the_budget_is_refused(tmp_path):
    config = make(tmp_path / "run")
    built = experiment.build(config)
    # Less noise than was paid for: the budget is gone before the last round.
    plan = dataclasses.replace(built.plan, sigma_ind=built.plan.sigma_ind * 0.8)
    affordable = int((privacy.epsilon_schedule(plan) <= plan.epsilon).sum())
    assert 0 < affordable < config.rounds
    stopper = Stopper()
    with Workdir(config.workdir, config) as folder, pytest.raises(UserError, match="privacy budget 500"):
        experiment._train(dataclasses.replace(built, plan=plan), folder, stopper, experiment.Programs())
    assert stopper.seen == list(range(1, affordable + 1))

    plan = dataclasses.replace(built.plan, rounds=3, sigma_ind=10.0)
    config = make(tmp_path / "other")
    with Workdir(config.workdir, config) as folder, pytest.raises(UserError, match="beyond the 3 rounds"):
        experiment._train(dataclasses.replace(built, plan=plan), folder, Silent(), experiment.Programs())


@pytest.mark.parametrize(
    "part, change, message",
    [
        ("plan", {"sigma_ind": 0.001}, "another privacy plan, sigma_ind 0.001 there"),
        ("dataset", {"checksums": {"train-images": "0"}}, "another dataset, train-images 0 there"),
    ],
)
def test_a_changed_record_is_refused(tmp_path, part, change, message):
    with pytest.raises(Crash):
        experiment.run(make(tmp_path / "run"), progress=Stopper(2, crash))
    path = tmp_path / "run" / "config.json"
    record = json.loads(path.read_text())
    record[part].update(change)
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=message):
        experiment.run(make(tmp_path / "run"))


def test_other_software_is_a_warning(tmp_path):
    with pytest.raises(Crash):
        experiment.run(make(tmp_path / "run"), progress=Stopper(2, crash))
    path = tmp_path / "run" / "config.json"
    record = json.loads(path.read_text())
    record["versions"]["jax"] = "0.0.1"
    path.write_text(json.dumps(record))
    progress = Stopper()
    experiment.run(make(tmp_path / "run"), progress=progress)
    warnings = [line for line in progress.lines if line.startswith("warning")]
    assert len(warnings) == 1 and "jax 0.0.1 there" in warnings[0]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"batch_size": 81}, ["batch_size=81", "worker 0", "'homogeneous'", "80 examples", "at most 80"]),
        ({"batch_size": 60, "partition": "dirichlet", "alpha": 0.1}, ["'dirichlet'", "a larger alpha"]),
    ],
)
def test_a_batch_larger_than_a_worker_is_refused(tmp_path, changes, words):
    with pytest.raises(UserError) as error:
        experiment.build(make(tmp_path, **changes))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"aggregator": "smea", "num_workers": 60, "num_byzantine": 20}, "SMEA looks at each of them"),
        ({"pre_aggregator": "bucketing", "num_byzantine": 2}, "num_byzantine = 2 of n = 3 workers"),
    ],
)
def test_a_rule_that_cannot_do_with_so_many_workers_is_refused(tmp_path, changes, words):
    with pytest.raises(UserError, match=words):
        experiment.build(make(tmp_path / "run", **changes))


@pytest.mark.parametrize(
    "rule, pre, short",
    [("smea", "none", True), ("mda", "nnm", True), ("caf", "nnm", False), ("median", "none", False)],
)
def test_adaptive_attacks_try_less_where_a_linear_rule_is_slow(tmp_path, monkeypatch, rule, pre, short):
    searches = []

    def attack(aggregator, *, search=None):
        searches.append(search)
        return attacks.sign_flip()

    monkeypatch.setitem(attacks.BY_NAME, "alie_adaptive", attack)
    settings = {"aggregator": rule, "pre_aggregator": pre, "attack": "alie_adaptive"}
    experiment.build(make(tmp_path / "run", **settings))
    assert searches == [attacks.adaptive.DIRECT if short else None]


def test_a_pre_aggregation_comes_before_the_rule(tmp_path):
    config = make(tmp_path / "run", pre_aggregator="nnm", aggregator="median")
    assert "aggregator nnm + median" in experiment.title(config)
    built = experiment.build(config)
    x = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    want = aggregators.median()(aggregators.nnm(num_byzantine=1)(x))
    np.testing.assert_allclose(built.aggregator(x), want)


def test_what_a_part_refuses_is_the_users_to_change(tmp_path, monkeypatch):
    def picky(num_byzantine):
        raise ValueError("num_byzantine = 1 is odd.")

    monkeypatch.setitem(experiment.aggregators.BY_NAME, "caf", picky)
    with pytest.raises(UserError, match="is odd"):
        experiment.build(make(tmp_path))


def test_the_attack_gets_its_factor(tmp_path, monkeypatch):
    factors = []
    monkeypatch.setitem(experiment.attacks.BY_NAME, "alie", lambda factor=1.5: factors.append(factor))
    experiment.build(make(tmp_path, attack_factor=0.4))
    experiment.build(make(tmp_path))
    assert factors == [0.4, 1.5]


def test_an_attack_gets_what_it_asks_for(tmp_path, monkeypatch):
    seen = []

    def curious(aggregator, num_classes):
        seen.append((aggregator, num_classes))
        return experiment.attacks.none()

    monkeypatch.setitem(experiment.attacks.BY_NAME, "alie", curious)
    built = experiment.build(make(tmp_path))
    assert seen == [(built.aggregator, 10)]


@pytest.mark.parametrize(
    "weights, num_honest, expected",
    [
        ([0.5, 0.5, 0.0], 2, 1.0),
        ([0.0, 0.0, 1.0], 2, 0.0),
        ([0.25] * 4, 3, 0.5),
        ([0.1, 0.3, 0.2, 0.4], 2, 0.25),
        ([0.5, 0.5], 2, math.nan),
        ([math.nan, 0.5, 0.5], 2, math.nan),
    ],
)
def test_separation_is_the_chance_to_tell_them_apart(weights, num_honest, expected):
    found = experiment.separation(np.array(weights), num_honest)
    np.testing.assert_equal(found, expected)


def test_the_noise_can_be_given_and_epsilon_counted(tmp_path):
    """The paper's Figure 2: a noise multiplier of 0.5 in the sum of all workers' messages."""
    config = make(
        tmp_path,
        threat_model="cdp",
        privacy_level="example",
        sampling="poisson",
        clip_norm=5.0,
        noise_multiplier=0.5,
    )
    plan = experiment.build(config).plan
    assert plan.sigma_ind == pytest.approx(0.5 * 5 / config.batch_size / math.sqrt(config.num_workers))
    assert plan.sigma_cor == 0 and math.isinf(plan.epsilon)
    calibrated = experiment.build(
        dataclasses.replace(config, noise_multiplier=None, epsilon=privacy.epsilon(plan))
    )
    assert calibrated.plan.sigma_ind == pytest.approx(plan.sigma_ind, rel=1e-4)
    summary = experiment.run(config)
    assert summary.epsilon == pytest.approx(privacy.epsilon(plan)) and math.isfinite(summary.epsilon)


@pytest.mark.slow
def test_events_are_the_metrics_also_of_a_run_that_was_stopped(tmp_path):
    pytest.importorskip("tensorboardX")
    config = make(tmp_path / "run", tensorboard="on", checkpoint_every=2)
    with pytest.raises(Crash):
        experiment.run(config, progress=Stopper(3, crash))
    summary = experiment.run(config)
    again = make(tmp_path / "later")
    assert experiment.run(again).params_sha256 == summary.params_sha256
    experiment.run(dataclasses.replace(again, tensorboard="on"))  # asked for when the run is done
    for folder in (config.workdir, again.workdir):
        metrics = read_metrics(f"{folder}/metrics.csv")
        written = scalars(Path(folder) / "tensorboard")
        losses = [written["train/loss", round] for round in range(1, config.rounds + 1)]
        np.testing.assert_allclose(losses, metrics["loss"], rtol=1e-6)
        evaluated = np.flatnonzero(np.isfinite(metrics["test_accuracy"])) + 1
        assert sorted(step for tag, step in written if tag == "test/accuracy") == evaluated.tolist()


def test_compiled_code_serves_another_seed_and_nothing_else(tmp_path):
    programs = experiment.Programs()
    alone = experiment.run(make(tmp_path / "a", seed=2))
    experiment.run(make(tmp_path / "b", seed=1), programs=programs)
    assert len(programs._kept) == 1
    shared = experiment.run(make(tmp_path / "c", seed=2), programs=programs)
    assert len(programs._kept) == 1
    assert shared.params_sha256 == alone.params_sha256
    experiment.run(make(tmp_path / "d", seed=2, learning_rate=0.01), programs=programs)
    assert len(programs._kept) == 2


@pytest.mark.parametrize(
    "schedule, rates", [("constant", [0.5] * 4), ("linear", [0.5, 0.375, 0.25, 0.125]),
                        ("cosine", [0.25 * (1 + math.cos(math.pi * t / 4)) for t in range(4)])]
)  # fmt: skip
def test_optimizer_is_sgd_with_l2(tmp_path, schedule, rates):
    config = make(tmp_path, rounds=4, learning_rate_schedule=schedule, weight_decay=0.1)
    optimizer = experiment._optimizer(config)
    params, gradient = jnp.array([1.0, -2.0]), jnp.array([0.5, 0.0])
    state = optimizer.init(params)
    for rate in rates:
        update, state = optimizer.update(gradient, state, params)
        np.testing.assert_allclose(update, -rate * (gradient + 0.1 * params), rtol=1e-5)
        params = optax.apply_updates(params, update)


@pytest.mark.parametrize(
    "rounds, every, length", [(30, 1, 1), (30, 10, 10), (400, 25, 5), (7, 5, 1), (100, 100, 10)]
)
def test_all_chunks_have_the_same_length(tmp_path, monkeypatch, rounds, every, length):
    monkeypatch.setattr(experiment, "_MAX_CHUNK", {"cpu": 10})
    assert experiment._chunk_length(make(tmp_path, rounds=rounds, eval_every=every)) == length


def test_the_introduction_says_what_is_run(tmp_path):
    text = experiment.build(make(tmp_path)).describe()
    for words in ("6 workers", "1 malicious", "alie", "caf", "ByzLDP", "sigma_ind", "(exact)", str(tmp_path)):
        assert words in text


def test_compilations_are_cached_beside_the_data(tmp_path, monkeypatch):
    updates = {}
    monkeypatch.setattr(experiment.jax.config, "update", updates.__setitem__)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    experiment.cache_compilations(make(tmp_path, data_dir=str(tmp_path / "data")))
    assert updates == {"jax_compilation_cache_dir": str(tmp_path / "data" / "xla")}

    updates.clear()
    experiment.cache_compilations(make(tmp_path, data_dir="/dev/null/data"))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    experiment.cache_compilations(make(tmp_path))
    assert updates == {}


def test_a_rule_with_a_memory_resumes_to_the_same_bits(tmp_path):
    changes = dict(aggregator="caf_history", attack="bias", attack_factor=50.0)
    experiment.run(make(tmp_path / "a", **changes))
    with pytest.raises(Crash):
        experiment.run(make(tmp_path / "b", **changes), progress=Stopper(5, crash))
    experiment.run(make(tmp_path / "b", **changes))
    assert result(tmp_path / "a") == result(tmp_path / "b")
    metrics = read_metrics(tmp_path / "a" / "metrics.csv")
    assert (metrics["law_fits"] == 1).all() and (metrics["false_alarms"] == 0).all()


def test_rules_that_know_the_noise_get_it_from_the_plan(tmp_path, monkeypatch):
    seen = {}

    def spy(**options):
        seen.update(options)
        return aggregators.caf_history(**options)

    monkeypatch.setitem(aggregators.OVER_ROUNDS, "caf_history", spy)
    built = experiment.build(make(tmp_path, aggregator="caf_history", false_alarm=0.01))
    plan = built.plan
    assert seen["sigma_ind"] == plan.sigma_ind > 0 and seen["sigma_cor"] == plan.sigma_cor > 0
    assert (seen["clip_norm"], seen["false_alarm"]) == (plan.clip_norm, 0.01)
    assert (seen["momentum"], seen["num_byzantine"]) == (built.config.momentum, 1)
    with pytest.raises(UserError, match="pre_aggregator='nnm' does not go with aggregator='caf_history'"):
        experiment.build(make(tmp_path, aggregator="caf_history", pre_aggregator="nnm"))


def test_secldp_and_workers_that_keep_to_the_protocol_is_pointed_out(tmp_path):
    changes = dict(threat_model="secldp", attack="bias")
    assert "the budget does not hold" in experiment.build(make(tmp_path, **changes)).describe()
    assert "the budget does not hold" not in experiment.build(make(tmp_path, attack="bias")).describe()
