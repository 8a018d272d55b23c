"""`scripts/benchmark.py`, called in this process, on messages so small that only compiling takes time."""

import csv
import importlib
import json
import sys
from pathlib import Path

import pytest

from cafcor_jax import cli
from tests.compiling import compiled_quickly  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("compiled_quickly")

SCRIPT = Path(__file__).parents[1] / "scripts" / "benchmark.py"
SMALL = ("--n=6", "--f=1", "--dims=2000", "--repeats=1", "--nomemory", "--nopeers")


@pytest.fixture(scope="module")
def benchmark():
    return importlib.import_module("scripts.benchmark")


@pytest.fixture
def call(benchmark, capsys):
    """Runs the script: its status, what it printed, and its errors. Later flags win over `SMALL`."""

    def run(*arguments):
        status = cli.status(lambda: benchmark.main(["benchmark.py", *SMALL, *map(str, arguments)]))
        return status, *capsys.readouterr()

    return run


def line_of(rule, out):
    return next(line.split() for line in out.splitlines() if line.startswith(f"  {rule} "))


def test_everything_is_in_the_table_and_the_files(call, tmp_path):
    result, sheet, plots = tmp_path / "new" / "result.json", tmp_path / "result.csv", tmp_path / "plots"
    flags = ("--dims=2000,3e3", "--rules=mean,nnm+krum", f"--json={result}", f"--csv={sheet}")
    status, out, _ = call(*flags, f"--plots={plots}")
    assert status == 0
    assert "7/8  n = 6, f = 1, d = 3,000: nnm+krum ...\n8/8  n = 6, f = 1, d = 3,000: all in turn ..." in out
    for d in ("2,000", "3,000"):
        part = out.split(f"\nn = 6, f = 1, d = {d}, float32\n")[1]
        assert part.startswith("averaging, the first counts: ")
        rule, seconds, ratio, *_ = line_of("nnm+krum", part)
        assert float(seconds) > 0 and float(ratio.replace(",", "")) > 0

    report = json.loads(result.read_text())
    assert {"cpu", "cores", "memory_bytes"} == set(report["machine"])
    assert {"python", "jax", "jaxlib", "numpy", "torch", "byzfl"} == set(report["versions"])
    assert report["date"] and "--rules=mean,nnm+krum" in report["command"]
    assert [(row["d"], row["rule"]) for row in report["results"]] == [
        (d, rule) for d in (2000, 3000) for rule in ("mean", "nnm+krum")
    ]
    for row in report["results"]:
        times = next(part["seconds"] for part in report["averaging"] if part["d"] == row["d"])
        assert {"matmul", "row by row", "x.mean(0)"} <= set(times)
        assert row["averaging_seconds"] == min(times.values()) == times[row["averaging"]]
        assert row["ratio"] == row["seconds"] / row["averaging_seconds"]
    with open(sheet) as stream:
        rows = list(csv.DictReader(stream))
    assert [row["ratio"] for row in rows] == [str(row["ratio"]) for row in report["results"]]
    assert [path.name for path in plots.iterdir()] == ["ratio_over_d.png"]
    assert (plots / "ratio_over_d.png").read_bytes().startswith(b"\x89PNG")


def test_a_rule_that_cannot_run_says_why_and_the_rest_goes_on(call):
    status, out, _ = call("--n=50", "--f=5", "--dims=20", "--rules=smea,mean")
    assert status == 0
    assert float(line_of("mean", out)[1]) > 0
    assert " ".join(line_of("smea", out)[1:]) == (
        "num_byzantine = 5 of n = 50 workers gives 2,118,760 subsets; "
        "SMEA looks at each of them and takes at most 200,000."
    )


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_is_measured_in_another_process(call, tmp_path):
    status, out, _ = call("--memory", "--rules=mean", f"--json={tmp_path / 'result.json'}")
    assert status == 0 and "4/4  n = 6, f = 1, d = 2,000: memory of mean ..." in out
    assert json.loads((tmp_path / "result.json").read_text())["results"][0]["memory"] >= 1


def test_without_byzfl_it_says_so_and_goes_on(call, benchmark, monkeypatch):
    monkeypatch.setitem(sys.modules, "byzfl", None)
    monkeypatch.setitem(benchmark.PAPER, 2000, {"mean": 7})
    status, out, _ = call("--peers", "--rules=mean", "--n=30", "--f=3")
    assert status == 0 and out.startswith("byzfl is not compared: it is not installed")
    paper, memory, peer = line_of("mean", out)[3:]
    assert (paper, memory, peer) == ("7", "-", "-")


def test_byzfl_is_compared(call, benchmark):
    if benchmark.load_byzfl() is None:
        pytest.skip("byzfl is not installed")
    status, out, _ = call("--peers", "--rules=mean,arc+mean")
    assert status == 0
    assert float(line_of("mean", out)[-1]) > 0 and float(line_of("arc+mean", out)[-1]) > 0


def test_a_peer_that_never_ends_is_stopped(benchmark):
    with pytest.raises(TimeoutError), benchmark.bounded(0.05):
        while True:
            pass


def test_help_lists_the_flags(benchmark, capsys):
    with pytest.raises(SystemExit) as caught:
        benchmark.main(["benchmark.py", "--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0 and "--repeats=5" in out and "memory_of" not in out


@pytest.mark.parametrize(
    "flag, sentence",
    [
        ("--rules=caf,nnm+best", "--rules has 'nnm+best'; rules are mean, caf, smea, krum, "),
        ("--rules=caf+nnm", "--rules has 'caf+nnm'; rules are mean, caf, "),
        ("--rules=", "--rules has ''; rules are mean, caf, "),
        ("--f=1,3", "--f=3 of --n=6: fewer than half of the workers may be malicious."),
        ("--dims=1e7,0", "--dims=1e7,0: it must be whole numbers of at least 1."),
        ("--dims=1.5", "--dims=1.5: it must be whole numbers of at least 1."),
        ("--dims=", "--dims=: it must be whole numbers of at least 1."),
        ("--n=many", "--n=many: it must be whole numbers of at least 1."),
        ("--n=nan", "--n=nan: it must be whole numbers of at least 1."),
        ("--f=-1", "--f=-1: it must be whole numbers of at least 0."),
        ("--repeats=0", "flag --repeats=0: "),
        ("--dtype=int8", "flag --dtype=int8: value should be one of <float32|bfloat16>."),
        ("--speed=1", "Unknown command line flag 'speed'."),
        ("caf", "'caf' is not a flag: flags are written --name=value."),
        ("--json=/dev/null/result.json", "--json=/dev/null/result.json cannot be written: "),
        ("--csv=/", "--csv=/ cannot be written: "),
        ("--plots=/dev/null", "--plots=/dev/null cannot be written: "),
    ],
)
def test_what_is_wrong_is_one_sentence_before_any_work(flag, sentence, call, benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "time_setting", lambda *_: pytest.fail("it began to work"))
    status, out, err = call(flag)
    assert status == 2 and out == ""
    assert err.startswith(f"error: {sentence}") and err.count("\n") == 1 and err.endswith(".\n")
