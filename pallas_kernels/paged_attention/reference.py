"""Paged attention with nothing clever: every row's whole table is gathered and each token attends densely.

The truth that the other implementations are compared with in XLA; itself compared with float64 NumPy. It forms a
(tokens x table) score matrix, so it serves tests and tiny shapes only.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
) -> Float[Array, "T N H"]:
    """See `pallas_kernels.paged_attention.api`. `tile_queries` has no meaning here: there are no tiles."""
    del tile_queries
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[2]
    token = jnp.arange(num_tokens)
    row = jnp.minimum(jnp.searchsorted(query_start[1:], token, side="right"), context_lens.shape[0] - 1)
    position = context_lens[row] - query_start[row + 1] + token

    def keys(pages):
        gathered = pages[layer][page_table].transpose(0, 2, 1, 3, 4)
        gathered = gathered.reshape(page_table.shape[0], num_kv_heads, -1, head_dim)[row]
        return jnp.repeat(gathered, num_heads // num_kv_heads, axis=1).astype(jnp.float32)

    scores = jnp.einsum("tnh,tnsh->tns", q.astype(jnp.float32), keys(k_pages)) * scale
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    key_position = jnp.arange(scores.shape[-1])
    visible = key_position <= position[:, None]
    visible &= (jnp.asarray(window) <= 0) | (key_position > position[:, None] - window)
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        top = jnp.maximum(top, sinks[:, None])
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    p = jnp.exp(scores - top)
    total = p.sum(-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks[:, None] - top)
    p = jnp.where(total > 0, p / total, 0.0)
    # Slots past the row's context may hold what an earlier sequence left, and 0 times its NaN would be NaN.
    values = jnp.where((key_position <= position[:, None])[:, None, :, None], keys(v_pages), 0)
    return jnp.einsum("tns,tnsh->tnh", p, values).astype(q.dtype)
