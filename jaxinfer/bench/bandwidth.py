"""What reading costs on this machine: the limit that decoding is held against."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine.load import abstract_model, leaf_path

PASSES = 3


class BandwidthProbe:
    """Reads one big float32 array with every core and says how fast, in bytes/s.

    The reading is XLA's sum of a flat array. On CPUs it was the fastest of what was tried (NumPy's sum, max, or and dot
    in one thread a core, XLA's row sums and matrix-vector product): a slower reader would flatter what is held
    against it. It runs where the model runs, so it measures a GPU's memory on a GPU. One call reads the array
    `PASSES` times over, since one pass is short beside the steps it is compared with.
    """

    def __init__(self, num_bytes: int, clock: Callable[[], float] = time.perf_counter):
        # Ones, not zeros: zero pages that were never written may all be one physical page.
        self._array = jax.block_until_ready(jnp.ones(max(1, num_bytes // 4), jnp.float32))
        self._sum = jax.jit(jnp.sum).lower(self._array).compile()
        self._clock = clock
        self()

    def __call__(self) -> float:
        start = self._clock()
        for _ in range(PASSES):
            self._sum(self._array).block_until_ready()
        return PASSES * self._array.nbytes / (self._clock() - start)


def weight_bytes(config: EngineConfig) -> int:
    """Bytes of the parameters that a decode step reads: all but an input table whose rows are only looked up."""
    _, abstract = abstract_model(config.model, config.dtype)
    total = 0
    for key_path, leaf in jax.tree_util.tree_flatten_with_path(abstract)[0]:
        if config.model.tie_embeddings or leaf_path(key_path) != ("embed",):
            total += math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
    return total


def cache_bytes(model: ModelConfig, context_len: int, dtype: str) -> int:
    """Bytes of keys and values that one decoded token attends to, over all layers, sliding windows honoured."""
    num_positions = sum(min(context_len, window or context_len) for window in model.windows)
    return 2 * num_positions * model.num_kv_heads * model.head_dim * jnp.dtype(dtype).itemsize
