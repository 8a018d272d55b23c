"""`scripts/train.py` as a user calls it: in processes of their own, with the real model."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from absl import flags

from cafcor_jax import cli, config, experiment, progress

ROOT = Path(__file__).parent.parent
SMALL = (
    "--dataset=synthetic",
    "--num_workers=5",
    "--num_byzantine=1",
    "--epsilon=500",
    "--rounds=8",
    "--batch_size=4",
    "--noise_mode=projected",
    "--checkpoint_every=2",
)


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Starts the script; all processes share the compiled code."""
    cache = tmp_path_factory.mktemp("cache")
    # The workers of a parallel pytest are themselves processes with settings: they are not to be inherited.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    environment |= {"PYTHONPATH": str(ROOT), "CAFCOR_JAX_DATA": str(cache), "JAX_PLATFORMS": "cpu"}

    def start(*arguments):
        return subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "train.py"), *SMALL, *map(str, arguments)],
            env=environment,
            cwd=cache,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return start


def finish(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def content(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_one_sentence(outcome, *words):
    """The process failed, and stderr is one line for a person, with these words in it."""
    code, _, err = outcome
    assert code == 2, outcome
    assert "Traceback" not in err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    for word in words:
        assert word in err


def result(workdir):
    summary = json.loads((workdir / "summary.json").read_text())
    rows = [line.rsplit(",", 1)[0] for line in (workdir / "metrics.csv").read_text().splitlines()]
    return summary["params_sha256"], summary["best_accuracy"], rows, (workdir / "weights.npy").read_bytes()


def kill_after(process, metrics, rounds):
    """Kills the process, without a chance to clean up, once so many rounds are in the file."""
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") > rounds):
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_killed_then_resumed_is_the_same_as_never_killed(tmp_path, command):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    kill_after(command(f"--workdir={killed}"), killed / "metrics.csv", rounds=5)
    assert not (killed / "summary.json").exists()

    # A wrong byte in the checkpoint is noticed, and nothing is touched.
    damaged = tmp_path / "damaged"
    shutil.copytree(killed, damaged)
    newest = max((damaged / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    file = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    before = content(damaged)
    outcome = finish(command(f"--workdir={damaged}"))
    assert_one_sentence(outcome, str(newest), "is damaged", "delete that folder")
    assert content(damaged) == before

    # Another config is refused.
    before = content(killed)
    assert_one_sentence(finish(command(f"--workdir={killed}", "--seed=2")), "seed (1 there, 2 now)")
    assert content(killed) == before

    code, out, err = finish(command(f"--workdir={killed}"))
    assert (code, err) == (0, ""), err
    assert "resuming after round" in out and "test accuracy" in out
    code, out, err = finish(command(f"--workdir={whole}"))
    assert (code, err) == (0, ""), err
    for words in ("5 workers, 1 malicious", "ByzLDP", "sigma_ind", "round 8/8", "privacy spent", "filtering"):
        assert words in out
    assert result(killed) == result(whole)

    before = content(whole)
    code, out, _ = finish(command(f"--workdir={whole}"))
    assert code == 0 and "is finished" in out and "test accuracy" in out
    assert content(whole) == before


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--attack=nonsense"], ["attack='nonsense'", "alie"]),
        (["--num_workers=6", "--num_byzantine=3"], ["num_byzantine=3", "at most 2"]),
        (["--epsilon=0"], ["epsilon=0", "greater than 0"]),
        (["--epsilon=-1"], ["epsilon=-1", "greater than 0"]),
        (["--batch_size=3000"], ["batch_size=3000", "worker 0", "2500 examples", "'homogeneous'"]),
        (["--workdir=/dev/null/run"], ["/dev/null/run", "cannot be written"]),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capfd, arguments, words):
    """In this process, from the command line to the exit status; below and above are processes that fail."""
    workdir = tmp_path / "run"
    values = flags.FlagValues()
    config.define_flags(values)
    command_line = ["train.py", *SMALL, f"--workdir={workdir}", *arguments]

    def train():
        experiment.run(cli.parse_flags(command_line, values), progress=progress.automatic())

    assert_one_sentence((cli.status(train), *capfd.readouterr()), *words)
    assert not workdir.exists() or content(workdir) == {workdir / ".cafcor.lock": b""}


def test_a_corrupt_archive_is_one_sentence(tmp_path, command):
    archives = tmp_path / "idx"
    archives.mkdir()
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (archives / f"{name}-ubyte").write_bytes(b"\x00\x00\x08\x01\x00\x00\x00\x03abc")
    before = content(archives)
    outcome = finish(command(f"--workdir={tmp_path / 'run'}", "--dataset=mnist", f"--idx_dir={archives}"))
    assert_one_sentence(outcome, "-ubyte", str(archives))
    assert content(archives) == before


def test_a_folder_of_other_files_is_one_sentence(tmp_path, command):
    (tmp_path / "notes.txt").write_text("mine")
    assert_one_sentence(finish(command(f"--workdir={tmp_path}")), str(tmp_path), "notes.txt")
    assert content(tmp_path) == {tmp_path / "notes.txt": b"mine"}
