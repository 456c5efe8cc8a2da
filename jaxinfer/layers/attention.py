"""Self-attention over the paged cache: project, rotate, write this step's keys and values, attend, project back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxinfer.cache import paged_kv
from jaxinfer.cache.paged_kv import PagedKVCache
from jaxinfer.config import ModelConfig
from jaxinfer.layers.linear import Linear
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import rotate
from pallas_kernels.paged_attention import paged_attention


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionInputs:
    """What every layer's attention needs to know of the step, the same for all of them.

    `positions` and `slots` are those of the T tokens; padding tokens have slots in the null page.
    """

    positions: Any  # int32 [T]
    slots: Any  # int32 [T]
    page_table: Any  # int32 [B, P]
    query_start: Any  # int32 [B + 1]
    context_lens: Any  # int32 [B]
    tile_queries: int = field(metadata={"static": True}, default=1)
    implementation: str | None = field(metadata={"static": True}, default=None)


def locate(
    page_table: Int[Array, "B P"],
    query_start: Int[Array, " B1"],
    context_lens: Int[Array, " B"],
    num_tokens: int,
    page_size: int,
) -> tuple[Int[Array, " T"], Int[Array, " T"], Int[Array, " T"]]:
    """The row, position and slot of each of `num_tokens` flat tokens, from page tables alone.

    A token past the last row has position 0 and a slot in the null page.
    """
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(query_start[1:], token, side="right").astype(jnp.int32)
    live = token < query_start[-1]
    row = jnp.minimum(row, context_lens.shape[0] - 1)
    position = jnp.where(live, context_lens[row] - query_start[row + 1] + token, 0)
    page = jnp.where(live, page_table[row, position // page_size], 0)
    return row, position, page * page_size + position % page_size


class Attention(nnx.Module):
    """Grouped-query attention. The fused weight is `[K, (G + 2) * H, D]`: a KV head's queries, its key, its value."""

    def __init__(self, config: ModelConfig, *, dtype: str, rngs: nnx.Rngs):
        self.group = config.num_heads // config.num_kv_heads
        self.head_dim = config.head_dim
        fused = (config.num_kv_heads, (self.group + 2) * config.head_dim)
        self.qkv = Linear(config.embed_dim, fused, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        inner = config.num_heads * config.head_dim
        self.out = Linear(inner, (config.embed_dim,), bias=config.out_bias, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(config.head_dim, eps=config.norm_eps, dtype=dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, eps=config.norm_eps, dtype=dtype) if config.qk_norm else None

    def __call__(
        self,
        x: Float[Array, "T D"],
        cache: PagedKVCache,
        inputs: AttentionInputs,
        rotation: tuple[Float[Array, "T 1 H2"], Float[Array, "T 1 H2"]],
        layer: int | Int[Array, ""],
        window: int | Int[Array, ""],
    ) -> tuple[Float[Array, "T D"], PagedKVCache]:
        num_tokens = x.shape[0]
        qkv = self.qkv(x)
        qkv = qkv.reshape(num_tokens, qkv.shape[1], self.group + 2, self.head_dim)
        q = qkv[:, :, : self.group].reshape(num_tokens, -1, self.head_dim)
        k, v = qkv[:, :, self.group], qkv[:, :, self.group + 1]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        cache = paged_kv.write(cache, layer, inputs.slots, k, v)
        attended = paged_attention(
            q, cache.k, cache.v, layer, inputs.page_table, inputs.query_start, inputs.context_lens,
            window=window, tile_queries=inputs.tile_queries, implementation=inputs.implementation,
        )  # fmt: skip
        return self.out(attended.reshape(num_tokens, -1)), cache
