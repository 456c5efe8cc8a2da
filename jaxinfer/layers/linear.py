"""Linear maps. A weight is stored [..., K] with the contracted axis last: `[out, in]`, as checkpoints have it."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxinfer.layers.init import normal


def contract(
    x: Float[Array, "T K"], weight: Float[Array, "... K"], out_dtype: jnp.dtype | None = None
) -> Float[Array, "T ..."]:
    """x times the weight's transpose, accumulated in float32.

    Both operands contract their last axis. On CPUs this is the one form of XLA's matmul whose bits for a row do not
    depend on how many rows there are (from 8 on; the buckets see to that): docs/performance.md.
    """
    # Two axes, by a reshape that moves nothing: given three, XLA transposes the weight on every call.
    flat = weight.reshape(-1, weight.shape[-1])
    out = lax.dot_general(x, flat, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    out = out.astype(x.dtype if out_dtype is None else out_dtype)
    return out.reshape(x.shape[0], *weight.shape[:-1])


class Linear(nnx.Module):
    """`x @ weight.T (+ bias)` with a weight of shape `[*out, in]`."""

    def __init__(self, in_dim: int, out_shape: tuple[int, ...], *, bias: bool, dtype: str, rngs: nnx.Rngs):
        self.weight = nnx.Param(normal(rngs, (*out_shape, in_dim), dtype, in_dim**-0.5))
        self.bias = nnx.Param(jnp.zeros(out_shape, dtype)) if bias else None

    def __call__(self, x: Float[Array, "T K"]) -> Float[Array, "T ..."]:
        out = contract(x, self.weight[...])
        return out if self.bias is None else out + self.bias[...]
