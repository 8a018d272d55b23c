"""Sweeps: which runs belong to one, what is run again, and what stays when something goes wrong."""

import contextlib
import csv
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cafcor_jax import cli, experiment, sweep
from cafcor_jax.config import Config
from cafcor_jax.errors import UserError
from cafcor_jax.progress import Silent
from cafcor_jax.workdir import Workdir
from tests import tiny
from tests.test_tensorboard import scalars
from tests.tiny import compile_once  # noqa: F401 (a fixture)

BASE = {
    "dataset": "synthetic",
    "num_workers": 6,
    "num_byzantine": 1,
    "batch_size": 10,
    "rounds": 3,
    "epsilon": 500.0,
    "attack": "sign_flip",
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    tiny.use(monkeypatch)


def make(tmp_path, panels=None, curves=None, base=None, **axes):
    return sweep.plan(
        name="test",
        command="python scripts/sweep.py",
        pool=tmp_path / "pool",
        base=BASE | (base or {}),
        panels=panels or {},
        curves=curves or {},
        axes=axes,
    )


def run_all(found, folder):
    """Runs a sweep; returns the folders of the runs that were run, and the failures."""
    ended = []
    sweep.save(found, folder)
    failed = sweep.run_all(
        found,
        folder,
        progress_of=lambda run: Silent(),
        finished=lambda run, outcome: ended.append((run.folder.name, outcome.status)),
    )
    return ended, failed


def table(folder):
    with open(folder / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_the_product_of_panels_curves_and_axes(tmp_path):
    found = make(
        tmp_path,
        panels={"one": {"num_byzantine": 1}, "two": {"num_byzantine": 2}},
        curves={"DSGD": {"aggregator": "mean", "num_byzantine": 0, "attack": "none"}, "CAF": {}},
        attack=["alie", "foe"],
        seed=[1, 2],
    )
    assert len(found.runs) == 2 * 2 * 2 * 2
    assert found.panels == ("one", "two") and found.curves == ("DSGD", "CAF")
    assert found.varied == ("num_byzantine", "attack", "aggregator", "seed")
    # The seed varies slowest.
    assert [run.config.seed for run in found.runs] == [1] * 8 + [2] * 8
    # The curve wins over panel and axis: the baseline is the same run in both panels and for both attacks.
    baselines = [run for run in found.runs if run.curve == "DSGD"]
    assert {run.config.attack for run in baselines} == {"none"}
    assert len({run.folder for run in baselines}) == 2
    assert len(found.distinct()) == 2 + 8
    assert [run.folder for run in found.distinct()] == list(dict.fromkeys(run.folder for run in found.runs))
    with pytest.raises(UserError, match="attack is an axis, and panels set it too"):
        make(tmp_path, panels={"one": {"attack": "zero"}}, attack=["alie"])


def test_folders_are_named_by_what_decides_results():
    a = Config(seed=3)
    assert sweep.folder_name(a) == sweep.folder_name(Config(seed=3, workdir="elsewhere", checkpoint_every=7))
    others = [
        {"seed": 3},
        {"seed": 4},
        {"rounds": 7},
        {"alpha": 0.1},
        {"noise_mode": "projected"},
        {"eval_every": 2},
    ]
    names = {sweep.folder_name(Config(**settings)) for settings in others}
    assert len(names) == 6


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("aggregator", "'aggregator' is not an axis"),
        ("=1,2", "'=1,2' is not an axis"),
        ("seed=", "'seed=' has no values, so there is nothing to run"),
        ("seed=,", "has no values"),
        ("foo=", "'foo' is not a setting"),
        ("agregator=caf", "'agregator' is not a setting: did you mean aggregator?"),
        ("seed=1,x", "seed='x' must be a whole number."),
        ("aggregator=caf,kaf", "aggregator='kaf' is not known: choose one of mean, caf"),
        ("seed=1,2,1", "has a value twice"),
        ("workdir=a,b", "varies workdir, which changes no result"),
    ],
)
def test_a_wrong_axis_is_refused(text, sentence):
    with pytest.raises(UserError, match="^[^\n]*$") as error:
        sweep.parse_axis(text)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("dataset=mnist", "is not a panel: write"),
        ("label:", "is not a panel: write"),
        (": seed=1", "is not a panel: write"),
        ("label: mnist", "'mnist' is not name=value"),
        ("label: sed=1", "'sed' is not a setting: did you mean seed?"),
        ("label: data_dir=x", "changes no result"),
    ],
)
def test_a_wrong_panel_is_refused(text, sentence):
    with pytest.raises(UserError, match="^[^\n]*$") as error:
        sweep.parse_variant(text, "panel")
    assert sentence in str(error.value)


def test_variants():
    assert sweep.parse_variants(["a: secret_graph=regular:4", "b: seed=2"], "curve") == {
        "a": {"secret_graph": "regular:4"},
        "b": {"seed": 2},
    }
    with pytest.raises(UserError, match="There are two of --curve='a'"):
        sweep.parse_variants(["a: seed=1", "a: seed=2"], "curve")


def test_an_empty_sweep_is_refused(tmp_path):
    with pytest.raises(UserError, match="Nothing varies in this sweep"):
        make(tmp_path)


def test_a_combination_that_is_not_allowed_is_named_before_anything_runs(tmp_path):
    with pytest.raises(UserError, match=r"cannot run \[big, num_byzantine=3\]: num_byzantine=3 is too many"):
        make(tmp_path, panels={"big": {"rounds": 4}}, num_byzantine=[1, 3])


def test_a_sweep_is_run_once_and_grows(tmp_path):
    folder = tmp_path / "sweep"
    ended, failed = run_all(make(tmp_path, aggregator=["caf", "median"], seed=[1]), folder)
    assert [status for _, status in ended] == ["done", "done"] and not failed
    again, _ = run_all(make(tmp_path, aggregator=["caf", "median"], seed=[1]), folder)
    assert again == []
    grown = make(tmp_path, aggregator=["caf", "median"], seed=[1, 2])
    more, _ = run_all(grown, folder)
    assert len(more) == 2 and not set(more) & set(ended)

    rows = table(folder)
    assert [row["status"] for row in rows] == ["done"] * 4
    assert [(row["aggregator"], row["seed"]) for row in rows] == [
        ("caf", "1"), ("median", "1"), ("caf", "2"), ("median", "2")]  # fmt: skip
    for row, run in zip(rows, grown.runs, strict=True):
        summary = json.loads((run.folder / "summary.json").read_text())
        assert float(row["final_accuracy"]) == summary["final_accuracy"]
        assert row["params_sha256"] == summary["params_sha256"]
    with pytest.raises(UserError, match="holds a sweep with 3 runs that this one does not have"):
        sweep.save(make(tmp_path, aggregator=["caf"], seed=[1]), folder)
    assert sweep.load(folder) == grown
    # A run of a sweep is the run that the same settings are alone.
    alone = experiment.run(
        Config(**BASE | {"aggregator": "caf", "seed": 2, "workdir": str(tmp_path / "alone")})
    )
    assert alone.params_sha256 == rows[2]["params_sha256"]
    assert sweep.load(folder) == grown


def test_a_killed_sweep_goes_on(tmp_path):
    found, folder = make(tmp_path, seed=[1, 2, 3]), tmp_path / "sweep"
    sweep.save(found, folder)

    class Killed(Silent):
        def update(self, round, **values):
            if round == 2:
                raise KeyboardInterrupt

    def progress_of(run):
        return Killed() if run.config.seed == 2 else Silent()

    with pytest.raises(KeyboardInterrupt):
        sweep.run_all(found, folder, progress_of=progress_of, finished=lambda *_: None)
    assert [sweep.outcome(run).status for run in found.runs] == ["done", "unfinished", "missing"]
    ended, failed = run_all(found, folder)
    assert [name for name, _ in ended] == [run.folder.name for run in found.runs[1:]] and not failed


def test_a_failed_run_does_not_stop_the_rest(tmp_path, monkeypatch):
    found, folder = make(tmp_path, seed=[1, 2, 3, 4]), tmp_path / "sweep"
    real = experiment.build

    def build(config, **options):
        if config.seed == 1:
            raise UserError("the first is wrong.")
        if config.seed == 3:
            raise RuntimeError("out of memory\nand more")
        return real(config, **options)

    monkeypatch.setattr(experiment, "build", build)
    ended, failed = run_all(found, folder)
    assert [status for _, status in ended] == ["failed", "done", "failed", "done"]
    first, third = found.runs[0].folder.name, found.runs[2].folder.name
    assert failed[first] == "the first is wrong."
    trace = f"failure_{third}.txt"
    assert failed[third] == f"RuntimeError: out of memory (the whole trace: {trace})"
    assert "Traceback" in (folder / trace).read_text()
    assert [row["status"] for row in table(folder)] == ["failed", "done", "failed", "done"]
    assert table(folder)[0]["error"] == "the first is wrong."

    # They are tried again, and forgotten when they are done.
    monkeypatch.setattr(experiment, "build", real)
    ended, failed = run_all(found, folder)
    assert [status for _, status in ended] == ["done", "done"] and not failed
    assert [row["status"] for row in table(folder)] == ["done"] * 4
    assert not (folder / trace).exists()


def test_a_run_in_another_process_is_left_to_it(tmp_path):
    found, folder = make(tmp_path, seed=[1, 2]), tmp_path / "sweep"
    with Workdir(found.runs[0].folder, found.runs[0].config):
        ended, failed = run_all(found, folder)
    assert [status for _, status in ended] == ["elsewhere", "done"] and not failed
    assert [row["status"] for row in table(folder)] == ["missing", "done"]


def test_runs_of_another_process_are_looked_at_once_more(tmp_path):
    """It may have been stopped before they were done."""
    found, folder = make(tmp_path, seed=[1, 2, 3]), tmp_path / "sweep"
    first, second, third = found.runs
    ended = []
    with contextlib.ExitStack() as others:
        for run in (first, second):
            others.enter_context(Workdir(run.folder, run.config))

        def finished(run, outcome):
            ended.append((run.config.seed, outcome.status))
            if run == third:
                others.close()
                experiment.run(second.config)

        sweep.save(found, folder)
        failed = sweep.run_all(found, folder, progress_of=lambda run: Silent(), finished=finished)
    assert ended == [(1, "elsewhere"), (2, "elsewhere"), (3, "done"), (1, "done")] and not failed
    assert [row["status"] for row in table(folder)] == ["done"] * 3


def test_the_script_names_the_runs_of_another_process(tmp_path, monkeypatch, capsys):
    from scripts import sweep as script

    monkeypatch.setattr(experiment, "cache_compilations", lambda config: None)
    found = make(tmp_path, seed=[1, 2])
    arguments = [f"--{name}={value}" for name, value in BASE.items()]
    arguments += ["--sweep=seed=1,2", f"--pool={tmp_path / 'pool'}", f"--sweep_dir={tmp_path / 'sweep'}"]
    run = found.runs[0]
    with Workdir(run.folder, run.config):
        assert script.main(["scripts/sweep.py", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].startswith("1 of 2 runs are done")
    assert lines[-2] == (
        f"still running in another process: {run.folder.name}; when that has ended, give the command again"
    )
    assert script.main(["scripts/sweep.py", *arguments]) == 0
    out = capsys.readouterr().out
    assert "2 of 2 runs are done" in out and "another process" not in out


@pytest.mark.parametrize("tensorboard", ["on", "off"])
def test_finished_runs_get_event_files_if_they_are_wanted_later(tmp_path, tensorboard):
    pytest.importorskip("tensorboardX")
    folder = tmp_path / "sweep"
    run_all(make(tmp_path, seed=[1]), folder)
    found = make(tmp_path, seed=[1], base={"tensorboard": tensorboard})
    events = found.runs[0].folder / "tensorboard"
    assert not events.exists()
    assert run_all(found, folder) == ([], {})
    assert events.exists() == (tensorboard == "on")
    if tensorboard == "on":
        assert {step for _, step in scalars(events)} == {1, 2, 3}
        # In use, or damaged: the results stay what they are.
        with Workdir(found.runs[0].folder, found.runs[0].config):
            assert run_all(found, folder) == ([], {})
        (found.runs[0].folder / "weights.npy").unlink()
        ended, failed = run_all(found, folder)
        assert ended == [] and "weights.npy cannot be read" in failed[found.runs[0].folder.name]
        assert [row["status"] for row in table(folder)] == ["done"]


def test_a_baseline_is_one_row_of_a_panel(tmp_path):
    found = make(
        tmp_path,
        panels={"one": {"rounds": 3}, "two": {"rounds": 2}},
        curves={"DSGD": {"aggregator": "mean", "num_byzantine": 0, "attack": "none"}, "CAF": {}},
        attack=["alie", "foe"],
    )
    sweep.save(found, tmp_path / "sweep")
    sweep.write_table(found, tmp_path / "sweep")
    rows = [(row["panel"], row["curve"], row["attack"]) for row in table(tmp_path / "sweep")]
    assert sorted(rows) == sorted(
        (panel, *of) for panel in ("one", "two") for of in (("DSGD", "none"), ("CAF", "alie"), ("CAF", "foe"))
    )


def test_damaged_runs_are_failures_with_a_sentence(tmp_path):
    found, folder = make(tmp_path, seed=[1, 2, 3]), tmp_path / "sweep"
    run_all(found, folder)
    (found.runs[0].folder / "summary.json").write_text("{")
    (found.runs[1].folder / "config.json").write_text('{"config": {"sed": 1}}')
    for run in found.runs[:2]:
        status, summary, error = sweep.outcome(run)
        assert status == "failed" and summary is None and "delete it to run it again" in error
    ended, failed = run_all(found, folder)
    assert set(failed) == {run.folder.name for run in found.runs[:2]}
    assert sweep.outcome(found.runs[2]).status == "done"


def test_a_folder_that_holds_another_run_is_no_result(tmp_path):
    found, folder = make(tmp_path, seed=[1, 2]), tmp_path / "sweep"
    run_all(found, folder)
    one, two = (run.folder for run in found.runs)
    os.rename(one, tmp_path / "kept")
    os.rename(two, one)
    assert sweep.outcome(found.runs[0]).status == "failed"
    assert "another seed" in sweep.outcome(found.runs[0]).error


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"name": 1', '{"pool": "x", "runs": [{}]}', '{"pool": 3}']
)
def test_a_damaged_sweep_is_refused(tmp_path, content):
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(UserError, match=r"sweep\.json is damaged .* the command of the sweep makes it anew"):
        sweep.load(tmp_path)
    found = make(tmp_path, seed=[1])
    sweep.save(found, tmp_path)
    assert sweep.load(tmp_path) == found


def test_foreign_folders_are_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        sweep.load(tmp_path / "nowhere")
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="holds no sweep"):
        sweep.load(tmp_path)
    with pytest.raises(UserError, match="holds other files and no sweep"):
        sweep.save(make(tmp_path, seed=[1]), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_moved_sweep_finds_its_pool(tmp_path):
    before = tmp_path / "before"
    before.mkdir()
    found = make(before, seed=[1])
    run_all(found, before / "sweep")
    before.rename(tmp_path / "after")
    loaded = sweep.load(tmp_path / "after" / "sweep")
    assert [sweep.outcome(run).status for run in loaded.runs] == ["done"]


def test_the_estimate_grows_with_the_work_and_learns(tmp_path):
    base = Config()
    seconds = sweep.estimated_seconds
    assert seconds(Config(rounds=60)) == pytest.approx(2 * seconds(base))
    assert seconds(Config(noise_mode="projected")) < seconds(base) / 2
    assert seconds(Config(attack="label_flip")) > seconds(base)

    def search(rule, **settings):
        """What an adaptive attack adds to a round."""
        config = Config(aggregator=rule, attack="alie_adaptive", num_byzantine=5, **settings)
        fixed = dataclasses.replace(config, attack="alie")
        return (seconds(config) - seconds(fixed)) / config.rounds

    # Of a linear rule an evaluation knows nothing of the dimension; others are called for each, on a sample.
    assert 0 < search("caf") < 1 and search("caf") < search("median", num_workers=100)
    numbers = 100 * (60 * 2**14 + 3 * 431_080)
    assert search("median", num_workers=100) == pytest.approx(numbers * 8.5e-9)
    assert search("median", num_workers=64) < search("median", num_workers=65) / 5  # written out, a loop
    assert search("mean", pre_aggregator="nnm") == search("caf")
    assert search("smea", num_workers=15) > search("caf", num_workers=15)
    found, folder = make(tmp_path, seed=[1, 2]), tmp_path / "sweep"
    before, factor = sweep.estimate(found)
    assert factor == 1 and before > 0
    run_all(make(tmp_path, seed=[1]), folder)
    took = json.loads((found.runs[0].folder / "summary.json").read_text())["seconds"]
    after, factor = sweep.estimate(found)
    assert factor == pytest.approx(took / seconds(found.runs[0].config))
    run_all(found, folder)
    assert sweep.estimate(found)[0] == 0


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[1] / "configs" / "sweeps").glob("*.cfg")))
def test_every_sweep_file_can_be_run(file, capsys, monkeypatch, tmp_path):
    from scripts import sweep as script

    monkeypatch.chdir(tmp_path)
    assert script.main(["scripts/sweep.py", f"--flagfile={file}", "--list"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"sweep {file.stem}: ")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--sweep=seed=1,2", "--aggregatr=caf"], "aggregatr"),
        ([], "Nothing varies in this sweep"),
        (["--sweep=foo=1"], "'foo' is not a setting"),
        (["--panel=a: rounds=3", "--rounds=4"], "--rounds is given, and panels set it too"),
        (["--sweep=num_byzantine=1,200"], "cannot run [num_byzantine=200]: num_byzantine=200 is too many"),
    ],
)
def test_the_script_says_what_is_wrong(arguments, sentence, tmp_path, capfd):
    """The first in a process of its own."""
    from scripts import sweep as script

    command = ["scripts/sweep.py", *arguments, f"--sweep_dir={tmp_path / 'x'}"]
    if "--aggregatr=caf" in arguments:
        folder = Path(__file__).parents[1]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=folder)
        status, out, err = done.returncode, done.stdout, done.stderr
    else:
        status = cli.status(lambda: script.main(command))
        out, err = capfd.readouterr()
    assert status == 2 and not out
    assert err.startswith("error: ") and err.count("\n") == 1 and sentence in err
    assert not any(tmp_path.iterdir())


def test_the_name_comes_from_the_flagfile(tmp_path):
    from scripts import sweep as script

    file = tmp_path / "mine.cfg"
    file.write_text("--sweep=seed=1,2\n")
    for arguments in ([f"--flagfile={file}"], ["--flagfile", str(file)]):
        values = script.read_flags(["scripts/sweep.py", *arguments])
        found, folder = script.describe_sweep(values, ["scripts/sweep.py", *arguments])
        assert found.name == "mine" and folder == Path("runs/mine")
