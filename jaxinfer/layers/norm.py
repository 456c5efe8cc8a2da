"""Normalisation."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxinfer.layers.reduce import row_sum


class RMSNorm(nnx.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019) over the last axis, computed in float32."""

    def __init__(self, dim: int, *, eps: float, dtype: str):
        self.weight = nnx.Param(jnp.ones((dim,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(row_sum(y * y) / y.shape[-1] + self.eps)
        return y.astype(x.dtype) * self.weight[...]
