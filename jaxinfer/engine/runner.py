"""Owns what lives on the device, parameters and cache, and runs steps of the planned shapes on it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jaxinfer.cache.paged_kv import PagedKVCache, init_cache
from jaxinfer.engine.buckets import Bucket, choose_bucket
from jaxinfer.engine.inputs import Row, build
from jaxinfer.engine.load import LoadedModel
from jaxinfer.engine.steps import StepInputs, make_forward


class ModelRunner:
    """Runs rows through the model. `num_pages` counts the null page; tables are `table_width` pages wide.

    Programs are compiled by `warm_up`; `num_compiles` counts them, so that one made later shows.
    """

    def __init__(
        self,
        model: LoadedModel,
        buckets: Sequence[Bucket],
        *,
        num_pages: int,
        page_size: int,
        table_width: int,
        kv_dtype: str,
    ):
        config = model.config
        if page_size < 1 or 128 % page_size:
            raise ValueError(f"page_size={page_size} must divide 128")
        self.config = config
        self.buckets = list(buckets)
        self.table_width = table_width
        self.num_compiles = 0
        leaves, self._treedef = jax.tree.flatten(model.params)
        self._leaves = tuple(leaves)
        self._graphdef = model.graphdef
        self._programs: dict[Bucket, Any] = {}
        self._make_cache = partial(
            init_cache, config.num_layers, num_pages, config.num_kv_heads, page_size, config.head_dim, kv_dtype
        )
        self.cache: PagedKVCache = self._make_cache()

    def program(self, bucket: Bucket) -> Any:
        """The compiled step of a bucket, compiled now if it has not been."""
        if bucket not in self._programs:
            forward = make_forward(self._graphdef, self._treedef, tile_queries=bucket.tile_queries)
            inputs = build([], bucket, self.table_width)
            self._programs[bucket] = forward.lower(self._leaves, self.cache, inputs).compile()
            self.num_compiles += 1
        return self._programs[bucket]

    def run(self, rows: Sequence[Row]) -> tuple[Array, Array]:
        """One step: hidden states `[T, D]` and, for each row's last token, logits `[R, V]`, both padded.

        Raises:
            ValueError: the rows exceed every bucket, or a row has more pages than a table holds.
        """
        bucket = choose_bucket(self.buckets, [len(row.tokens) for row in rows])
        inputs: StepInputs = build(rows, bucket, self.table_width)
        hidden, logits, self.cache = self.program(bucket)(self._leaves, self.cache, inputs)
        return hidden, logits

    def restore_cache(self) -> None:
        """After a failed step: an empty cache in place of one that the step had consumed or left in error."""
        try:
            jax.block_until_ready(self.cache)
        except RuntimeError:
            self.cache = PagedKVCache(None, None)  # first, so that both are never in memory together
            self.cache = self._make_cache()

    def close(self) -> None:
        """Drop parameters, cache and programs; nothing can run afterwards."""
        self._leaves = ()
        self._programs = {}
        self.cache = PagedKVCache(None, None)

    def logits_of(self, hidden: Array) -> np.ndarray:
        """Logits of given hidden states, `[T, V]`: for tests and small inputs, since it is one array."""
        from flax import nnx

        model = nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, self._leaves))
        return np.asarray(model.logits(hidden))
