import gzip
import hashlib

import numpy as np
import pytest

from cafcor_jax.data import idx
from cafcor_jax.errors import UserError


def test_parse_is_the_inverse_of_writing():
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    content = idx.header(array) + array.tobytes()
    # The bytes are spelled out, so that header and parse cannot be wrong together.
    assert content[:16] == bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4])
    np.testing.assert_array_equal(idx.parse(content, "x"), array)
    assert idx.checksum(array) == hashlib.sha256(content).hexdigest()
    # A view that is not contiguous has the checksum of its values.
    assert idx.checksum(array[:, :, ::-1]) == idx.checksum(array[:, :, ::-1].copy())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\x00",
        b"<html>not found</html>",
        bytes([0, 0, 13, 1, 0, 0, 0, 4]) + bytes(16),  # floats
        bytes([0, 0, 8, 0]),  # no dimensions
        bytes([0, 0, 8, 3, 0, 0, 0, 2]),  # ends in the header
        bytes([0, 0, 8, 1, 0, 0, 0, 4]) + bytes(3),  # too short
        bytes([0, 0, 8, 1, 0, 0, 0, 4]) + bytes(5),  # too long
    ],
)
def test_malformed_content_is_an_error_that_names_the_file(content):
    with pytest.raises(UserError, match="folder/some-file"):
        idx.parse(content, "folder/some-file")


def test_reads_packed_and_raw_files(arrays, spec, idx_dir):
    found = idx.read_directory(idx_dir, spec.checksums)
    assert set(found) == set(idx.KEYS)
    for key, array in arrays.items():
        np.testing.assert_array_equal(found[key], array)


def test_gzip_is_recognised_by_content_not_by_name(arrays, spec, idx_dir):
    raw = idx_dir / "t10k-labels-idx1-ubyte"
    raw.write_bytes(gzip.compress(raw.read_bytes()))
    np.testing.assert_array_equal(
        idx.read_directory(idx_dir, spec.checksums)["t10k-labels"], arrays["t10k-labels"]
    )


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_a_wrong_byte_is_an_error_that_names_the_file(spec, idx_dir, name, damage):
    path = idx_dir / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    elif damage == "truncate":
        content = content[:-100]
    else:
        content = bytearray()
    path.write_bytes(content)
    with pytest.raises(UserError, match=str(path)) as error:
        idx.read_directory(idx_dir, spec.checksums)
    assert "\n" not in str(error.value)


def test_a_valid_file_of_another_dataset_is_refused(spec, idx_dir, arrays):
    other = arrays["t10k-labels"][::-1]
    (idx_dir / "t10k-labels-idx1-ubyte").write_bytes(idx.header(other) + other.tobytes())
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte .*SHA-256"):
        idx.read_directory(idx_dir, spec.checksums)


def test_missing_file_and_missing_directory(spec, idx_dir):
    (idx_dir / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UserError, match=r"no file train-labels-idx1-ubyte\.gz"):
        idx.read_directory(idx_dir, spec.checksums)
    with pytest.raises(UserError, match="nowhere is not a directory"):
        idx.read_directory(idx_dir / "nowhere", spec.checksums)
