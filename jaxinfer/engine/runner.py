"""Owns what lives on the device, parameters and cache, and runs steps of the planned shapes on it."""

from __future__ import annotations

from collections.abc import Sequence
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
from jaxinfer.engine.layerwise import (
    LayerwiseProgram,
    LayerwiseWeights,
    compile_layerwise,
    split_weights,
    supports,
)
from jaxinfer.engine.load import LoadedModel, named_leaves
from jaxinfer.engine.programs import Compiler, ProgramTable, abstract
from jaxinfer.engine.steps import StepInputs, compile_forward, make_score, memory_of
from jaxinfer.phases import phase
from jaxinfer.request import MAX_LOGPROBS

SCORE_TILE_ROWS = 64
"""Prompt positions that reach the head together when a prompt is scored."""
COPY_PAGES = 8
"""Pages that one program copies."""


class StepPrograms:
    """The programs of a runner. They refer to no array, so that a thread that compiles keeps none alive."""

    def __init__(
        self,
        compiler: Compiler,
        model: LoadedModel,
        weights: Any,
        cache: PagedKVCache,
        *,
        first: Bucket,
        table_width: int,
        num_lanes: int,
    ):
        self._graphdef, self._treedef = model.graphdef, jax.tree.structure(model.params)
        self.layerwise = isinstance(weights, LayerwiseWeights)
        leaves, layers = (weights.leaves, weights.layers[:1]) if self.layerwise else (weights, ())
        self._leaves, self._layers, self._cache = abstract((leaves, layers, cache))
        self._first, self._table_width, self._num_lanes = first, table_width, num_lanes
        self._compiler = compiler
        self._steps: ProgramTable[Bucket] = ProgramTable(self._compile_step)
        self._score: ProgramTable[int] = ProgramTable(self._compile_score)
        self._copy: ProgramTable[int] = ProgramTable(self._compile_copy)

    def has_step(self, bucket: Bucket) -> bool:
        return bucket in self._steps

    def step(self, bucket: Bucket) -> Any:
        """A bucket's step, `(weights, cache, inputs) -> (hidden [T, D], logits [R, V], cache)`."""
        return self._steps[bucket]

    def score(self) -> Any:
        """The head over a tile of prompt positions, as of `make_score`."""
        return self._score[SCORE_TILE_ROWS]

    def copy(self) -> Any:
        """The copy of `COPY_PAGES` pages, as of `copy_pages`; the cache is donated."""
        return self._copy[COPY_PAGES]

    def clear(self) -> None:
        self._steps.clear()
        self._score.clear()
        self._copy.clear()

    def _compile_step(self, bucket: Bucket) -> Any:
        inputs = abstract(build([], bucket, self._table_width, self._num_lanes))
        tile_queries = bucket.tile_queries
        model = self._graphdef, self._treedef

        def compile() -> dict[str, Any]:
            if not self.layerwise:
                step = compile_forward(*model, self._leaves, self._cache, inputs, tile_queries=tile_queries)
                return {"step": step}
            weights = LayerwiseWeights(self._leaves, self._layers)
            return compile_layerwise(*model, weights, self._cache, inputs, tile_queries=tile_queries)

        name = f"step of {bucket.num_tokens} tokens, {bucket.num_rows} rows{', decode' if tile_queries == 1 else ''}"
        described = (*model, self._leaves, self._layers, self._cache, inputs, tile_queries)
        parts = self._compiler.get(name, described, compile)
        return LayerwiseProgram(**parts) if self.layerwise else parts["step"]

    def _compile_score(self, num_rows: int) -> Any:
        step = self.step(self._first)
        of_step = (step.end if self.layerwise else step).out_info[0]
        hidden = jax.ShapeDtypeStruct((num_rows, of_step.shape[-1]), of_step.dtype)
        targets = jax.ShapeDtypeStruct((num_rows,), np.int32)

        def compile() -> dict[str, Any]:
            score = make_score(self._graphdef, self._treedef, num_logprobs=MAX_LOGPROBS)
            return {"score": score.lower(self._leaves, hidden, targets).compile()}

        described = (self._graphdef, self._treedef, self._leaves, hidden, targets, MAX_LOGPROBS)
        return self._compiler.get("prompt scores", described, compile)["score"]

    def _compile_copy(self, num_pages: int) -> Any:
        pages = jax.ShapeDtypeStruct((num_pages,), np.int32)

        def compile() -> dict[str, Any]:
            return {"copy": jax.jit(copy_pages, donate_argnums=0).lower(self._cache, pages, pages).compile()}

        return self._compiler.get("page copy", (self._cache, pages), compile)["copy"]


class ModelRunner:
    """Runs rows through the model. `num_pages` counts the null page; tables are `table_width` pages wide.

    A step runs in the smallest bucket that is compiled by then. `num_run_tokens` counts the tokens of all steps, and
    `num_padded_tokens` what was added to fill their buckets.
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
        compiler: Compiler | None = None,
    ):
        config = model.config
        self.config = config
        self.buckets = list(buckets)
        self.table_width = table_width
        self.num_lanes = num_lanes
        self.num_run_tokens = 0
        self.num_padded_tokens = 0
        self._graphdef = model.graphdef
        self._treedef = jax.tree.structure(model.params)
        self._layerwise = jax.default_backend() == "cpu" and supports(nnx.merge(model.graphdef, model.params))
        self._take_params(model.params)
        self._make_cache = partial(
            init_cache, config.num_layers, num_pages, config.num_kv_heads, page_size, config.head_dim, kv_dtype
        )
        self.cache: PagedKVCache = jax.eval_shape(self._make_cache)
        self.programs = StepPrograms(
            compiler or Compiler(),
            model,
            self._weights,
            self.cache,
            first=self.buckets[0],
            table_width=table_width,
            num_lanes=num_lanes,
        )
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in self._leaves):
            self.allocate(model.params)

    def allocate(self, params: Any) -> None:
        """Take the parameters, of the shapes that the runner was made with, and make the cache."""
        self._take_params(params)
        with phase("cache"):
            self.cache = self._make_cache()

    def memory_bytes(self) -> tuple[int, int]:
        """The most that the largest programs take beside parameters and cache, by their own analysis.

        Returns:
            Bytes while a program runs, and bytes of what a step returns.
        """
        working, outputs = memory_of(self.program(self.buckets[0]))
        return max(sum(memory_of(self.programs.score())), working), outputs

    def program(self, bucket: Bucket) -> Any:
        """The compiled step of a bucket, compiled now if it has not been."""
        return self.programs.step(bucket)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages of the cache, each `(from, to)`; a later pair may write what an earlier one reads."""
        for start in range(0, len(pairs), COPY_PAGES):
            part = [*pairs[start : start + COPY_PAGES], *[(0, 0)] * (start + COPY_PAGES - len(pairs))]
            source, target = np.array(part, np.int32).T
            self.cache = self.programs.copy()(self.cache, source, target)

    def run(self, rows: Sequence[Row], last_token: Any = None) -> tuple[Array, Array]:
        """One step: hidden states `[T, D]` and, for each row's last token, logits `[R, V]`, both padded.

        `last_token` is the lanes' int32 `[num_lanes + 1]`, where rows have tokens that only the device knows.

        Raises:
            ValueError: the rows exceed every bucket, or a row has more pages than a table holds.
        """
        query_lens = [len(row.tokens) for row in rows]
        compiled = [bucket for bucket in self.buckets if self.programs.has_step(bucket) and bucket.holds(query_lens)]
        bucket = choose_bucket(compiled or self.buckets, query_lens)
        inputs: StepInputs = build(rows, bucket, self.table_width, self.num_lanes)
        if last_token is not None:
            inputs = replace(inputs, last_token=last_token)
        hidden, logits, self.cache = self.program(bucket)(self._weights, self.cache, inputs)
        self.num_run_tokens += sum(query_lens)
        self.num_padded_tokens += bucket.num_tokens - sum(query_lens)
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
            tile = self.programs.score()(self._leaves, rows, wanted)
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
        self.programs.clear()
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
