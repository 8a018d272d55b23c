"""Event files, read back by their definition, and by TensorBoard itself where it is installed."""

import importlib.util
import math
import struct
import sys
import time

import numpy as np
import pytest

from cafcor_jax import tensorboard, workdir
from cafcor_jax.errors import UserError

needs_tensorboardx = pytest.mark.skipif(
    importlib.util.find_spec("tensorboardX") is None, reason="event files need tensorboardX"
)
needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="TensorBoard is not installed"
)

N, HONEST = 6, 4


def crc32c(data):
    """CRC-32C (Castagnoli), bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def records(content):
    """The records of a TFRecord file, each with its length and two masked checksums."""

    def check(data, stored):
        crc = crc32c(data)
        mask = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
        assert struct.unpack("<I", stored)[0] == mask

    while content:
        (length,) = struct.unpack("<Q", content[:8])
        check(content[:8], content[8:12])
        check(content[12 : 12 + length], content[12 + length : 16 + length])
        yield content[12 : 12 + length]
        content = content[16 + length :]


def events(folder):
    """All events of the one event file in a folder."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = folder.glob("*tfevents*")
    return [Event.FromString(record) for record in records(path.read_bytes())]


def scalars(folder):
    """What was measured, by tag and step."""
    return {
        (value.tag, event.step): value.simple_value
        for event in events(folder)
        for value in event.summary.value
        if value.HasField("simple_value")
    }


def histograms(folder):
    return {
        (value.tag, event.step): value.histo
        for event in events(folder)
        for value in event.summary.value
        if value.HasField("histo")
    }


def run(rounds, seed=0):
    """Rows and weights of a run; the test data is looked at every second round."""
    generator = np.random.default_rng(seed)
    rows = []
    for round in range(1, rounds + 1):
        row = dict(zip(workdir.COLUMNS, generator.random(len(workdir.COLUMNS)).tolist(), strict=True))
        rows.append({**row, "round": round})
        if round % 2:
            rows[-1].update(test_accuracy=None, test_loss=None)
    weights = generator.random((rounds, N)).astype(np.float32)
    return rows, weights / weights.sum(1, keepdims=True)


def expected(rows):
    return {
        (tensorboard.TAGS[column], row["round"]): float(np.float32(value))
        for row in rows
        for column, value in row.items()
        if column != "round" and value is not None and math.isfinite(value)
    }


def write(folder, rows, weights, settings=None):
    with tensorboard.writer(folder, settings) as writer:
        writer.add(rows, weights, HONEST)


def test_the_checksum_is_the_published_one():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert crc32c(b"\xff" * 32) == 0x62A8AB43


def test_every_metric_has_a_tag_of_its_own():
    assert set(workdir.COLUMNS) - {"round"} <= set(tensorboard.TAGS)
    assert len(set(tensorboard.TAGS.values())) == len(tensorboard.TAGS)


@needs_tensorboardx
def test_scalars_are_those_of_the_rows(tmp_path):
    rows, weights = run(5)
    write(tmp_path, rows, weights)
    assert scalars(tmp_path) == expected(rows)
    assert ("test/accuracy", 1) not in expected(rows) and ("test/accuracy", 2) in expected(rows)
    first = events(tmp_path)[0]
    assert first.file_version == "brain.Event:2"


@needs_tensorboardx
def test_numbers_that_are_not_finite_are_left_out(tmp_path):
    row = dict.fromkeys(workdir.COLUMNS, 0.5) | {"round": 1, "epsilon": np.inf, "loss": np.nan}
    write(tmp_path, [row], np.full((1, N), np.nan))
    assert scalars(tmp_path) == expected([row])
    assert {"privacy/epsilon", "train/loss"}.isdisjoint(tag for tag, _ in scalars(tmp_path))
    assert ("gradient/norm", 1) in scalars(tmp_path)


@needs_tensorboardx
@pytest.mark.parametrize("scale", [1, 0, -1], ids=["usual", "all zero", "negative"])
def test_histograms_hold_the_weights(tmp_path, scale):
    rows, weights = run(3)
    weights = scale * weights
    weights[1, 4:] = 0  # filtered
    write(tmp_path, rows, weights)
    found = histograms(tmp_path)
    groups = ("weights/honest", "weights/malicious")
    assert set(found) == {(group, step) for group in groups for step in (1, 2, 3)}
    for step, row in enumerate(weights.astype(np.float64), 1):
        both = [found[group, step] for group in groups]
        assert list(both[0].bucket_limit) == list(both[1].bucket_limit)
        limits = np.array(both[0].bucket_limit)
        assert (np.diff(limits) > 0).all() and limits[-1] >= row.max()
        for histogram, values in zip(both, (row[:HONEST], row[HONEST:]), strict=True):
            assert (histogram.min, histogram.max, histogram.num) == (values.min(), values.max(), len(values))
            np.testing.assert_allclose(histogram.sum, values.sum(), rtol=1e-12)
            np.testing.assert_allclose(histogram.sum_squares, (values**2).sum(), rtol=1e-12)
            assert sum(histogram.bucket) == len(values)
            # What is in a bucket is in its range, by the counts up to each limit.
            below = [(values < limit).sum() for limit in limits[:-1]]
            np.testing.assert_array_equal(np.cumsum(histogram.bucket)[:-1], below)


@needs_tensorboardx
def test_no_histograms_without_weights_or_malicious_workers(tmp_path):
    rows, weights = run(2)
    write(tmp_path / "nan", rows, np.full((2, N), np.nan))
    assert not histograms(tmp_path / "nan")
    with tensorboard.writer(tmp_path / "honest") as writer:
        writer.add(rows, weights, N)
    assert {tag for tag, _ in histograms(tmp_path / "honest")} == {"weights/honest"}


@needs_tensorboardx
def test_settings_are_the_first_text(tmp_path):
    write(tmp_path, *run(1), {"seed": 3, "secret_graph": "a|b\\c\nd"})
    values = [value for event in events(tmp_path) for value in event.summary.value]
    assert values[0].tag == "settings/text_summary"
    assert values[0].metadata.plugin_data.plugin_name == "text"
    table = values[0].tensor.string_val[0].decode().splitlines()
    assert table == ["| setting | value |", "|---|---|", "| seed | 3 |", "| secret_graph | a\\|b\\\\c d |"]


@needs_tensorboardx
def test_times_go_back_by_the_seconds_of_the_rounds(tmp_path):
    rows, weights = run(4)
    for row, seconds in zip(rows, [100.0, 10.0, np.nan, 0.5], strict=True):
        row["seconds"] = seconds
    before = time.time()
    write(tmp_path, rows, weights)
    after = time.time()
    times = [event.wall_time for event in events(tmp_path) if event.step]
    assert before <= times[-1] <= after
    np.testing.assert_allclose(np.diff(times), [10, 0, 0.5], atol=1e-5)


@needs_tensorboardx
def test_rounds_can_be_read_before_the_file_is_closed(tmp_path):
    rows, weights = run(3)
    with tensorboard.writer(tmp_path) as writer:
        writer.add(rows[:1], weights[:1], HONEST)
        assert scalars(tmp_path) == expected(rows[:1])
        writer.add(rows[1:], weights[1:], HONEST)
        assert scalars(tmp_path) == expected(rows)
        writer.add([], np.zeros((0, N)), HONEST)
        assert scalars(tmp_path) == expected(rows)


@needs_tensorboardx
def test_a_resumed_run_leaves_one_consistent_story(tmp_path):
    rows, weights = run(6)
    other_rows, other_weights = run(6, seed=1)  # what a killed process wrote beyond its checkpoint
    foreign = [tmp_path / "events.out.tfevents.1.host", tmp_path / "notes.cafcor_jax"]
    write(tmp_path, rows[:3] + other_rows[3:], np.concatenate([weights[:3], other_weights[3:]]))
    for file in foreign:
        file.write_text("mine")
    with tensorboard.writer(tmp_path) as writer:
        writer.add(rows[:3], weights[:3], HONEST)
        writer.add(rows[3:], weights[3:], HONEST)
    for file in foreign:
        assert file.read_text() == "mine"
        file.unlink()
    assert scalars(tmp_path) == expected(rows) != expected(other_rows)
    steps = [event.step for event in events(tmp_path) if event.summary.value]
    assert steps == [1, 2, 3, 4, 5, 6]


@needs_tensorboardx
def test_a_file_that_was_cut_short_is_replaced(tmp_path):
    rows, weights = run(3)
    write(tmp_path, rows, weights)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-7])
    write(tmp_path, rows, weights)
    assert scalars(tmp_path) == expected(rows)


def stored(path, rounds):
    """The metrics and weights of a run, as a run leaves them."""
    rows, weights = run(rounds)
    lines = [",".join(workdir.COLUMNS)]
    for row in rows:
        lines.append(",".join("" if row[name] is None else f"{row[name]:.9g}" for name in workdir.COLUMNS))
    path.mkdir()
    (path / "metrics.csv").write_text("\n".join(lines) + "\n")
    np.save(path / "weights.npy", weights)
    return rows, weights


@needs_tensorboardx
def test_export_writes_what_the_files_of_a_run_hold(tmp_path):
    rows, weights = stored(tmp_path / "run", 4)
    path = tensorboard.export(tmp_path / "run", HONEST, {"seed": 1})
    assert path.parent == tmp_path / "run" / "tensorboard" and path.exists()
    assert scalars(path.parent) == pytest.approx(expected(rows), rel=1e-6)  # the file has nine digits
    histogram = histograms(path.parent)["weights/malicious", 3]
    np.testing.assert_allclose(histogram.sum, weights[2, HONEST:].sum(dtype=np.float64), rtol=1e-6)


@needs_tensorboardx
def test_export_says_what_is_wrong_with_a_run(tmp_path):
    with pytest.raises(UserError, match=r"metrics.csv cannot be read"):
        tensorboard.export(tmp_path / "nothing", HONEST)
    stored(tmp_path / "run", 3)
    np.save(tmp_path / "run" / "weights.npy", np.zeros((2, N)))
    with pytest.raises(UserError, match=r"shape \(2, 6\), which does not fit the 3 rounds"):
        tensorboard.export(tmp_path / "run", HONEST)
    (tmp_path / "run" / "weights.npy").write_text("no array")
    with pytest.raises(UserError, match="weights.npy cannot be read"):
        tensorboard.export(tmp_path / "run", HONEST)
    (tmp_path / "run" / "weights.npy").unlink()
    with pytest.raises(UserError, match="weights.npy cannot be read"):
        tensorboard.export(tmp_path / "run", HONEST)
    assert not (tmp_path / "run" / "tensorboard").exists()


@needs_tensorboardx
@pytest.mark.parametrize(
    ("shape", "num_honest", "message"),
    [
        ((3, N), HONEST, r"weights of shape \(3, 6\) do not fit 2 rows"),
        ((2,), HONEST, r"weights of shape \(2,\) do not fit 2 rows"),
        ((2, N), N + 1, "num_honest=7 must be from 0 to the 6 workers"),
        ((2, N), -1, "num_honest=-1 must be from 0 to the 6 workers"),
    ],
)
def test_weights_that_do_not_fit(tmp_path, shape, num_honest, message):
    with tensorboard.writer(tmp_path) as writer, pytest.raises(ValueError, match=message):
        writer.add(run(2)[0], np.zeros(shape), num_honest)


@needs_tensorboardx
def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="cannot be written: (File exists|Not a directory)"):
        tensorboard.writer(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@needs_tensorboardx
def test_a_full_disk_is_told_at_once(tmp_path):
    if not sys.platform.startswith("linux"):
        pytest.skip("needs /dev/full")
    with tensorboard.writer(tmp_path) as writer, open("/dev/full", "wb", buffering=0) as full:
        file, writer._records._writer = writer._records._writer, full
        with pytest.raises(UserError, match="cannot be written: No space left on device"):
            writer.add(*run(1), HONEST)
        writer._records._writer = file


def test_without_the_package_there_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    stored(tmp_path / "run", 1)
    for call in (
        tensorboard.check_installed,
        lambda: tensorboard.writer(tmp_path / "new"),
        lambda: tensorboard.export(tmp_path / "run", HONEST),
    ):
        with pytest.raises(UserError, match=r'install it with: pip install "cafcor_jax\[tensorboard\]"\.$'):
            call()
    assert not (tmp_path / "new").exists()


@needs_tensorboardx
@needs_tensorboard
def test_tensorboard_reads_them(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows, weights = run(6)
    write(tmp_path, run(6, seed=1)[0], weights, {"seed": 1})
    write(tmp_path, rows[:4], weights[:4], {"seed": 2})
    accumulator = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0, "scalars": 0, "tensors": 0})
    accumulator.Reload()
    found = {
        (tag, scalar.step): scalar.value
        for tag in accumulator.Tags()["scalars"]
        for scalar in accumulator.Scalars(tag)
    }
    assert found == expected(rows[:4])
    seen = accumulator.Histograms("weights/malicious")
    assert [value.step for value in seen] == [1, 2, 3, 4]
    sums = [value.histogram_value.sum for value in seen]
    np.testing.assert_allclose(sums, weights[:4, HONEST:].sum(1), rtol=1e-6)
    (text,) = accumulator.Tensors("settings/text_summary")
    assert b"| seed | 2 |" in text.tensor_proto.string_val[0]
