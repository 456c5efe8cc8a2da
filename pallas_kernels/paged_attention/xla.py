"""Ragged paged attention in plain XLA: query tiles against KV tiles, online softmax, a loop as long as the context.

Layout of one call (T=7 tokens, B=3 rows, tile_queries=4):

    tokens    r0 r0 r0 r0 r0 r1 r2        query_start = [0, 5, 6, 7]
    tiles     [r0 r0 r0 r0] [r0 . . .] [r1 . . .] [r2 . . .]      T // tile_queries + B tiles at most

A tile belongs to one row, so its keys are that row's pages. The KV tile is counted in tokens (KV_TILE_TOKENS), never
in pages, and is the same for decode, chunks and verification: together with the row sum written as a matrix product
this makes a query's bits independent of the tile it sits in, of the rows beside it and of the page size
(docs/performance.md, "Same row, same bits").
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

KV_TILE_TOKENS = 128
MIN_TILE_ROWS = 8 if jax.__version_info__ >= (0, 12) else 16
"""Rows of the score matrix (queries x G) in a tile are padded to this: below it XLA takes other code, other bits.

Before jax 0.12 that is so below 16 rows, with 4 and more KV heads."""
VALUE_WIDTH = 64
"""Values are padded to a multiple of this many features: for other widths XLA takes other code from 64 rows on."""
FEW_ROWS = 8
"""Up to so many rows a tile is a group of its own (docs/performance.md)."""
_MASKED = -1e30


def tile_map(
    query_start: Int[Array, " B1"], num_tokens: int, tile_queries: int, multiple: int = 1
) -> tuple[Int[Array, " n"], Int[Array, " n"], Int[Array, ""]]:
    """The row of each query tile, its first query within that row, and how many tiles are in use.

    There are `num_tokens // tile_queries + B` tiles, rounded up to `multiple`; one not in use holds no query.
    """
    num_rows = query_start.shape[0] - 1
    num_tiles = num_tokens // tile_queries + num_rows if tile_queries > 1 else num_tokens
    num_tiles += -num_tiles % multiple
    tiles_per_row = (query_start[1:] - query_start[:-1] + tile_queries - 1) // tile_queries
    ends = jnp.cumsum(tiles_per_row)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, tile, side="right"), num_rows - 1).astype(jnp.int32)
    return row, ((tile - (ends - tiles_per_row)[row]) * tile_queries).astype(jnp.int32), ends[-1]


def _row_sum(p: Float[Array, "n K m S"]) -> Float[Array, "n K m"]:
    """Sum over the last axis as a product with ones: XLA's own reduction changes its order with the shape."""
    ones = jnp.ones((8, p.shape[-1]), p.dtype)
    flat = lax.dot_general(p.reshape(-1, p.shape[-1]), ones, (((1,), (1,)), ((), ())))
    return flat[:, 0].reshape(p.shape[:-1])


def paged_attention(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "L pages K page_size H"],
    v_pages: Float[Array, "L pages K page_size H"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B P"],
    query_start: Int[Array, " B1"],
    context_lens: Int[Array, " B"],
    *,
    scale: float,
    window: int | Int[Array, ""] = 0,
    softcap: float = 0.0,
    sinks: Float[Array, " N"] | None = None,
    tile_queries: int = 1,
    tiles_per_group: int | None = None,
) -> Float[Array, "T N H"]:
    """Causal attention of each row's last queries over its pages; see `pallas_kernels.paged_attention.api`.

    Tiles run in groups of `tiles_per_group`, each group as long as its longest context; groups that hold no query do
    not run. Rows sorted by context length therefore pay for little more than their own context. The size of a group
    changes no bit: 1 is best for few rows, where a second tile would be padding, 2 for many.
    """
    if tiles_per_group is None:
        tiles_per_group = 1 if query_start.shape[0] - 1 <= FEW_ROWS else 2
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, page_size = k_pages.shape[2:4]
    group = num_heads // num_kv_heads
    pages_per_kv_tile = KV_TILE_TOKENS // page_size
    page_table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages_per_kv_tile)))

    tiling = tile_map(query_start, num_tokens, tile_queries, tiles_per_group)
    tiles, position = _tile(q, query_start, context_lens, tiling, num_kv_heads, tile_queries)
    row, _, num_used = tiling

    # Heads join the page index, so that a gather yields [g, K, S, H] with no transpose after it.
    k_pool, v_pool = (x.reshape(-1, page_size, head_dim) for x in (k_pages, v_pages))
    tables = (page_table + layer * k_pages.shape[1])[:, None, :] * num_kv_heads + jnp.arange(num_kv_heads)[:, None]

    def attend_group(index, out):
        def part(x):
            return lax.dynamic_slice_in_dim(x, index * tiles_per_group, tiles_per_group)

        pages = tables[part(row)]
        q_tile, q_position = part(tiles), part(position)
        bounds = _visible_kv_tiles(q_position, window)

        def body(kv_tile, carry):
            return _kv_tile_step(
                kv_tile, carry, q_tile, q_position, pages, k_pool, v_pool, scale=scale, window=window, softcap=softcap
            )

        rows = q_tile.shape[:-1]
        carry = (jnp.zeros(q_tile.shape, jnp.float32), jnp.full(rows, _MASKED), jnp.zeros(rows))
        acc, row_max, row_sum = lax.fori_loop(*bounds, body, carry)
        if sinks is not None:
            acc, row_sum = _add_sinks(acc, row_max, row_sum, sinks.reshape(num_kv_heads, group), tile_queries)
        normal = jnp.where(row_sum[..., None] > 0, acc / row_sum[..., None], 0.0).astype(q.dtype)
        return lax.dynamic_update_slice_in_dim(out, normal, index * tiles_per_group, 0)

    num_groups = (num_used + tiles_per_group - 1) // tiles_per_group
    out = lax.fori_loop(0, num_groups, attend_group, jnp.zeros_like(tiles))
    return _untile(out, query_start, num_tokens, group, tile_queries)


def _tile(q, query_start, context_lens, tiling, num_kv_heads: int, tile_queries: int):
    """Queries in tiles [n, K, m, H], as the query heads of one KV head share its keys, and each row's position [n, m].

    m is queries * G, padded; a row without a query has position -1.
    """
    row, start, _ = tiling
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // num_kv_heads
    query_len = (query_start[1:] - query_start[:-1])[row]
    offset = start[:, None] + jnp.arange(tile_queries, dtype=jnp.int32)
    token = query_start[row][:, None] + offset
    position = jnp.where(offset < query_len[:, None], (context_lens[row] - query_len)[:, None] + offset, -1)
    tiles = q[jnp.clip(token, 0, num_tokens - 1)].reshape(-1, tile_queries, num_kv_heads, group, head_dim)
    tiles = tiles.transpose(0, 2, 1, 3, 4).reshape(-1, num_kv_heads, tile_queries * group, head_dim)
    padding = -(tile_queries * group) % MIN_TILE_ROWS
    tiles = jnp.pad(tiles, ((0, 0), (0, 0), (0, padding), (0, 0)))
    return tiles, jnp.pad(jnp.repeat(position, group, axis=1), ((0, 0), (0, padding)), constant_values=-1)


def _visible_kv_tiles(q_position, window):
    """The first KV tile that a group's queries see, and one past the last: position p sees keys (p - window, p]."""
    queries = q_position >= 0
    first = jnp.min(
        jnp.where(queries & (window > 0), jnp.maximum(q_position - window + 1, 0), 0),
        where=queries,
        initial=jnp.iinfo(jnp.int32).max,
    )
    end = jnp.max(q_position) + 1
    return first // KV_TILE_TOKENS, (end + KV_TILE_TOKENS - 1) // KV_TILE_TOKENS


def _kv_tile_step(kv_tile, carry, q_tile, q_position, pages, k_pool, v_pool, *, scale, window, softcap):
    """One step of the online softmax: KV_TILE_TOKENS keys against the queries of one group of tiles."""
    acc, row_max, row_sum = carry
    pages_per_kv_tile = KV_TILE_TOKENS // k_pool.shape[1]
    pages = lax.dynamic_slice_in_dim(pages, kv_tile * pages_per_kv_tile, pages_per_kv_tile, 2)
    shape = (*pages.shape[:2], KV_TILE_TOKENS, k_pool.shape[2])
    k, v = (x[pages].reshape(shape).astype(q_tile.dtype) for x in (k_pool, v_pool))
    scores = lax.dot_general(q_tile, k, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32) * scale
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    key_position = kv_tile * KV_TILE_TOKENS + jnp.arange(KV_TILE_TOKENS, dtype=jnp.int32)
    visible = key_position <= q_position[:, :, None]
    visible &= (window <= 0) | (key_position > q_position[:, :, None] - window)
    # Slots past the row's context may hold what an earlier sequence left, and 0 times its NaN would be NaN.
    written = key_position <= q_position.max(-1, keepdims=True)
    v = jnp.where(written[:, None, :, None], v, 0)
    visible = visible[:, None]
    scores = jnp.where(visible, scores, _MASKED)
    new_max = jnp.maximum(row_max, scores.max(-1))
    correction = jnp.exp(row_max - new_max)
    p = jnp.where(visible, jnp.exp(scores - new_max[..., None]), 0.0)
    dims = (((3,), (2,)), ((0, 1), (0, 1)))
    head_dim = v.shape[-1]
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, -head_dim % VALUE_WIDTH)))
    pv = lax.dot_general(p.astype(q_tile.dtype), v, dims, preferred_element_type=jnp.float32)[..., :head_dim]
    return acc * correction[..., None] + pv, new_max, row_sum * correction + _row_sum(p)


def _add_sinks(acc, row_max, row_sum, sinks: Float[Array, "K G"], tile_queries: int):
    """A sink is one more logit a head in the softmax's denominator, with no value behind it."""
    sink = jnp.tile(sinks, (1, tile_queries))
    sink = jnp.pad(sink, ((0, 0), (0, row_max.shape[2] - sink.shape[1])))
    correction = jnp.exp(row_max - jnp.maximum(row_max, sink))
    row_sum = row_sum * correction + jnp.exp(sink - jnp.maximum(row_max, sink))
    return acc * correction[..., None], row_sum


def _untile(
    out: Float[Array, "n K m H"], query_start: Int[Array, " B1"], num_tokens: int, group: int, tile_queries: int
) -> Float[Array, "T N H"]:
    """The inverse of `_tile`: each token's output, its padding rows left behind."""
    num_tiles, num_kv_heads, _, head_dim = out.shape
    out = out[:, :, : tile_queries * group].reshape(num_tiles, num_kv_heads, tile_queries, group, head_dim)
    out = out.transpose(0, 2, 1, 3, 4).reshape(num_tiles, tile_queries, num_kv_heads * group, head_dim)
    tiles_per_row = (query_start[1:] - query_start[:-1] + tile_queries - 1) // tile_queries
    first_tile = jnp.cumsum(tiles_per_row) - tiles_per_row
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(query_start[1:], token, side="right").astype(jnp.int32)
    row = jnp.minimum(row, tiles_per_row.shape[0] - 1)
    offset = token - query_start[row]
    flat = (first_tile[row] * tile_queries + offset).clip(0, out.shape[0] * tile_queries - 1)
    return out.reshape(-1, *out.shape[2:])[flat]
