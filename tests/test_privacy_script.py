"""`scripts/privacy.py` and `cafcor_jax.planner`: what is shown is what the library says."""

import dataclasses
import importlib
import inspect
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cafcor_jax import cli, data, planner, privacy
from cafcor_jax.config import Config
from cafcor_jax.data import synthetic
from cafcor_jax.errors import UserError

ROOT = Path(__file__).parents[1]
MNIST = {
    "epsilon": 26.4, "delta": 1e-4, "num_workers": 100, "num_byzantine": 10, "rounds": 30, "clip_norm": 2.25,
}  # fmt: skip
SMALL = {"num_workers": 9, "num_byzantine": 2, "rounds": 5, "epsilon": 3.0, "delta": 1e-5, "clip_norm": 1.0}
EXAMPLE = SMALL | {"privacy_level": "example", "batch_size": 20}


@pytest.fixture(scope="module")
def script():
    return importlib.import_module("scripts.privacy")


@pytest.fixture
def call(script, capsys, monkeypatch):
    """Runs the script in this process: its status, what it printed, and its errors. No data may be loaded."""

    def refuse(*arguments, **options):
        raise AssertionError("a dataset was loaded")

    for owner, name in ((data, "load"), (synthetic, "generate")):
        monkeypatch.setattr(owner, name, refuse)

    def run(*arguments, **settings):
        flags = [f"--{name}={value}" for name, value in settings.items()]
        argv = ["privacy.py", *flags, *map(str, arguments)]
        status = cli.status(lambda: script.main(argv))
        return status, *capsys.readouterr()

    return run


def section(out, title):
    """The lines below the title, as lists of words."""
    part = next(part for part in out.split("\n\n") if part.startswith(title))
    return [line.split() for line in part.splitlines()[1:]]


def row(out, title, name):
    return next(words for words in section(out, title) if words[0] == name)


def shown(*numbers):
    return [f"{number:.5g}" for number in numbers]


def noise(plan):
    return shown(plan.sigma_ind, plan.sigma_cor, plan.message_std, plan.honest_mean_std)


def rejected(outcome, *words):
    """The script failed with one sentence that has these words."""
    status, out, err = outcome
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.endswith((".\n", "?\n")) and err.count("\n") == 1
    for word in words:
        assert word in err


def test_the_printed_numbers_are_the_librarys(call):
    status, out, err = call(f"--flagfile={ROOT}/configs/mnist_byzldp.cfg")
    assert (status, err) == (0, "")
    plans = {model: privacy.calibrate(threat_model=model, **MNIST) for model in planner.THREAT_MODELS}
    for model, name in planner.THREAT_MODELS.items():
        words = [word for word in row(out, "Noise under each threat model", name) if word != "(chosen)"]
        ind, cor, message, mean = noise(plans[model])
        assert words[1:4] == [ind, cor, message] and words[6] == mean
        for place, what in ((4, "message_std"), (7, "honest_mean_std")):
            for offset, other in enumerate(("cdp", "ldp")):
                ratio = getattr(plans[model], what) / getattr(plans[other], what)
                assert words[place + offset] == f"{ratio:.3f}"
    assert "ByzLDP (chosen)" in out and out.count("(chosen)") == 1

    chosen = plans["byzldp"]
    assert out.startswith(chosen.describe() + "\n\n")
    paper = privacy.calibrate(threat_model="byzldp", accountant="paper", **MNIST)
    for name in privacy.ACCOUNTANTS:
        plan = privacy.calibrate(threat_model="byzldp", accountant=name, **MNIST)
        ratio = f"{plan.sigma_cor / paper.sigma_cor:.4f}"
        spent = shown(privacy.epsilon(chosen, name))
        assert row(out, "Accountants", name) == [name, *spent, *noise(plan), ratio]

    for split in privacy.SPLITS:
        plan = privacy.calibrate(threat_model="byzldp", split=split, **MNIST)
        words = row(out, "ByzLDP with q = 10", split)
        ind, cor, message, mean = noise(plan)
        over = [f"{getattr(plan, x) / getattr(chosen, x):.3f}" for x in ("message_std", "honest_mean_std")]
        assert words[1:7] == [ind, cor, message, over[0], mean, over[1]]

    assert [words[0] for words in section(out, "Dropouts")[1:4]] == ["0", "1", "10"]
    for count in (1, 10):
        left = 90 - count
        std = math.sqrt(((10 + count) * chosen.sigma_cor**2 + chosen.sigma_ind**2) / left)
        ratio = f"{std / chosen.honest_mean_std:.3f}"
        assert row(out, "Dropouts", str(count)) == [str(count), *shown(std), ratio]
    assert "Privacy holds" in out and "Secret graph" not in out and "Example level" not in out


def test_ratios_have_their_closed_forms():
    n, f = 31, 6
    of = planner.setting(Config(num_workers=n, num_byzantine=f))
    rows = {row["threat_model"]: row for row in planner.threat_models(of)}
    assert rows["cdp"]["mean_over_ldp"] == pytest.approx(1 / math.sqrt(n), rel=1e-9)
    # From the lemma: sigma_cor^2 = sigma_ldp^2 (1 + 1/f) / n, and 2 sigma_ldp^2 / (n - f + 1).
    assert rows["secldp"]["mean_over_ldp"] == pytest.approx(math.sqrt((f + 1) / n), rel=1e-9)
    assert rows["byzldp"]["mean_over_ldp"] == pytest.approx(math.sqrt(2 * (f + 1) / (n - f + 1)), rel=1e-9)
    accountants = {row["accountant"]: row for row in planner.accountants(of)}
    assert accountants["exact"]["over_paper"] < accountants["rdp"]["over_paper"] < 1


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"threat_model": "cdp", "accountant": "exact"},
        {"num_colluding": 1, "noise_split": "robust"},
        {"threat_model": "secldp", "secret_graph": "regular:4", "seed": 5},
        {"privacy_level": "example", "batch_size": 20},
        {"privacy_level": "example", "batch_size": 20, "sampling": "poisson", "threat_model": "ldp"},
    ],
    ids=str,
)
def test_settings_reach_the_plan(settings):
    cfg = Config(**SMALL, **settings)
    example = cfg.privacy_level == "example"
    plan = planner.calibrate(planner.setting(cfg, 300 if example else None))
    correlated = cfg.threat_model in ("secldp", "byzldp") and cfg.secret_graph != "complete"
    assert plan == privacy.calibrate(
        threat_model=cfg.threat_model,
        **SMALL,
        num_colluding=cfg.num_colluding,
        accountant=cfg.accountant,
        level=cfg.privacy_level,
        batch_size=cfg.batch_size,
        samples_per_worker=300 if example else None,
        sampling=cfg.sampling if example else None,
        split=cfg.noise_split,
        graph=privacy.graphs.parse(cfg.secret_graph, cfg.num_workers, cfg.seed) if correlated else None,
    )


def test_flags_win_over_the_flagfile_wherever_they_stand(call):
    status, out, _ = call("--epsilon=7", f"--flagfile={ROOT}/configs/fashion_secldp.cfg", "--rounds=3")
    assert status == 0 and "SecLDP (chosen)" in out
    settings = MNIST | {"epsilon": 7, "rounds": 3, "clip_norm": 1.0}
    assert noise(privacy.calibrate(threat_model="secldp", **settings))[1] in out


def test_an_impossible_threat_model_says_why_and_the_rest_goes_on(call, tmp_path):
    status, out, _ = call(num_byzantine=0, json=tmp_path / "plan.json")
    assert status == 0
    # No attack was asked for, so f = 0 needs no other flag.
    why = "num_byzantine must be at least 1 under 'secldp', got 0:"
    assert f"SecLDP           {why}" in out
    plan = privacy.calibrate(threat_model="byzldp", **MNIST | {"num_byzantine": 0})
    assert row(out, "Noise under", "ByzLDP")[2:5] == noise(plan)[:3]
    rows = {
        row["threat_model"]: row for row in json.loads((tmp_path / "plan.json").read_text())["threat_models"]
    }
    assert rows["secldp"]["why"].startswith(why) and "plan" not in rows["secldp"]
    assert all("why" not in row for model, row in rows.items() if model != "secldp")
    assert "f = 0" not in out.split("Dropouts")[1]
    rejected(call(num_byzantine=0, threat_model="secldp"), "num_byzantine=0", "'secldp'")


def test_a_graph_in_pieces_leaves_secldp_out_only(call, tmp_path):
    two_triangles = np.kron(np.eye(2), 1 - np.eye(3))
    np.savetxt(tmp_path / "two.csv", two_triangles, delimiter=",")
    status, out, _ = call(num_workers=6, num_byzantine=1, secret_graph=tmp_path / "two.csv")
    assert status == 0
    assert "sigma_ind is 0, and on this given graph" in out.split("ByzLDP (chosen)")[0]
    assert "Given graph, 6 pairs, 2 a worker: 40.0% of all 15 pairs." in out


@pytest.mark.parametrize(
    "graph, how",
    [("ring", "exact for the worst colluders."), ("regular:4", "(all sets were looked at)")],
)
def test_the_secret_graph_against_the_complete_one(call, graph, how):
    status, out, _ = call(**SMALL, secret_graph=graph, seed=3)
    assert status == 0 and how in " ".join(out.split())
    secrets = privacy.graphs.parse(graph, 9, 3)
    sparse = privacy.calibrate(threat_model="byzldp", graph=secrets, **SMALL)
    complete = privacy.calibrate(threat_model="byzldp", **SMALL)
    ratio = sparse.honest_mean_std / complete.honest_mean_std
    words = row(out, "Secret graph", "this")
    assert words[2:5] == noise(sparse)[:3] and words[6:] == [noise(sparse)[3], f"{ratio:.3f}"]
    assert ratio > 1 and row(out, "Secret graph", "complete")[2:5] == noise(complete)[:3]
    assert (
        row(out, "ByzLDP with q = 2", "robust")[1:3]
        == noise(privacy.calibrate(threat_model="byzldp", graph=secrets, split="robust", **SMALL))[:2]
    )
    assert "at most what is shown" in " ".join(out.split())


def test_under_cdp_dropouts_cost_privacy(call):
    status, out, _ = call(threat_model="cdp", num_byzantine=4)
    assert status == 0 and "Privacy suffers" in out and "Privacy holds" not in out
    plan = privacy.calibrate(threat_model="cdp", **MNIST | {"num_byzantine": 4})
    for count in (1, 4, 10):
        # The same noise a worker, and that many workers fewer.
        left = dataclasses.replace(plan, num_workers=100 - count)
        assert row(out, "Dropouts", str(count))[-1] == shown(privacy.epsilon(left))[0]
    assert privacy.epsilon(left) > 1.05 * plan.epsilon


def test_one_honest_worker_cannot_vanish(call):
    status, out, _ = call(num_workers=1, num_byzantine=0, epsilon=1)
    assert status == 0 and "nobody can vanish" in out


def test_example_level_shows_both_samplings(call, tmp_path):
    file = tmp_path / "plan.json"
    status, out, _ = call(**EXAMPLE, samples_per_worker=300, json=file)
    assert status == 0 and "Only 'rdp' covers the example level" in out
    settings = SMALL | {
        "level": "example",
        "batch_size": 20,
        "samples_per_worker": 300,
        "threat_model": "byzldp",
    }
    found = json.loads(file.read_text())
    for sampling in privacy.SAMPLINGS[1:]:
        plan = privacy.calibrate(sampling=sampling, **settings)
        assert row(out, "Example level", sampling)[-5:] == [*shown(plan.sensitivity), *noise(plan)]
    poisson = planner.samplings(planner.setting(Config(**EXAMPLE), 300))[1]["plan"]
    assert poisson == plan
    # PLD is tighter than rdp; that it is not too small, the next test shows.
    assert 0.5 * SMALL["epsilon"] < found["pld_epsilon"] < SMALL["epsilon"]
    assert f"epsilon = {found['pld_epsilon']:.5g}, rdp 3;" in " ".join(out.split())


def test_pld_of_full_batches_is_the_exact_gaussian():
    plan = privacy.calibrate(
        threat_model="byzldp",
        level="example",
        sampling="poisson",
        batch_size=50,
        samples_per_worker=50,
        **SMALL,
    )
    exact = privacy.gaussian_epsilon(math.sqrt(2 * plan.rounds * plan.step_divergence), plan.delta)
    assert planner.pld_epsilon(plan) == pytest.approx(float(exact), rel=2e-4)
    with pytest.raises(UserError, match="Poisson sampling only"):
        planner.pld_epsilon(dataclasses.replace(plan, sampling="without_replacement"))


def test_a_missing_dp_accounting_is_said(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    status, out, _ = call(**EXAMPLE, samples_per_worker=300, partition="dirichlet")
    assert status == 0 and "the package dp-accounting is not installed" in " ".join(out.split())
    assert "give its number as --samples_per_worker" in " ".join(out.split())


def test_the_number_of_examples_is_the_datasets_share():
    assert set(planner.TRAINING_SIZES) == set(data.NAMES)
    size = inspect.signature(synthetic.generate).parameters["num_train"].default
    assert planner.TRAINING_SIZES["synthetic"] == size
    labels = np.arange(size) % 10
    for partition in ("homogeneous", "extreme"):
        parts = data.partition(labels, 7, kind=partition, seed=0)
        cfg = Config(**EXAMPLE, dataset="synthetic", partition=partition)
        assert planner.setting(cfg).samples_per_worker == min(map(len, parts))


def plans_in(value):
    """All plans of a report, wherever they stand."""
    if isinstance(value, dict):
        if "sigma_ind" in value and "accountant" in value and "threat_model" in value:
            yield value
        for item in value.values():
            yield from plans_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from plans_in(item)


def test_json_holds_everything_and_comes_back(call, tmp_path):
    file = tmp_path / "new" / "plan.json"
    status, out, _ = call(**SMALL, secret_graph="ring", accountant="exact", json=file)
    assert status == 0 and f"Written: {file}" in out
    found = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert Config.from_dict(found["config"]) == Config(
        **SMALL, secret_graph="ring", accountant="exact", attack="none"
    )
    assert f"--json={file}" in found["command"]
    plans = [privacy.PrivacyPlan.from_dict(plan) for plan in plans_in(found)]
    assert len(plans) == 1 + len(planner.THREAT_MODELS) + len(privacy.SPLITS)
    for plan in plans:
        assert privacy.epsilon(plan) == pytest.approx(3.0, rel=1e-5)
    assert privacy.PrivacyPlan.from_dict(found["plan"]) == privacy.calibrate(
        threat_model="byzldp", accountant="exact", graph=privacy.graphs.ring(9), batch_size=50, **SMALL
    )
    for part in found["threat_models"] + found["splits"]:
        if "plan" in part:
            plan = privacy.PrivacyPlan.from_dict(part["plan"])
            assert (part["mean"], part["message"]) == (plan.honest_mean_std, plan.message_std)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"num_byzantine": 60}, ["num_byzantine=60", "at most 49"]),
        ({"epsilon": 0}, ["epsilon=0", "greater than 0"]),
        ({"epsilon": "lots"}, ["--epsilon=lots", "a number"]),
        ({"delta": 1}, ["delta=1", "between 0 and 1"]),
        ({"threat_model": "none"}, ["threat_model='none'", "ldp, cdp, secldp, byzldp"]),
        ({"num_colluding": 11}, ["num_colluding=11", "at most 10"]),
        ({"num_byzantine": 0, "attack": "alie"}, ["attack='alie'"]),
        ({"secret_graph": "star"}, ["secret_graph='star'", "regular:DEGREE"]),
        ({"secret_graph": "regular:200"}, ["degree 200", "at most 99"]),
        (
            {"secret_graph": "ring", "threat_model": "secldp", "num_workers": 5, "num_byzantine": 0},
            ["at least 1"],
        ),
        ({"samples_per_worker": 600}, ["samples_per_worker=600", "privacy_level='example'"]),
        ({"privacy_level": "example", "samples_per_worker": 0}, ["samples_per_worker=0"]),
        ({"privacy_level": "example", "samples_per_worker": 49}, ["samples_per_worker=49", "50"]),
        ({"privacy_level": "example", "batch_size": 667}, ["batch_size=667", "666", "'mnist'"]),
        ({"privacy_level": "example", "accountant": "exact"}, ["accountant='exact'", "'rdp'"]),
        ({"flagfile": "no/such.cfg"}, ["'no/such.cfg' does not exist"]),
        ({"flagfile": f"{ROOT}/configs/mnist_dsgd.cfg"}, ["threat_model='none'"]),
        ({"paper_tabel": "yes"}, ["Unknown command line flag 'paper_tabel'"]),
    ],
    ids=str,
)
def test_bad_input_is_one_sentence_and_nothing_is_written(call, tmp_path, settings, words):
    rejected(call(**settings, json=tmp_path / "x" / "plan.json", plots=tmp_path / "plots"), *words)
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written_it_is_said(call, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    rejected(call(**SMALL, json=tmp_path), str(tmp_path), "cannot be written: Is a directory")
    rejected(call(**SMALL, json=file / "plan.json"), "cannot be written")
    rejected(call(**SMALL, plots=file, json=tmp_path / "plan.json"), str(file), "cannot be written")
    rejected(call(**SMALL, json=""), "--json is empty")
    assert list(tmp_path.iterdir()) == [file] and file.read_text() == "mine"


def test_pictures_are_made_of_the_librarys_numbers(call, script, tmp_path):
    status, out, _ = call(**SMALL, plots=tmp_path / "plots", num_colluding=1)
    names = {f"noise_over_{x}.png" for x in ("epsilon", "q", "f")}
    assert status == 0 and {path.name for path in (tmp_path / "plots").iterdir()} == names
    for path in (tmp_path / "plots").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG") and str(path) in out
    of = planner.setting(Config(**SMALL, num_colluding=1))
    pictures, notes = script.figures(of)
    assert set(pictures) == names and notes == []
    sweeps = {"epsilon": planner.over_epsilon, "q": planner.over_colluding, "f": planner.over_byzantine}
    for name, sweep in sweeps.items():
        curves = sweep(of)
        axes = pictures[f"noise_over_{name}.png"].axes[0]
        lines = {line.get_label().split(" ")[0]: line for line in axes.lines if line.get_label()[0] != "_"}
        assert set(lines) == set(planner.THREAT_MODELS.values())
        assert axes.get_yscale() == "log" and len({line.get_color() for line in lines.values()}) == 4
        for model, label in planner.THREAT_MODELS.items():
            np.testing.assert_array_equal(lines[label].get_xdata(), curves.x)
            np.testing.assert_array_equal(lines[label].get_ydata(), curves.mean[model])
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_a_picture_of_one_point_is_not_made(call, tmp_path):
    status, out, _ = call(num_workers=2, num_byzantine=0, epsilon=1, plots=tmp_path)
    assert status == 0 and [path.name for path in tmp_path.iterdir()] == ["noise_over_epsilon.png"]
    assert out.count("No picture over") == 2


@pytest.mark.parametrize("example", [False, True], ids=["user", "example"])
def test_curves_are_calibrated_plans(example):
    of = planner.setting(
        Config(**EXAMPLE if example else SMALL | {"accountant": "exact"}), 300 if example else None
    )

    def mean(model, **changes):
        return planner.calibrate(of, threat_model=model, **changes).honest_mean_std

    curves = planner.over_colluding(of)
    assert curves.x.tolist() == [0, 1, 2]
    for model in planner.THREAT_MODELS:
        for q in (0, 2) if example else (0, 1, 2):  # At the example level a calibration takes half a second.
            expected = mean(model, num_colluding=q if model == "byzldp" else None)
            assert curves.mean[model][q] == pytest.approx(expected, rel=1e-7)
    assert curves.mean["byzldp"][2] > 1.05 * curves.mean["byzldp"][0]

    curves = planner.over_byzantine(of)
    assert curves.x.tolist() == [0, 1, 2, 3, 4] and math.isnan(curves.mean["secldp"][0])
    for model in ("secldp", "byzldp", "cdp"):
        assert curves.mean[model][3] == pytest.approx(mean(model, num_byzantine=3), rel=1e-7)

    curves = planner.over_epsilon(of, points=3)
    assert curves.x[[0, 2]] == pytest.approx([3.0 / 50, 3.0 * 4], rel=1e-5)
    for model in ("ldp", "byzldp"):
        assert curves.mean[model][1] == pytest.approx(mean(model, epsilon=float(curves.x[1])), rel=1e-5)


def test_the_papers_table(call, tmp_path):
    status, out, _ = call("--paper_table", json=tmp_path / "table.json")
    assert status == 0
    rows = json.loads((tmp_path / "table.json").read_text())["paper_table"]
    table = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line[:2] == "| "
    ]
    assert len(rows) == 16 and len(table) == 2 + 16 and len({len(line) for line in table}) == 1
    for line, found in zip(table[2:], rows, strict=True):
        assert line[1] == planner.THREAT_MODELS[found["threat_model"]]
        assert line[2:5] == [f"{found['sigma'][name]:.4f}" for name in ("paper", "rdp", "exact")]
        assert line[5:8] == [f"{found['mean'][name]:.4f}" for name in ("paper", "rdp", "exact")]
        assert found["sigma"]["exact"] < found["sigma"]["rdp"] < found["sigma"]["paper"]
        if found["threat_model"] == "ldp":
            # epsilon = rho + 2 sqrt(rho log(1/delta)) with rho = T 2 C^2 / sigma^2, solved for sigma.
            log = math.log(1e4)
            rho = (math.sqrt(log + found["epsilon"]) - math.sqrt(log)) ** 2
            sigma = found["clip_norm"] * math.sqrt(2 * 30 / rho)
            assert found["sigma"]["paper"] == pytest.approx(sigma, rel=1e-5)
    # What the paper's budgets were made with, as far as it can be told (docs/paper_notes.md).
    secldp = [found["sigma"]["rdp"] for found in rows if found["threat_model"] == "secldp"]
    assert secldp == pytest.approx([0.6033, 0.6, 0.2088, 0.2], rel=1e-3)
    # The settings are those of the flagfiles.
    for dataset, name in (("MNIST", "mnist"), ("Fashion-MNIST", "fashion")):
        text = (ROOT / "configs" / f"{name}_byzldp.cfg").read_text()
        found = next(row for row in rows if row["dataset"] == dataset and row["num_byzantine"] == 10)
        for flag in (f"--epsilon={found['epsilon']}", f"--clip_norm={found['clip_norm']}", "--rounds=30"):
            assert f"{flag}\n" in text
    for flag in ("epsilon=3", f"plots={tmp_path}", "samples_per_worker=3"):
        rejected(call("--paper_table", f"--{flag}"), f"--{flag.split('=')[0]} has no effect on --paper_table")


def test_help_has_the_flags_of_the_script_and_of_training(script, capsys):
    with pytest.raises(SystemExit) as done:
        script.main(["scripts/privacy.py", "--help"])
    out = capsys.readouterr().out
    assert done.value.code == 0
    own = out.split("Of this script:")[1]
    assert all(f"  --{name}=" in own for name in ("samples_per_worker", "plots", "json", "paper_table"))
    assert "--flagfile" not in own and "  --num_byzantine=10" in out


# In a process of its own, where nothing else has used JAX.
PROGRAM = """
import runpy, sys
del sys.argv[0]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "JAX was used"
assert not {"orbax", "flax", "tensorflow_datasets", "matplotlib.pyplot"} & set(sys.modules)
"""


def test_nothing_is_compiled_and_no_library_for_training_is_loaded(tmp_path):
    script = str(ROOT / "scripts" / "privacy.py")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM,
            script,
            f"--plots={tmp_path}",
            "--num_workers=5",
            "--num_byzantine=1",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "ByzLDP (chosen)" in done.stdout and len(list(tmp_path.iterdir())) == 3
