"""`cafcor_jax.figures`: the numbers behind the figures, and that figures show them."""

import dataclasses
import functools
import math
import sys

import matplotlib
import numpy as np
import pytest

from cafcor_jax import aggregators, figures, privacy, sweep, workdir
from cafcor_jax.errors import UserError
from cafcor_jax.experiment import Summary

BASE = {"dataset": "synthetic", "num_workers": 13, "num_byzantine": 3, "attack": "alie", "rounds": 6}
VERSIONS = {"python": "3.11.7", "jax": "0.10.2", "commit": "0123456789abcdef"}


def plan(folder, *, panels=None, curves=None, axes=None, name="demo", **base):
    """A sweep and its folder, with no run done."""
    found = sweep.plan(
        name=name,
        command=f"python scripts/sweep.py --name={name}",
        pool=folder / "pool",
        base=BASE | base,
        panels=panels or {},
        curves=curves or {},
        axes=axes or {},
    )
    sweep.save(found, folder / "sweep")
    return sweep.load(folder / "sweep")


@functools.cache
def noise_of(threat_model, epsilon, **settings):
    """The plan of a run, what it spends by each accountant, and what up to each round."""
    if threat_model == "none":
        settings.pop("delta")
        noise = privacy.no_privacy(**settings)
        return noise, {}, privacy.epsilon_schedule(noise)
    noise = privacy.calibrate(threat_model=threat_model, epsilon=epsilon, **settings)
    spent = {name: privacy.epsilon(noise, accountant=name) for name in privacy.ACCOUNTANTS}
    return noise, spent, privacy.epsilon_schedule(noise)


def budget(config):
    names = ("delta", "num_workers", "num_byzantine", "rounds", "clip_norm")
    settings = {name: getattr(config, name) for name in names}
    return noise_of(config.threat_model, config.epsilon, **settings)


def begin(run, versions=None):
    """Writes what a run writes first."""
    config = run.config
    noise, spent, _ = budget(config)
    record = {
        "config": config.to_dict(),
        "plan": noise.to_dict(),
        "epsilon_by_accountant": spent,
        "dataset": {"name": config.dataset, "checksums": {}},
        "versions": versions or VERSIONS,
    }
    with workdir.Workdir(run.folder, config) as folder:
        folder.start(record, print)
        folder.resume_metrics(0)


def finish(run, accuracies, *, seconds=2.0, versions=None):
    """Writes the folder of a finished run; accuracies in percent after each round, None if not measured."""
    config = run.config
    begin(run, versions)
    _, _, spent = budget(config)
    shares = [None if value is None else value / 100 for value in accuracies]
    rows = [
        dict.fromkeys(workdir.COLUMNS, 1.0)
        | {
            "round": i + 1,
            "test_accuracy": share,
            "epsilon": float(spent[i]),
            "seconds": seconds / len(shares),
        }
        for i, share in enumerate(shares)
    ]
    measured = [share for share in shares if share is not None]
    values = {
        "rounds": config.rounds,
        "final_accuracy": measured[-1],
        "final_loss": 1.0,
        "best_accuracy": max(measured),
        "best_round": 1,
        "epsilon": float(spent[-1]),
        "delta": config.delta,
        "accountant": config.accountant,
        "seconds": seconds,
        "honest_weight": 1.0,
        "honest_share": config.num_honest / config.num_workers,
        "rounds_beyond_f": 0,
        "params_sha256": "00",
        "workdir": config.workdir,
    }
    defaults = {"int": 0, "float": 0.0, "str": ""}
    summary = Summary(
        **{f.name: values.get(f.name, defaults[str(f.type)]) for f in dataclasses.fields(Summary)}
    )
    with workdir.Workdir(run.folder, config) as folder:
        folder.append_metrics(rows)
        folder.write_json("summary.json", dataclasses.asdict(summary))


def rising(final, rounds=6):
    """An accuracy that rises to its last value."""
    return [final * (i + 1) / rounds for i in range(rounds)]


def texts(figure):
    """All words that a figure shows."""
    return [
        text.get_text()
        for text in figure.findobj(matplotlib.text.Text)
        if text.get_text() and text.get_visible()
    ]


def legend(figure):
    return [text.get_text() for box in figure.findobj(matplotlib.legend.Legend) for text in box.get_texts()]


# Styles.

PAPER = {
    "CAF": "caf",
    "SMEA": "smea",
    "CWTM": "trimmed_mean",
    "CWMED": "median",
    "GM": "geometric_median",
    "MK": "multi_krum",
    "Meamed": "meamed",
    "Mean": "mean",
}
THREATS = ["DSGD-CDP", "DSGD-LDP", "CafCor-CDP", "CafCor-LDP", "CafCor-SecLDP", "CafCor-ByzLDP"]


@pytest.mark.parametrize("family", [list(PAPER), list(PAPER.values()), THREATS])
def test_methods_of_a_figure_differ_in_colour_and_in_marker_and_in_line(family):
    found = figures.styles(family)
    assert len({style.colour for style in found.values()}) == len(family)
    assert len({style.marker for style in found.values()}) == len(family)
    solid = [style.dashes for style in found.values() if style.dashes != "--"]
    assert len(set(solid)) == len(solid)


def test_all_rules_differ():
    found = figures.styles(aggregators.BY_NAME)
    assert len(set(found.values())) == len(aggregators.BY_NAME)
    assert len({style.marker for style in found.values()}) == len(aggregators.BY_NAME)


def test_baselines_alone_are_dashed():
    found = figures.styles([*THREATS, *PAPER, *aggregators.BY_NAME, *(f"new {i}" for i in range(30))])
    assert {name for name, style in found.items() if style.dashes == "--"} == {
        "DSGD-CDP",
        "DSGD-LDP",
        "Mean",
        "mean",
    }


def test_a_method_has_one_style_under_all_its_names_and_in_all_figures():
    for paper, setting in PAPER.items():
        assert figures.styles([paper])[paper] == figures.styles(["other", setting])[setting]
    assert figures.styles(["cafcor secldp"]) == {"cafcor secldp": figures.styles(THREATS)["CafCor-SecLDP"]}
    assert figures.styles(["secldp"])["secldp"] == figures.styles(THREATS)["CafCor-SecLDP"]


def test_unknown_methods_get_their_own_style_whatever_the_order():
    names = [f"method {i}" for i in range(40)]
    found = figures.styles([*THREATS, *names])
    assert len(set(found.values())) == len(found)
    assert figures.styles([*reversed(names), *THREATS]) == found
    # Two of them with nothing else around: not even the colour is the same.
    a, b = figures.styles(names[:2]).values()
    assert a.colour != b.colour
    assert list(figures.styles(["b", "a", "b"])) == ["b", "a"]


def test_colours_are_okabe_and_itos():
    palette = {"#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#999999"}
    found = figures.styles([*THREATS, *PAPER, *aggregators.BY_NAME, *map(str, range(50))])
    assert {style.colour for style in found.values()} <= palette


# Numbers.


def test_mean_std_and_count_are_those_of_numpy(tmp_path):
    axes = {"aggregator": ["caf", "median"], "dataset": ["synthetic", "mnist"], "seed": [1, 2, 3]}
    found = plan(tmp_path, axes=axes, threat_model="cdp")
    rng = np.random.default_rng(0)
    accuracies = {run.folder: rng.uniform(10, 90, 6) for run in found.runs}
    for run in found.runs:
        finish(run, accuracies[run.folder].tolist(), seconds=6.0 * run.config.seed)
    results = figures.collect(found)
    assert [panel.label for panel in results.panels] == ["dataset = synthetic", "dataset = mnist"]
    assert results.labels == ("caf", "median") and results.curves_by == "aggregator"
    assert results.missing == 0 and results.partial() == "" and results.without_runs() == []
    for panel, dataset in zip(results.panels, axes["dataset"], strict=True):
        for curve, rule in zip(panel.curves, axes["aggregator"], strict=True):
            rows = np.array(
                [
                    accuracies[r.folder]
                    for r in found.runs
                    if (r.config.dataset, r.config.aggregator) == (dataset, rule)
                ]
            )
            assert rows.shape == (3, 6) and curve.label == rule and not curve.partial
            np.testing.assert_array_equal(curve.rounds, np.arange(1, 7))
            np.testing.assert_allclose(curve.mean, rows.mean(axis=0), rtol=1e-7)
            np.testing.assert_allclose(curve.std, rows.std(axis=0, ddof=1), rtol=1e-7)
            np.testing.assert_array_equal(curve.count, 3)
            np.testing.assert_allclose(np.sort(curve.final), np.sort(rows[:, -1]), rtol=1e-7)
            np.testing.assert_allclose(curve.seconds, 2.0 * np.arange(1, 7))
            np.testing.assert_allclose(curve.epsilon, budget(curve.runs[0].run.config)[2], rtol=1e-7)


def test_rounds_that_not_all_seeds_have_are_counted(tmp_path):
    found = plan(tmp_path, axes={"seed": [1, 2, 3]})
    finish(found.runs[0], [None, 20, None, 40, None, 60])
    finish(found.runs[1], [None, 30, None, 50, None, 80])
    finish(found.runs[2], [5, None, None, None, None, 70])
    (panel,) = figures.collect(found).panels
    (curve,) = panel.curves
    assert (panel.label, curve.label) == ("demo", "caf")
    np.testing.assert_array_equal(curve.rounds, [1, 2, 4, 6])
    np.testing.assert_array_equal(curve.count, [1, 2, 2, 3])
    np.testing.assert_allclose(curve.mean, [5, 25, 45, 70])
    np.testing.assert_allclose(curve.std, [np.nan, math.sqrt(50), math.sqrt(50), 10])


LABELS = {
    "panels": {"Few": {"num_byzantine": 2}, "Many": {"num_byzantine": 5}},
    "curves": {
        "DSGD-CDP": {"aggregator": "mean", "threat_model": "cdp", "num_byzantine": 0, "attack": "none"},
        "CafCor-SecLDP": {"threat_model": "secldp"},
    },
    "axes": {"seed": [1, 2]},
}


def test_panels_and_curves_are_the_sweeps_own_in_its_order(tmp_path):
    found = plan(tmp_path, **LABELS)
    for run in found.distinct():
        finish(run, rising(70 if run.curve == "DSGD-CDP" else 60 - run.config.num_byzantine))
    results = figures.collect(found)
    assert [panel.label for panel in results.panels] == ["Few", "Many"]
    assert results.labels == ("DSGD-CDP", "CafCor-SecLDP")
    # The baseline has no malicious workers: it is the same run in both panels, and counts once.
    assert len(results.runs) == 6 and len(found.runs) == 8
    finals = [[curve.final.tolist() for curve in panel.curves] for panel in results.panels]
    np.testing.assert_allclose(finals, [[[70, 70], [58, 58]], [[70, 70], [55, 55]]])


def test_a_mean_is_over_seeds_alone(tmp_path):
    """A setting that varies beside the labels splits panels, and never goes into a mean."""
    labels = LABELS | {"axes": {"seed": [1, 2], "attack": ["alie", "sign_flip"]}}
    found = plan(tmp_path, **labels)
    for run in found.distinct():
        finish(run, rising({"none": 80, "alie": 60, "sign_flip": 30}[run.config.attack]))
    results = figures.collect(found)
    expected = [
        f"{panel}, attack = {attack}" for panel in ("Few", "Many") for attack in ("alie", "sign_flip")
    ]
    assert [panel.label for panel in results.panels] == expected
    for panel in results.panels:
        baseline, cafcor = panel.curves
        np.testing.assert_allclose(baseline.final, [80, 80])
        np.testing.assert_allclose(cafcor.final, [60, 60] if "alie" in panel.label else [30, 30])


@pytest.mark.parametrize(
    "axes, by",
    [
        ({"seed": [1, 2], "attack": ["alie", "foe"], "threat_model": ["cdp", "ldp"]}, "threat_model"),
        ({"attack": ["alie", "foe"], "rounds": [3, 6]}, "attack"),
        ({"seed": [1, 2], "rounds": [3, 6], "momentum": [0.5, 0.9]}, "rounds"),
        ({"seed": [1, 2]}, ""),
    ],
)
def test_without_labels_curves_are_by_the_first_setting_of_interest(tmp_path, axes, by):
    found = plan(tmp_path, axes=axes)
    results = figures.collect(found)
    assert results.curves_by == by
    assert results.labels == (tuple(map(str, axes[by])) if by else ("caf",))
    others = [name for name in axes if name not in (by, "seed")]
    assert len(results.panels) == math.prod(len(axes[name]) for name in others)
    assert all(f"{name} = " in panel.label for panel in results.panels for name in others)


def test_curves_by_wins_over_labels(tmp_path):
    found = plan(tmp_path, **LABELS)
    results = figures.collect(found, "seed")
    assert results.labels == ("1", "2")
    assert all(len(curve.runs) == 1 for panel in results.panels for curve in panel.curves)


@pytest.mark.parametrize("by", ["colour", "rounds"])
def test_curves_by_something_that_does_not_vary(tmp_path, by):
    found = plan(tmp_path, axes={"attack": ["alie", "foe"], "seed": [1, 2]})
    with pytest.raises(UserError, match=f"curves_by='{by}' does not vary.*attack, seed"):
        figures.collect(found, by)


# What is missing.


def partial_sweep(folder):
    """Nine runs of three rules: caf has all seeds, median two of three, krum none."""
    found = plan(folder, axes={"aggregator": ["caf", "median", "krum"], "seed": [1, 2, 3]})
    runs = {(run.config.aggregator, run.config.seed): run for run in found.runs}
    for (rule, seed), run in runs.items():
        if rule == "caf" or (rule == "median" and seed < 3):
            finish(run, rising(50 + seed))
    begin(runs["krum", 1])
    failed = {runs["krum", 2].folder.name: "The worker's batch is too large."}
    return found, runs, failed


def test_missing_runs_are_counted_and_curves_without_runs_named(tmp_path):
    found, _, failed = partial_sweep(tmp_path)
    results = figures.collect(found, failed=failed)
    assert results.missing == 4
    assert results.partial() == "partial: 4 of 9 runs are missing (1 not finished, 1 failed)"
    assert results.without_runs() == [("demo", "krum")]
    assert [len(curve.final) for curve in results.panels[0].curves] == [3, 2, 0]
    assert [run.error for run in results.runs if run.status == "failed"] == list(failed.values())

    figure = figures.curves(results)
    assert legend(figure) == ["caf", "median (2 of 3 seeds)"]
    words = " ".join(texts(figure)).replace("\n", " ")
    assert "Partial: 4 of 9 runs are missing (1 not finished, 1 failed)." in words
    assert "Left out, no finished run: krum (demo)." in words
    assert figure.findobj(matplotlib.axes.Axes)[0].get_title() == "demo (partial)"
    assert len(figure.findobj(matplotlib.axes.Axes)[0].lines) == 2


def test_a_panel_without_any_finished_run_says_so(tmp_path):
    found = plan(
        tmp_path, axes={"dataset": ["synthetic", "mnist"], "aggregator": ["caf", "median"]}, rounds=3
    )
    finish(found.runs[0], rising(50, 3))
    figure = figures.curves(figures.collect(found))
    full, empty = figure.findobj(matplotlib.axes.Axes)
    assert [text.get_text() for text in empty.texts] == ["no finished run"] and len(empty.get_xticks()) == 0
    assert not full.texts and [tick for tick in full.get_xticks() if tick <= 3] == [0, 1, 2, 3]
    assert "median (dataset = synthetic; dataset = mnist)" in " ".join(texts(figure)).replace("\n", " ")


def test_a_whole_sweep_is_not_called_partial(tmp_path):
    found = plan(tmp_path, axes={"aggregator": ["caf", "median"], "seed": [1, 2]})
    for run in found.runs:
        finish(run, rising(50))
    figure = figures.curves(figures.collect(found))
    assert legend(figure) == ["caf", "median"]
    assert not any("artial" in text or "seeds)" in text or "Left out" in text for text in texts(figure))


def without_last_line(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


CORRUPTIONS = {
    "removed": lambda path: path.unlink(),
    "cut": without_last_line,
    "empty": lambda path: path.write_text(""),
    "text": lambda path: path.write_text("hello\nworld\n"),
    "bytes": lambda path: path.write_bytes(b"\x89PNG\xff\xfe" * 50),
    "a word": lambda path: path.write_text(path.read_text().replace("\n3,", "\nthree,")),
    "above 1": lambda path: path.write_text(path.read_text().replace(",0.", ",7.")),
    "another end": lambda path: path.write_text(path.read_text().replace(",0.5,", ",0.6,")),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_corrupt_run_is_named_and_counts_as_missing(tmp_path, kind):
    found = plan(tmp_path, axes={"aggregator": ["caf", "median"]}, threat_model="none", clip_norm=1.0)
    for run in found.runs:
        finish(run, rising(50))
    CORRUPTIONS[kind](found.runs[0].folder / "metrics.csv")
    results = figures.collect(found)
    assert [run.status for run in results.runs] == ["corrupt", "done"]
    error = results.runs[0].error
    assert str(found.runs[0].folder / "metrics.csv") in error and error.endswith(".") and "\n" not in error
    assert results.missing == 1 and "1 cannot be read" in results.partial()
    assert legend(figures.curves(results)) == ["median"]


# Drawing.


def test_lines_bands_and_axes(tmp_path):
    found = plan(tmp_path, axes={"aggregator": ["caf", "median"], "seed": [1, 2]}, rounds=120)
    rng = np.random.default_rng(1)
    for run in found.runs:
        finish(run, rng.uniform(0, 100, 120).tolist())
    results = figures.collect(found)
    figure = figures.curves(results)
    (axes,) = figure.findobj(matplotlib.axes.Axes)
    assert axes.get_ylim() == (0, 100)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Round", "Test accuracy (%)")
    for line, band, curve in zip(axes.lines, axes.collections, results.panels[0].curves, strict=True):
        style = figures.styles([curve.label])[curve.label]
        assert (line.get_color(), line.get_marker()) == (style.colour, style.marker)
        np.testing.assert_allclose(line.get_xdata(), curve.rounds)
        np.testing.assert_allclose(line.get_ydata(), curve.mean)
        first, every = line.get_markevery()
        assert 0 <= first < every and len(range(first, 120, every)) <= 10
        drawn = band.get_paths()[0].vertices
        for i, sign in ((5, -1), (5, 1), (77, -1), (77, 1)):
            corner = [curve.rounds[i], np.clip(curve.mean[i] + sign * curve.std[i], 0, 100)]
            assert np.isclose(drawn, corner).all(axis=1).any()
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_one_seed_has_no_band_and_few_rounds_all_have_markers(tmp_path):
    found = plan(tmp_path, axes={"aggregator": ["caf", "median"]})
    for run in found.runs:
        finish(run, rising(50))
    figure = figures.curves(figures.collect(found))
    (axes,) = figure.findobj(matplotlib.axes.Axes)
    assert len(axes.collections) == 0 and [line.get_markevery() for line in axes.lines] == [(0, 1)] * 2
    assert not any("bands" in text for text in texts(figure))


def test_other_horizontal_axes(tmp_path):
    found = plan(tmp_path, axes={"threat_model": ["none", "cdp"], "seed": [1, 2]})
    for run in found.runs:
        finish(run, rising(50), seconds=6.0)
    results = figures.collect(found)
    figure = figures.curves(results, x="epsilon")
    (axes,) = figure.findobj(matplotlib.axes.Axes)
    assert axes.get_xlabel() == "Privacy spent (epsilon)" and len(axes.lines) == 1
    np.testing.assert_allclose(axes.lines[0].get_xdata(), results.panels[0].curves[1].epsilon)
    assert any(
        "Left out, no finite epsilon: none (demo)." in text.replace("\n", " ") for text in texts(figure)
    )
    (tmp_path / "sweep" / "sweep.json").unlink()  # another sweep over some of the same runs
    endless = figures.collect(plan(tmp_path, axes={"seed": [1, 2]}, threat_model="none"))
    (axes,) = figures.curves(endless, x="epsilon").findobj(matplotlib.axes.Axes)
    assert [text.get_text() for text in axes.texts] == ["no finite epsilon"]
    (axes,) = figures.curves(results, x="seconds").findobj(matplotlib.axes.Axes)
    np.testing.assert_allclose(axes.lines[0].get_xdata(), np.arange(1, 7))
    with pytest.raises(UserError, match="x='time' is not known: choose one of round, epsilon, seconds"):
        figures.curves(results, x="time")
    with pytest.raises(UserError, match="columns=0 must be at least 1"):
        figures.curves(results, columns=0)


@pytest.mark.parametrize("columns, visible_rows", [(1, 3), (2, 2), (3, 1), (9, 1)])
def test_panels_stand_in_a_grid(tmp_path, columns, visible_rows):
    found = plan(
        tmp_path, axes={"dataset": ["synthetic", "mnist", "fashion_mnist"], "aggregator": ["caf", "mean"]}
    )
    for run in found.runs:
        finish(run, rising(50))
    figure = figures.curves(figures.collect(found), columns=columns)
    figure.canvas.draw()
    shown = [axes for axes in figure.findobj(matplotlib.axes.Axes) if axes.get_visible()]
    assert len(shown) == 3 and len({round(axes.get_position().y0, 3) for axes in shown}) == visible_rows
    assert [axes.get_ylabel() != "" for axes in shown] == [place % min(columns, 3) == 0 for place in range(3)]
    assert len(figure.findobj(matplotlib.legend.Legend)) == 1


def test_nothing_overlaps_and_nothing_is_cut(tmp_path):
    labels = {f"a method with quite a long name {i}": {"momentum": 0.1 * i} for i in range(6)}
    panels = {
        f"A panel with a name that takes more than one line, number {i}": {"rounds": 3 + i} for i in range(4)
    }
    found = plan(tmp_path, panels=panels, curves=labels, axes={"seed": [1, 2]})
    for run in found.runs:
        if run.curve != "a method with quite a long name 5" and (
            run.config.seed == 1 or run.config.rounds == 3
        ):
            finish(run, rising(50, run.config.rounds))
    figure = figures.curves(figures.collect(found))
    figure.canvas.draw()
    renderer, (width, height) = figure.canvas.get_renderer(), figure.canvas.get_width_height()
    (box,) = figure.findobj(matplotlib.legend.Legend)
    axes = figure.findobj(matplotlib.axes.Axes)
    notes = next(text for text in figure.findobj(matplotlib.text.Text) if "Partial: " in text.get_text())
    boxes = [one.get_tightbbox(renderer) for one in (*axes, box, notes)]
    for place, one in enumerate(boxes):
        assert one.x0 >= -1 and one.y0 >= -1 and one.x1 <= width + 1 and one.y1 <= height + 1
        assert not any(one.padded(-1).overlaps(other.padded(-1)) for other in boxes[:place])


@pytest.mark.parametrize(
    "label", ["$\\frac{", "_hidden", "a $ b $ c", "100 %", "<b>&", "\N{GREEK SMALL LETTER ALPHA}"]
)
def test_labels_are_shown_as_they_are(tmp_path, label):
    found = plan(
        tmp_path, panels={label: {"rounds": 3}}, curves={label: {"momentum": 0.5}}, axes={"seed": [1]}
    )
    for run in found.runs:
        finish(run, rising(50, 3))
    figure = figures.curves(figures.collect(found))
    assert legend(figure) == [label] and figure.findobj(matplotlib.axes.Axes)[0].get_title() == label
    assert figures.render(figure, "png").startswith(b"\x89PNG")


def test_files_are_the_same_each_time(tmp_path):
    found = plan(tmp_path, axes={"aggregator": ["caf", "mean"]})
    for run in found.runs:
        finish(run, rising(50))
    results = figures.collect(found)
    for kind, head in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        first, second = (figures.render(figures.curves(results), kind) for _ in range(2))
        assert first == second and first.startswith(head)
    assert b"/Type3" not in figures.render(figures.curves(results), "pdf")  # fonts that printers take


# Heat maps.

HEAT = {
    "panels": {
        "homogeneous": {"partition": "homogeneous"},
        "1": {"partition": "dirichlet", "alpha": 1.0},
        "0.1": {"partition": "dirichlet", "alpha": 0.1},
        "extreme": {"partition": "extreme"},
    },
    "axes": {
        "aggregator": ["caf", "median"],
        "attack": ["alie", "foe"],
        "num_byzantine": [1, 3],
        "seed": [1, 2],
    },
}


def accuracy_of(config):
    """By hand: alie takes 10 points a malicious worker, foe 20 on extreme data; seeds are 2 points apart."""
    taken = 10 * config.num_byzantine if config.attack == "alie" else 20 * (config.partition == "extreme")
    return 80 - taken - (5 if config.aggregator == "median" else 0) + (1 if config.seed == 1 else -1)


def test_heat_maps_by_hand(tmp_path):
    found = plan(tmp_path, **HEAT)
    for run in found.runs:
        finish(run, rising(accuracy_of(run.config)))
    results = figures.collect(found)
    assert figures.why_no_heat_map(results) == ""
    maps = figures.heat_maps(results)
    assert list(maps) == ["synthetic"]
    caf, median = maps["synthetic"]
    assert (caf.rule, median.rule) == ("caf", "median")
    assert caf.f == (1, 3) and caf.spread == ("homogeneous", "1", "0.1", "extreme")
    # f = 1: alie takes 10 and foe nothing, but 20 on extreme data. f = 3: alie takes 30.
    np.testing.assert_allclose(caf.worst, [[70, 70, 70, 60], [50, 50, 50, 50]])
    np.testing.assert_allclose(median.worst, caf.worst - 5)
    assert caf.complete.all()

    figure = figures.heat_map(maps["synthetic"], results, "synthetic")
    words = texts(figure)
    for value, times in (("70.0", 3), ("60.0", 1), ("50.0", 4), ("65.0", 3), ("55.0", 1), ("45.0", 4)):
        assert words.count(value) == times
    meshes = figure.findobj(matplotlib.collections.QuadMesh)
    assert all(mesh.get_clim() == (0, 100) for mesh in meshes[:2])
    assert not any("artial" in word or word == "missing" for word in words)


def test_a_cell_with_a_missing_seed_is_not_complete(tmp_path):
    found = plan(tmp_path, **HEAT)
    gone = found.runs[-1]
    for run in found.runs[:-1]:
        finish(run, rising(accuracy_of(run.config)))
    assert any(
        run.config.seed != gone.config.seed and run.config.attack == gone.config.attack for run in found.runs
    )
    maps = figures.heat_maps(figures.collect(found))["synthetic"]
    assert sum(int((~one.complete).sum()) for one in maps) == 1


def test_an_attacked_mean_and_averaging_without_attackers_are_told_apart():
    drawn = figures.styles(["Mean", "DSGD", "DSGD-CDP", "CAF"])
    assert len(set(drawn.values())) == 4


def test_heat_maps_with_missing_runs(tmp_path):
    found = plan(tmp_path, **HEAT)
    for run in found.runs:
        config = run.config
        gone = config.aggregator == "median" and config.num_byzantine == 3  # the whole row
        gone |= config.aggregator == "caf" and config.attack == "alie" and config.partition == "extreme"
        if not gone:
            finish(run, rising(accuracy_of(config)))
    results = figures.collect(found)
    caf, median = figures.heat_maps(results)["synthetic"]
    np.testing.assert_allclose(caf.worst, [[70, 70, 70, 60], [50, 50, 50, 60]])
    assert caf.complete.tolist() == [[True, True, True, False]] * 2
    np.testing.assert_allclose(median.worst, [[65, 65, 65, 55], [np.nan] * 4])
    figure = figures.heat_map((caf, median), results, "synthetic")
    words = texts(figure)
    assert words.count("\N{LESS-THAN OR EQUAL TO}60.0") == 2 and legend(figure) == ["missing"]
    hatched = [patch for patch in figure.findobj(matplotlib.patches.Rectangle) if patch.get_hatch()]
    assert len(hatched) == 4 + 1  # the cells, and the legend's
    assert any("Partial: 20 of 64 runs are missing." in word for word in words)


def test_a_heat_map_never_mixes_settings(tmp_path):
    axes = HEAT["axes"] | {"threat_model": ["cdp", "none"], "seed": [1]}
    found = plan(tmp_path, panels={"extreme": {"partition": "extreme"}}, axes=axes)
    for run in found.runs:
        finish(run, rising(accuracy_of(run.config) - (7 if run.config.threat_model == "cdp" else 0)))
    maps = figures.heat_maps(figures.collect(found))["synthetic"]
    worst = {one.rule: one.worst[0, 0] for one in maps}
    assert worst == pytest.approx(
        {
            "caf, threat_model = cdp": 54,
            "caf, threat_model = none": 61,
            "median, threat_model = cdp": 49,
            "median, threat_model = none": 56,
        }
    )


def test_curves_by_attack_leave_the_rules_to_the_heat_map(tmp_path):
    found = plan(tmp_path, axes=HEAT["axes"] | {"seed": [1]})
    for run in found.runs:
        finish(run, rising(accuracy_of(run.config) - 1))
    maps = figures.heat_maps(figures.collect(found, "attack"))["synthetic"]
    assert {one.rule: one.worst[1, 0] for one in maps} == pytest.approx({"caf": 50, "median": 45})


@pytest.mark.parametrize(
    "axes, why",
    [
        ({"aggregator": ["caf", "mean"], "num_byzantine": [1, 3]}, "on synthetic the only attack is alie"),
        ({"attack": ["alie", "foe"]}, "on synthetic the sweep has one f and one partition only"),
        ({"attack": ["alie", "foe"], "num_byzantine": [1, 3]}, "on synthetic no run is finished"),
    ],
)
def test_why_there_is_no_heat_map(tmp_path, axes, why):
    found = plan(tmp_path, axes=axes)
    if "finished" not in why:
        for run in found.runs:
            finish(run, rising(50))
    results = figures.collect(found)
    assert figures.heat_maps(results) == {}
    assert figures.why_no_heat_map(results) == (
        "No heat map: it takes several attacks, and at least two values of f or two partitions or alphas; "
        + why
        + "."
    )


def test_no_heat_map_without_malicious_workers(tmp_path):
    found = plan(
        tmp_path, axes={"aggregator": ["caf", "mean"]}, num_byzantine=0, attack="none", threat_model="cdp"
    )
    finish(found.runs[0], rising(50))
    assert "on synthetic no worker is malicious" in figures.why_no_heat_map(figures.collect(found))
