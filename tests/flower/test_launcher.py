"""`scripts/federation.py` in this process: what it starts, keeps going and gives up."""

import dataclasses
import importlib
import os
import signal
import time
from pathlib import Path
from unittest import mock

import pytest

from cafcor_jax import progress
from cafcor_jax.errors import InUseError, UserError
from cafcor_jax.flower import server_app
from tests.flower import fake


@pytest.fixture(scope="module")
def launcher():
    return importlib.import_module("scripts.federation")


class Told(progress.Silent):
    def __init__(self):
        self.lines = []

    def log(self, text):
        self.lines.append(text)


@pytest.fixture
def children(launcher, tmp_path):
    (tmp_path / "worker0.log").write_text("error: of an earlier run\n")
    children = launcher.Children(tmp_path)
    yield children
    children.stop()


def wait_for_end(children):
    end = time.monotonic() + 30
    while not children.ended() and time.monotonic() < end:
        time.sleep(0.02)


def test_a_process_that_ends_at_once_again_and_again_is_given_up(children, tmp_path):
    told = Told()
    children.start("worker0", ["sh", "-c", "echo 'error: no such thing.'; exit 2"])
    for _ in range(2):
        wait_for_end(children)
        children.revive(told)
    assert told.lines == 2 * ["the process worker0 has ended (status 2: no such thing) and is started again"]
    wait_for_end(children)
    with pytest.raises(UserError, match=r"The process worker0 has ended: no such thing \(.*worker0.log has"):
        children.revive(told)


def test_a_second_launcher_writes_nothing(launcher, tmp_path, monkeypatch):
    config, logs = fake.make(tmp_path / "run"), tmp_path / "run_processes"
    monkeypatch.setattr(launcher.experiment, "cache_compilations", lambda config: None)
    monkeypatch.setattr(launcher.experiment, "build", lambda config, **_: mock.Mock())
    runs = []

    def run_and_start_again(cfg, *others):
        runs.append(cfg)
        if len(runs) == 1:
            with pytest.raises(InUseError, match=r"The workdir .*run is in use by another process"):
                launcher.main(config)

    monkeypatch.setattr(launcher, "_run_and_compare", run_and_start_again)
    monkeypatch.setattr(launcher, "_SETUP_TIMEOUT", mock.Mock(value=1.0))
    monkeypatch.setattr(launcher, "_ROUND_TIMEOUT", mock.Mock(value=1.0))
    monkeypatch.setattr(launcher, "_VIRTUAL", mock.Mock(value=False))
    launcher.main(config)
    assert len(runs) == 1 and [path.name for path in logs.iterdir()] == [".cafcor.lock"]
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    launcher.main(dataclasses.replace(config, workdir=str(tmp_path / "link" / "run")))
    assert [cfg.workdir for cfg in runs] == 2 * [str(tmp_path.resolve() / "run")]


@pytest.mark.parametrize("closed", [False, True])
def test_a_server_app_without_its_parent_says_so_and_ends(monkeypatch, capsys, closed):
    ended = mock.Mock(side_effect=SystemExit)
    monkeypatch.setattr(os, "_exit", ended)
    if closed:
        monkeypatch.setattr("builtins.print", mock.Mock(side_effect=BrokenPipeError))
    with pytest.raises(SystemExit):
        server_app._end_without(-1)
    ended.assert_called_once_with(1)
    if not closed:
        assert capsys.readouterr().out.startswith(
            "error: The process -1 that started this ServerApp has ended"
        )


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to look for processes")
def test_of_a_process_that_is_started_again_nothing_is_left(children, tmp_path):
    told = Told()
    first = children.start("worker0", ["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/inner; exec sleep 600"])
    end = time.monotonic() + 30
    while not (tmp_path / "inner").exists() or not (tmp_path / "inner").read_text().strip():
        assert time.monotonic() < end
        time.sleep(0.02)
    inner = int((tmp_path / "inner").read_text())
    os.kill(first.pid, signal.SIGKILL)
    wait_for_end(children)
    children.revive(told)
    # It said nothing: what an earlier process of that name said is not its reason.
    assert told.lines == ["the process worker0 has ended (signal 9: it said nothing) and is started again"]
    while _runs(inner):
        assert time.monotonic() < end
        time.sleep(0.02)


def _runs(process):
    """Whether it does; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
