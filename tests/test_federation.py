import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from cafcor_jax import (
    aggregators,
    attacks,
    chacha,
    clipping,
    federation,
    grid,
    noise,
    privacy,
    secrets,
)
from tests.compiling import compiled_quickly, fast_jit, usual_jit  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("compiled_quickly")

N, F, M, B = 6, 2, 9, 4
H = N - F
BETA, RATE, DECAY, CLIP = 0.8, 0.1, 0.01, 0.5


def loss_fn(params, x, y):
    scores = x.reshape(x.shape[0], -1).astype(jnp.float32) @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()


@pytest.fixture(scope="module")
def params():
    return {"w": 0.1 * jax.random.normal(jax.random.key(5), (8, 3)), "b": jnp.zeros(3)}


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    return federation.Data(
        jnp.asarray(rng.integers(0, 3, (H, M, 2, 4)), jnp.uint8),
        jnp.asarray(rng.integers(0, 3, (H, M)), jnp.int32),
        jnp.full(H, M, jnp.int32),
    )


def plan(threat_model="byzldp", **changes):
    settings = {
        "threat_model": threat_model,
        "epsilon": 50.0,
        "delta": 1e-4,
        "num_workers": N,
        "num_byzantine": F,
        "rounds": 10,
        "clip_norm": CLIP,
    }
    return privacy.calibrate(**(settings | changes))


def make(plan, **changes):
    settings = {
        "loss_fn": loss_fn,
        "plan": plan,
        "aggregator": aggregators.caf(num_byzantine=F),
        "attack": attacks.alie(),
        "optimizer": optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(RATE)),
        "momentum": BETA,
        "batch_size": M,  # the whole data: the reference below need not know the sample
    }
    return federation.federation(**(settings | changes))


def clipped_mean_gradients(params, data):
    gradients = jax.vmap(jax.grad(loss_fn), (None, 0, 0))(params, data.images, data.labels)
    rows = np.concatenate([np.asarray(gradients[k], np.float64).reshape(H, -1) for k in ("b", "w")], axis=1)
    return rows * np.minimum(1, CLIP / np.linalg.norm(rows, axis=1))[:, None]


@functools.cache
def jit_row(size, sigma):
    return jax.jit(lambda own, i, round_index: noise.pairwise_row(own, i, round_index, size, sigma))


def noise_rows(key, round_index, plan, size):
    """The noise as separate workers would draw it, each from its own secrets."""
    _, pairs, own, _ = jax.random.split(key, 4)
    matrix = secrets.key_matrix(pairs, N)
    row = jit_row(size, plan.sigma_cor)
    rows = np.stack([np.asarray(row(matrix[i], i, round_index)) for i in range(H)])
    return rows + np.asarray(
        noise.independent(jax.random.split(own, N)[:H], round_index, size, plan.sigma_ind)
    )


def unflatten(flat):
    return {"b": jnp.asarray(flat[:3], jnp.float32), "w": jnp.asarray(flat[3:], jnp.float32).reshape(8, 3)}


def test_label_flip_sends_the_mean_raw_gradient_of_flipped_labels(params, data):
    """Under the mean, and with honest messages that are 0 (round 0), the aggregate is f/n of that."""
    attack = attacks.label_flip(num_classes=3)
    fed = make(plan(), attack=attack, aggregator=aggregators.mean(), optimizer=optax.sgd(RATE))
    state, _ = jax.jit(fed.step)(jax.random.key(7), fed.init(params), data)
    flipped = jax.vmap(jax.grad(loss_fn), (None, 0, 0))(params, data.images, 2 - data.labels)
    for name in params:
        expected = params[name] - RATE * F / N * flipped[name].mean(0)
        np.testing.assert_allclose(state.params[name], expected, rtol=1e-5, atol=1e-7)
    # It would not hold with labels as they are, nor with clipped gradients.
    straight = jax.vmap(jax.grad(loss_fn), (None, 0, 0))(params, data.images, data.labels)
    assert not np.allclose(straight["w"].mean(0), flipped["w"].mean(0), rtol=1e-2)
    norms = jax.vmap(optax.global_norm)(flipped)
    assert (norms > CLIP).any()


@pytest.mark.parametrize("num_classes", [1, 0, -3, True, 2.5])
def test_label_flip_needs_classes(num_classes):
    with pytest.raises(ValueError, match=f"num_classes is {num_classes}; it must be a whole number"):
        attacks.label_flip(num_classes)


@pytest.mark.slow
def test_rounds_are_algorithm_one(params, data):
    """Three rounds against Algorithm 1 written out in NumPy, noise included."""
    private = plan()
    key = jax.random.key(7)
    fed = make(private)
    state = fed.init(params)
    step = jax.jit(fed.step)

    theta = np.concatenate([np.asarray(params["b"]), np.asarray(params["w"]).ravel()]).astype(np.float64)
    momentum = np.zeros((H, theta.size))
    for t in range(3):
        state, info = step(key, state, data)
        if t >= 1:
            noisy = clipped_mean_gradients(unflatten(theta), data) + noise_rows(key, t, private, theta.size)
            momentum = BETA * momentum + (1 - BETA) * noisy
        malicious = momentum.mean(0) + 1.5 * momentum.std(0, ddof=1)
        messages = np.concatenate([momentum, np.repeat(malicious[None], F, 0)])
        aggregate = np.asarray(aggregators.caf(num_byzantine=F)(jnp.asarray(messages, jnp.float32)))
        theta = theta - RATE * (aggregate + DECAY * theta)
        actual = np.concatenate([np.asarray(state.params["b"]), np.asarray(state.params["w"]).ravel()])
        np.testing.assert_allclose(actual, theta, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            info.deviation, np.linalg.norm(aggregate - momentum.mean(0)), rtol=1e-3, atol=1e-5
        )
    assert int(state.round) == 3


def test_the_first_round_sends_nothing(params, data):
    """m_0 = 0: only weight decay moves the model."""
    fed = make(plan())
    state, _ = fed.step(jax.random.key(0), fed.init(params), data)
    jax.tree.map(
        lambda new, old: np.testing.assert_allclose(new, old * (1 - RATE * DECAY), rtol=1e-6),
        state.params,
        params,
    )
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(state.momentum))


@pytest.mark.parametrize("threat_model", ["none", "ldp", "cdp", "secldp", "byzldp"])
@pytest.mark.parametrize("mode", ["pairwise", "projected"])
def test_noise_has_the_law_of_the_plan(threat_model, mode, data):
    """With zero gradients the first noisy momentum is (1 - beta) times the noise: its covariance is known."""
    chosen = plan(threat_model)
    size = 20_000
    zero = {"w": jnp.zeros(size)}
    fed = make(
        chosen, loss_fn=lambda p, x, y: 0.0 * p["w"].sum(), noise_mode=mode, aggregator=aggregators.mean()
    )
    step = jax.jit(fed.step)
    state, _ = step(jax.random.key(3), fed.init(zero), data)
    state, _ = step(jax.random.key(3), state, data)
    rows = np.asarray(state.momentum["w"]) / (1 - BETA)
    if threat_model == "none":
        assert not rows.any()
        return
    covariance = chosen.sigma_cor**2 * (N * np.eye(H) - 1) + chosen.sigma_ind**2 * np.eye(H)
    white = np.linalg.solve(np.linalg.cholesky(covariance), rows)
    accepted = stats.chi2.cdf((white**2).sum(), white.size)
    assert 1e-4 < accepted < 1 - 1e-4
    # A sigma that is 2% off must be told apart.
    for factor in (0.98, 1.02):
        assert not 1e-4 < stats.chi2.cdf((white**2).sum() / factor**2, white.size) < 1 - 1e-4


def test_a_run_is_a_function_of_its_key(params, data):
    fed = make(plan(), batch_size=B)
    step = jax.jit(fed.step)

    def run(key, rounds=3):
        state = fed.init(params)
        for _ in range(rounds):
            state, _ = step(key, state, data)
        return state.params["w"]

    assert (run(jax.random.key(1)) == run(jax.random.key(1))).all()
    assert (run(jax.random.key(1)) != run(jax.random.key(2))).any()


def test_steps_scan_and_vmap_over_seeds(params, data):
    fed = make(plan(), batch_size=B)

    def run(key):
        return jax.lax.scan(lambda s, _: fed.step(key, s, data), fed.init(params), length=3)[0].params

    keys = jax.random.split(jax.random.key(0), 2)
    both = jax.jit(jax.vmap(run))(keys)
    for index in range(2):
        alone = jax.jit(run)(keys[index])
        jax.tree.map(lambda a, b, i=index: np.testing.assert_allclose(a[i], b, atol=1e-5), both, alone)


def test_one_trace_for_all_rounds(params, data):
    traces = []

    def counted(p, x, y):
        traces.append(1)
        return loss_fn(p, x, y)

    fed = make(plan(), loss_fn=counted, batch_size=B)
    step = jax.jit(fed.step)
    state = fed.init(params)
    for _ in range(3):
        state, _ = step(jax.random.key(0), state, data)
    assert len(traces) == 1


@pytest.mark.parametrize("bad", [np.nan, 1e38])
def test_malicious_garbage_does_not_break_a_round(params, data, bad):
    def garbage(key, honest, f):
        return jax.tree.map(lambda leaf: jnp.full_like(leaf[:f], bad), honest)

    fed = make(plan(), attack=garbage)
    step = jax.jit(fed.step)
    state = fed.init(params)
    for _ in range(2):
        state, info = step(jax.random.key(0), state, data)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    assert info.honest_weight == pytest.approx(1.0)
    assert info.not_finite == (F if np.isnan(bad) else 0)


def test_example_level_is_used_when_the_plan_says_so(params, data):
    private = plan("cdp", level="example", batch_size=M, samples_per_worker=M)
    assert private.level == "example"
    silent = dataclasses.replace(private, sigma_ind=1e-9, sigma_cor=0.0, epsilon=float("inf"))
    fed = make(silent, aggregator=aggregators.mean(), attack=attacks.none())
    state, _ = fed.step(jax.random.key(0), fed.init(params), data)
    state, _ = fed.step(jax.random.key(0), state, data)
    each = jax.vmap(jax.vmap(lambda x, y: jax.grad(loss_fn)(params, x[None], y[None])))(
        data.images, data.labels
    )
    rows = np.concatenate([np.asarray(each[k]).reshape(H, M, -1) for k in ("b", "w")], axis=2)
    rows = rows * np.minimum(1, CLIP / np.linalg.norm(rows, axis=2, keepdims=True))
    actual = np.concatenate([np.asarray(state.momentum[k]).reshape(H, -1) for k in ("b", "w")], axis=1)
    # The parameters moved by weight decay in round 0, hence the tolerance.
    np.testing.assert_allclose(actual / (1 - BETA), rows.mean(1), atol=2e-3)


def test_samples_are_distinct_uniform_and_within_size():
    draw = jax.jit(
        jax.vmap(lambda key: federation.sample_without_replacement(key, 10, jnp.int32(7), 3)),
    )
    samples = np.asarray(draw(jax.random.split(jax.random.key(0), 7000)))
    assert samples.max() == 6 and samples.min() == 0
    assert all(len(set(row)) == 3 for row in samples)
    # Each of the 7 items is in 3/7 of the samples, each of the 21 pairs in 1/7.
    single = np.bincount(samples.ravel(), minlength=7)
    assert stats.chisquare(single).pvalue > 1e-3
    pairs = [tuple(sorted(pair)) for row in samples for pair in (row[:2], row[1:], row[::2])]
    counts = np.unique([a * 7 + b for a, b in pairs], return_counts=True)[1]
    assert len(counts) == 21
    assert stats.chisquare(counts).pvalue > 1e-3


def test_poisson_samples():
    draw = jax.jit(jax.vmap(lambda key: federation.sample_poisson(key, 10, jnp.int32(7), 3, 7)))
    chosen, present = map(np.asarray, draw(jax.random.split(jax.random.key(0), 7000)))
    assert chosen.shape == present.shape == (7000, 10)
    taken = np.zeros((7000, 10), int)
    np.add.at(taken, (np.arange(7000)[:, None], chosen), present)
    assert taken.max() == 1 and not taken[:, 7:].any()
    # Each by itself with chance 3/7: the size is binomial, and two items are taken together in 9/49.
    sizes = np.bincount(taken.sum(1), minlength=8)
    assert stats.chisquare(sizes, 7000 * stats.binom.pmf(np.arange(8), 7, 3 / 7)).pvalue > 1e-3
    together = sum(taken[:, i] @ taken[:, j] for i in range(7) for j in range(i))
    assert together / 7000 / 21 == pytest.approx(9 / 49, rel=0.03)
    # Never more than the largest batch, and all of them where the batch is everything.
    _, few = federation.sample_poisson(jax.random.key(1), 200, jnp.int32(200), 100, 20)
    assert few.shape == (20,) and few.all()
    _, everything = federation.sample_poisson(jax.random.key(1), 10, jnp.int32(7), 7, 7)
    assert everything.sum() == 7


def test_poisson_batches_are_divided_by_their_expected_size(params, data):
    """Over many rounds the mean of the clipped gradients is that over all examples, whatever the sizes."""
    private = plan(
        "cdp", level="example", sampling="poisson", batch_size=3, samples_per_worker=M, epsilon=5.0
    )
    clipped_gradient = clipping.example_level(loss_fn, private.clip_norm)
    draw = jax.jit(
        lambda key: federation.honest_gradients(
            jax.random.split(key, H), params, data, clipped_gradient=clipped_gradient, batch_size=3,
            largest_batch=private.largest_batch,
        ).gradient
    )  # fmt: skip
    keys = jax.random.split(jax.random.key(3), 600)
    mean = jax.tree.map(lambda leaf: np.asarray(leaf).mean(0), jax.lax.map(draw, keys))
    for worker in range(H):
        whole = clipped_gradient(params, data.images[worker], data.labels[worker]).gradient
        for got, want in zip(jax.tree.leaves(mean), jax.tree.leaves(whole), strict=True):
            assert np.linalg.norm(got[worker] - want) < 0.1 * CLIP
    # A draw by itself is not the mean: sizes vary, and the divisor does not.
    assert np.std([float(jnp.linalg.norm(draw(key)["w"][0])) for key in keys[:20]]) > 1e-3


def test_poisson_batches_of_larger_workers_have_room():
    """The plan knows the smallest worker; the larger ones' batches vary more, and must not be cut."""
    private = plan(
        "cdp", level="example", sampling="poisson", batch_size=100, samples_per_worker=120, rounds=400
    )
    draw = jax.jit(
        jax.vmap(
            lambda key: federation.sample_poisson(key, 6000, jnp.int32(6000), 100, private.largest_batch)[1]
        )
    )
    sizes = np.asarray(draw(jax.random.split(jax.random.key(0), 4000))).sum(axis=1)
    assert sizes.max() < private.largest_batch - 20
    assert sizes.mean() == pytest.approx(100, abs=1) and sizes.std() == pytest.approx(10, rel=0.1)


def test_a_federation_must_sample_what_its_plan_counts_with(params, data):
    private = plan("cdp", level="example", batch_size=B, samples_per_worker=M)
    with pytest.raises(ValueError, match=f"batch_size is 3, and the plan counts with batches of {B}"):
        make(private, batch_size=3)
    larger = plan("cdp", level="example", batch_size=B, samples_per_worker=M + 1)
    rounds = make(larger, batch_size=B)
    with pytest.raises(ValueError, match=f"at most {M} examples, and the plan counts with at least {M + 1}"):
        rounds.step(jax.random.key(0), rounds.init(params), data)


def test_a_federation_samples_as_its_plan_says(params, data):
    """The same keys with the other sampling give other rounds: the plan is what decides."""
    settings = {"level": "example", "batch_size": B, "samples_per_worker": M}
    after = {}
    for sampling in ("without_replacement", "poisson"):
        rounds = make(plan("cdp", sampling=sampling, **settings), batch_size=B)
        state = rounds.init(params)
        for _ in range(2):
            state, info = jax.jit(rounds.step)(jax.random.key(0), state, data)
        assert np.isfinite(info.loss)
        after[sampling] = np.asarray(state.params["w"])
    assert (after["poisson"] != after["without_replacement"]).any()


@pytest.mark.parametrize("noise_mode", ["pairwise", "projected"])
def test_noise_on_a_secret_graph_has_its_law(params, data, noise_mode):
    """Messages less gradients: covariance sigma_cor^2 L + sigma_ind^2 I over the honest workers."""
    graph = privacy.graphs.ring(N)
    wide = {"w": jnp.zeros((8, 2000)), "b": jnp.zeros(2000)}
    private = plan(graph=graph, epsilon=5.0, clip_norm=1e-6)
    rounds = make(private, noise_mode=noise_mode, momentum=0.0, attack=attacks.none())
    state = rounds.init(wide)._replace(round=jnp.int32(1))
    state, _ = jax.jit(rounds.step)(jax.random.key(0), state, data)
    rows = np.concatenate(
        [np.asarray(leaf).reshape(H, -1) for leaf in jax.tree.leaves(state.momentum)], axis=1
    )
    laplacian = np.diag(graph.degrees) - graph.adjacency.astype(float)
    want = (private.sigma_cor**2 * laplacian + private.sigma_ind**2 * np.eye(N))[:H, :H]
    np.testing.assert_allclose(rows @ rows.T / rows.shape[1], want, atol=0.05 * want.max())
    complete = private.sigma_cor**2 * (N * np.eye(N) - 1) + private.sigma_ind**2 * np.eye(N)
    assert np.abs(rows @ rows.T / rows.shape[1] - complete[:H, :H]).max() > 0.3 * want.max()


@pytest.mark.parametrize("impl, graph", [("threefry2x32", "ring"), (chacha.IMPL, None)], ids=str)
def test_on_the_grid_messages_are_whole_steps_and_pairs_cancel_bitwise(params, data, impl, graph):
    """With one round's momentum of 0 a message is the noisy gradient itself: recomputed here in integers."""
    private = plan(graph=graph and privacy.graphs.parse(graph, N), epsilon=20.0)
    bits = 14
    rounds = make(private, grid_bits=bits, momentum=0.0, attack=attacks.none())
    key = jax.random.key(0, impl=impl)
    start = rounds.init(params)._replace(round=jnp.int32(1))
    state, _ = usual_jit(rounds.step)(key, start, data)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))

    def steps(tree):
        flat = np.concatenate([np.asarray(leaf).reshape(H, -1) for leaf in jax.tree.leaves(tree)], axis=1)
        whole = flat.astype(np.float64) * 2**bits
        assert (whole == np.round(whole)).all()
        return whole.astype(np.int64)

    sent = steps(state.momentum)
    streams = federation._streams(key)
    independent = usual_jit(lambda keys: grid.independent(keys, 1, size, private.sigma_ind, bits))
    own = np.asarray(independent(jax.random.split(streams.own, N)[:H]))
    row = usual_jit(lambda own, i: grid.pairwise_row(own, i, 1, size, private.sigma_cor, bits, private.graph))
    pair_keys = fast_jit(secrets.key_matrix, static_argnums=1)(streams.pairs, N)
    pairs = np.stack([row(pair_keys[i], i) for i in range(N)])
    assert not pairs.astype(np.int64).sum(axis=0).any()
    gradient = sent - own - pairs[:H]
    # What is left is the clipped gradient, rounded toward zero: no longer than C.
    assert (np.linalg.norm(gradient, axis=1) <= CLIP * 2**bits).all() and np.abs(gradient).max() > 10


def test_what_the_grid_cannot_keep_is_refused(params, data):
    with pytest.raises(ValueError, match="noise_mode is 'projected', which has no grid"):
        make(plan(), noise_mode="projected", grid_bits=14)
    rounds = make(plan(accountant="exact"), grid_bits=14)
    with pytest.raises(ValueError, match="accountant must be 'rdp' or 'paper' on the grid"):
        rounds.step(jax.random.key(0), rounds.init(params), data)


def test_flips_happen_to_half_of_the_images():
    images = jnp.arange(400 * 4, dtype=jnp.uint8).reshape(400, 1, 4, 1)
    flipped = np.asarray(federation.random_flip(jax.random.key(0), images))
    same = (flipped == images).all((1, 2, 3))
    assert (flipped[~same] == np.asarray(images)[~same][:, :, ::-1]).all()
    assert 160 < same.sum() < 240


def test_bad_noise_modes_are_named():
    with pytest.raises(ValueError, match="'loud'"):
        make(plan(), noise_mode="loud")
    with pytest.raises(ValueError, match="correlated noise"):
        make(plan("secldp"), noise_mode="independent")


def test_malicious_workers_that_keep_to_the_protocol_owe_noise_and_keep_a_momentum(params, data):
    """Messages less noise are the momenta of what they put in; the pair noise of all n cancels."""
    private = plan("secldp")
    size = 27
    fed = make(private, attack=attacks.bias(5.0), aggregator=aggregators.mean())
    key, step = jax.random.key(7), jax.jit(fed.step)
    state = fed.init(params)
    assert jax.tree.leaves(state.momentum)[0].shape[0] == N
    put_in = np.zeros((N, size))
    for t in range(3):
        before = state.params
        state, info = step(key, state, data)
        if t == 0:
            continue
        rows = clipped_mean_gradients(before, data)
        mean = rows.mean(0)
        rows = np.concatenate([rows, np.tile(-5.0 * mean / np.linalg.norm(mean), (F, 1))])
        pairs = secrets.key_matrix(jax.random.split(key, 4)[1], N)
        rows += np.asarray(noise.pairwise(pairs, t, size, private.sigma_cor))
        put_in = BETA * put_in + (1 - BETA) * rows
        sent = np.concatenate([np.asarray(state.momentum[k]).reshape(N, -1) for k in ("b", "w")], axis=1)
        np.testing.assert_allclose(sent, put_in, rtol=1e-4, atol=1e-5)
    assert info.weights.shape == (N,) and not info.flagged.any() and info.law_fits


def test_a_bias_without_a_length_is_searched_in_every_round(params, data):
    """The messages are those of the length that `best_push` finds on messages without the bias."""
    rule = aggregators.median(F)
    private = plan("secldp")
    searched = make(private, attack=attacks.bias(), aggregator=rule)
    without = make(private, attack=attacks.bias(0.0), aggregator=rule)
    key = jax.random.key(7)
    state = searched.init(params)
    state, _ = usual_jit(searched.step)(key, state, data)
    assert all(not leaf.any() for leaf in jax.tree.leaves(state.momentum))  # round 0 sends nothing
    base = usual_jit(without.step)(key, state, data)[0].momentum
    sent = usual_jit(searched.step)(key, state, data)[0].momentum
    mean = clipped_mean_gradients(state.params, data).mean(0)
    rows = [
        np.concatenate([np.asarray(tree[k]).reshape(N, -1) for k in ("b", "w")], axis=1)
        for tree in (base, sent)
    ]
    unit = -(1 - BETA) * mean / np.linalg.norm(mean)
    np.testing.assert_array_equal(rows[0][: N - F], rows[1][: N - F])
    along = (rows[1] - rows[0])[N - F :]
    found = attacks.best_push(
        rule, (), jnp.asarray(rows[0]), jnp.tile(jnp.asarray(unit, jnp.float32), (F, 1))
    )
    assert found.factor > 0
    np.testing.assert_allclose(along, np.tile(found.factor * unit, (F, 1)), rtol=1e-3, atol=1e-4)


def test_a_rule_with_a_state_is_applied_round_after_round(data):
    """With zero gradients messages are noise: the law holds in every round, and two who shift it show."""
    wide = {"w": jnp.zeros(6000)}
    private = plan("secldp")
    rule = aggregators.caf_history(
        F, momentum=BETA, sigma_ind=private.sigma_ind, sigma_cor=private.sigma_cor, clip_norm=0.0
    )

    def loss(p, x, y):
        return 0.0 * p["w"].sum()

    for attack, caught in ((attacks.none(), 2), (attacks.bias_fixed(60 * private.message_std), 2)):
        fed = make(private, loss_fn=loss, aggregator=rule, attack=attack)
        step, state = jax.jit(fed.step), fed.init(wide)
        for t in range(4):
            state, info = step(jax.random.key(3), state, data)
            assert int(state.server.round) == t + 1
            if t > 0:
                # None sends the honest mean, which is far too short for a message.
                assert info.flagged.tolist() == [False] * H + [True] * caught
                assert info.law_fits and float(info.honest_weight) > 0.99


def test_an_adaptive_attack_meets_the_rule_of_the_round(params, data):
    private = plan("secldp")
    rule = aggregators.OVER_ROUNDS["caf_noise_aware"](
        F, momentum=BETA, sigma_ind=private.sigma_ind, sigma_cor=private.sigma_cor
    )
    against = attacks.adaptive.AgainstRound(attacks.alie_adaptive)
    fed = make(private, aggregator=rule, attack=against)
    step, state = jax.jit(fed.step), fed.init(params)
    for _ in range(2):
        state, info = step(jax.random.key(3), state, data)
    assert np.isfinite(info.deviation)
    with pytest.raises(ValueError, match="needs a rule with a state"):
        make(private, attack=against)
