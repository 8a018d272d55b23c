"""The cipher against JAX's own and the published vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from cafcor_jax.threefry import threefry

encrypt = jax.jit(threefry)

# Random123, kat_vectors: threefry2x32 20: counter, key, result.
KNOWN = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
@pytest.mark.parametrize("function", [threefry, encrypt])
def test_known_answers(function, counter, key, result):
    got = function(jnp.array(key, jnp.uint32), jnp.uint32(counter[0]), jnp.uint32(counter[1]))
    assert tuple(int(word) for word in got) == result


@pytest.mark.parametrize("seed", range(5))
def test_equals_jax(seed):
    rng = np.random.default_rng(seed)
    key = jnp.array(rng.integers(0, 2**32, 2, np.uint32))
    counters = jnp.array(rng.integers(0, 2**32, 2000, np.uint32))
    got = jnp.concatenate(encrypt(key, counters[:1000], counters[1000:]))
    np.testing.assert_array_equal(got, threefry_2x32(key, counters))


def test_keys_broadcast_against_counters():
    rng = np.random.default_rng(0)
    keys = jnp.array(rng.integers(0, 2**32, (3, 2), np.uint32))
    first, second = jnp.array(rng.integers(0, 2**32, (2, 40), np.uint32))
    got = encrypt(keys[:, None, :], first[None], second[None])
    for i, key in enumerate(keys):
        want = encrypt(key, first, second)
        np.testing.assert_array_equal([got[0][i], got[1][i]], want)


def test_every_bit_of_key_and_counter_matters():
    words = np.random.default_rng(0).integers(0, 2**32, 4, np.uint32)

    def run(w):
        return [int(word) for word in encrypt(jnp.array(w[:2]), jnp.uint32(w[2]), jnp.uint32(w[3]))]

    start = run(words)
    for word in range(4):
        for bit in (0, 7, 16, 31):
            changed = words.copy()
            changed[word] ^= np.uint32(1) << np.uint32(bit)
            flipped = sum((a ^ b).bit_count() for a, b in zip(start, run(changed), strict=True))
            assert 12 <= flipped <= 52  # of 64: half of them, give or take five standard deviations
