"""Real federations over TLS: a SuperLink, three SuperNodes and three workers as processes on this machine."""

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
    "--num_workers=3",
    "--num_byzantine=1",
    "--attack=nan",  # to the rule as a worker that is killed, so both runs end where the simulation does
    "--threat_model=none",
    "--rounds=3",
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


def kill(folder, *words, number=signal.SIGKILL):
    (process,) = processes_of(folder, *words)
    os.kill(process, number)


def wait_for_text(path, text, *, times):
    end = time.monotonic() + 60
    while path.read_text().count(text) < times:
        assert time.monotonic() < end
        time.sleep(0.2)


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
        assert any(line.startswith("round 1/3") for line in process.stdout)
        kill(tmp_path, "worker.py", "--worker=1 ")
        kill(tmp_path, "flower-superlink")
        _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert err.startswith("error: ") and "goes on from" in err and "Traceback" not in err
    assert_all_end(tmp_path)

    with launcher(tmp_path) as process:
        assert any(line.startswith("resuming after round 1 with 3 workers") for line in process.stdout)
        log = tmp_path / "run_processes" / "worker2.log"
        ready = log.read_text().count("is ready")
        # The round waits for worker 0 until worker 2, which is malicious, is there again.
        kill(tmp_path, "worker.py", "--worker=0 ", number=signal.SIGSTOP)
        kill(tmp_path, "worker.py", "--worker=2 ")
        wait_for_text(log, "is ready", times=ready + 1)
        kill(tmp_path, "worker.py", "--worker=0 ", number=signal.SIGCONT)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert "the process worker2 has ended (signal 9: " in out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["rounds"] == 3 and {fault["worker"] for fault in summary["faults"]} == {2}
    # Started again within the run it takes part in its session again.
    assert summary["faults"][-1] == {"round": 2, "worker": 2, "what": "is not finite"}
    line = next(line for line in out.splitlines() if line.startswith("difference"))
    assert float(line.split()[1]) < 1e-3, line
    assert_all_end(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray (the extra flower_simulation)")
def test_flowers_simulation_trains_as_ours_does(tmp_path):
    ended = launch(
        tmp_path, "--virtual", "--num_workers=2", "--num_byzantine=0", "--attack=none", "--rounds=2"
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    line = next(line for line in ended.stdout.splitlines() if line.startswith("difference"))
    assert float(line.split()[1]) < 1e-3, line
    assert_all_end(tmp_path)


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--attack=alie", "attack='alie' looks at what honest workers send"),
        ("--round_timeout=0", "round-timeout=0.0 must be a number of seconds greater than 0"),
    ],
)
def test_bad_settings_are_one_sentence(tmp_path, flag, sentence):
    ended = launch(tmp_path, flag)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ") and sentence in ended.stderr and "Traceback" not in ended.stderr
