import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from cafcor_jax.data import cache
from cafcor_jax.errors import UserError


def test_round_trip(arrays, spec, tmp_path):
    path = tmp_path / "mnist.npz"
    cache.write(path, arrays, "somewhere")
    found, source = cache.read(path, spec.checksums)
    assert source == "somewhere"
    for key, array in arrays.items():
        np.testing.assert_array_equal(found[key], array)
        assert found[key].dtype == np.uint8
    assert [file.name for file in tmp_path.iterdir()] == ["mnist.npz"]


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "other"])
def test_a_corrupt_file_is_an_error_that_names_it(arrays, spec, tmp_path, damage):
    path = tmp_path / "mnist.npz"
    if damage == "other":
        # A valid file whose content is not the dataset: the zip's own checksums cannot see that.
        arrays["train-labels"] = arrays["train-labels"][::-1]
    cache.write(path, arrays, "somewhere")
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[5000] ^= 1
    elif damage == "truncate":
        content = content[: len(content) // 2]
    elif damage == "empty":
        content = bytearray()
    path.write_bytes(content)
    with pytest.raises(UserError, match=str(path)):
        cache.read(path, spec.checksums)


def test_a_write_that_fails_keeps_the_old_file(arrays, spec, tmp_path, monkeypatch):
    path = tmp_path / "mnist.npz"
    cache.write(path, arrays, "old")

    def full(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        cache.write(path, arrays, "new")
    assert cache.read(path, spec.checksums)[1] == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["mnist.npz"]


def test_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("CAFCOR_JAX_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.directory(None) == tmp_path / ".cache" / "cafcor_jax"
    monkeypatch.setenv("CAFCOR_JAX_DATA", str(tmp_path / "env"))
    assert cache.directory(None) == tmp_path / "env"
    assert cache.directory(tmp_path / "argument") == tmp_path / "argument"


def test_a_directory_that_cannot_be_written_is_a_user_error(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError, match="CAFCOR_JAX_DATA"), cache.workspace(file / "below", "mnist", print):
        pass


def test_the_next_process_takes_over_from_a_killed_one(tmp_path):
    code = (
        "import sys, time, pathlib\n"
        "from cafcor_jax.data import cache\n"
        "with cache.workspace(pathlib.Path(sys.argv[1]), 'mnist', print) as made:\n"
        "    (made / 'half').write_text('half')\n"
        "    print(made, flush=True)\n"
        "    time.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        made = process.stdout.readline().strip()
        assert os.path.isdir(made)
        process.send_signal(signal.SIGKILL)
        process.wait()
    other = tmp_path / ".fashion_mnist.tmp.busy"
    other.mkdir()
    with cache.workspace(tmp_path, "mnist", pytest.fail) as fresh:
        assert fresh.is_dir() and not os.path.exists(made)
    assert not fresh.exists()
    assert other.is_dir(), "what another dataset's process works on is not touched"


def test_a_second_process_waits_and_says_so(tmp_path):
    inside, waiting, log = threading.Event(), threading.Event(), []

    def say(line):
        log.append(line)
        waiting.set()

    def second():
        with cache.workspace(tmp_path, "mnist", say):
            inside.set()

    with cache.workspace(tmp_path, "mnist", pytest.fail):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(10)
        assert not inside.is_set()
    thread.join(10)
    assert inside.is_set()
    assert "another process is preparing" in log[0]
