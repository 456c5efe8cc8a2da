"""Random parameters, for models built without a checkpoint (tests, benchmarks, training from scratch)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: str, scale: float) -> jax.Array:
    """Gaussian values of the given standard deviation."""
    return (jax.random.normal(rngs.params(), shape, jnp.float32) * scale).astype(dtype)
