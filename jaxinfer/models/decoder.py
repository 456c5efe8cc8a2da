"""The decoder-only transformer that the Llama family shares: embedding, layers, norm, head."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxinfer.cache.paged_kv import PagedKVCache
from jaxinfer.config import ModelConfig
from jaxinfer.layers.attention import Attention, AttentionInputs
from jaxinfer.layers.ffn import GatedFFN
from jaxinfer.layers.init import normal
from jaxinfer.layers.linear import contract
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import inverse_frequencies, rotations


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, *, dtype: str, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.embed_dim, eps=config.norm_eps, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.ffn_norm = RMSNorm(config.embed_dim, eps=config.norm_eps, dtype=dtype)
        self.ffn = GatedFFN(config, dtype=dtype, rngs=rngs)

    def __call__(self, x, cache, inputs, rotation, layer, window):
        attended, cache = self.attention(self.attention_norm(x), cache, inputs, rotation, layer, window)
        x = x + attended
        return x + self.ffn(self.ffn_norm(x)), cache


class Decoder(nnx.Module):
    """A decoder-only language model: `embed`, `layers`, `norm`, and `head` unless it is tied to the embedding.

    The parameters of all layers lie in arrays `[L, ...]` and a call runs them under `lax.scan`, so that a program
    compiles one layer, not L, and takes few arguments. What differs between layers (the sliding window) is data. On
    CPUs the engine calls the layers one by one instead: jaxinfer/engine/layerwise.py.
    """

    def __init__(self, config: ModelConfig, *, dtype: str = "float32", rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Param(normal(rngs, (config.vocab_size, config.embed_dim), dtype, 1.0))

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def make_layers(rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(config, dtype=dtype, rngs=rngs)

        self.layers = make_layers(rngs)
        self.norm = RMSNorm(config.embed_dim, eps=config.norm_eps, dtype=dtype)
        head_shape = (config.vocab_size, config.embed_dim)
        self.head = None if config.tie_embeddings else nnx.Param(normal(rngs, head_shape, dtype, head_shape[1] ** -0.5))

    def __call__(
        self, tokens: Int[Array, " T"], cache: PagedKVCache, inputs: AttentionInputs
    ) -> tuple[Float[Array, "T D"], PagedKVCache]:
        """Run T flat tokens through the layers: the normalised hidden states, and the cache with their keys added."""
        rotation = self.rotation(inputs.positions)
        graphdef, stack = nnx.split(self.layers)

        def body(carry, layer_data):
            x, cache = carry
            params, index, window = layer_data
            return nnx.merge(graphdef, params)(x, cache, inputs, rotation, index, window), None

        indices = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        windows = jnp.asarray(self.config.windows, jnp.int32)
        (x, cache), _ = lax.scan(body, (self.embed_tokens(tokens), cache), (stack, indices, windows))
        return self.norm(x), cache

    def embed_tokens(self, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
        """The residual stream before the first layer."""
        return self.embed[...][tokens]

    def rotation(self, positions: Int[Array, " T"]) -> tuple[Float[Array, "T 1 H2"], Float[Array, "T 1 H2"]]:
        """Cosines and sines of the rotary embedding, the same for every layer."""
        config = self.config
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        return rotations(positions, jnp.asarray(frequencies))

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Scores over the vocabulary in float32, for the rows that need them."""
        head = self.embed if self.head is None else self.head
        return contract(hidden, head[...], jnp.dtype(jnp.float32))
