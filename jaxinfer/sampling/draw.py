"""Randomness: one uniform per (seed, choice, position), through an inverse CDF in token order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

FANOUT = 64


def uniforms(seed: UInt32[Array, "B 2"], choice: Int[Array, " B"], position: Int[Array, " B"]) -> Float[Array, " B"]:
    """One float32 in [0, 1) per row, a multiple of 2^-24: a function of (seed, choice, position) and nothing else.

    Threefry-2x32 (Salmon et al. 2011) on the seed, with choice and then position folded in.
    """

    def one(seed: Array, choice: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, choice), position)
        return jax.random.bits(key, (), jnp.uint32)

    bits = jax.vmap(one)(seed, choice, position)
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def inverse_cdf(weights: Float[Array, "B V"], u: Float[Array, " B"]) -> Int[Array, " B"]:
    """The first token whose cumulative weight exceeds u · total.

    Three levels of sums, each searched in token order, stand for the cumulative sum over V, whose XLA form on a CPU
    costs ten times as much. Every level takes only children of positive weight, so rounding can never select a
    token of weight zero. A row without any gives token 0.
    """
    num_rows, vocab_size = weights.shape
    weights = jnp.pad(weights, ((0, 0), (0, -vocab_size % FANOUT**2)))
    leaves = weights.reshape(num_rows, -1, FANOUT)
    nodes = jnp.sum(leaves, axis=-1).reshape(num_rows, -1, FANOUT)
    roots = jnp.sum(nodes, axis=-1)
    total = jnp.sum(roots, axis=-1)
    rows = jnp.arange(num_rows)
    root, rest = _descend(roots, u * total)
    node, rest = _descend(nodes[rows, root], rest)
    block = root * FANOUT + node
    leaf, _ = _descend(leaves[rows, block], rest)
    return (block * FANOUT + leaf).astype(jnp.int32)


def _descend(weights: Float[Array, "B N"], target: Float[Array, " B"]) -> tuple[Array, Array]:
    """The first child whose cumulative weight exceeds `target`, and what remains of the target inside that child."""
    ends = jnp.cumsum(weights, axis=-1)
    positive = weights > 0
    hit = positive & (ends > target[:, None])
    last_positive = weights.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    child = jnp.where(jnp.any(hit, axis=-1), jnp.argmax(hit, axis=-1), last_positive)
    child = jnp.where(jnp.any(positive, axis=-1), child, 0)
    rows = jnp.arange(weights.shape[0])
    start = jnp.where(child > 0, ends[rows, jnp.maximum(child - 1, 0)], 0.0)
    return child, jnp.maximum(target - start, 0.0)
