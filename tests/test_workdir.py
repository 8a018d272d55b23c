import os
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from cafcor_jax import workdir
from cafcor_jax.config import Config
from cafcor_jax.errors import UserError
from cafcor_jax.workdir import Workdir

RECORD = {"dataset": {"checksums": {}}, "plan": {}, "versions": {}}


def make(path, **changes):
    return Config(dataset="synthetic", num_workers=4, num_byzantine=1, workdir=str(path), **changes)


def open_(path, **changes):
    return Workdir(path, make(path, **changes))


def started(path):
    """The folder of a run that has begun."""
    folder = open_(path)
    folder.start({"config": make(path).to_dict(), **RECORD}, print)
    folder.resume_metrics(0)
    return folder


def tree(value):
    return {"a": jnp.full((64, 50), value), "b": {"c": jnp.int32(value)}}


def snapshot(path):
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    return {str(file): (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="/dev/null/run cannot be written: Not a directory"):
        open_("/dev/null/run")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="file cannot be written"):
        open_(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    # Folders are never read-only to root, who may run the tests.
    monkeypatch.setattr(workdir.Path, "mkdir", refuse)
    with pytest.raises(UserError, match="run cannot be written: Permission denied"):
        open_(tmp_path / "run")


def test_a_folder_with_other_content_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="holds other files .such as thesis.tex. and no run"):
        open_(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_a_folder_with_another_config_is_refused(tmp_path):
    started(tmp_path).close()
    with pytest.raises(UserError, match=r"rounds \(30 there, 20 now\); give another workdir"):
        open_(tmp_path, rounds=20)
    open_(tmp_path, checkpoint_every=3).close()  # decides nothing


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"config": {"rounds": "many"}}'])
def test_a_damaged_config_is_refused(tmp_path, content):
    started(tmp_path).close()
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match="config.json"):
        open_(tmp_path)
    assert (tmp_path / "config.json").read_text() == content


def test_a_damaged_summary_is_refused(tmp_path):
    with started(tmp_path) as folder:
        assert folder.summary() is None
        (tmp_path / "summary.json").write_text("{")
        with pytest.raises(UserError, match="summary.json is damaged .*delete it"):
            folder.summary()


def test_one_process_at_a_time(tmp_path):
    with open_(tmp_path), pytest.raises(UserError, match="in use by another process"):
        open_(tmp_path)
    open_(tmp_path).close()


def test_what_a_killed_process_left_is_removed(tmp_path):
    with started(tmp_path) as folder:
        folder.save(1, tree(1))
    (tmp_path / ".cafcor-tmp-curves.png").write_text("half")
    shutil.copytree(
        tmp_path / "checkpoints" / "1", tmp_path / "checkpoints" / ".cafcor-tmp-2.orbax-checkpoint-tmp"
    )
    with open_(tmp_path) as folder:
        assert folder.rounds() == [1]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1"]
    assert not (tmp_path / ".cafcor-tmp-curves.png").exists()


def test_a_file_that_fails_leaves_the_old_one(tmp_path):
    with started(tmp_path) as folder:
        folder.write_json("summary.json", {"a": 1})

        def fail(path):
            path.write_text("half")
            raise OSError(28, "No space left on device")

        with pytest.raises(UserError, match="summary.json cannot be written: No space left"):
            folder.write("summary.json", fail)
        assert folder.summary() == {"a": 1}


def test_checkpoints_come_back_and_two_are_kept(tmp_path):
    with started(tmp_path) as folder:
        for round in (5, 10, 15):
            folder.save(round, tree(round))
        assert folder.rounds() == [10, 15]
        restored = folder.restore(10, tree(0))
        assert workdir.digest(restored) == workdir.digest(tree(10)) != workdir.digest(tree(15))
        folder.prune(keep=1)
        assert folder.rounds() == [15]


def flip_a_byte(path):
    """In the middle of the arrays, where nothing but a checksum can see it."""
    file = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut_short(path):
    for file in path.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:10])


def lose_checksum(path):
    (path / "sha256.txt").unlink()


def wrong_checksum(path):
    (path / "sha256.txt").write_text("0" * 64)


@pytest.mark.parametrize("damage", [flip_a_byte, cut_short, lose_checksum, wrong_checksum])
def test_a_damaged_checkpoint_is_refused(tmp_path, damage):
    with started(tmp_path) as folder:
        folder.save(5, tree(5))
        folder.save(10, tree(10))
        damage(tmp_path / "checkpoints" / "10")
        before = snapshot(tmp_path)
        with pytest.raises(UserError, match="checkpoints/10 is damaged .* to go on from round 5") as error:
            folder.restore(10, tree(0))
        assert "\n" not in str(error.value)
        assert snapshot(tmp_path) == before
        damage(tmp_path / "checkpoints" / "5")
        with pytest.raises(UserError, match="checkpoints/5 is damaged .* to start anew"):
            folder.restore(5, tree(0))


def row(round, **values):
    return dict.fromkeys(workdir.COLUMNS, 0.1) | {"round": round} | values


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path):
    with started(tmp_path) as folder:
        folder.append_metrics([row(1, test_accuracy=None), row(2), row(3, epsilon=float("inf"))])
        folder.write_weights(np.arange(12, dtype=np.float32).reshape(3, 4))
    with open_(tmp_path) as folder:
        assert folder.resume_metrics(2).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        metrics = workdir.read_metrics(tmp_path / "metrics.csv")
        assert metrics["round"].tolist() == [1, 2]
        assert np.isnan(metrics["test_accuracy"]).tolist() == [True, False]
        folder.append_metrics([row(3, epsilon=float("inf"))])
        assert workdir.read_metrics(tmp_path / "metrics.csv")["epsilon"][2] == float("inf")
        assert folder.resume_metrics(0).shape == (0, 4)
        assert workdir.read_metrics(tmp_path / "metrics.csv")["round"].tolist() == []


def test_lost_metrics_are_not_made_up(tmp_path):
    with started(tmp_path) as folder:
        folder.append_metrics([row(1)])
        folder.write_weights(np.zeros((2, 4), np.float32))
        before = snapshot(tmp_path)
        with pytest.raises(UserError, match="do not reach its checkpoint of round 2 .rows are missing"):
            folder.resume_metrics(2)
        (tmp_path / "weights.npy").unlink()
        with pytest.raises(UserError, match="do not reach its checkpoint of round 1"):
            folder.resume_metrics(1)
        del before[str(tmp_path / "weights.npy")]
        assert snapshot(tmp_path) == before


def test_a_float32_survives_the_csv(tmp_path):
    value = float(np.float32(1) / np.float32(3))
    with started(tmp_path) as folder:
        folder.append_metrics([row(1, loss=value)])
    assert np.float32(workdir.read_metrics(tmp_path / "metrics.csv")["loss"][0]) == np.float32(value)


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "round,loss\n1,x\n"])
def test_a_foreign_csv_is_refused(tmp_path, content):
    (tmp_path / "metrics.csv").write_text(content)
    if content:
        with pytest.raises(UserError, match="is not a metrics file"):
            workdir.read_metrics(tmp_path / "metrics.csv")
    with pytest.raises(UserError, match="cannot be read"):
        workdir.read_metrics(tmp_path / "missing.csv")


def test_the_digest_sees_places_types_and_values():
    base = {"a": jnp.zeros(2)}
    others = [
        {"b": jnp.zeros(2)},
        {"a": jnp.zeros((2, 1))},
        {"a": jnp.zeros(2, jnp.int32)},
        {"a": -jnp.zeros(2)},
    ]
    assert workdir.digest(base) == workdir.digest({"a": np.zeros(2, np.float32)})
    assert len({workdir.digest(tree) for tree in [base, *others]}) == 5
