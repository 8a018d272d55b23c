"""Secret graphs: the covariance from single noise terms, worst cases by brute force, bounds that hold."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cafcor_jax import privacy
from cafcor_jax.privacy import graphs

SIGMAS = [(1.0, 1.0), (0.3, 2.0), (2.0, 0.3), (0.0, 1.0)]


def covariance_by_definition(graph, sigma_ind, sigma_cor, colluding, silent):
    """One column for every noise source that the server does not know, rows of honest workers."""
    n = graph.num_workers
    honest = [i for i in range(n) if i not in (*colluding, *silent)]
    columns = [sigma_ind * np.eye(n)[i] for i in honest]
    for i, j in graph.edges:
        if i not in colluding and j not in colluding:
            columns.append(sigma_cor * (np.eye(n)[i] - np.eye(n)[j]))
    sources = np.array(columns)[:, honest]
    return sources.T @ sources


def brute_force(graph, sigma_ind, sigma_cor, f, q, clip_norm=1.0):
    worst = 0.0
    workers = range(graph.num_workers)
    for colluding in itertools.combinations(workers, q):
        for silent in itertools.combinations([i for i in workers if i not in colluding], f - q):
            sigma = covariance_by_definition(graph, sigma_ind, sigma_cor, colluding, silent)
            if np.linalg.matrix_rank(sigma, tol=1e-9) < len(sigma):
                return math.inf
            worst = max(worst, np.diag(np.linalg.inv(sigma)).max())
    return 2 * clip_norm**2 * worst


def worst_case(graph, sigma_ind, sigma_cor, f, q, clip_norm=1.0):
    return graphs.worst_case(
        graph, sigma_ind=sigma_ind, sigma_cor=sigma_cor, num_byzantine=f, num_colluding=q, clip_norm=clip_norm
    )


SMALL = [
    graphs.complete(6), graphs.ring(3), graphs.ring(7), graphs.ring(8), graphs.regular(8, 3, seed=1),
    graphs.regular(7, 4, seed=2),
    graphs.given(np.kron(np.eye(2), 1 - np.eye(4))),  # two groups that share nothing
    graphs.given(np.eye(7, k=1) + np.eye(7, k=-1)),  # a path
]  # fmt: skip


@pytest.mark.parametrize("graph", SMALL, ids=lambda graph: f"{graph.name}{graph.num_workers}")
def test_the_worst_case_is_the_worst_of_all_choices(graph):
    for f in range((graph.num_workers - 1) // 2 + 1):
        for q, sigmas in itertools.product(range(f + 1), SIGMAS):
            found = worst_case(graph, *sigmas, f, q, clip_norm=1.7)
            assert found.how in ("exact", "enumerated")
            assert found.step_divergence == pytest.approx(brute_force(graph, *sigmas, f, q, 1.7), rel=1e-9)


@pytest.mark.parametrize("graph", SMALL, ids=lambda graph: f"{graph.name}{graph.num_workers}")
def test_the_spectral_bound_holds(graph, monkeypatch):
    monkeypatch.setattr(graphs, "MAX_NUMBERS", 0)
    graphs._worst_inverse.cache_clear()
    graphs._least_connectivity.cache_clear()
    try:
        kinds = set()
        for f in range((graph.num_workers - 1) // 2 + 1):
            for q, sigmas in itertools.product(range(f + 1), SIGMAS):
                found = worst_case(graph, *sigmas, f, q)
                kinds.add(found.how)
                assert found.step_divergence >= brute_force(graph, *sigmas, f, q) * (1 - 1e-9)
                # Never worse than the independent noise alone.
                if sigmas[0]:
                    assert found.step_divergence <= 2 / sigmas[0] ** 2 * (1 + 1e-9)
        assert "bound" in kinds or graph.name in ("complete", "ring")
    finally:
        graphs._worst_inverse.cache_clear()
        graphs._least_connectivity.cache_clear()


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 9), st.data())
def test_covariance_is_that_of_the_single_noise_terms(n, data):
    bits = data.draw(st.lists(st.booleans(), min_size=math.comb(n, 2), max_size=math.comb(n, 2)))
    matrix = np.zeros((n, n), int)
    matrix[np.triu_indices(n, 1)] = bits
    graph = graphs.given(matrix + matrix.T)
    order = data.draw(st.permutations(range(n)))
    f = data.draw(st.integers(0, (n - 1) // 2))
    q = data.draw(st.integers(0, f))
    colluding, silent = order[:q], order[q:f]
    got = graphs.covariance(graph, sigma_ind=0.7, sigma_cor=1.3, colluding=colluding, silent=silent)
    np.testing.assert_allclose(
        got, covariance_by_definition(graph, 0.7, 1.3, colluding, silent), rtol=1e-12, atol=1e-12
    )


def test_the_complete_graph_is_the_lemma():
    for f, q in ((0, 0), (3, 0), (3, 2), (3, 3)):
        federation = dict(sigma_ind=0.6, sigma_cor=0.9, num_byzantine=f, num_colluding=q, clip_norm=2.0)
        lemma = privacy.step_divergence(num_workers=20, **federation)
        assert privacy.worst_case(graphs.complete(20), **federation).step_divergence == pytest.approx(lemma)


def test_a_large_graph_is_bounded_between_complete_and_independent_noise():
    graph = graphs.regular(100, 30, seed=3)
    found = worst_case(graph, 1.0, 1.0, 5, 5)
    complete = worst_case(graphs.complete(100), 1.0, 1.0, 5, 5)
    assert found.how == "bound"
    assert complete.step_divergence < found.step_divergence < 2.0
    # The bound is not far off: a worker that keeps 25 of its 30 secrets is a choice, and its own.
    neighbours = np.flatnonzero(graph.adjacency[0])[:5]
    one = graphs.covariance(graph, sigma_ind=1.0, sigma_cor=1.0, colluding=neighbours, silent=[])
    below = 2 * np.linalg.inv(one)[0, 0]
    assert below <= found.step_divergence < 2.5 * below


@pytest.mark.parametrize("degree, f", [(10, 5), (20, 10), (30, 5)])
def test_bounds_lie_between_an_attack_and_independent_noise(degree, f):
    """The colluders are neighbours of worker 0: one choice, so below the worst one."""
    graph = graphs.regular(100, degree, seed=1)
    for sigmas in ((1.0, 1.0), (1.0, 0.3), (0.3, 1.0)):
        found = worst_case(graph, *sigmas, f, f)
        neighbours = np.flatnonzero(graph.adjacency[0])[:f]
        one = graphs.covariance(
            graph, sigma_ind=sigmas[0], sigma_cor=sigmas[1], colluding=neighbours, silent=[]
        )
        attack = 2 * np.linalg.inv(one)[0, 0]
        assert found.how == "bound"
        assert attack <= found.step_divergence < 2 / sigmas[0] ** 2
        # k - f neighbours are left, each with noise of its own: not the independent noise alone.
        ind, cor = np.square(sigmas)
        assert found.step_divergence <= 2 / (ind + (degree - f) * cor * ind / (cor + ind)) * (1 + 1e-9)


@pytest.mark.parametrize("n, degree", [(30, 28), (100, 90), (100, 98), (100, 50), (6, 5)])
def test_dense_regular_graphs(n, degree):
    graph = graphs.regular(n, degree, seed=4)
    assert (graph.degrees == degree).all() and graph.name == "regular"


def test_colluders_around_a_worker_leave_it_its_own_noise():
    found = worst_case(graphs.regular(60, 6), 0.5, 3.0, 6, 6)
    assert (found.how, found.step_divergence) == ("exact", pytest.approx(2 / 0.25))


@pytest.mark.parametrize("n, degree", [(10, 3), (11, 4), (100, 8), (5, 4)])
def test_regular_graphs_are_regular_and_random(n, degree):
    a, b = graphs.regular(n, degree, seed=1), graphs.regular(n, degree, seed=2)
    for graph in (a, b):
        assert (graph.degrees == degree).all() and len(set(graph.edges)) == n * degree // 2
    assert (a.edges != b.edges) or a.is_complete
    assert graphs.regular(n, degree, seed=1) == a


@pytest.mark.parametrize("graph", SMALL, ids=lambda graph: f"{graph.name}{graph.num_workers}")
def test_matchings_have_every_edge_once_and_no_worker_twice(graph):
    groups = graphs.matchings(graph)
    assert sorted(edge for group in groups for edge in group) == list(graph.edges)
    for group in groups:
        ends = [worker for edge in group for worker in edge]
        assert len(ends) == len(set(ends))


@pytest.mark.parametrize("graph", SMALL, ids=lambda graph: f"{graph.name}{graph.num_workers}")
def test_graphs_survive_json(graph):
    assert graphs.SecretGraph.from_dict(json.loads(json.dumps(graph.to_dict()))) == graph


def test_plans_on_a_graph():
    settings = dict(epsilon=5.0, delta=1e-5, num_workers=20, num_byzantine=3, rounds=10, clip_norm=1.0)
    sparse = graphs.regular(20, 10, seed=1)
    plan = privacy.calibrate(threat_model="byzldp", graph=sparse, accountant="exact", **settings)
    assert privacy.epsilon(plan) == pytest.approx(5.0, rel=1e-6) and privacy.epsilon(plan) <= 5.0
    full = privacy.calibrate(threat_model="byzldp", accountant="exact", **settings)
    assert plan.sigma_cor > full.sigma_cor
    assert privacy.PrivacyPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert "regular graph, 100 pairs, 10 a worker; epsilon is " in plan.describe()
    same = privacy.calibrate(threat_model="byzldp", accountant="exact", graph=graphs.complete(20), **settings)
    assert same.sigma_cor == pytest.approx(full.sigma_cor, rel=1e-9)
    # The mean over all graphs with secrets between honest and Byzantine workers is what is left of it.
    assert same.honest_mean_std == pytest.approx(full.honest_mean_std, rel=1e-9)


@pytest.mark.parametrize(
    "graph, f, q, threat_model",
    [
        (graphs.given(np.kron(np.eye(2), 1 - np.eye(4))), 1, 0, "secldp"),  # a group without Byzantine worker
        (graphs.ring(9), 3, 2, "byzldp"),
    ],
)
def test_a_disconnected_honest_graph_without_independent_noise(graph, f, q, threat_model):
    with pytest.raises(ValueError, match=r"sigma_ind is 0.*cut honest workers off.*epsilon is infinite"):
        privacy.PrivacyPlan(
            threat_model=threat_model, num_workers=graph.num_workers, num_byzantine=f, num_colluding=q,
            rounds=3, clip_norm=1.0, delta=1e-5, sigma_ind=0.0, sigma_cor=1.0, graph=graph,
        )  # fmt: skip


def test_files(tmp_path):
    matrix = graphs.regular(6, 3).adjacency.astype(int)
    np.save(tmp_path / "a.npy", matrix)
    np.savetxt(tmp_path / "a.csv", matrix, delimiter=",", fmt="%d")
    np.savetxt(tmp_path / "a.txt", matrix, fmt="%d")
    for name in ("a.npy", "a.csv", "a.txt"):
        graph = graphs.parse(str(tmp_path / name), 6)
        np.testing.assert_array_equal(graph.adjacency, matrix)
    with pytest.raises(ValueError, match=r"a matrix for 6 workers, and there are 7\."):
        graphs.parse(str(tmp_path / "a.csv"), 7)
    (tmp_path / "bad.csv").write_text("1,a\n")
    with pytest.raises(ValueError, match="cannot be read as a matrix"):
        graphs.parse(str(tmp_path / "bad.csv"), 6)


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("star", "secret_graph='star' is not known: it must be complete, ring, regular:DEGREE"),
        ("regular:x", "has no whole number as its degree"),
        ("regular:10", "degree 10 over 10 workers does not exist"),
        ("regular:0", "degree must be a whole number of at least 1, got 0"),
        ("nowhere.npy", "cannot be read as a matrix"),
    ],
)
def test_bad_names(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        graphs.parse(text, 10)


@pytest.mark.parametrize(
    "matrix, sentence",
    [
        (np.zeros((2, 3)), r"must be \[n, n\], got one of shape \[2, 3\]"),
        (np.ones((3, 3)), "0 on the diagonal"),
        (np.triu(np.ones((3, 3)), 1), "symmetric"),
        (2 * (1 - np.eye(3)), "of 0 and 1 only"),
    ],
)
def test_bad_matrices(matrix, sentence):
    with pytest.raises(ValueError, match=sentence):
        graphs.given(matrix)


def test_odd_regular_graphs_do_not_exist():
    with pytest.raises(ValueError, match="workers times degree even"):
        graphs.regular(9, 3)


@settings(max_examples=50, deadline=None)
@given(st.integers(3, 12), st.data())
def test_vanished_workers_tell_less(n, data):
    """The view of those who are left is a part of the whole view: no entry of the inverse grows."""
    f = data.draw(st.integers(0, (n - 1) // 2))
    q = data.draw(st.integers(0, f))
    sigma = privacy.honest_covariance(
        sigma_ind=0.5, sigma_cor=1.2, num_workers=n, num_byzantine=f, num_colluding=q
    )
    left = data.draw(st.integers(1, n - f))
    whole, part = np.diag(np.linalg.inv(sigma)), np.diag(np.linalg.inv(sigma[:left, :left]))
    assert (part <= whole[:left] * (1 + 1e-12)).all()


def plan_of_twelve():
    return privacy.calibrate(
        threat_model="byzldp",
        epsilon=10.0,
        delta=1e-5,
        num_workers=12,
        num_byzantine=3,
        rounds=5,
        clip_norm=1.0,
    )


def test_noise_of_the_mean_without_vanished_workers():
    plan = plan_of_twelve()
    for vanished in range(9):
        left = 9 - vanished
        # From the covariance in which the vanished count as silent Byzantine ones, all secrets unknown.
        sigma = graphs.covariance(
            graphs.complete(12), sigma_ind=plan.sigma_ind, sigma_cor=plan.sigma_cor, colluding=[],
            silent=range(left, 12),
        )  # fmt: skip
        assert plan.mean_std_without(vanished) == pytest.approx(math.sqrt(sigma.sum()) / left)
    assert plan.mean_std_without(0) == plan.honest_mean_std
    with pytest.raises(ValueError, match="num_vanished must be less than the 9 honest workers, got 9"):
        plan.mean_std_without(9)


def test_message_std():
    plan = plan_of_twelve()
    assert plan.message_std == pytest.approx(math.sqrt(11 * plan.sigma_cor**2 + plan.sigma_ind**2))
