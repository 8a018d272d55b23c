import numpy as np
import pytest

from cafcor_jax.errors import UserError
from cafcor_jax.flower import messages


def test_a_record_comes_back():
    values = {"kind": "keys", "round": 3, "session": b"\x00\xff", "public_keys": [b"a", b""], "none": None}
    arrays = [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.zeros((0, 4), np.uint8),
        np.float32(2) * np.ones(()),
    ]
    arrays = [np.asarray(array, array.dtype) for array in arrays]
    got, back = messages.decode(
        messages.encode(values, [a.astype(np.float32) if a.ndim == 0 else a for a in arrays])
    )
    assert got == values
    for a, b in zip(arrays, back, strict=True):
        assert a.shape == b.shape and (a == b).all()


def test_hostile_bytes_are_refused_and_nothing_else():
    """Every cut and many flips of a message: a sentence or a record, never another exception."""
    whole = messages.encode({"kind": "train", "round": 1, "key": b"abc"}, [np.ones((3, 2), np.float32)])
    for end in range(len(whole)):
        with pytest.raises(UserError, match="cannot be read"):
            messages.decode(whole[:end])
    rng = np.random.default_rng(0)
    for _ in range(2000):
        changed = bytearray(whole)
        for place in rng.integers(0, len(whole), 3):
            changed[place] = rng.integers(256)
        try:
            messages.decode(bytes(changed))
        except UserError:
            pass
    headers = [
        b"[]",
        b"{}",
        b'{"values": [], "arrays": []}',
        b'{"values": {}, "arrays": [["float32", [1e9]]]}',
        b'{"values": {}, "arrays": [["float32", [99999999999]]]}',
        b'{"values": {}, "arrays": [["O", [1]]]}',
        b'{"values": {"a": {"hex": "zz"}}, "arrays": []}',
        b"[" * 100_000,
    ]
    for header in headers:
        with pytest.raises(UserError, match="cannot be read"):
            messages.decode(b"cafcor01" + len(header).to_bytes(4, "big") + header)
