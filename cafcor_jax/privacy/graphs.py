"""Who shares a secret with whom, and what that is worth against the worst set of colluders.

Correlated noise needs no secret between all pairs. On a sparse graph a worker draws the noise of its own few
edges, so a round costs O(n k d) instead of O(n^2 d); but colluders can then cut an honest worker off.

With honest workers H, colluders Q and silent Byzantine workers R (f = |Q| + |R|) the server sees, for each
coordinate, the honest gradients plus Gaussian noise of covariance

    Sigma = sigma_cor^2 L + diag(sigma_cor^2 r_i + sigma_ind^2),

where L is the Laplacian of the graph among H and r_i the number of i's secrets with R: noise shared with Q is
known, noise shared with R is not. A round leaks eps_step = 2 C^2 (Sigma^-1)_ii of worker i, and the promise
is for the worst i, Q and R.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cafcor_jax.errors import UserError
from cafcor_jax.privacy import mechanism

#: The most sets of colluders and silent workers that are looked at one by one, and the most numbers in all of
#: their matrices.
MAX_SETS, MAX_NUMBERS = 20_000, 10**7
# A smallest eigenvalue below this part of the largest is that of a singular matrix.
_SINGULAR = 1e-11
# Of computed eigenvalues, as a part of the largest: on the safe side.
_ROUNDING = 1e-14


@dataclasses.dataclass(frozen=True)
class SecretGraph:
    """An undirected graph over the workers: an edge is a secret.

    Attributes:
      name: "complete", "ring", "regular" or "given".
      num_workers: n.
      edges: Pairs (i, j) with i < j, in ascending order.

    Example:
      >>> ring(4).edges
      ((0, 1), (0, 3), (1, 2), (2, 3))
    """

    name: str
    num_workers: int
    edges: tuple[tuple[int, int], ...]

    @functools.cached_property
    def adjacency(self) -> np.ndarray:
        """Booleans [n, n], symmetric, with an empty diagonal."""
        matrix = np.zeros((self.num_workers, self.num_workers), bool)
        if self.edges:
            i, j = np.array(self.edges).T
            matrix[i, j] = matrix[j, i] = True
        matrix.setflags(write=False)
        return matrix

    @functools.cached_property
    def degrees(self) -> np.ndarray:
        """The number of secrets of every worker, [n]."""
        return self.adjacency.sum(axis=1)

    @property
    def is_complete(self) -> bool:
        """Whether every pair shares a secret."""
        return len(self.edges) == math.comb(self.num_workers, 2)

    def describe(self) -> str:
        """The graph in a few words."""
        low, high = int(self.degrees.min()), int(self.degrees.max())
        each = f"{low}" if low == high else f"{low} to {high}"
        return f"{self.name} graph, {len(self.edges):,} pairs, {each} a worker"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the edges only where the name does not say them."""
        plain = {"name": self.name, "num_workers": self.num_workers}
        return (
            plain if self.name in ("complete", "ring") else plain | {"edges": [list(e) for e in self.edges]}
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "SecretGraph":
        """The graph that `to_dict` wrote."""
        if values["name"] in ("complete", "ring"):
            return {"complete": complete, "ring": ring}[values["name"]](values["num_workers"])
        return cls(values["name"], values["num_workers"], tuple((int(i), int(j)) for i, j in values["edges"]))


def complete(num_workers: int) -> SecretGraph:
    """Every pair shares a secret: the paper's graph."""
    return SecretGraph("complete", num_workers, tuple(itertools.combinations(range(num_workers), 2)))


def ring(num_workers: int) -> SecretGraph:
    """Worker i shares a secret with i - 1 and i + 1."""
    if num_workers < 3:
        return dataclasses.replace(complete(num_workers), name="ring")
    pairs = [tuple(sorted((i, (i + 1) % num_workers))) for i in range(num_workers)]
    return SecretGraph("ring", num_workers, tuple(sorted((i, j) for i, j in pairs)))


@functools.lru_cache(maxsize=16)
def regular(num_workers: int, degree: int, seed: int = 0) -> SecretGraph:
    """A random graph in which every worker shares `degree` secrets.

    Pairs are drawn among workers that still lack secrets and do not share one yet; where that leads to a dead
    end, from the start (Steger and Wormald, Generating Random Regular Graphs Quickly, 1999). If most pairs
    share a secret, those that do not are drawn.

    Example:
      >>> regular(10, 4).degrees.tolist()
      [4, 4, 4, 4, 4, 4, 4, 4, 4, 4]
    """
    mechanism.check_int("degree", degree, 1)
    if degree >= num_workers or num_workers * degree % 2:
        raise UserError(
            f"a regular graph of degree {degree} over {num_workers} workers does not exist: the degree must "
            f"be at most {num_workers - 1}, and workers times degree even."
        )
    if degree == num_workers - 1:
        return dataclasses.replace(complete(num_workers), name="regular")
    if 2 * degree >= num_workers:
        others = regular(num_workers, num_workers - 1 - degree, seed).adjacency
        return dataclasses.replace(given(~others & ~np.eye(num_workers, dtype=bool)), name="regular")
    generator = np.random.default_rng(seed)
    while True:
        missing = np.full(num_workers, degree)
        adjacent = np.eye(num_workers, dtype=bool)
        while True:
            # The chance of a pair is in proportion to what both still lack.
            i, j = np.nonzero(np.triu(~adjacent & (missing[:, None] > 0) & (missing[None, :] > 0)))
            if not len(i):
                break
            weight = missing[i] * missing[j]
            chosen = generator.choice(len(i), p=weight / weight.sum())
            a, b = i[chosen], j[chosen]
            adjacent[a, b] = adjacent[b, a] = True
            missing[[a, b]] -= 1
        if not missing.any():
            pairs = zip(*np.nonzero(np.triu(adjacent, 1)), strict=True)
            return SecretGraph("regular", num_workers, tuple((int(a), int(b)) for a, b in pairs))


def given(adjacency: np.ndarray) -> SecretGraph:
    """The graph of an adjacency matrix [n, n]: symmetric, of 0 and 1, with 0 on the diagonal."""
    matrix = np.asarray(adjacency)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.shape[0]:
        raise UserError(f"an adjacency matrix must be [n, n], got one of shape {list(matrix.shape)}.")
    if not np.isin(matrix, (0, 1)).all() or (matrix != matrix.T).any() or np.diagonal(matrix).any():
        raise UserError(
            "an adjacency matrix must be symmetric, of 0 and 1 only, and 0 on the diagonal: no worker shares "
            "a secret with itself."
        )
    pairs = zip(*np.nonzero(np.triu(matrix, 1)), strict=True)
    return SecretGraph("given", matrix.shape[0], tuple((int(a), int(b)) for a, b in pairs))


def parse(text: str, num_workers: int, seed: int = 0) -> SecretGraph:
    """The graph that a flag names: complete, ring, regular:DEGREE, or a file with an adjacency matrix.

    Args:
      text: The name; a file ends in .npy, .csv or .txt.
      num_workers: n.
      seed: Of a random graph.

    Example:
      >>> parse("regular:4", 12).describe()
      'regular graph, 24 pairs, 4 a worker'
    """
    allowed = "complete, ring, regular:DEGREE such as regular:8, or a .npy, .csv or .txt file"
    if text == "complete":
        return complete(num_workers)
    if text == "ring":
        return ring(num_workers)
    if text.startswith("regular:"):
        if not text[8:].isdecimal():
            raise UserError(f"secret_graph={text!r} has no whole number as its degree: it must be {allowed}.")
        return regular(num_workers, int(text[8:]), seed)
    path = Path(text).expanduser()
    if path.suffix not in (".npy", ".csv", ".txt"):
        raise UserError(f"secret_graph={text!r} is not known: it must be {allowed}.")
    try:
        matrix = (
            np.load(path, allow_pickle=False)
            if path.suffix == ".npy"
            else np.loadtxt(path, delimiter="," if path.suffix == ".csv" else None, ndmin=2)
        )
    except (OSError, ValueError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"secret_graph={text!r} cannot be read as a matrix: {reason}.") from None
    graph = given(matrix)
    if graph.num_workers != num_workers:
        raise UserError(
            f"secret_graph={text!r} is a matrix for {graph.num_workers} workers, and there are {num_workers}."
        )
    return graph


def covariance(
    graph: SecretGraph,
    *,
    sigma_ind: float,
    sigma_cor: float,
    colluding: Sequence[int],
    silent: Sequence[int],
) -> np.ndarray:
    """Sigma, the honest workers' noise given the secrets of the colluding ones, [n-f, n-f].

    Args:
      graph: Who shares secrets.
      sigma_ind: Standard deviation of the independent noise.
      sigma_cor: Standard deviation of a pair's noise.
      colluding: Q, the workers that reveal their secrets.
      silent: R, the other Byzantine workers.

    Returns:
      The honest workers in ascending order, [n-f, n-f].

    Example:
      >>> covariance(ring(4), sigma_ind=0.0, sigma_cor=1.0, colluding=[0], silent=[2])
      array([[1., 0.],
             [0., 1.]])
    """
    outside = {*colluding, *silent}
    honest = [i for i in range(graph.num_workers) if i not in outside]
    between = graph.adjacency[np.ix_(honest, honest)].astype(np.float64)
    with_silent = graph.adjacency[np.ix_(honest, list(silent))].sum(axis=1) if len(silent) else 0
    diagonal = sigma_cor**2 * (between.sum(axis=1) + with_silent) + sigma_ind**2
    return np.diag(diagonal) - sigma_cor**2 * between


@dataclasses.dataclass(frozen=True)
class WorstCase:
    """eps_step for the worst honest worker and the worst colluders.

    Attributes:
      step_divergence: eps_step; infinite if some choice leaves a sum of gradients bare.
      how: "exact" (from the graph's symmetry, or because the bound is attained), "enumerated" (every choice
        looked at), or "bound" (from the graph's spectrum; the truth may be less).
    """

    step_divergence: float
    how: str


def worst_case(
    graph: SecretGraph,
    *,
    sigma_ind: float,
    sigma_cor: float,
    num_byzantine: int,
    num_colluding: int,
    clip_norm: float,
) -> WorstCase:
    """eps_step of one round for the worst honest worker, q colluders and f - q silent Byzantine workers.

    Complete graph: the paper's lemma. A ring, or a worker with at most q secrets (all of which may be known):
    solved. Few choices (`MAX_SETS`, `MAX_NUMBERS`): all of them. Otherwise, with lambda the least second
    eigenvalue of the Laplacian when q workers are taken away, Sigma is at least that of a complete graph over
    n - q workers with sigma_cor^2 lambda / (n - q) in place of sigma_cor^2, and the lemma applies to that.
    Taking a worker away lowers the second eigenvalue by at most 1 (Fiedler 1973). A second bound keeps worker
    i and its k - q remaining neighbours only: 1 / (Sigma^-1)_ii is the conductance from i to the ground of a
    network with conductances sigma_cor^2 between workers and sigma_ind^2 from each to the ground, and falls
    if edges are cut (Rayleigh). The smaller one counts.

    Args:
      graph: Who shares secrets.
      sigma_ind: Standard deviation of the independent noise.
      sigma_cor: Standard deviation of a pair's noise.
      num_byzantine: f.
      num_colluding: q.
      clip_norm: C.

    Returns:
      The divergence, and how it was found.

    Example:
      >>> worst = worst_case(ring(9), sigma_ind=1.0, sigma_cor=1.0, num_byzantine=2, num_colluding=2,
      ...                    clip_norm=1.0)
      >>> round(worst.step_divergence, 6), worst.how
      (2.0, 'exact')
    """
    mechanism.check_workers(graph.num_workers, num_byzantine, num_colluding)
    largest = max(sigma_ind, sigma_cor)
    if not largest > 0:
        raise UserError("sigma_ind and sigma_cor are both 0: without noise epsilon is infinite.")
    # Everything scales with the noise, so one computation serves all plans that differ in its scale only.
    inverse, how = _worst_inverse(
        graph,
        float(f"{sigma_ind / largest:.13g}"),
        float(f"{sigma_cor / largest:.13g}"),
        num_byzantine,
        num_colluding,
    )
    # What the rounding of the two quotients may have hidden.
    return WorstCase(2 * (clip_norm / largest) ** 2 * inverse * (1 + 1e-12), how)


@functools.lru_cache(maxsize=256)
def _worst_inverse(
    graph: SecretGraph, sigma_ind: float, sigma_cor: float, f: int, q: int
) -> tuple[float, str]:
    """The largest (Sigma^-1)_ii, and how it was found."""
    n, ind, cor = graph.num_workers, sigma_ind**2, sigma_cor**2
    alone = math.inf if ind == 0 else 1 / ind  # of a worker all of whose other noise is known
    if cor == 0:
        return alone, "exact"
    if graph.is_complete:
        if ind == 0 and q == f:
            return math.inf, "exact"
        return (1 + cor / ((f - q) * cor + ind)) / ((n - q) * cor + ind), "exact"
    if graph.degrees.min() <= q:
        return alone, "exact"
    if graph.name == "ring" and f:
        spectra = _path(n - f, grounded_ends=0 if q == f else 2 - q)
        return _worst_of(spectra, ind, cor), "exact"
    sets = math.comb(n, q) * math.comb(n - q, f - q)
    if sets <= MAX_SETS and sets * n**2 <= MAX_NUMBERS:
        return _worst_of(_all_spectra(graph, f, q), ind, cor), "enumerated"
    connectivity = _least_connectivity(graph, q) * cor
    if ind == 0 and (q == f or connectivity <= 0):
        return math.inf, "bound"
    bounds = []
    if connectivity > 0:
        pair = connectivity / (n - q)
        bounds.append((1 + pair / ((f - q) * pair + ind)) / (connectivity + ind))
    if ind > 0:
        neighbours = int(graph.degrees.min()) - q
        bounds.append(1 / (ind + neighbours * cor * ind / (cor + ind)))
    return min(bounds), "bound"


# Eigenvalues [m, h], and the squares of the eigenvectors' entries [m, h, h], of m matrices: with those the
# diagonal of the inverse of cor A + ind I costs a product, whatever the noise.
_Spectra = tuple[np.ndarray, np.ndarray]


def _spectra(matrices: np.ndarray) -> _Spectra:
    values, vectors = np.linalg.eigh(matrices)
    return values, vectors**2


def _worst_of(spectra: _Spectra, ind: float, cor: float) -> float:
    """The largest diagonal entry of all inverses of cor A + ind I; infinite if one is singular."""
    values, squares = spectra
    values = cor * np.maximum(values, 0) + ind
    values = values - _ROUNDING * values[:, -1:]
    if (values[:, 0] <= _SINGULAR * values[:, -1]).any():
        return math.inf
    return float(np.einsum("mik,mk->mi", squares, 1 / values).max())


def _path(length: int, *, grounded_ends: int) -> _Spectra:
    """The ring's worst case: all Byzantine workers side by side, a path of all honest ones is left.

    A silent worker at an end of the path leaves its noise there, a colluding one does not. On a shorter path
    every worker is nearer to an end, and no worse off.
    """
    path = np.zeros((length, length))
    index = np.arange(length - 1)
    path[index, index + 1] = path[index + 1, index] = -1
    np.fill_diagonal(path, -path.sum(axis=1))
    for end in (0, -1)[:grounded_ends]:
        path[end, end] += 1
    return _spectra(path[None])


@functools.lru_cache(maxsize=2)
def _all_spectra(graph: SecretGraph, f: int, q: int) -> _Spectra:
    """Of the correlated part of Sigma, for every choice of colluders and silent workers."""
    workers = range(graph.num_workers)
    return _spectra(
        np.stack(
            [
                covariance(graph, sigma_ind=0.0, sigma_cor=1.0, colluding=colluding, silent=silent)
                for colluding in itertools.combinations(workers, q)
                for silent in itertools.combinations([i for i in workers if i not in colluding], f - q)
            ]
        )
    )


@functools.lru_cache(maxsize=64)
def _least_connectivity(graph: SecretGraph, q: int) -> float:
    """At most the second smallest eigenvalue of the Laplacian after any q workers are taken away."""

    def second(kept: Sequence[int]) -> float:
        adjacency = graph.adjacency[np.ix_(kept, kept)].astype(np.float64)
        values = np.linalg.eigvalsh(np.diag(adjacency.sum(axis=1)) - adjacency)
        return float(values[1] - 1e-12 * values[-1])

    workers = range(graph.num_workers)
    sets = math.comb(graph.num_workers, q)
    if sets <= MAX_SETS and sets * graph.num_workers**2 <= MAX_NUMBERS:
        return min(
            second([i for i in workers if i not in away]) for away in itertools.combinations(workers, q)
        )
    return second(workers) - q


def matchings(graph: SecretGraph) -> list[tuple[tuple[int, int], ...]]:
    """The edges in groups in which no worker comes twice (greedily, about as many as the largest degree)."""
    groups: list[list[tuple[int, int]]] = []
    taken: list[set[int]] = []
    for i, j in graph.edges:
        place = next((g for g, busy in enumerate(taken) if i not in busy and j not in busy), len(groups))
        if place == len(groups):
            groups.append([])
            taken.append(set())
        groups[place].append((i, j))
        taken[place] |= {i, j}
    return [tuple(group) for group in groups]
