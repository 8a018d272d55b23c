"""`scripts/federation.py` in this process: what it starts, keeps going and gives up."""

import importlib
import os
import signal
import time
from pathlib import Path

import pytest

from cafcor_jax import progress
from cafcor_jax.errors import UserError


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
