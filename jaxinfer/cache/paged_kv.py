"""The paged KV cache on the device: one pool of pages for keys, one for values, every layer in both.

    k, v: [L, pages, K, page_size, H]      a head's page is contiguous
    slot  = page * page_size + offset      where one token's keys and values lie, the same in every layer

Page 0 is the null page: padding tokens write there and padding table entries read there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.cache.untouched import zeros


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedKVCache:
    """Keys and values of every layer; donated to each step, which returns it updated in place."""

    k: Any  # [L, pages, K, page_size, H]; jax also builds this class with other leaves than arrays
    v: Any

    @property
    def page_size(self) -> int:
        return self.k.shape[3]

    @property
    def num_pages(self) -> int:
        """Pages in the pool, the null page included."""
        return self.k.shape[1]


def page_bytes(num_layers: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: str) -> int:
    """Bytes that one page takes in both pools, over all layers."""
    return 2 * num_layers * num_kv_heads * page_size * head_dim * jnp.dtype(dtype).itemsize


def init_cache(
    num_layers: int, num_pages: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: str
) -> PagedKVCache:
    """A pool of zeros. `num_pages` counts the null page."""
    shape = (num_layers, num_pages, num_kv_heads, page_size, head_dim)
    return PagedKVCache(zeros(shape, dtype), zeros(shape, dtype))


def write(
    cache: PagedKVCache,
    layer: int | Int[Array, ""],
    slots: Int[Array, " T"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
) -> PagedKVCache:
    """Store the keys and values of T tokens at their slots of one layer.

    The layer is part of the scatter index: slicing it out would copy the layer's whole pool.
    """
    if slots.shape[0] == 1:
        # XLA turns a scatter of one token into an update of a slice, for which it copies the pool: add one for page 0.
        slots, k, v = jnp.pad(slots, (0, 1)), jnp.pad(k, ((0, 1), (0, 0), (0, 0))), jnp.pad(v, ((0, 1), (0, 0), (0, 0)))
    page, offset = slots // cache.page_size, slots % cache.page_size

    def put(pool, values):
        return pool.at[layer, page, :, offset, :].set(values.astype(pool.dtype))

    return PagedKVCache(put(cache.k, k), put(cache.v, v))


def copy_pages(cache: PagedKVCache, source: Int[Array, " C"], target: Int[Array, " C"]) -> PagedKVCache:
    """Copy C pages, all layers of each; every source is read before any target is written."""

    def put(pool):
        return pool.at[:, target].set(pool[:, source])

    return PagedKVCache(put(cache.k), put(cache.v))
