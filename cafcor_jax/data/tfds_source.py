"""MNIST and Fashion-MNIST through `tensorflow-datasets`, without TensorFlow.

The stock builders need TensorFlow to *generate* (gzip, file access, PNG). The subclasses here read IDX files
with NumPy and hand over PIL images instead. They also turn off the shuffling of records, so records keep the
order of the IDX files and what is read back can be compared with the published checksums. What they write is
an ordinary TFDS directory in the `array_record` format, which `tfds.data_source` reads.

`tensorflow_datasets` is imported only inside these functions: a run on prepared data does not need it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cafcor_jax.data import idx
from cafcor_jax.data.catalog import Spec
from cafcor_jax.errors import UserError

Log = Callable[[str], None]

PROBE_TIMEOUT = 3.0
_HEARTBEAT = 3.0
_BATCH = 1000
_SPLITS = {"train": "train", "test": "t10k"}


def exists(name: str, tfds_dir: Path) -> bool:
    """Whether there is a prepared copy; does not import TFDS."""
    return any(tfds_dir.glob(f"{name}/*/dataset_info.json"))


def read(spec: Spec, tfds_dir: Path, log: Log) -> idx.Arrays:
    """Reads a prepared copy through `tfds.data_source` and verifies it end to end.

    Args:
      spec: The dataset.
      tfds_dir: The `data_dir` of TFDS.
      log: Takes lines of progress.

    Returns:
      The arrays in the order of the IDX files.
    """
    with _quiet(log) as aloud:
        import tensorflow_datasets as tfds

        arrays: idx.Arrays = {}
        for split, prefix in _SPLITS.items():
            records = tfds.data_source(spec.name, split=split, data_dir=str(tfds_dir), download=False)
            images = np.empty((len(records), 28, 28), np.uint8)
            labels = np.empty(len(records), np.uint8)
            progress = _Progress(f"reading the {split} records back", len(records), aloud)
            for start in range(0, len(records), _BATCH):
                stop = min(start + _BATCH, len(records))
                batch = records.__getitems__(list(range(start, stop)))
                images[start:stop] = [record["image"][..., 0] for record in batch]
                labels[start:stop] = [record["label"] for record in batch]
                progress.show(stop)
            arrays |= {f"{prefix}-images": images, f"{prefix}-labels": labels}
    idx.verify_all(arrays, spec.checksums, f"the TFDS copy {tfds_dir / spec.name}")
    return arrays


def prepare(spec: Spec, arrays: idx.Arrays, tfds_dir: Path, workspace: Path, log: Log) -> None:
    """Writes verified arrays as a TFDS dataset.

    Args:
      spec: The dataset.
      arrays: Its four arrays.
      tfds_dir: The `data_dir` of TFDS; a copy that is there already is replaced.
      workspace: A temporary directory on the same file system. TFDS works there and the finished directory
        is moved, so that a killed process leaves no half copy.
      log: Takes lines of progress.
    """
    with _quiet(log) as aloud:
        builder = _builder(spec, workspace / "tfds", arrays, aloud)
        builder.download_and_prepare(file_format="array_record", download_dir=str(workspace / "downloads"))
    target = tfds_dir / spec.name
    target.parent.mkdir(parents=True, exist_ok=True)
    # A directory cannot be renamed over a full one; the lock around this keeps other processes out.
    shutil.rmtree(target, ignore_errors=True)
    (workspace / "tfds" / spec.name).rename(target)


def download(spec: Spec, workspace: Path, log: Log) -> idx.Arrays:
    """Gets the original archives with the TFDS download manager, which checks their checksums too.

    Args:
      spec: The dataset.
      workspace: A directory for the archives; the caller removes it.
      log: Takes lines of progress.

    Returns:
      The verified arrays. Raises `UserError` if the hub cannot be reached: that is found out first, within
      `PROBE_TIMEOUT` seconds, because TFDS itself retries for minutes.
    """
    urls = _urls(spec)
    if reason := probe(urls["t10k-labels"]):
        raise UserError(f"the hub cannot be reached: {reason}")
    log("  downloading the original archives ...")
    with _quiet(log) as aloud, _ticking("downloading", aloud):
        import tensorflow_datasets as tfds

        # Without extracting: TFDS caches extractions by file name, and both datasets use the same names.
        manager = tfds.download.DownloadManager(
            download_dir=str(workspace / "downloads"), dataset_name=spec.name
        )
        paths = manager.download(urls)
    return {key: idx.read(Path(paths[key]), spec.checksums[key]) for key in urls}


def probe(url: str) -> str:
    """Asks for a file's headers; returns why that failed, or an empty string.

    It runs in a thread, because a name look-up that hangs obeys no timeout.
    """
    result: list[str] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD")
            with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT):
                result.append("")
        except Exception as error:  # Any failure here has one meaning: go to the next source.
            result.append(str(getattr(error, "reason", "") or error) or type(error).__name__)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_TIMEOUT)
    return result[0] if result else f"no answer in {PROBE_TIMEOUT:.0f} s"


def _stock(name: str) -> Any:
    from tensorflow_datasets.image_classification import mnist

    return {"mnist": mnist.MNIST, "fashion_mnist": mnist.FashionMNIST}[name]


def _urls(spec: Spec) -> dict[str, str]:
    base = _stock(spec.name).URL
    return {key: urllib.parse.urljoin(base, idx.file_names(key)[0]) for key in spec.checksums}


def _builder(spec: Spec, data_dir: Path, arrays: idx.Arrays, log: Log) -> Any:
    """An instance of the stock builder's subclass that needs no TensorFlow."""
    import tensorflow_datasets as tfds
    from PIL import Image
    from tensorflow_datasets.core import registered

    # Outside the registry, so that `tfds.data_source(name)` still means the stock builder for everyone else.
    with registered.skip_registration():

        class Builder(_stock(spec.name)):  # type: ignore[misc]
            """The stock dataset, generated from NumPy arrays in IDX order."""

            name = spec.name

            def _info(self) -> Any:
                stock = super()._info()
                return tfds.core.DatasetInfo(
                    builder=self,
                    description=stock.description,
                    features=stock.features,
                    supervised_keys=stock.supervised_keys,
                    homepage=stock.homepage,
                    citation=stock.citation,
                    disable_shuffling=True,
                )

            def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
                return {
                    split: self._generate_examples(
                        arrays[f"{prefix}-images"], arrays[f"{prefix}-labels"], split
                    )
                    for split, prefix in _SPLITS.items()
                }

            def _generate_examples(
                self, images: np.ndarray, labels: np.ndarray, split: str
            ) -> Iterator[tuple[int, dict[str, Any]]]:
                progress = _Progress(f"writing the {split} records", len(images), log)
                for index, (image, label) in enumerate(zip(images, labels, strict=True)):
                    yield index, {"image": Image.fromarray(image), "label": int(label)}
                    progress.show(index + 1)

    return Builder(data_dir=str(data_dir), file_format="array_record")


class _Progress:
    """Logs a line every few seconds and one at the end."""

    def __init__(self, what: str, total: int, log: Log):
        self._what, self._total, self._log = what, total, log
        self._last = time.monotonic()

    def show(self, done: int) -> None:
        if done == self._total or time.monotonic() - self._last > _HEARTBEAT:
            self._last = time.monotonic()
            self._log(f"  {self._what}: {done:,} / {self._total:,}")


@contextlib.contextmanager
def _ticking(what: str, log: Log) -> Iterator[None]:
    """Logs every few seconds that something without progress of its own still runs."""
    done = threading.Event()

    def tick() -> None:
        start = time.monotonic()
        while not done.wait(_HEARTBEAT):
            log(f"  ... still {what} ({time.monotonic() - start:.0f} s)")

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def _quiet(log: Log) -> Iterator[Log]:
    """Silences what TFDS prints, and yields a `log` that still gets through."""
    out, err = sys.stdout, sys.stderr

    def aloud(message: str) -> None:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            log(message)

    logger = logging.getLogger("absl")
    level = logger.level
    sink = io.StringIO()
    with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        try:
            logger.setLevel(logging.ERROR)
            yield aloud
        finally:
            logger.setLevel(level)
