"""`scripts/audit.py`, called in this process with few trials."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from cafcor_jax import audit, cli
from tests.compiling import compiled_quickly  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("compiled_quickly")

SCRIPT = Path(__file__).parents[1] / "scripts" / "audit.py"


@pytest.fixture(scope="module")
def script():
    specification = importlib.util.spec_from_file_location("audit_script", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sys.modules["audit_script"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    yield module
    del sys.modules["audit_script"]


@pytest.fixture
def call(script, capsys):
    """Runs the script: its status, what it printed, and its errors."""

    def run(*arguments):
        try:
            status = cli.status(lambda: script.main(["audit.py", *map(str, arguments)]))
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


def line_of(name, out):
    return next(line.split() for line in out.splitlines() if line.startswith(f"  {name} "))


def test_a_claim_that_holds_and_a_fault_that_is_caught(call, tmp_path):
    file = tmp_path / "new" / "audit.json"
    status, out, _ = call("--lines=ldp,no_clipping", "--trials=81920", "--seed=2", f"--json={file}")
    assert status == 0
    assert "2/2  no_clipping ..." in out
    assert "All 2 as they should be, at a joint confidence of 0.95." in out
    _, claimed, audited, ratio, _, trials, verdict, *meaning = line_of("ldp", out)
    assert claimed == "2.000" and 1.5 < float(audited) < 2 and 0.75 < float(ratio) < 1
    assert (trials, verdict) == ("81,920", "holds") and meaning
    assert line_of("no_clipping", out)[5:7] == ["8,192", "caught"]

    report = json.loads(file.read_text())
    assert (
        report["seed"] == 2 and "--lines=ldp,no_clipping" in report["command"] and report["versions"]["jax"]
    )
    ldp, no_clipping = report["results"]
    assert ldp["ratio"] == ldp["lower_bound"] / ldp["claimed"] <= 1 < no_clipping["ratio"]
    assert ldp["confidence"] == pytest.approx(0.975)  # both lines at once: 95%
    assert ldp["detail"]["trials"] == 40_960 and ldp["as_it_should_be"] is True


def test_a_missed_fault_is_a_failure(call):
    status, out, _ = call("--lines=no_clipping", "--trials=40")  # too few to show anything
    assert status == 1
    assert line_of("no_clipping", out)[6] == "MISSED" and "Not as it should be: no_clipping." in out


def test_a_refuted_claim_is_a_failure(call, monkeypatch):
    monkeypatch.setattr(audit, "NO_FAULTS", audit.Faults(noise_scale=0.5))
    status, out, _ = call("--lines=ldp", "--trials=40000")
    assert status == 1
    assert line_of("ldp", out)[6] == "REFUTED" and "Not as it should be: ldp." in out


def test_lines_cover_every_threat_model_and_every_fault(script):
    right = [line for line in script.LINES.values() if line.faults is None]
    assert {line.plan().threat_model for line in right} == {"ldp", "cdp", "secldp", "byzldp"}
    collusions = {(line.plan().num_colluding, line.plan().num_byzantine) for line in right}
    assert any(0 < q < f for q, f in collusions) and any(q == f for q, f in collusions)
    assert max(line.plan().rounds for line in right) > 1
    broken = [line.faults for line in script.LINES.values() if line.faults is not None]
    changed = {
        name
        for faults in broken
        for name, value in vars(faults).items()
        if value != vars(audit.NO_FAULTS)[name]
    }
    assert changed == set(vars(audit.NO_FAULTS))


def test_canary_in_training_runs(call, tmp_path):
    file = tmp_path / "canary.json"
    status, out, _ = call("--canary", "--runs=8", f"--json={file}")
    assert status == 0
    assert line_of("messages", out)[4:6] == ["8", "holds"]
    assert line_of("final_parameters", out)[4:6] == ["8", "holds"]
    rows = json.loads(file.read_text())["results"]
    assert [row["mechanism"] for row in rows] == ["messages", "final_parameters"]
    assert all(row["lower_bound"] <= row["claimed"] for row in rows)


def test_help_lists_the_flags(script, capsys):
    with pytest.raises(SystemExit) as caught:
        script.main(["audit.py", "--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0 and "--trials=1500000" in out and "--canary" in out


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--lines=ldp,best"], "--lines has 'best'; lines are ldp, cdp, secldp, "),
        (["--lines="], "--lines has ''; lines are ldp, "),
        (["--lines=ldp,ldp"], "--lines=ldp,ldp: each line may be named once."),
        (["--trials=3"], "flag --trials=3: "),
        (["--trials=many"], "flag --trials=many: "),
        (["--seed=-1"], "flag --seed=-1: "),
        (["--seed=4294967296"], "flag --seed=4294967296: "),
        (["--confidence=1"], "--confidence=1: it must be strictly between 0 and 1."),
        (["--confidence=nan"], "--confidence=nan: it must be strictly between 0 and 1."),
        (["--runs=8"], "--runs is for training runs: it needs --canary."),
        (["--canary", "--trials=8"], "--trials is for the table, and --canary does not make it."),
        (["--canary", "--lines=ldp"], "--lines is for the table, and --canary does not make it."),
        (["--canary", "--runs=0"], "flag --runs=0: "),
        (["--json=/dev/null/audit.json"], "--json=/dev/null/audit.json cannot be written: "),
        (["--quick=1"], "Unknown command line flag 'quick'."),
        (["ldp"], "'ldp' is not a flag: flags are written --name=value."),
    ],
)
def test_what_is_wrong_is_one_sentence_before_any_work(flags, sentence, call, script, monkeypatch):
    monkeypatch.setattr(script, "table_row", lambda *_: pytest.fail("it began to work"))
    monkeypatch.setattr(script, "canary_rows", lambda *_: pytest.fail("it began to work"))
    status, out, err = call(*flags)
    assert status == 2 and out == ""
    assert err.startswith(f"error: {sentence}") and err.count("\n") == 1 and err.endswith(".\n")
