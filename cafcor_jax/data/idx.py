"""The IDX file format of MNIST and Fashion-MNIST: read, check, and checksum.

A checksum is always of the *decompressed* file. An array determines its IDX file byte for byte, so
`checksum(array)` can be compared with the published checksum of the original wherever the array came from.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from cafcor_jax.errors import UserError

# Arrays of one dataset under these keys: images uint8 [N, 28, 28], labels uint8 [N].
Arrays = dict[str, np.ndarray]
KEYS = ("train-images", "train-labels", "t10k-images", "t10k-labels")

_UINT8 = 8
_GZIP_MAGIC = b"\x1f\x8b"


def file_names(key: str) -> tuple[str, ...]:
    """The names under which one of the four files is found in the wild, the original first."""
    rank = 3 if key.endswith("images") else 1
    stems = (f"{key}-idx{rank}-ubyte", f"{key}.idx{rank}-ubyte")
    return tuple(stem + suffix for suffix in (".gz", "") for stem in stems)


def header(array: np.ndarray) -> bytes:
    """The IDX header of a uint8 array: magic number, then the shape as big-endian 32-bit integers."""
    return bytes([0, 0, _UINT8, array.ndim]) + np.array(array.shape, ">u4").tobytes()


def checksum(array: np.ndarray) -> str:
    """SHA-256 of the IDX file that holds this uint8 array."""
    digest = hashlib.sha256(header(array))
    digest.update(np.ascontiguousarray(array, np.uint8).data)
    return digest.hexdigest()


def parse(content: bytes, name: str) -> np.ndarray:
    """Reads a decompressed IDX file of uint8.

    Args:
      content: The bytes of the file.
      name: The file, for the error message.

    Returns:
      A read-only uint8 array of the shape that the header gives.
    """
    if len(content) < 4 or content[:3] != bytes([0, 0, _UINT8]) or content[3] == 0:
        raise UserError(
            f"{name} is not an IDX file of bytes: it starts with {content[:4].hex() or 'nothing'}"
        )
    start = 4 + 4 * content[3]
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], ">u4"))
    expected = start + math.prod(shape)
    if len(content) < start or len(content) != expected:
        raise UserError(
            f"{name} is truncated or too long: {len(content)} bytes where its header says {expected}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def verify(array: np.ndarray, expected: str, name: str) -> None:
    """Raises a `UserError` that names the file unless the array has the expected checksum."""
    found = checksum(array)
    if found != expected:
        raise UserError(
            f"{name} is corrupt or another file: SHA-256 of its content is {found}, expected {expected}"
        )


def decompress(content: bytes, name: str) -> bytes:
    """Unpacks gzip if the content is gzip (its first bytes tell, not its name)."""
    if not content.startswith(_GZIP_MAGIC):
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{name} is a corrupt gzip file: {error}") from error


def read(path: Path, expected: str) -> np.ndarray:
    """Reads one IDX file, gzip or raw, and verifies its content."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    array = parse(decompress(content, str(path)), str(path))
    verify(array, expected, str(path))
    return array


def read_directory(directory: Path, checksums: Mapping[str, str]) -> Arrays:
    """Reads and verifies the four files of a dataset in a directory.

    Args:
      directory: Holds each file under one of `file_names(key)`.
      checksums: The expected SHA-256 of each decompressed file, by key.

    Returns:
      The arrays, by key.
    """
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory")
    return {key: read(_find(directory, key), checksums[key]) for key in checksums}


def verify_all(arrays: Mapping[str, np.ndarray], checksums: Mapping[str, str], name: str) -> None:
    """Verifies every array of a dataset that did not come from IDX files."""
    for key, expected in checksums.items():
        verify(arrays[key], expected, f"{key} in {name}")


def listing(keys: Iterable[str] = KEYS) -> str:
    """The original file names, for messages."""
    return ", ".join(file_names(key)[0] for key in keys)


def _find(directory: Path, key: str) -> Path:
    for name in file_names(key):
        if (directory / name).is_file():
            return directory / name
    raise UserError(f"{directory} has no file {file_names(key)[0]} (or, unpacked, {file_names(key)[2]})")
