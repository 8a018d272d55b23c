"""`cafcor_jax.report`: the tables have the right numbers, and the page is safe, whole and alone."""

import html.parser
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest

from cafcor_jax import config as config_lib
from cafcor_jax import figures, privacy, report
from cafcor_jax.config import Config
from tests.test_figures import HEAT, LABELS, accuracy_of, begin, budget, finish, partial_sweep, plan, rising

VOID = {"meta", "link", "img", "br"}
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)


class Page(html.parser.HTMLParser):
    """Reads HTML strictly: every element is closed in its turn, and every attribute has its quotes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.tables, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(set(names)) == len(names)
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)
        if self.open and {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += f" {data}" if self.open[-1] == "small" else data

    def table(self, *head):
        """The rows of the table whose columns begin so."""
        (found,) = [rows for rows in self.tables if tuple(rows[0][: len(head)]) == head]
        return found

    def attributes(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def page(results, **options):
    png = figures.render(figures.curves(results), "png")
    return report.page(results, command="python scripts/plot.py --sweep_dir=runs/demo", figure=png, **options)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """A finished sweep of two panels and two curves with two seeds, and its results."""
    found = plan(tmp_path_factory.mktemp("labelled"), **LABELS)
    for run in found.distinct():
        top = 70 if run.curve == "DSGD-CDP" else 60 + run.config.num_byzantine * 3
        finish(run, rising(top + run.config.seed), seconds=30.0 * run.config.seed)
    return figures.collect(found)


def test_accuracies_with_seeds_and_the_best_in_bold(labelled):
    text = page(labelled)
    rows = Page(text).table("panel", "DSGD-CDP")
    assert rows[0] == ["panel", "DSGD-CDP", "CafCor-SecLDP"]
    # 71 and 72 for the baseline; 66 + 1, 66 + 2 with f = 2 and 75 + 1, 75 + 2 with f = 5.
    std = f"{np.std([1, 2], ddof=1):.1f}"
    assert rows[1:] == [
        ["Few", f"71.5 ± {std} 2 seeds", f"67.5 ± {std} 2 seeds"],
        ["Many", f"71.5 ± {std} 2 seeds", f"76.5 ± {std} 2 seeds"],
    ]
    assert re.findall(r"<strong>([^<]*)</strong><small>", text) == [f"71.5 ± {std}", f"76.5 ± {std}"]


def test_equal_means_are_both_in_bold(tmp_path):
    found = plan(tmp_path, axes={"aggregator": ["caf", "median", "mean"]})
    for run, accuracy in zip(found.runs, (50.04, 50.0, 49.9), strict=True):
        finish(run, rising(accuracy))
    results = figures.collect(found)
    assert report.best(results.panels[0].curves) == ["caf", "median"]
    assert report.best([]) == []
    assert "<strong>50.0</strong><small>1 seed</small>" in page(results)


def test_privacy_plans_are_those_of_the_runs(labelled):
    rows = Page(page(labelled)).table("panel", "method")
    assert rows[0][2:] == [
        "threat model", "sigma_ind", "sigma_cor", "epsilon", "delta", "accountant", "epsilon by accountant",
    ]  # fmt: skip
    assert [row[:2] for row in rows[1:]] == [
        [panel, curve] for panel in ("Few", "Many") for curve in ("DSGD-CDP", "CafCor-SecLDP")
    ]
    for row, curve in zip(rows[1:], (c for p in labelled.panels for c in p.curves), strict=True):
        noise, _, _ = budget(curve.runs[0].run.config)
        spent = ", ".join(f"{privacy.epsilon(noise, accountant=n):.4g} {n}" for n in privacy.ACCOUNTANTS)
        numbers = [f"{value:.4g}" for value in (noise.sigma_ind, noise.sigma_cor, noise.epsilon, noise.delta)]
        assert row[2:] == [noise.threat_model, *numbers, "rdp", spent]


def test_settings_time_and_software(labelled):
    read = Page(page(labelled))
    varied = dict(read.table("setting", "values")[1:])
    assert list(varied) == list(labelled.sweep.varied)
    assert varied["seed"] == "1, 2" and varied["num_byzantine"] == "0, 2, 5"
    common = {row[0]: row[1:] for row in read.table("setting", "value")[1:]}
    assert common["rounds"] == ["6", "30"] and common["learning_rate"] == ["0.075", ""]
    assert common["num_colluding"] == ["not set", ""] and "workdir" not in common
    assert not set(common) & set(varied)
    assert dict(read.table("software", "version")[1:])["commit"] == "0123456789abcdef"
    # Three runs of 30 s and three of 60 s.
    words = "".join(read.words)
    assert "6 finished runs took 4:30: 0:45 for the median run, 0:30 to 1:00" in words
    assert labelled.sweep.command in words and "python scripts/plot.py --sweep_dir=runs/demo" in words
    assert "6 runs: 6 done." in words and "Partial" not in words and "Failures" not in words


def test_different_software_is_counted(tmp_path):
    found = plan(tmp_path, axes={"seed": [1, 2, 3]})
    for run in found.runs:
        finish(run, rising(50), versions={"jax": "0.10.2", "commit": "new" if run.config.seed > 1 else None})
    rows = Page(page(figures.collect(found))).table("software", "version")
    assert rows[1:] == [["jax", "0.10.2"], ["commit", "new (runs: 2), not set (runs: 1)"]]


def test_every_run_has_a_command_that_makes_it(labelled):
    words = Page(page(labelled)).words
    commands = [word for word in words if word.startswith("python scripts/train.py ")]
    assert len(commands) == len(labelled.runs) == 6
    for run, command in zip(labelled.runs, commands, strict=True):
        settings = dict(flag[2:].split("=", 1) for flag in command.split()[2:])
        made = Config.from_dict({name: config_lib.parse(name, value) for name, value in settings.items()})
        assert made == run.run.config
        defaults = Config()
        assert all(getattr(made, name) != getattr(defaults, name) for name in settings)


def test_what_is_missing_is_said(tmp_path):
    found, runs, failed = partial_sweep(tmp_path)
    (runs["caf", 3].folder / "metrics.csv").write_text("<b>no table</b>\n")
    read = Page(page(figures.collect(found, failed=failed)))
    words = "".join(read.words)
    assert (
        "Partial results. 9 runs: 4 done, 2 not begun, 1 not finished, 1 failed, 1 cannot be read." in words
    )
    (row,) = read.table("panel", "caf")[1:]
    assert row[1].endswith("2 of 3 seeds") and row[2].endswith("2 of 3 seeds") and row[3] == "– 0 of 3 seeds"
    failures = {row[0]: row[1:] for row in read.table("run", "state")[1:]}
    assert len(failures) == 2
    for (rule, seed), state, why in (
        (("krum", 2), "failed", "The worker's batch is too large."),
        (("caf", 3), "cannot be read", "does not have the rounds 1 to 6, each once."),
    ):
        found_state, found_why = failures[f"seed {seed} ({runs[rule, seed].folder.name})"]
        assert found_state == state and why in found_why
    # The run that has begun has a plan already.
    assert [row[1] for row in read.table("panel", "method")[1:]] == ["caf", "median", "krum"]


def test_a_damaged_config_json_leaves_the_rest(tmp_path):
    found = plan(tmp_path, axes={"aggregator": ["caf", "median"]})
    finish(found.runs[0], rising(50))
    begin(found.runs[1])
    (found.runs[1].folder / "config.json").write_text("[1, 2")
    read = Page(page(figures.collect(found)))
    assert [row[1] for row in read.table("panel", "method")[1:]] == ["caf"]


EVIL = "<script>alert('x')</script>\"&amp;</title></style>"


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    """A sweep in which all texts that can come from a file want to be HTML."""
    found = plan(
        tmp_path_factory.mktemp("evil"),
        panels={f"panel {EVIL}": {"rounds": 6}},
        curves={f"curve {EVIL}": {"momentum": 0.5}, "other": {"momentum": 0.6}},
        axes={"seed": [1, 2]},
        name=f"name {EVIL}",
    )
    done, *others = found.runs
    finish(done, rising(50), versions={f"software {EVIL}": f"version {EVIL}"})
    stored = json.loads((done.folder / "config.json").read_text())
    stored["plan"]["accountant"] = f"accountant {EVIL}"
    stored["epsilon_by_accountant"] = {f"by {EVIL}": f"spent {EVIL}"}
    (done.folder / "config.json").write_text(json.dumps(stored))
    return figures.collect(found, failed={others[0].folder.name: f"error {EVIL}"})


def test_everything_is_escaped(evil):
    text = page(evil, heat_maps={EVIL: b"png"})
    read = Page(text)
    assert "<script" not in text and text.count("</style>") == text.count("</title>") == 1
    words = " ".join(read.words)
    for what in ("panel", "curve", "name", "software", "version", "accountant", "by", "spent", "error"):
        assert f"{what} {EVIL}" in words
    assert any(EVIL in image["alt"] for image in read.attributes("img"))


def test_nothing_comes_from_elsewhere(labelled):
    text = page(labelled, heat_maps={"mnist": b"png"})
    read = Page(text)
    assert text.startswith("<!DOCTYPE html>\n") and read.attributes("html") == [{"lang": "en"}]
    sources = [
        value
        for _, attributes in read.elements
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "data", "action", "poster")
    ]
    assert sources and all(value.startswith(("data:", "#")) for value in sources)
    assert not re.search(r"https?:|@import|url\(|<script|<iframe| on\w+=", text)
    targets = {attributes["id"] for _, attributes in read.elements if "id" in attributes}
    assert {link["href"][1:] for link in read.attributes("a")} == targets
    assert any("Content-Security-Policy" in str(meta) for meta in read.attributes("meta"))
    assert [image["alt"] != "" for image in read.attributes("img")] == [True, True]


def test_a_run_with_a_budget_without_an_end(tmp_path):
    found = plan(tmp_path, axes={"threat_model": ["none", "cdp"]})
    for run in found.runs:
        finish(run, rising(50))
    rows = Page(page(figures.collect(found))).table("panel", "method")
    assert rows[1][3:6] == ["0", "0", "not set"] and rows[1][-1] == "–"


# In a browser.


def browse(folder, *arguments):
    """Runs the browser; what it printed, and its log."""
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--no-first-run", "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", *arguments,
    ]  # fmt: skip
    environment = os.environ | {"HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


# A page beside the report that looks at it: the report itself lets no script run.
PROBE = """<!DOCTYPE html><title>probe</title><pre id="found"></pre>
<iframe src="report.html" style="width: 1200px; height: 900px; border: 0"></iframe>
<iframe src="report.html" style="width: 400px; height: 900px; border: 0"></iframe>
<script>
const look = frame => {
  const page = frame.contentDocument, root = page.documentElement;
  return {
    title: page.title,
    images: [...page.images].map(image => [image.naturalWidth, image.clientWidth]),
    rows: [...page.querySelectorAll("table")].map(table => table.rows.length),
    bold: [...page.querySelectorAll("td strong")].map(cell => cell.textContent),
    details: [...page.querySelectorAll("details")].map(part => part.open),
    overflow: root.scrollWidth - root.clientWidth,
    background: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
    scripts: page.scripts.length,
  };
};
window.onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(look);
  document.getElementById("found").textContent = "FOUND" + JSON.stringify(found) + "END";
};
</script>
"""


def probe(folder, text, *arguments):
    """What the browser makes of a report in a window of 1200 pixels, and in one of 400."""
    (folder / "report.html").write_text(text)
    (folder / "probe.html").write_text(PROBE)
    # The second flag lets the probe look into the report.
    flags = ["--virtual-time-budget=5000", "--allow-file-access-from-files", *arguments]
    out, log = browse(folder, *flags, "--dump-dom", (folder / "probe.html").as_uri())
    assert "CONSOLE" not in log, log
    match = re.search(r"FOUND(\[.*\])END", out, re.DOTALL)
    assert match, out[-2000:]
    return json.loads(html.unescape(match[1]))


needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on the PATH")


@needs_browser
def test_in_a_browser(tmp_path):
    found = plan(tmp_path, **HEAT)
    for run in found.runs:
        if run.config.partition == "extreme" and run.config.seed == 1:
            finish(run, rising(accuracy_of(run.config)))
    results = figures.collect(found)
    maps = figures.heat_maps(results)["synthetic"]
    picture = figures.render(figures.heat_map(maps, results, "synthetic"), "png")
    text = page(results, heat_maps={"synthetic": picture})
    read = Page(text)
    for seen, width in zip(probe(tmp_path, text), (1200, 400), strict=True):
        assert seen["title"] == "Sweep demo" and seen["scripts"] == 0
        assert len(seen["images"]) == 2
        for natural, shown in seen["images"]:
            assert natural > 500 and 200 < shown <= width
        assert seen["rows"] == [len(rows) for rows in read.tables] and len(seen["rows"]) == 5
        assert len(seen["bold"]) == 4  # the best of each panel with a finished run
        assert seen["details"] == [False, False]
        assert seen["overflow"] == 0  # only tables scroll, in boxes of their own
        assert seen["background"] == "rgb(255, 255, 255)"


@needs_browser
def test_in_a_browser_by_night(tmp_path, labelled):
    for seen in probe(tmp_path, page(labelled), "--blink-settings=preferredColorScheme=0"):
        assert seen["background"] == "rgb(22, 24, 27)"


@needs_browser
def test_in_a_browser_nothing_evil_happens(tmp_path, evil):
    for seen in probe(tmp_path, page(evil)):
        assert seen["scripts"] == 0 and EVIL in seen["title"]


@needs_browser
def test_the_browser_would_have_told(tmp_path, labelled):
    """What the tests above rely on: the policy stops scripts, and what it stops is in the log."""
    bad = page(labelled).replace("</main>", '<script>document.title = "run"</script></main>')
    with pytest.raises(AssertionError, match="CONSOLE"):
        probe(tmp_path, bad)
