"""Rotary position embedding (Su et al. 2021), first half of a head against second half, and its scalings."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxinfer.config import RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Radians a position, `[head_dim / 2]` in float32.

    Raises:
        ValueError: a scaling of unknown kind, or of "frequencies" with the wrong number of divisors.
    """
    frequencies = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        pass
    elif scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling.kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    elif scaling.kind == "frequencies":
        if len(scaling.divisors) != head_dim // 2:
            raise ValueError(f"rope scaling: {len(scaling.divisors)} divisors for head_dim={head_dim}")
        frequencies = frequencies / np.asarray(scaling.divisors)
    else:
        raise ValueError(f"rope scaling kind={scaling.kind!r} is not one of linear, llama3, frequencies")
    return frequencies.astype(np.float32)


def _llama3(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between blended linearly in frequency."""
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def rotations(
    positions: Int[Array, " T"], frequencies: Float[Array, " H2"]
) -> tuple[Float[Array, "T 1 H2"], Float[Array, "T 1 H2"]]:
    """Cosines and sines for each position, computed once a step and shared by the layers."""
    angles = positions[:, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]


def rotate(
    x: Float[Array, "T heads H"], cos: Float[Array, "T 1 H2"], sin: Float[Array, "T 1 H2"]
) -> Float[Array, "T heads H"]:
    """Rotate each (first half, second half) pair of every head by its position's angle."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
