"""ChaCha20: the published vectors, its definition in plain integers, JAX's transformations, and the noise."""

import importlib
import struct
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from cafcor_jax import chacha, noise, secrets, threefry
from cafcor_jax.errors import UserError

B = noise.BLOCK
SEED, BITS, FOLD_IN, SPLIT = ((purpose, 0, 0) for purpose in range(4))

jit_block = jax.jit(chacha.block, static_argnames="double_rounds")


def definition(key, counter, nonce):
    """RFC 8439, section 2.3, on Python integers: 64 bytes."""

    def rotate(value, by):
        return ((value << by) | (value >> (32 - by))) & 0xFFFFFFFF

    def quarter(x, a, b, c, d):
        for to, of, mixed, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[to] = (x[to] + x[of]) & 0xFFFFFFFF
            x[mixed] = rotate(x[mixed] ^ x[to], by)

    start = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), counter, *nonce]
    x = list(start)
    for _ in range(10):
        for at in ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)):
            quarter(x, *at)
        for at in ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)):
            quarter(x, *at)
    return struct.pack("<16I", *((a + b) & 0xFFFFFFFF for a, b in zip(x, start, strict=True)))


def stream(key, nonce, length):
    return b"".join(definition(key, i, nonce) for i in range(-(-length // 64)))[:length]


def material(seed):
    return np.random.default_rng(seed).bytes(32)


def key_bytes(key):
    return np.asarray(jax.random.key_data(key), "<u4").tobytes()


# The published vectors: key, counter, nonce, 64 bytes. RFC 8439, section 2.3.2 and appendix A.1.
COUNTING = bytes(range(32))
VECTORS = {
    "2.3.2": (
        COUNTING,
        1,
        "000000090000004a00000000",
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    "A.1 #1": (
        bytes(32),
        0,
        "000000000000000000000000",
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    "A.1 #2": (
        bytes(32),
        1,
        "000000000000000000000000",
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    "A.1 #3": (
        bytes(31) + b"\x01",
        1,
        "000000000000000000000000",
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    "A.1 #4": (
        b"\x00\xff" + bytes(30),
        2,
        "000000000000000000000000",
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    "A.1 #5": (
        bytes(32),
        0,
        "000000000000000000000002",
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
}


def run_block(key, counter, nonce, **options):
    """Blocks as bytes; counter an integer or a list of them."""
    words = jit_block(
        jnp.asarray(np.frombuffer(key, "<u4")),
        jnp.asarray(np.asarray(counter, np.uint32)),
        tuple(jnp.uint32(word) for word in nonce),
        **options,
    )
    return np.stack([np.asarray(word) for word in words], axis=-1).astype("<u4").tobytes()


@pytest.mark.parametrize("name", VECTORS)
def test_published_blocks(name):
    key, counter, nonce, want = VECTORS[name]
    words = struct.unpack("<3I", bytes.fromhex(nonce))
    assert run_block(key, counter, words).hex() == want
    assert definition(key, counter, words).hex() == want


def test_published_encryption():
    """RFC 8439, section 2.4.2: two blocks, the second one cut."""
    plain = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, "
        b"sunscreen would be it."
    )
    cipher = (
        "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0bf91b65c5524733ab8f593dabcd62b357"
        "1639d624e65152ab8f530c359f0861d807ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab7793736"
        "5af90bbf74a35be6b40b8eedf2785e42874d"
    )
    words = struct.unpack("<3I", bytes.fromhex("000000000000004a00000000"))
    pad = run_block(COUNTING, [1, 2], words)
    assert len(plain) == 114
    assert bytes(a ^ b for a, b in zip(plain, pad, strict=False)).hex() == cipher


@pytest.mark.parametrize("seed", range(3))
def test_blocks_equal_the_definition_with_keys_and_counters_broadcast(seed):
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 2**32, (3, 8), np.uint32)
    counters = np.array([0, 1, 2**31, 2**32 - 1, *rng.integers(0, 2**32, 4)], np.uint32)
    nonce = tuple(int(word) for word in rng.integers(0, 2**32, 3))
    words = jit_block(
        jnp.asarray(keys)[:, None], jnp.asarray(counters), tuple(jnp.uint32(word) for word in nonce)
    )
    got = np.stack([np.asarray(word) for word in words], axis=-1)
    assert got.shape == (3, 8, 16)
    for i, key in enumerate(keys):
        for j, counter in enumerate(counters):
            want = definition(key.astype("<u4").tobytes(), int(counter), nonce)
            assert got[i, j].astype("<u4").tobytes() == want


def test_the_stream_of_another_implementation():
    """OpenSSL's, over 64 kB."""
    algorithms = pytest.importorskip("cryptography.hazmat.primitives.ciphers.algorithms")
    ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers")
    key = material(0)
    nonce = struct.pack("<4I", 0, *BITS)
    want = ciphers.Cipher(algorithms.ChaCha20(key, nonce), None).encryptor().update(bytes(2**16))
    bits = jax.random.bits(chacha.key_from_bytes(key), (2**14,), jnp.uint32)
    assert np.asarray(bits, "<u4").tobytes() == want


# What JAX's functions give, from the definition.


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.uint32])
@pytest.mark.parametrize("shape", [(), (3, 0), (2, 3, 43)])
def test_bits_are_the_key_stream(dtype, shape):
    bits = np.asarray(jax.random.bits(chacha.key_from_bytes(material(1)), shape, dtype))
    assert bits.shape == shape and bits.dtype == dtype
    assert bits.astype(bits.dtype.newbyteorder("<")).tobytes() == stream(material(1), BITS, bits.nbytes)


def test_bits_of_64():
    with jax.enable_x64(True):
        bits = np.asarray(jax.random.bits(chacha.key_from_bytes(material(1)), (3, 7), jnp.uint64))
    assert bits.dtype == np.uint64
    assert bits.astype("<u8").tobytes() == stream(material(1), BITS, bits.nbytes)


@pytest.mark.parametrize("data", [0, 1, 2**31, 2**32 - 1])
def test_fold_in_is_half_a_block(data):
    key = chacha.key_from_bytes(material(2))
    assert key_bytes(jax.random.fold_in(key, np.uint32(data))) == definition(material(2), data, FOLD_IN)[:32]


@pytest.mark.parametrize("shape", [2, 5, (2, 3)])
def test_split_is_half_a_block_each(shape):
    keys = jax.random.split(chacha.key_from_bytes(material(3)), shape)
    assert keys.shape == (shape if isinstance(shape, tuple) else (shape,))
    assert [key_bytes(key) for key in keys.reshape(-1)] == [
        definition(material(3), i, SPLIT)[:32] for i in range(keys.size)
    ]


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, np.uint32(2**32 - 1), np.int8(5)])
def test_seeds_of_32_bits(seed):
    want = definition(struct.pack("<II", int(seed), 0) + bytes(24), 0, SEED)[:32]
    assert key_bytes(jax.random.key(seed, impl="chacha20")) == want


@pytest.mark.parametrize("seed", [3, 2**32, 2**63 - 1, -1])
def test_seeds_of_64_bits(seed):
    with jax.enable_x64(True):
        key = jax.random.key(seed, impl=chacha.IMPL)
    want = definition(struct.pack("<Q", seed % 2**64) + bytes(24), 0, SEED)[:32]
    assert key_bytes(key) == want


def test_a_seed_must_be_an_integer():
    with pytest.raises(TypeError, match="float32; it must be an integer"):
        jax.random.key(0.5, impl=chacha.IMPL)


def test_no_block_serves_two_purposes():
    """Bits, child keys and seeds share no block, though counters and keys are the same."""
    key = jax.random.key(0, impl=chacha.IMPL)
    words = np.asarray(jax.random.bits(key, (64 * 16,), jnp.uint32), "<u4").reshape(64, 2, 8)
    halves = {half.tobytes() for block in words for half in block}
    folded = {key_bytes(jax.random.fold_in(key, i)) for i in range(8)}
    split = {key_bytes(child) for child in jax.random.split(key, 64)}
    assert len(halves) == 128 and len(folded) == 8 and len(split) == 64
    assert len(halves | folded | split | {key_bytes(key)}) == 128 + 8 + 64 + 1


def test_children_differ_in_half_of_their_bits():
    key = jax.random.key(1, impl=chacha.IMPL)
    data = np.concatenate([np.arange(2000), 2 ** np.arange(32)]).astype(np.uint32)
    children = jax.random.key_data(jax.vmap(lambda m: jax.random.fold_in(key, m))(jnp.asarray(data)))
    bits = np.unpackbits(np.asarray(children).view(np.uint8), axis=-1)
    assert len({row.tobytes() for row in np.asarray(children)}) == len(set(data.tolist()))
    flipped = (bits[1:] != bits[:-1]).sum(axis=1)[:1999]  # of 256, standard deviation 8
    assert flipped.min() > 128 - 56 and flipped.max() < 128 + 56
    assert abs(flipped.mean() - 128) < 2  # standard error 0.2


# Statistics, with the same bounds for generators that are broken.


def byte_statistic(words):
    """Chi-square of the bytes of a stream, standardised."""
    counts = np.bincount(np.frombuffer(words, np.uint8), minlength=256)
    expected = counts.sum() / 256
    return (((counts - expected) ** 2 / expected).sum() - 255) / np.sqrt(2 * 255)


def avalanche(run):
    """The largest distance from 1/2 of an output bit's chance to flip with a counter's bit, over 8 x 512."""
    base = np.random.default_rng(5).integers(0, 2**32, 500, np.uint32)
    start = np.unpackbits(np.frombuffer(run(base), np.uint8).reshape(500, 64), axis=1)
    worst = 0.0
    for bit in range(0, 32, 4):
        other = np.unpackbits(
            np.frombuffer(run(base ^ np.uint32(1 << bit)), np.uint8).reshape(500, 64), axis=1
        )
        worst = max(worst, np.abs((start != other).mean(axis=0) - 0.5).max())
    return worst


def test_bytes_are_uniform():
    bits = jax.random.bits(jax.random.key(3, impl=chacha.IMPL), (2**18,), jnp.uint8)
    assert abs(byte_statistic(np.asarray(bits).tobytes())) < 6
    assert abs(byte_statistic(run_block(material(4), np.arange(4096), BITS))) < 6


def test_bytes_of_broken_variants_are_not():
    two_rounds = run_block(material(4), np.arange(4096), BITS, double_rounds=1)
    constant_counter = run_block(material(4), np.zeros(4096, int), BITS)
    assert byte_statistic(two_rounds) > 12
    assert byte_statistic(constant_counter) > 12


def test_every_bit_depends_on_every_bit_of_the_counter():
    # Of 500 flips a fraction has standard deviation 0.022: six of them.
    assert avalanche(lambda counter: run_block(material(6), counter, BITS)) < 0.134
    assert avalanche(lambda counter: run_block(material(6), counter, BITS, double_rounds=1)) > 0.4


def test_normals_have_the_right_scale_and_not_another():
    normals = np.asarray(jax.random.normal(jax.random.key(8, impl=chacha.IMPL), (100_000,)), np.float64)
    assert stats.kstest(normals, "norm").pvalue > 1e-6
    assert stats.kstest(normals * 1.05, "norm").pvalue < 1e-9


# JAX's transformations.


def test_vmap_and_jit_give_what_single_keys_give():
    keys = jax.random.split(jax.random.key(5, impl=chacha.IMPL), 6).reshape(2, 3)

    def draw(key):
        child = jax.random.fold_in(key, 7)
        return (
            jax.random.bits(key, (37,), jnp.uint32),
            jax.random.bits(child, (5,), jnp.uint8),
            jax.random.key_data(jax.random.split(child, 3)),
        )

    single = jax.jit(draw)
    batched = jax.jit(jax.vmap(jax.vmap(draw)))(keys)
    for i in range(2):
        for j in range(3):
            for whole, part in zip(batched, single(keys[i, j]), strict=True):
                np.testing.assert_array_equal(whole[i, j], part)
    assert len({row.tobytes() for row in np.asarray(batched[0]).reshape(6, -1)}) == 6


def test_fold_in_of_many_numbers_and_keys_at_once():
    keys = jax.random.split(jax.random.key(5, impl=chacha.IMPL), 3)
    numbers = jnp.arange(3)
    both = jax.vmap(jax.random.fold_in)(keys, numbers)
    table = jax.vmap(lambda k: jax.vmap(lambda m: jax.random.fold_in(k, m))(numbers))(keys)
    for i in range(3):
        assert both[i] == jax.random.fold_in(keys[i], i)
        for j in range(3):
            assert table[i, j] == jax.random.fold_in(keys[i], j)


@pytest.mark.parametrize(("impl", "batched"), [("threefry2x32", True), ("chacha20", True), ("rbg", False)])
def test_over_keys_maps_all_keys_at_once_only_where_draws_stay_the_same(impl, batched):
    keys = jax.random.split(jax.random.key(0, impl=impl), 3)

    def draw(key):
        return jax.random.bits(key, (4,), jnp.uint32)

    over = threefry.over_keys(draw, keys)
    np.testing.assert_array_equal(over(keys), [draw(key) for key in keys])
    assert ("scan" not in str(jax.make_jaxpr(over)(keys))) == batched


# The implementation and its name.


def test_the_name_and_the_implementation_are_one():
    named, given = jax.random.key(0, impl="chacha20"), jax.random.key(0, impl=chacha.IMPL)
    assert named == given and named.dtype == given.dtype
    assert chacha.is_chacha(named) and not chacha.is_chacha(jax.random.key(0))
    assert jax.random.wrap_key_data(jax.random.key_data(named), impl=chacha.IMPL) == named


def test_reloading_and_importing_anew_give_keys_of_the_same_type(monkeypatch):
    before = jax.random.key(0, impl=chacha.IMPL)
    assert jax.random.key(0, impl=importlib.reload(chacha).IMPL) == before
    monkeypatch.delitem(sys.modules, "cafcor_jax.chacha")
    again = importlib.import_module("cafcor_jax.chacha")
    assert again is not chacha
    assert again.key_from_bytes(key_bytes(before)) == before


def test_without_a_name_the_implementation_works_all_the_same(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax._src.random.prng", None)
    spec = chacha._implementation("nameless")
    with pytest.raises(ValueError, match="nameless"):
        jax.random.key(0, impl="nameless")
    key = jax.random.key(0, impl=spec)
    assert str(jax.random.key_impl(key)) == "nameless"
    assert key_bytes(key) == key_bytes(jax.random.key(0, impl=chacha.IMPL))


# Refusals.


@pytest.mark.parametrize(
    ("bad", "said"), [(b"", "0 bytes"), (bytes(31), "31"), (bytes(33), "33"), ("a" * 32, "'aaa"), (5, "5")]
)
def test_key_material_of_another_length(bad, said):
    with pytest.raises(UserError, match=rf"material is .*{said}.*from 32 bytes"):
        chacha.key_from_bytes(bad)


def test_more_than_the_counter_can_count():
    key_data = jnp.zeros(8, jnp.uint32)
    with pytest.raises(ValueError, match="4294967297 blocks; it can give at most 4294967296"):
        chacha._random_bits(key_data, 32, (2**36 + 1,))
    with pytest.raises(ValueError, match="4294967297 keys; it can give at most 4294967296"):
        chacha._split(key_data, (2**32 + 1,))
    # One block fewer is allowed, at every width.
    for width in (8, 16, 32):
        shape = (2**32 * 512 // width,)
        allowed = jax.eval_shape(lambda k, w=width, s=shape: chacha._random_bits(k, w, s), key_data)
        assert allowed.shape == shape


def test_other_bit_widths():
    with pytest.raises(ValueError, match="bit width is 24; it must be one of 8, 16, 32, 64"):
        chacha._random_bits(jnp.zeros(8, jnp.uint32), 24, (3,))


# The noise.

jit_pairwise = jax.jit(noise.pairwise, static_argnums=2)
jit_row = jax.jit(noise.pairwise_row, static_argnums=3)


def test_pairwise_noise_cancels_and_a_worker_alone_draws_its_row():
    n = 5
    keys = secrets.key_matrix(jax.random.key(7, impl=chacha.IMPL), n)
    whole = np.asarray(jit_pairwise(keys, 3, B + 5, 1.0))
    assert np.abs(whole.sum(axis=0, dtype=np.float64)).max() < 1e-5
    np.testing.assert_allclose(whole.std(axis=1), np.sqrt(n - 1), rtol=0.05)
    for i in range(n):
        np.testing.assert_array_equal(jit_row(keys[i], i, 3, B + 5, 1.0), whole[i])
    assert np.abs(np.corrcoef(whole[0], np.asarray(jit_pairwise(keys, 4, B + 5, 1.0))[0])[0, 1]) < 0.07


def test_the_key_of_a_pair_matters():
    keys = secrets.key_matrix(jax.random.key(7, impl=chacha.IMPL), 5)
    broken = jax.random.wrap_key_data(jax.random.key_data(keys).at[1, 3, 7].add(1), impl=chacha.IMPL)
    rows = [np.asarray(jit_row((broken if i == 1 else keys)[i], i, 3, B + 5, 1.0)) for i in range(5)]
    assert np.std(np.sum(rows, axis=0)) > 1  # v_13 - v'_13


@pytest.mark.parametrize("mode", ["independent", "projected"])
def test_the_law_of_the_other_noises(mode):
    n, sigma = 4, 0.6
    key = jax.random.key(7, impl=chacha.IMPL)
    if mode == "independent":
        run = jax.jit(noise.independent, static_argnums=2)
        rows = np.asarray(run(jax.random.split(key, n), 3, 2 * B, sigma), np.float64)
        scale = sigma
    else:
        run = jax.jit(noise.projected, static_argnums=(1, 3))
        rows = np.asarray(run(key, n, 3, 2 * B, sigma), np.float64)
        scale = sigma * np.sqrt(n - 1)
        assert np.abs(rows.sum(axis=0)).max() < 1e-5
    for row in rows:
        assert stats.kstest(row, "norm", (0, scale)).pvalue > 1e-6
        assert stats.kstest(row, "norm", (0, 1.15 * scale)).pvalue < 1e-9
    correlation = np.corrcoef(rows)[~np.eye(n, dtype=bool)]
    want = 0 if mode == "independent" else -1 / (n - 1)
    np.testing.assert_allclose(correlation, want, atol=0.05)  # six standard deviations
