"""The bytes that server and workers exchange, and that workers store.

A message is a flat record of numbers, texts, bytes, lists of bytes, and arrays: a JSON header of known
length, then the arrays one after the other, as they are. Nothing in it is executed, compressed or allocated
by its own word, so that reading a hostile one costs no more than its length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cafcor_jax.errors import UserError

_MAGIC = b"cafcor01"
_DTYPES = ("float32", "float64", "float16", "int32", "uint32", "uint8")
# JSON of a hundred thousand keys fits; nothing honest is longer.
_LONGEST_HEADER = 2**24


def encode(values: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> bytes:
    """The bytes of a record.

    Args:
      values: numbers, texts, bytes, and lists of bytes, by name.
      arrays: in order.

    Returns:
      What `decode` reads.
    """
    shapes = [[str(array.dtype), list(array.shape)] for array in arrays]
    header = json.dumps({"values": {name: _plain(value) for name, value in values.items()}, "arrays": shapes})
    body = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    return _MAGIC + len(header).to_bytes(4, "big") + header.encode("ascii") + body


def decode(content: bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The record that `encode` wrote.

    Args:
      content: bytes from anybody.

    Returns:
      Values by name, and arrays.

    Raises:
      UserError: if it is none.
    """
    start = len(_MAGIC) + 4
    try:
        if content[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it does not begin as one")
        length = int.from_bytes(content[len(_MAGIC) : start], "big")
        if length > min(_LONGEST_HEADER, len(content) - start):
            raise ValueError("its header is cut off")
        header = json.loads(content[start : start + length].decode("ascii"))
        values = {str(name): _rich(value) for name, value in header["values"].items()}
        arrays, place = [], start + length
        for name, shape in header["arrays"]:
            if name not in _DTYPES or not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError("an array has no known type or shape")
            dtype, count = np.dtype(name), 1
            for size in shape:
                count *= size
            end = place + count * dtype.itemsize
            if end > len(content):
                raise ValueError("an array is cut off")
            arrays.append(np.frombuffer(content, dtype, count, place).reshape(shape))
            place = end
        if place != len(content):
            raise ValueError("bytes are left over")
        return values, arrays
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"A message of {len(content)} bytes cannot be read: {error}.") from None


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _rich(value: Any) -> Any:
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    return [_rich(item) for item in value] if isinstance(value, list) else value
