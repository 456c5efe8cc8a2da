"""Owns what lives on the device, parameters and cache, and runs steps of the planned shapes on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jaxinfer.cache.paged_kv import PagedKVCache, copy_pages, init_cache
from jaxinfer.engine.buckets import Bucket, choose_bucket
from jaxinfer.engine.inputs import Row, build
from jaxinfer.engine.layerwise import compile_layerwise, split_weights, supports
from jaxinfer.engine.load import LoadedModel, named_leaves
from jaxinfer.engine.steps import StepInputs, compile_forward, make_score, memory_of
from jaxinfer.request import MAX_LOGPROBS

SCORE_TILE_ROWS = 64
"""Prompt positions that reach the head together when a prompt is scored."""
COPY_PAGES = 8
"""Pages that one program copies."""


class ModelRunner:
    """Runs rows through the model. `num_pages` counts the null page; tables are `table_width` pages wide.

    A program is compiled when `program` first asks for it; `num_compiles` counts them, so that one made late shows.
    With a model whose `params` are shapes, it compiles and holds nothing on the device until `allocate`.
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
        num_lanes: int = 0,
    ):
        config = model.config
        self.config = config
        self.buckets = list(buckets)
        self.table_width = table_width
        self.num_lanes = num_lanes
        self.num_compiles = 0
        self._graphdef = model.graphdef
        self._treedef = jax.tree.structure(model.params)
        self._layerwise = jax.default_backend() == "cpu" and supports(nnx.merge(model.graphdef, model.params))
        self._take_params(model.params)
        self._programs: dict[Bucket, Any] = {}
        self._score: Any = None
        self._copy: Any = None
        self._hidden_dtype: Any = None
        self._make_cache = partial(
            init_cache, config.num_layers, num_pages, config.num_kv_heads, page_size, config.head_dim, kv_dtype
        )
        self.cache: PagedKVCache = jax.eval_shape(self._make_cache)
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in self._leaves):
            self.allocate(model.params)

    def allocate(self, params: Any) -> None:
        """Take the parameters, of the shapes that the runner was made with, and make the cache."""
        self._take_params(params)
        self.cache = self._make_cache()

    def memory_bytes(self) -> tuple[int, int]:
        """The most that the programs compiled so far take beside parameters and cache, by their own analysis.

        Returns:
            Bytes while a program runs, and bytes of what a step returns.
        """
        steps = [memory_of(program) for program in self._programs.values()]
        scoring = 0 if self._score is None else sum(memory_of(self._score))
        return max(scoring, *(working for working, _ in steps)), max(outputs for _, outputs in steps)

    def program(self, bucket: Bucket) -> Any:
        """The compiled step of a bucket, compiled now if it has not been."""
        if bucket not in self._programs:
            make: Callable[..., tuple[Any, Any]] = compile_layerwise if self._layerwise else compile_forward
            inputs = build([], bucket, self.table_width, self.num_lanes)
            tile_queries = bucket.tile_queries
            self._programs[bucket], self._hidden_dtype = make(
                self._graphdef, self._treedef, self._weights, self.cache, inputs, tile_queries=tile_queries
            )
            self.num_compiles += 1
        return self._programs[bucket]

    def score_program(self) -> Any:
        """The compiled head over a tile of prompt positions, compiled now if it has not been."""
        if self._score is None:
            self.program(self.buckets[0])
            score = make_score(self._graphdef, self._treedef, num_logprobs=MAX_LOGPROBS)
            hidden = jax.ShapeDtypeStruct((SCORE_TILE_ROWS, self.config.embed_dim), self._hidden_dtype)
            targets = jax.ShapeDtypeStruct((SCORE_TILE_ROWS,), np.int32)
            self._score = score.lower(self._leaves, hidden, targets).compile()
            self.num_compiles += 1
        return self._score

    def copy_program(self) -> Any:
        """The compiled copy of `COPY_PAGES` pages, compiled now if it has not been."""
        if self._copy is None:
            pages = jax.ShapeDtypeStruct((COPY_PAGES,), np.int32)
            self._copy = jax.jit(copy_pages, donate_argnums=0).lower(self.cache, pages, pages).compile()
            self.num_compiles += 1
        return self._copy

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages of the cache, each `(from, to)`; a later pair may write what an earlier one reads."""
        for start in range(0, len(pairs), COPY_PAGES):
            part = [*pairs[start : start + COPY_PAGES], *[(0, 0)] * (start + COPY_PAGES - len(pairs))]
            source, target = np.array(part, np.int32).T
            self.cache = self.copy_program()(self.cache, source, target)

    def run(self, rows: Sequence[Row], last_token: Any = None) -> tuple[Array, Array]:
        """One step: hidden states `[T, D]` and, for each row's last token, logits `[R, V]`, both padded.

        `last_token` is the lanes' int32 `[num_lanes + 1]`, where rows have tokens that only the device knows.

        Raises:
            ValueError: the rows exceed every bucket, or a row has more pages than a table holds.
        """
        bucket = choose_bucket(self.buckets, [len(row.tokens) for row in rows])
        inputs: StepInputs = build(rows, bucket, self.table_width, self.num_lanes)
        if last_token is not None:
            inputs = replace(inputs, last_token=last_token)
        hidden, logits, self.cache = self.program(bucket)(self._weights, self.cache, inputs)
        return hidden, logits

    def score(self, hidden: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, ...]:
        """How well states `[n, D]` predict tokens int32 `[n]`, the head in tiles of `SCORE_TILE_ROWS`.

        Returns:
            Log-probability `[n]` and rank `[n]` of each target; ids and log-probabilities `[n, MAX_LOGPROBS]` of the
            likeliest tokens.
        """
        parts = []
        for start in range(0, len(targets), SCORE_TILE_ROWS):
            rows, wanted = (x[start : start + SCORE_TILE_ROWS] for x in (hidden, targets))
            padding = SCORE_TILE_ROWS - len(wanted)
            rows, wanted = np.pad(rows, ((0, padding), (0, 0))), np.pad(wanted, (0, padding))
            tile = self.score_program()(self._leaves, rows, wanted)
            parts.append([np.asarray(each)[: SCORE_TILE_ROWS - padding] for each in tile])
        return tuple(np.concatenate(part) for part in zip(*parts, strict=True))

    @property
    def params(self) -> Any:
        """The parameters, in the structure of the module's state."""
        return jax.tree.unflatten(self._treedef, self._leaves)

    def update_params(self, params: Any) -> None:
        """Take other values for every parameter; the arrays are used as they are where their device and dtype fit.

        Raises:
            ValueError: another structure, or a leaf of another shape, by its path.
        """
        self._take_params(matching_params(self.params, params))

    def _take_params(self, params: Any) -> None:
        self._leaves = tuple(jax.tree.leaves(params))
        self._weights: Any = split_weights(self._graphdef, params) if self._layerwise else self._leaves

    def restore_cache(self) -> None:
        """After a failed step: an empty cache in place of one that the step had consumed or left in error."""
        try:
            jax.block_until_ready(self.cache)
            lost = self.cache.k is None
        except RuntimeError:
            lost = True
        if lost:
            self.cache = PagedKVCache(None, None)  # first, so that both are never in memory together
            self.cache = self._make_cache()

    def close(self) -> None:
        """Drop parameters, cache and programs; nothing can run afterwards."""
        self._leaves = self._weights = ()
        self._programs, self._score, self._copy = {}, None, None
        self.cache = PagedKVCache(None, None)

    def logits_of(self, hidden: Array) -> np.ndarray:
        """Logits of given hidden states, `[T, V]`: for tests and small inputs, since it is one array."""
        model = nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, self._leaves))
        return np.asarray(model.logits(hidden))


def matching_params(ours: Any, theirs: Any) -> Any:
    """`theirs`, a pytree or nested dict with the leaves of `ours`, placed like them and in their dtypes.

    Raises:
        ValueError: a leaf is missing, unknown or of another shape.
    """
    expected, given = named_leaves(ours), named_leaves(theirs)
    for name in [*expected, *given]:
        if name not in given or name not in expected:
            raise ValueError(f"params: {name} is {'missing' if name in expected else 'no parameter of this model'}")
    for name, leaf in expected.items():
        if np.shape(given[name]) != leaf.shape:
            raise ValueError(f"params: {name} has shape {np.shape(given[name])}; the model needs {leaf.shape}")
    placed = [
        jax.device_put(jnp.asarray(given[name], leaf.dtype), getattr(leaf, "sharding", None))
        for name, leaf in expected.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(ours), placed)
