"""The product x x^T of a few rows with many columns, on all cores of a CPU.

A product of few rows uses one core of a CPU, so a step of the loop over columns has several blocks in flight.
XLA runs the operations of a step at once if there are some forty of them and none waits for another's memory.
It would let the blocks share memory one after the other, so each of them is also named in the step's sum. The
matrix is symmetric, so the rows are cut into tiles and each pair of tiles is multiplied once.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from cafcor_jax.columns import ACCELERATOR_BLOCK, accumulator_dtype, fold_blocks, per_platform
from cafcor_jax.float64 import dot, in_float64
from cafcor_jax.types import Array

# Numbers in flight: eight megabytes of float32.
_IN_FLIGHT = 2**21
_SMALLEST, _LARGEST = 2**9, 2**13


class _Tile(NamedTuple):
    start: int
    rows: int
    padding: int


@in_float64
def products_of_wide_rows(rows: Array) -> Array:
    """Returns x x^T in float64, [n, n]: the products of blocks in float32 (float64 for float64), then summed.

    Args:
      rows: x, [n, columns].
    """
    n = rows.shape[0]
    nothing = jnp.zeros((n, n), np.float64)
    product = per_platform(
        lambda rows: _by_tiles(rows, nothing),
        lambda rows: fold_blocks(_add_product, rows, nothing, ACCELERATOR_BLOCK),
        rows,
    )
    return (product + product.T) / 2


def _add_product(total: Array, block: Array) -> Array:
    block = block.astype(accumulator_dtype(block.dtype))
    return total + dot(block, block.T).astype(np.float64)


def _by_tiles(rows: Array, nothing: Array) -> Array:
    n, columns = rows.shape
    dtype = accumulator_dtype(rows.dtype)
    tiles, in_flight = _tiles(n)
    pairs = [(i, j) for i in range(len(tiles)) for j in range(i, len(tiles))]
    size = min(max(2 ** ((_IN_FLIGHT // (n * in_flight)).bit_length() - 1), _SMALLEST), _LARGEST)
    steps = columns // (size * in_flight)

    def load(tile: _Tile, start: Array) -> Array:
        block = lax.dynamic_slice(rows, (tile.start, start), (tile.rows, size)).astype(dtype)
        return jnp.pad(block, ((0, tile.padding), (0, 0)))

    def step(index: Array, totals: list[Array]) -> list[Array]:
        starts = [(index * in_flight + place) * size for place in range(in_flight)]
        blocks = [[load(tile, start) for tile in tiles] for start in starts]
        products = [[dot(block[i], block[j].T).astype(np.float64) for block in blocks] for i, j in pairs]
        # The index is never negative, but that is not known when the memory is laid out.
        in_use = jnp.where(index < 0, sum(tile[0, 0] for block in blocks for tile in block), 0)
        return [total + sum(parts) + in_use for total, parts in zip(totals, products, strict=True)]

    heights = [tile.rows + tile.padding for tile in tiles]
    totals = [jnp.zeros((heights[i], heights[j]), np.float64) for i, j in pairs]
    totals = lax.fori_loop(0, steps, step, totals)
    result = nothing
    for (i, j), total in zip(pairs, totals, strict=True):
        total = total[: tiles[i].rows, : tiles[j].rows]
        result = lax.dynamic_update_slice(result, total, (tiles[i].start, tiles[j].start))
        result = lax.dynamic_update_slice(result, total.T, (tiles[j].start, tiles[i].start))
    return fold_blocks(_add_product, rows[:, steps * size * in_flight :], result, size)


def _tiles(n: int) -> tuple[list[_Tile], int]:
    """The tiles n rows are cut into, and the number of blocks in flight: the fastest of those tried."""
    parts, in_flight = (1, 16) if n <= 16 else (2, 16) if n <= 64 else (3, 8) if n <= 128 else (3, 4)
    size = 16 * -(-n // (16 * parts))
    tiles = []
    for start in range(0, n, size):
        rows = min(size, n - start)
        missing = -rows % 16
        # Whole sixteens are faster, but not by more than it costs to fill up many rows.
        tiles.append(_Tile(start, rows, missing if missing <= 2 else 0))
    return tiles, in_flight
