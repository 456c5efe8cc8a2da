"""Feed-forward blocks."""

from __future__ import annotations

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxinfer.config import ModelConfig
from jaxinfer.layers.linear import Linear


class GatedFFN(nnx.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x)); gate and up share one weight of shape `[2, F, D]`."""

    def __init__(self, config: ModelConfig, *, dtype: str, rngs: nnx.Rngs):
        kwargs = {"bias": config.ffn_bias, "dtype": dtype, "rngs": rngs}
        self.gate_up = Linear(config.embed_dim, (2, config.ffn_dim), **kwargs)
        self.down = Linear(config.ffn_dim, (config.embed_dim,), **kwargs)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        gate_up = self.gate_up(x)
        return self.down(jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1])
