"""The folder of one run: its settings, its metrics, its checkpoints and its results.

    config.json    settings, versions, commit, dataset checksums, privacy plan; written first
    metrics.csv    one row a round, see `COLUMNS`
    weights.npy    weight of every worker in the aggregate, float32 [rounds, n]; NaN for rules without weights
    checkpoints/   one folder a checkpoint, named by its round
    curves.png     accuracy, loss and epsilon over the rounds
    filtering.png  who was filtered when, for rules with weights
    tensorboard/   the metrics as TensorBoard event files, if wanted
    summary.json   the result; written last, so a folder that has it holds a finished run

A run may be killed at any moment. Every file and every checkpoint is made under a temporary name and then
renamed, so what stands under its own name is whole; `metrics.csv` alone grows, and is cut back to the
checkpoint on resuming.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import cafcor_jax
from cafcor_jax import config as config_lib
from cafcor_jax.errors import InUseError, UserError
from cafcor_jax.types import PyTree

try:
    import fcntl
except ImportError:  # Not on Windows; then nothing keeps two processes out of one folder.
    fcntl = None  # type: ignore[assignment]

COLUMNS = (
    "round",
    "loss",
    "test_accuracy",
    "test_loss",
    "epsilon",
    "gradient_norm",
    "clipped",
    "deviation",
    "honest_weight",
    "separation",
    "not_finite",
    "flagged",
    "false_alarms",
    "law_fits",
    "seconds",
)

_KEEP = 2  # checkpoints, while the run goes on
_TEMPORARY = ".cafcor-tmp-"
_LOCK = ".cafcor.lock"
_DIGEST = "sha256.txt"
_FLAT_DIGEST = "flat_sha256.txt"
_PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint")


class Workdir:
    """A run's folder, held by this process alone until `close`.

    Making one checks that the folder can be written and does not hold anything else; it writes no results.

    Args:
      path: the folder; made if it is missing.
      config: the settings of the run.
      leads: whether this process is the one to write, of those that compute the run together. The others hold
        nothing and write nothing but their part of checkpoints; they are made after the leader's is there.

    Raises:
      UserError: if the folder cannot be used, holds a run with other settings, or is in use.
    """

    def __init__(self, path: str | os.PathLike[str], config: config_lib.Config, *, leads: bool = True):
        self.path = Path(path)
        self._config = config
        self._leads = leads
        self.stored: dict[str, Any] | None = None
        self._lock: IO[str] | None = None
        if not leads:
            return
        self._refuse_other_files()  # before anything is written there
        self._lock = hold(self.path)
        try:
            self.stored = self._check_content()
            self._remove_leftovers()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Workdir:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets other processes use the folder."""
        if self._lock is not None:
            self._lock.close()

    def _refuse_other_files(self) -> None:
        """Raises if the folder is somebody else's."""
        if not self.path.is_dir():
            return
        with writing(self.path):
            names = sorted(entry.name for entry in self.path.iterdir())
        others = [name for name in names if name != _LOCK and not name.startswith(_TEMPORARY)]
        if others and "config.json" not in others:
            raise UserError(
                f"The workdir {self.path} holds other files (such as {others[0]}) and no run: give another "
                "workdir, or an empty one."
            )

    def _check_content(self) -> dict[str, Any] | None:
        """Returns what config.json says, or None in a new folder."""
        if not (self.path / "config.json").exists():
            return None
        stored = _read_json(self.path / "config.json", f"delete {self.path} to start anew")
        try:
            config = config_lib.Config.from_dict(stored["config"])
            _ = stored["dataset"]["checksums"], stored["plan"], stored["versions"]
        except (UserError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.path / 'config.json'} holds no settings that can be read ({_line(error)}): give "
                "another workdir."
            ) from None
        differences = config_lib.differences(config, self._config)
        if differences:
            listing = ", ".join(
                f"{name} ({old!r} there, {new!r} now)" for name, (old, new) in differences.items()
            )
            raise UserError(
                f"The workdir {self.path} holds a run with other settings: {listing}; give another workdir, "
                "or those settings to resume."
            )
        return stored

    def _remove_leftovers(self) -> None:
        """Removes what a killed process was writing."""
        with writing(self.path):
            for leftover in (*self.path.glob(f"{_TEMPORARY}*"), *self._checkpoints.glob(f"{_TEMPORARY}*")):
                if leftover.is_dir():
                    shutil.rmtree(leftover)
                else:
                    leftover.unlink()

    # What is run.

    def start(self, record: Mapping[str, Any], log: Callable[[str], None]) -> None:
        """Writes config.json, or compares with it when the run is resumed.

        Args:
          record: "config", "versions", "dataset" (with "checksums"), "plan", and what else is worth keeping.
          log: takes a warning if this software is not the one that the run began with.

        Raises:
          UserError: if the stored run has other data or another privacy plan.
        """
        record = strict(record)
        if not self._leads:
            return
        if self.stored is None:
            self.write_json("config.json", record)
            return
        stored = self.stored
        _check_same("dataset", stored["dataset"]["checksums"], record["dataset"]["checksums"], self.path)
        _check_same("privacy plan", stored["plan"], record["plan"], self.path)
        changed = _changes(stored["versions"], record["versions"])
        if changed:
            log(
                "warning: the run began with other software, so its last bits may change: "
                + ", ".join(changed)
            )

    # What comes out.

    def write(self, name: str, writer: Callable[[Path], object]) -> None:
        """Writes a file such that readers see the old one or the whole new one.

        Args:
          name: of the file.
          writer: writes it to the path that it is given.
        """
        if not self._leads:
            return
        temporary = self.path / f"{_TEMPORARY}{name}"
        with writing(self.path / name):
            writer(temporary)
            os.replace(temporary, self.path / name)

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes a JSON file; numbers that JSON does not have become text ("inf", "nan")."""
        self.write(name, lambda path: path.write_text(json.dumps(strict(value), indent=2) + "\n"))

    def summary(self) -> dict[str, Any] | None:
        """The content of summary.json if the run is finished."""
        path = self.path / "summary.json"
        return _read_json(path, "delete it, and the same command makes it anew") if path.exists() else None

    # Metrics.

    def resume_metrics(self, round: int) -> np.ndarray:
        """Cuts metrics.csv back to the first rounds, or begins it.

        Args:
          round: how many rows to keep.

        Returns:
          The workers' weights in these rounds, [round, n].

        Raises:
          UserError: if the files do not reach so far.
        """
        path = self.path / "metrics.csv"
        lines = [",".join(COLUMNS)]
        weights = np.zeros((0, self._config.num_workers), np.float32)
        if round and self._leads:
            try:
                lines = path.read_text().splitlines()[: round + 1]
                weights = np.load(self.path / "weights.npy")[:round]
            except (OSError, ValueError, EOFError) as error:
                raise self._lost_metrics(round, _line(error)) from None
            if lines[:1] != [",".join(COLUMNS)]:
                raise self._lost_metrics(round, "metrics.csv has other columns than this version writes")
            numbers = [line.split(",")[0] for line in lines]
            if numbers != ["round", *map(str, range(1, round + 1))] or len(weights) != round:
                raise self._lost_metrics(round, "rows are missing")
        self.write("metrics.csv", lambda temporary: temporary.write_text("\n".join(lines) + "\n"))
        return weights

    def _lost_metrics(self, round: int, why: str) -> UserError:
        return UserError(
            f"The metrics in {self.path} do not reach its checkpoint of round {round} ({why}): put "
            "metrics.csv and weights.npy back, or delete the folder to start anew."
        )

    def append_metrics(self, rows: Sequence[Mapping[str, float | None]]) -> None:
        """Adds rows to metrics.csv.

        Args:
          rows: by column; None for what was not measured.
        """
        if not self._leads:
            return
        with writing(self.path / "metrics.csv"), open(self.path / "metrics.csv", "a") as file:
            for row in rows:
                file.write(",".join(_cell(row[column]) for column in COLUMNS) + "\n")

    def write_weights(self, weights: np.ndarray) -> None:
        """Writes weights.npy, [rounds, n]."""

        def writer(path: Path) -> None:
            with open(path, "wb") as file:
                np.save(file, weights)

        self.write("weights.npy", writer)

    # Checkpoints.

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def rounds(self) -> list[int]:
        """The rounds of which there are checkpoints, in order."""
        return sorted(int(path.name) for path in self._checkpoints.glob("*") if path.name.isdecimal())

    def save(self, round: int, tree: PyTree, *, keep: int = _KEEP, flat: bool = False) -> None:
        """Writes a checkpoint, then removes old ones; all processes that compute the run take part.

        Args:
          round: how many rounds are done.
          tree: arrays.
          keep: how many checkpoints stay.
          flat: whether they are the flat arrays of a mesh, whose last axis may be longer than what it holds,
            with zeros at its end. They are read and written device by device.
        """
        target = self._checkpoints / str(round)
        # Absolute, as orbax wants it.
        temporary = (self._checkpoints / f"{_TEMPORARY}{round}").absolute()
        with writing(target):
            if self._leads:
                self._checkpoints.mkdir(exist_ok=True)
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(temporary, tree)
                checkpointer.wait_until_finished()
            # Orbax notices a missing or a shortened file, but not a wrong byte.
            content = flat_digest(tree) if flat else digest(tree)
            if not self._leads:
                return
            (temporary / (_FLAT_DIGEST if flat else _DIGEST)).write_text(content + "\n")
            os.replace(temporary, target)
            self.prune(keep)

    def prune(self, keep: int) -> None:
        """Removes all checkpoints but the last ones."""
        if not self._leads:
            return
        for old in self.rounds()[:-keep]:
            # Renamed first: a removal that is cut short must not leave a damaged checkpoint.
            doomed = self._checkpoints / f"{_TEMPORARY}{old}"
            os.replace(self._checkpoints / str(old), doomed)
            shutil.rmtree(doomed)

    def is_flat(self, round: int) -> bool:
        """Whether a checkpoint holds the flat arrays of a mesh."""
        return (self._checkpoints / str(round) / _FLAT_DIGEST).exists()

    def restore(self, round: int, like: PyTree) -> PyTree:
        """Reads a checkpoint.

        Args:
          round: which one.
          like: a tree of arrays, or of their shapes and types, that it has to match. Of a flat checkpoint the
            last axes may have another length: they are cut, or filled up with zeros. Shapes may have
            shardings, and every device then reads its own part. What is NumPy's comes back as that.

        Returns:
          The tree.

        Raises:
          UserError: if a byte of it is wrong.
        """
        path = self._checkpoints / str(round)
        flat = self.is_flat(round)
        shapes = jax.tree.map(_shape, like)
        try:
            expected = (path / (_FLAT_DIGEST if flat else _DIGEST)).read_text().strip()
            with ocp.StandardCheckpointer() as checkpointer:
                tree = checkpointer.restore(path.absolute(), shapes, strict=not flat)
        except Exception as error:  # Orbax fails in many ways on a damaged folder.
            raise self._corrupt(path, _line(error)) from None
        if (flat_digest(tree) if flat else digest(tree)) != expected:
            raise self._corrupt(path, "its content does not match its checksum")
        return tree

    def _corrupt(self, path: Path, why: str) -> UserError:
        earlier = [round for round in self.rounds() if round < int(path.name)]
        way_out = f"go on from round {earlier[-1]}" if earlier else "start anew"
        return UserError(f"The checkpoint {path} is damaged ({why}): delete that folder to {way_out}.")


def hold(folder: Path, workdir: str | os.PathLike[str] | None = None) -> IO[str]:
    """Takes a folder, which is made if it is missing, for this process alone until the result is closed.

    Args:
      folder: to be held.
      workdir: the one that it belongs to, if it is not one itself.

    Returns:
      The open lock file.

    Raises:
      InUseError: if another process has it.
      UserError: if it cannot be made.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / _LOCK, "a")
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise InUseError(
                f"The workdir {workdir or folder} is in use by another process: wait for it, or give another "
                "one."
            ) from None
        except OSError:  # A file system without locks.
            pass
    return lock


def read_metrics(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads a metrics.csv.

    Args:
      path: the file.

    Returns:
      Its columns as float64 arrays [rounds]; NaN where nothing was measured.

    Raises:
      UserError: if the file cannot be read or is not one of ours.
    """
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        # Runs from before these columns were there had no rule that knows a law.
        none = {"flagged": "0", "false_alarms": "0", "law_fits": "1"}
        rows = [none | row for row in rows]
        return {name: np.array([float(row[name] or "nan") for row in rows]) for name in COLUMNS}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"{path} is not a metrics file of a run ({_line(error)}).") from None


def digest(tree: PyTree) -> str:
    """The SHA-256 of all arrays of a tree, with their places, types and shapes."""
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        total.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def flat_digest(tree: PyTree) -> str:
    """Like `digest`, of flat arrays [..., d] on any mesh: each device reads its own part only.

    Zeros at the ends of rows do not count, so it does not depend on how long the rows are. It is two sums of
    32 bits an array: enough against damage, and not against an adversary.
    """
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        sums = np.asarray(jax.jit(_checksums)(leaf)).tolist()
        place = f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape[:-1]}"
        total.update(f"{place} {sums}\n".encode())
    return total.hexdigest()


def _checksums(array: jax.Array) -> jax.Array:
    """Two sums over all numbers, of what depends on a number's bits and its place; a zero adds nothing."""
    bits = jax.lax.bitcast_convert_type(array, jnp.uint32)
    bits = jnp.where(array == 0, 0, bits)
    place = jnp.zeros(array.shape, jnp.uint32)
    for axis in range(array.ndim):
        index = jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
        place = _mixed(place + index + jnp.uint32(0x9E3779B9))
    # Odd factors: a change of one number always changes the first sum.
    return jnp.stack([jnp.sum(bits * (place | 1)), jnp.sum(_mixed(bits ^ place) * (bits != 0))])


def _mixed(words: jax.Array) -> jax.Array:
    """Words of 32 bits whose every bit depends on all of what went in (the finalizer of MurmurHash3)."""
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)


def _shape(leaf: Any) -> Any:
    """What Orbax is to make of a leaf: a NumPy array for one, else an array on devices."""
    if isinstance(leaf, np.ndarray):
        return leaf
    sharding = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def versions() -> dict[str, str | None]:
    """The software that decides the last bits of a run, and the device."""
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "cafcor_jax": cafcor_jax.__version__,
        "commit": _commit(),
        "device": f"{device.platform}: {device.device_kind}",
    }


def _commit() -> str | None:
    """The git commit of the code, marked if files were changed; None outside a clone."""
    root = Path(cafcor_jax.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def strict(value: Any) -> Any:
    """The same value for strict JSON: numbers that it does not have become text ("inf", "nan")."""
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the operating system's refusal to write into a sentence."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or _line(error)}.") from None


def write_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Writes a file such that readers see the old one or the whole new one, in a folder that many may use.

    If it is to be durable, that also holds after the machine has lost its power.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable and hasattr(os, "O_DIRECTORY"):
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def _read_json(path: Path, way_out: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
        return value
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({_line(error)}): {way_out}.") from None


def _check_same(what: str, old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    changes = _changes(old, new)
    if changes:
        raise UserError(
            f"The workdir {path} holds a run with another {what}, {', '.join(changes)}: give another "
            "workdir, or use the software that the run began with."
        )


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The entries that differ, in words; the last digits of a number may."""

    def same(a: Any, b: Any) -> bool:
        numbers = isinstance(a, float) and isinstance(b, float)
        return math.isclose(a, b, rel_tol=1e-9) if numbers else a == b

    names = dict.fromkeys([*old, *new])
    return [
        f"{name} {old.get(name)} there, {new.get(name)} now"
        for name in names
        if not same(old.get(name), new.get(name))
    ]


def _cell(value: float | None) -> str:
    """A number with all digits of a float32, and nothing for one that was not measured."""
    return "" if value is None else f"{value:.9g}"


def _line(error: BaseException) -> str:
    """The first line of an error, not too long."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200].rstrip(".:")
