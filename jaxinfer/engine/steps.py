"""The pure functions that run on the device: one forward over flat ragged tokens, and the head over chosen rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxinfer.cache.paged_kv import PagedKVCache
from jaxinfer.layers.attention import AttentionInputs, locate
from jaxinfer.sampling.logprobs import prompt_logprobs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """One step's rows, which share `tokens`: prefill chunks, decodes and verifications alike.

    Row b owns tokens query_start[b] ... query_start[b + 1] - 1, the last of its context_lens[b] positions. Rows past
    the last have no tokens, context 0 and a table of null pages. Only the hidden states at `logit_rows` reach the head.
    NumPy arrays on the host, JAX arrays in a step. A token of -1 - lane is the one that was sampled last in that lane,
    which the host need not know yet.
    """

    tokens: Any  # int32 [T]
    query_start: Any  # int32 [B + 1]
    context_lens: Any  # int32 [B]
    page_table: Any  # int32 [B, P]
    logit_rows: Any  # int32 [R]
    last_token: Any  # int32 [S], of each lane


def compile_forward(
    graphdef: Any,
    treedef: Any,
    leaves: tuple[Any, ...],
    cache: PagedKVCache,
    inputs: StepInputs,
    *,
    tile_queries: int,
) -> Any:
    """The step for the shapes of `inputs`, as one program; arrays may be given as `jax.ShapeDtypeStruct`.

    The program is `(leaves, cache, inputs) -> (hidden [T, D], logits [R, V], cache)`; the cache is donated. `leaves`
    are the parameters as a flat tuple: jit flattens one in C++, where a module state costs milliseconds. Parameters and
    cache may be shapes.
    """

    def forward(
        leaves: tuple[Array, ...], cache: PagedKVCache, inputs: StepInputs
    ) -> tuple[Float[Array, "T D"], Float[Array, "R V"], PagedKVCache]:
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        hidden, cache = model(known_tokens(inputs), cache, attention_inputs(inputs, cache.page_size, tile_queries))
        return hidden, model.logits(hidden[inputs.logit_rows]).astype(jnp.float32), cache

    return jax.jit(forward, donate_argnums=1).lower(leaves, cache, inputs).compile()


def known_tokens(inputs: StepInputs) -> Int[Array, " T"]:
    """The step's tokens, those that the device alone knows filled in."""
    return jnp.where(inputs.tokens < 0, inputs.last_token[-1 - inputs.tokens], inputs.tokens)


def attention_inputs(inputs: StepInputs, page_size: int, tile_queries: int) -> AttentionInputs:
    """What attention needs of a step, positions and slots derived on the device."""
    tables = inputs.page_table, inputs.query_start, inputs.context_lens
    _, positions, slots = locate(*tables, inputs.tokens.shape[0], page_size)
    return AttentionInputs(positions, slots, *tables, tile_queries=tile_queries)


def make_score(graphdef: Any, treedef: Any, *, num_logprobs: int) -> Callable[..., Any]:
    """A jitted `(leaves, hidden [R, D], targets [R]) -> (logprob, rank, top ids, top logprobs)`.

    The head over a tile of R prompt positions: all the positions of a prompt at once would be an array of prompt length
    times vocabulary.
    """

    def score(leaves: tuple[Array, ...], hidden: Float[Array, "R D"], targets: Int[Array, " R"]):
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        return prompt_logprobs(model.logits(hidden), targets, num_logprobs)

    return jax.jit(score)


def memory_of(program: Any) -> tuple[int, int]:
    """Bytes of a compiled program: its temporaries, and its outputs that take no donated argument's place.

    A program in parts runs one part at a time; what the parts pass on counts as output.
    """
    parts = getattr(program, "parts", (program,))
    found = [part.memory_analysis() for part in parts]
    outputs = sum(each.output_size_in_bytes - each.alias_size_in_bytes for each in found)
    return max(each.temp_size_in_bytes for each in found), outputs
