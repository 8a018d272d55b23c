import functools
import gzip
import http.server
import threading
import time

import numpy as np
import pytest

from cafcor_jax.data import idx, tfds_source
from cafcor_jax.errors import UserError


def prepare(spec, arrays, tmp_path, log=lambda line: None):
    workspace = tmp_path / "workspace"
    workspace.mkdir(exist_ok=True)
    tfds_source.prepare(spec, arrays, tmp_path / "tfds", workspace, log)


def test_round_trip_through_a_real_tfds_dataset(spec, arrays, tmp_path, capfd):
    log = []
    assert not tfds_source.exists("mnist", tmp_path / "tfds")
    prepare(spec, arrays, tmp_path, log.append)
    assert tfds_source.exists("mnist", tmp_path / "tfds")
    found = tfds_source.read(spec, tmp_path / "tfds", log.append)
    for key, array in arrays.items():
        np.testing.assert_array_equal(found[key], array)  # in IDX order, not shuffled
        assert found[key].dtype == np.uint8
    assert any("writing the train records: 50 / 50" in line for line in log)
    assert any("reading the test records back: 20 / 20" in line for line in log)
    assert capfd.readouterr() == ("", ""), "TFDS is silent: only the log speaks"


def test_the_copy_is_an_ordinary_tfds_dataset(spec, arrays, tmp_path):
    import tensorflow_datasets as tfds

    prepare(spec, arrays, tmp_path)
    records = tfds.data_source("mnist", split="test", data_dir=str(tmp_path / "tfds"), download=False)
    assert len(records) == 20
    np.testing.assert_array_equal(records[7]["image"][..., 0], arrays["t10k-images"][7])
    assert records[7]["label"] == arrays["t10k-labels"][7]


def test_preparing_again_replaces_a_copy(spec, arrays, tmp_path):
    prepare(spec, arrays | {"train-labels": (arrays["train-labels"] + 1) % 10}, tmp_path)
    with pytest.raises(UserError, match="train-labels in the TFDS copy .*SHA-256"):
        tfds_source.read(spec, tmp_path / "tfds", print)
    prepare(spec, arrays, tmp_path)
    tfds_source.read(spec, tmp_path / "tfds", print)


@pytest.fixture
def hub(idx_dir, arrays, monkeypatch):
    """A local web server with the original archives, in the place of the real one."""
    for key, array in arrays.items():
        packed = gzip.compress(idx.header(array) + array.tobytes())
        (idx_dir / idx.file_names(key)[0]).write_bytes(packed)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Handler, directory=str(idx_dir))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        base = f"http://127.0.0.1:{server.server_port}/"
        monkeypatch.setattr(
            tfds_source, "_urls", lambda spec: {key: base + idx.file_names(key)[0] for key in idx.KEYS}
        )
        yield idx_dir
        server.shutdown()


def test_download_with_the_tfds_manager(hub, spec, arrays, tmp_path):
    found = tfds_source.download(spec, tmp_path / "workspace", print)
    for key, array in arrays.items():
        np.testing.assert_array_equal(found[key], array)


def test_a_wrong_byte_from_the_hub_is_refused(hub, spec, arrays, tmp_path):
    array = arrays["t10k-images"] ^ 1
    (hub / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx.header(array) + array.tobytes()))
    with pytest.raises(UserError, match="SHA-256"):
        tfds_source.download(spec, tmp_path / "workspace", print)


def test_the_urls_are_those_of_the_stock_builder(spec):
    urls = tfds_source._urls(spec)
    assert set(urls) == set(idx.KEYS)
    assert urls["t10k-labels"].endswith("/mnist/t10k-labels-idx1-ubyte.gz")


def test_an_unreachable_hub_is_found_out_at_once(spec, tmp_path, monkeypatch):
    # Port 9 of the local machine: refused, or silent, never an archive.
    monkeypatch.setattr(tfds_source, "_urls", lambda spec: {"t10k-labels": "http://127.0.0.1:9/x"})
    start = time.monotonic()
    with pytest.raises(UserError, match="the hub cannot be reached"):
        tfds_source.download(spec, tmp_path, print)
    assert time.monotonic() - start < 10


def test_a_hub_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(tfds_source, "PROBE_TIMEOUT", 0.2)
    monkeypatch.setattr(tfds_source.urllib.request, "urlopen", lambda *args, **kwargs: time.sleep(5))
    start = time.monotonic()
    assert "no answer" in tfds_source.probe("http://example.invalid/x")
    assert time.monotonic() - start < 2
