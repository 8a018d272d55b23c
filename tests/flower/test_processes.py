"""Real federations over TLS: a SuperLink, two SuperNodes and two workers as processes on this machine."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "federation.py"
SETTINGS = [
    "--dataset=synthetic",
    "--num_workers=2",
    "--num_byzantine=0",
    "--attack=none",
    "--threat_model=none",
    "--rounds=2",
    "--batch_size=10",
]


@contextlib.contextmanager
def launcher(folder, *flags):
    command = [sys.executable, str(SCRIPT), *SETTINGS, f"--workdir={folder / 'run'}", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # it ends its children first
            process.wait(60)


def launch(folder, *flags):
    with launcher(folder, *flags) as process:
        out, err = process.communicate(timeout=900)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def processes_of(folder, *words):
    """The processes with the folder in their environment, as all children of the launcher have it."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            ours = f"FLWR_HOME={folder}".encode() in (path / "environ").read_bytes()
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if ours and all(word in command for word in words):
            found.append(int(path.name))
    return found


def kill(folder, *words):
    (process,) = processes_of(folder, *words)
    os.kill(process, signal.SIGKILL)


def assert_all_end(folder):
    # Some end when they see that their parent has.
    end = time.monotonic() + 20
    while processes_of(folder) and time.monotonic() < end:
        time.sleep(0.5)
    assert processes_of(folder) == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc to look for processes")
def test_killed_processes_go_on_and_train_as_the_simulation_does(tmp_path):
    with launcher(tmp_path, "--nocompare") as process:
        assert any(line.startswith("round 1/2") for line in process.stdout)
        kill(tmp_path, "worker.py", "--worker=1 ")
        kill(tmp_path, "flower-superlink")
        _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert err.startswith("error: ") and "goes on from" in err and "Traceback" not in err
    assert_all_end(tmp_path)

    ended = launch(tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "resuming after round 1 with 2 workers" in ended.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["rounds"] == 2 and summary["absences"] == []
    line = next(line for line in ended.stdout.splitlines() if line.startswith("difference"))
    assert float(line.split()[1]) < 1e-3, line
    assert_all_end(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray (the extra flower_simulation)")
def test_flowers_simulation_trains_as_ours_does(tmp_path):
    ended = launch(tmp_path, "--virtual")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    line = next(line for line in ended.stdout.splitlines() if line.startswith("difference"))
    assert float(line.split()[1]) < 1e-3, line
    assert_all_end(tmp_path)


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--attack=alie", "attack='alie' has nobody to carry it out"),
        ("--round_timeout=0", "round-timeout=0.0 must be a number of seconds greater than 0"),
    ],
)
def test_bad_settings_are_one_sentence(tmp_path, flag, sentence):
    ended = launch(tmp_path, flag)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ") and sentence in ended.stderr and "Traceback" not in ended.stderr
