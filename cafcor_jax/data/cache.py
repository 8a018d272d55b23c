"""Prepared data on disk: one file of uint8 arrays a dataset, and a lock for preparing it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from cafcor_jax.data import idx
from cafcor_jax.errors import UserError

try:
    import fcntl
except ImportError:  # Not on Windows; then two processes both prepare, and the last rename wins.
    fcntl = None  # type: ignore[assignment]

Log = Callable[[str], None]

ENVIRONMENT = "CAFCOR_JAX_DATA"


def directory(data_dir: str | os.PathLike[str] | None) -> Path:
    """Where prepared data is kept: the argument, else `$CAFCOR_JAX_DATA`, else `~/.cache/cafcor_jax`."""
    return Path(data_dir or os.environ.get(ENVIRONMENT) or "~/.cache/cafcor_jax").expanduser()


def read(path: Path, checksums: Mapping[str, str]) -> tuple[idx.Arrays, str]:
    """Reads a cache file and verifies its content against the published checksums.

    Args:
      path: The file.
      checksums: The expected SHA-256 of each array as an IDX file.

    Returns:
      The arrays and where they came from originally. Raises `UserError` naming the file if it is corrupt.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in checksums}
            source = str(file["source"])
    except FileNotFoundError:
        raise
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is corrupt or cannot be read: {error}") from error
    idx.verify_all(arrays, checksums, str(path))
    return arrays, source


def write(path: Path, arrays: Mapping[str, np.ndarray], source: str) -> None:
    """Writes a cache file so that a reader sees the old one or the whole new one, never a part."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=_prefix(path.stem))
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, source=np.array(source), **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        # Temporary files are private by default; the data may be shared like any other file.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def workspace(root: Path, name: str, log: Log) -> Iterator[Path]:
    """A temporary directory next to the cache, while no other process prepares the same dataset.

    The operating system drops the lock when its holder dies, and whoever holds it next removes what a
    killed process left behind.

    Args:
      root: The data directory; made if it is missing.
      name: The dataset.
      log: Takes a line if another process has to be waited for.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = open(root / f"{name}.lock", "w")
    except OSError as error:
        raise UserError(
            f"{root} cannot be written ({error.strerror or error}): name another data directory with "
            f"data_dir or the environment variable {ENVIRONMENT}"
        ) from error
    with lock:
        if _acquire(lock.fileno(), name, log):
            for leftover in root.glob(_prefix(name) + "*"):
                if leftover.is_dir():
                    shutil.rmtree(leftover, ignore_errors=True)
                else:
                    leftover.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=_prefix(name), ignore_cleanup_errors=True) as made:
            yield Path(made)


def _prefix(name: str) -> str:
    # The dots keep `mnist` from matching the leftovers of `fashion_mnist`.
    return f".{name}.tmp."


def _acquire(descriptor: int, name: str, log: Log) -> bool:
    """Waits for the lock; false where the platform or the file system has none."""
    if fcntl is None:
        return False
    waited = 0.0
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if waited % 10 == 0:
                log(f"{name}: another process is preparing it, waiting ({waited:.0f} s) ...")
            time.sleep(0.5)
            waited += 0.5
        except OSError:
            return False
