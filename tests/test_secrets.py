"""The pairs' keys: those of a simulation, and key agreement against published vectors and its definition."""

import hmac
import importlib.util
import sys

import jax
import numpy as np
import pytest

from cafcor_jax import chacha, noise, secrets
from cafcor_jax.errors import UserError

IMPLEMENTATIONS = ["threefry2x32", "rbg", "unsafe_rbg", "chacha20"]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("n", [1, 2, 5, 12])
def test_key_matrix_is_symmetric_with_distinct_pairs(impl, n):
    keys = secrets.key_matrix(jax.random.key(0, impl=impl), n)
    assert keys.shape == (n, n)
    data = np.asarray(jax.random.key_data(keys))
    np.testing.assert_array_equal(data, data.swapaxes(0, 1))
    pairs = {data[i, j].tobytes() for i in range(n) for j in range(i)}
    assert len(pairs) == n * (n - 1) // 2


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_pair_key_is_the_same_from_both_ends(impl):
    key = jax.random.key(3, impl=impl)
    assert secrets.pair_key(key, 2, 5) == secrets.pair_key(key, 5, 2)
    assert secrets.pair_key(key, 2, 5) == secrets.key_matrix(key, 6)[2, 5]
    assert secrets.pair_key(key, 2, 5) != secrets.pair_key(key, 2, 4)


def test_another_seed_shares_no_key():
    def data(seed):
        keys = jax.random.key_data(secrets.key_matrix(jax.random.key(seed), 8)).reshape(64, 2)
        return {row.tobytes() for row in np.asarray(keys)}

    assert not data(0) & data(1)


def test_a_larger_federation_keeps_the_keys_of_a_smaller_one():
    key = jax.random.key(0)
    np.testing.assert_array_equal(
        jax.random.key_data(secrets.key_matrix(key, 9))[:5, :5],
        jax.random.key_data(secrets.key_matrix(key, 5)),
    )


# Key agreement, against published vectors.

# RFC 7748, section 6.1.
ALICE = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
BOB = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
ALICE_PUBLIC = bytes.fromhex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
BOB_PUBLIC = bytes.fromhex("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
SHARED = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")

# RFC 5869, appendix A.1 to A.3: material, salt, info, result.
HKDF = [
    (
        b"\x0b" * 22,
        bytes(range(13)),
        bytes(range(0xF0, 0xFA)),
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
    ),
    (
        bytes(range(0x50)),
        bytes(range(0x60, 0xB0)),
        bytes(range(0xB0, 0x100)),
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
        "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
    ),
    (
        b"\x0b" * 22,
        b"",
        b"",
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
    ),
]

P = 2**255 - 19
# The points of order 1, 2, 4 and 8 on the curve and its twist that 255 bits can write.
LOW_ORDER = [
    0,
    1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
    P - 1,
    P,
    P + 1,
]

needs_cryptography = pytest.mark.skipif(
    importlib.util.find_spec("cryptography") is None, reason="key agreement needs cryptography"
)


def private_keys(n, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.bytes(32) for _ in range(n)]


def federation(n, seed=0):
    private = private_keys(n, seed)
    return private, [secrets.public_key(key) for key in private]


def key_bytes(key):
    return np.asarray(jax.random.key_data(key), "<u4").tobytes()


def hkdf_definition(material, info, length):
    """RFC 5869 with an empty salt, from HMAC."""
    pseudorandom = hmac.digest(bytes(32), material, "sha256")
    block, out = b"", b""
    for i in range(1, -(-length // 32) + 1):
        block = hmac.digest(pseudorandom, block + info + bytes([i]), "sha256")
        out += block
    return out[:length]


@needs_cryptography
def test_published_agreement():
    assert secrets.public_key(ALICE) == ALICE_PUBLIC
    assert secrets.public_key(BOB) == BOB_PUBLIC
    assert secrets.shared_secret(ALICE, BOB_PUBLIC) == SHARED
    assert secrets.shared_secret(BOB, ALICE_PUBLIC) == SHARED


@needs_cryptography
@pytest.mark.parametrize(("material", "salt", "info", "want"), HKDF)
def test_published_derivation(material, salt, info, want):
    got = secrets.hkdf_sha256(material, salt=salt, info=info, length=len(want) // 2)
    assert got.hex() == want


@needs_cryptography
@pytest.mark.parametrize(("impl", "length"), [("threefry2x32", 8), ("rbg", 16), ("chacha20", 32)])
def test_a_pair_key_from_its_definition(impl, length):
    """Alice and Bob at places 2 and 0 of three: the info byte by byte, and the derivation from HMAC."""
    carol = private_keys(1)[0]
    published = [BOB_PUBLIC, secrets.public_key(carol), ALICE_PUBLIC]
    info = b"cafcor_jax pair key 1"
    info += b"\0\0\0\x05run 1" + bytes([0, 0, 0, len(impl)]) + impl.encode()
    info += b"\0\0\0\x03" + b"\0\0\0\0" + b"\0\0\0\x02" + BOB_PUBLIC + ALICE_PUBLIC
    want = hkdf_definition(SHARED, info, length)
    alice = secrets.derive_row(ALICE, published, 2, session=b"run 1", impl=impl)
    bob = secrets.derive_row(BOB, published, 0, session=b"run 1", impl=impl)
    assert alice.shape == bob.shape == (3,)
    assert str(jax.random.key_impl(alice)) == impl
    assert key_bytes(alice[0]) == key_bytes(bob[2]) == want
    assert key_bytes(alice[2]) == key_bytes(bob[0]) == bytes(length)


@needs_cryptography
def test_the_default_keys_have_256_bits():
    private, published = federation(2)
    row = secrets.derive_row(private[0], published, 0, session=b"run 1")
    assert chacha.is_chacha(row)
    assert key_bytes(row[1]) == key_bytes(
        secrets.derive_row(private[0], published, 0, session=b"run 1", impl="chacha20")[1]
    )


@needs_cryptography
def test_generated_keys_differ():
    keys = {secrets.generate_private_key() for _ in range(20)}
    assert len(keys) == 20 and {len(key) for key in keys} == {32}
    assert len({secrets.public_key(key) for key in keys}) == 20


@needs_cryptography
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("n", [2, 7])
def test_the_agreed_matrix_is_symmetric_with_distinct_pairs(impl, n):
    private, published = federation(n)
    keys = secrets.agreed_key_matrix(private, session=b"run 1", impl=impl)
    assert keys.shape == (n, n) and str(jax.random.key_impl(keys)) == impl
    data = np.asarray(jax.random.key_data(keys))
    np.testing.assert_array_equal(data, data.swapaxes(0, 1))
    assert len({data[i, j].tobytes() for i in range(n) for j in range(i)}) == n * (n - 1) // 2
    assert not data[range(n), range(n)].any()
    for i in range(n):
        row = secrets.derive_row(private[i], published, i, session=b"run 1", impl=impl)
        np.testing.assert_array_equal(jax.random.key_data(row), data[i])


@needs_cryptography
def test_everything_the_key_is_bound_to_changes_it():
    """Alice and Bob with another session, implementation, place, order or company have another key."""
    carol, dave = (secrets.public_key(key) for key in private_keys(2))
    a, b = ALICE_PUBLIC, BOB_PUBLIC

    def key(published, session=b"run 1", impl="chacha20"):
        row = secrets.derive_row(ALICE, published, published.index(a), session=session, impl=impl)
        return key_bytes(row[published.index(b)])

    base = key([a, b, carol])
    assert base == key([a, b, dave])  # not bound to who else is there
    others = [
        key([a, b, carol], session=b"run 2"),
        key([a, b, carol], session=b"run 1\0"),
        key([b, a, carol]),
        key([a, carol, b]),
        key([a, b]),
        key([a, b, carol, dave]),
        key([a, b, carol], impl="rbg"),
        key([a, b, carol], impl="unsafe_rbg"),
        key([a, b, carol], impl="threefry2x32"),
    ]
    # Nor is a short key the beginning of a long one.
    assert len({value[:8] for value in [base, *others]}) == 1 + len(others)


@needs_cryptography
def test_workers_who_agreed_draw_noise_that_cancels():
    n, size = 4, 300
    private, published = federation(n)
    matrix = secrets.agreed_key_matrix(private, session=b"run 1")
    whole = np.asarray(jax.jit(noise.pairwise, static_argnums=2)(matrix, 3, size, 1.0))
    row = jax.jit(noise.pairwise_row, static_argnums=3)
    for i in range(n):
        own = secrets.derive_row(private[i], published, i, session=b"run 1")
        np.testing.assert_array_equal(row(own, i, 3, size, 1.0), whole[i])
    assert np.abs(whole.sum(axis=0)).max() < 1e-5 < 1 < whole.std()
    # One worker in another session, and it does not cancel.
    stray = row(secrets.derive_row(private[0], published, 0, session=b"run 2"), 0, 3, size, 1.0)
    assert np.std(whole.sum(axis=0) - whole[0] + np.asarray(stray)) > 1


# Refusals.


@needs_cryptography
@pytest.mark.parametrize("high_bit", [0, 1])
@pytest.mark.parametrize("point", LOW_ORDER)
def test_points_of_low_order(point, high_bit):
    public = (point + high_bit * 2**255).to_bytes(32, "little")
    with pytest.raises(UserError, match=f"{public.hex()} is a point of low order"):
        secrets.shared_secret(ALICE, public)
    with pytest.raises(UserError, match=f"{public.hex()} is a point of low order"):
        secrets.derive_row(ALICE, [BOB_PUBLIC, public, ALICE_PUBLIC], 2, session=b"run 1")


@needs_cryptography
def test_another_point_is_not_of_low_order():
    assert any(secrets.shared_secret(ALICE, (2).to_bytes(32, "little")))


@needs_cryptography
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"private": ALICE[:31]}, "private key has 31 bytes; it must have 32"),
        ({"private": ALICE.hex()}, "private key is of type str; it must be 32 bytes"),
        ({"public_keys": [ALICE_PUBLIC, BOB_PUBLIC + b"0"]}, "public key at place 1 has 33 bytes"),
        ({"public_keys": [ALICE_PUBLIC, None]}, "public key at place 1 is of type NoneType"),
        ({"public_keys": [ALICE_PUBLIC]}, "There are 1 public keys; a pair takes at least 2"),
        ({"public_keys": []}, "There are 0 public keys"),
        ({"public_keys": [ALICE_PUBLIC, BOB_PUBLIC, BOB_PUBLIC]}, "places 1 and 2 are the same"),
        ({"public_keys": [ALICE_PUBLIC, ALICE_PUBLIC]}, "places 0 and 1 are the same"),
        ({"public_keys": [BOB_PUBLIC, ALICE_PUBLIC]}, "public key at place 0 is de9e.*own private key, 8520"),
        ({"worker": 1}, "public key at place 1 is de9e.*own private key, 8520"),
        ({"worker": 2}, "worker is 2; with 2 public keys it must be an integer from 0 to 1"),
        ({"worker": -1}, "worker is -1"),
        ({"worker": 0.0}, "worker is 0.0"),
        ({"worker": False}, "worker is False"),
        ({"session": b""}, "session is b''; it must be bytes"),
        ({"session": "run 1"}, "session is 'run 1'; it must be bytes"),
        ({"impl": "chacha21"}, "chacha21"),
    ],
)
def test_bad_rows(change, said):
    good = {"private": ALICE, "public_keys": [ALICE_PUBLIC, BOB_PUBLIC], "worker": 0, "session": b"run 1"}
    assert secrets.derive_row(**good).shape == (2,)
    with pytest.raises(ValueError, match=said):
        secrets.derive_row(**(good | change))


@needs_cryptography
def test_a_key_written_in_another_way_is_the_same_key():
    """X25519 ignores the highest bit and reduces modulo p."""
    flipped = BOB_PUBLIC[:31] + bytes([BOB_PUBLIC[31] ^ 0x80])
    small = [(value).to_bytes(32, "little") for value in (5, P + 5)]
    for pair in ([BOB_PUBLIC, flipped], small):
        assert secrets.shared_secret(ALICE, pair[0]) == secrets.shared_secret(ALICE, pair[1])
        with pytest.raises(UserError, match="places 1 and 2 are the same"):
            secrets.derive_row(ALICE, [ALICE_PUBLIC, *pair], 0, session=b"run 1")


@needs_cryptography
@pytest.mark.parametrize(("n", "said"), [(0, "There are 0"), (1, "There are 1")])
def test_a_matrix_of_no_pair(n, said):
    with pytest.raises(UserError, match=said):
        secrets.agreed_key_matrix(private_keys(n), session=b"run 1")


@needs_cryptography
def test_a_matrix_of_equal_keys():
    with pytest.raises(UserError, match="places 0 and 2 are the same"):
        secrets.agreed_key_matrix([ALICE, BOB, ALICE], session=b"run 1")


@needs_cryptography
@pytest.mark.parametrize("length", [0, 255 * 32 + 1])
def test_a_length_that_cannot_be_derived(length):
    with pytest.raises(UserError, match=f"length is {length}; it must be between 1 and 8160"):
        secrets.hkdf_sha256(b"secret", salt=b"", info=b"", length=length)


def test_without_the_package(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for call in (
        lambda: secrets.public_key(ALICE),
        lambda: secrets.shared_secret(ALICE, BOB_PUBLIC),
        lambda: secrets.derive_row(ALICE, [ALICE_PUBLIC, BOB_PUBLIC], 0, session=b"run 1"),
        lambda: secrets.agreed_key_matrix([ALICE, BOB], session=b"run 1"),
    ):
        with pytest.raises(UserError, match=r'pip install "cafcor_jax\[secrets\]"'):
            call()
    assert secrets.key_matrix(jax.random.key(0), 3).shape == (3, 3)
