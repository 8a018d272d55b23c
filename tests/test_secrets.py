"""The pairs' keys."""

import jax
import numpy as np
import pytest

from cafcor_jax import secrets

IMPLEMENTATIONS = ["threefry2x32", "rbg", "unsafe_rbg"]


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
