"""One real federation: a SuperLink, three SuperNodes and three workers as processes on this machine."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "federation.py"
SETTINGS = [
    "--dataset=synthetic",
    "--num_workers=3",
    "--num_byzantine=0",
    "--attack=none",
    "--threat_model=none",
    "--rounds=2",
    "--batch_size=10",
]


def launch(folder, *flags):
    command = [sys.executable, str(SCRIPT), *SETTINGS, f"--workdir={folder / 'run'}", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=900)
    finally:
        if process.poll() is None:
            process.terminate()  # it ends its children first
            process.wait(60)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def processes_of(folder):
    """Processes with the folder in their environment, as all children of the launcher have it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"FLWR_HOME={folder}".encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc to look for processes")
def test_processes_train_as_the_simulation_does(tmp_path):
    ended = launch(tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "round 2/2" in ended.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["absences"] == []
    line = next(line for line in ended.stdout.splitlines() if line.startswith("difference"))
    assert float(line.split()[1]) < 1e-3, line
    # Some end when they see that their parent has.
    end = time.monotonic() + 20
    while processes_of(tmp_path) and time.monotonic() < end:
        time.sleep(0.5)
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--attack=alie", "attack='alie' has nobody to carry it out"),
        ("--noise_mode=projected", "noise_mode='projected' is for simulation"),
        ("--num_workers=1", "num_workers=1 is too few"),
    ],
)
def test_bad_settings_are_one_sentence(tmp_path, flag, sentence):
    ended = launch(tmp_path, flag)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ") and sentence in ended.stderr and "Traceback" not in ended.stderr
