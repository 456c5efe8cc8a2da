"""Sums whose bits for a row do not depend on how many rows there are."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_MIN_ROWS = 8
_PARTED_ELEMENTS = 4096
"""From so many on, XLA's reduction on CPUs takes other code, with another order of additions (docs/performance.md)."""


def row_sum(x: Float[Array, "T ... D"]) -> Float[Array, "T ... 1"]:
    """The sum over the last axis, for T from 8 on.

    XLA's reduction, where all T have the same code of it; else a product with ones, whose order is always the same.
    """
    if _MIN_ROWS * math.prod(x.shape[1:]) >= _PARTED_ELEMENTS:
        return jnp.sum(x, axis=-1, keepdims=True)
    ones = jnp.ones((_MIN_ROWS, x.shape[-1]), x.dtype)
    dims = (((1,), (1,)), ((), ()))
    sums = lax.dot_general(x.reshape(-1, x.shape[-1]), ones, dims, precision=lax.Precision.HIGHEST)
    return sums[:, :1].reshape(*x.shape[:-1], 1)
