"""Logits to tokens, on the device: one pure function, compiled once per row count, whose options are all data.

Order of operations, vLLM's where it defines one:

1. log-probabilities and ranks, from the raw logits;
2. logits processors, in the order of registration;
3. logit_bias, then the token mask (allowed_token_ids, bad_words, min_tokens, grammars);
4. repetition, then frequency and presence penalties;
5. temperature 0: the most likely token (the lowest id of several), whatever the options below say;
6. otherwise temperature, min_p, top_k, top_p, typical_p, and one uniform through the inverse CDF in token order.

A row's result does not depend on the other rows, on their options or on B ≥ 8, bit for bit: whatever is skipped
when no row needs it (`lax.cond`) changes nothing in the rows that did not ask for it, and the arithmetic that all
rows share is compiled once, outside these branches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxinfer.sampling.draw import inverse_cdf, uniforms
from jaxinfer.sampling.filters import kept_weights
from jaxinfer.sampling.inputs import SamplingInputs
from jaxinfer.sampling.logprobs import first_argmax, log_normalizer, pick, ranks, top_tokens
from jaxinfer.sampling.processors import LogitsProcessor, apply_processors
from jaxinfer.sampling.state import SamplingState, record_tokens

MIN_TEMPERATURE = 1e-6  # smaller positive temperatures act as this one: (logit − max) / temperature stays defined


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleOutput:
    """What one step sampled. Rows that are not `valid` hold token 0 and otherwise nothing of value."""

    tokens: Any  # int32 [B]
    logprob: Any  # float32 [B]: log softmax(raw logits) of the token
    rank: Any  # int32 [B]: 1 + tokens of larger raw logit; 0 in rows without want_logprobs
    top_ids: Any  # int32 [B, num_logprobs]: by raw logit, then lower id; 0 in rows without want_logprobs
    top_logprobs: Any  # float32 [B, num_logprobs]: 0 in rows without want_logprobs
    mask_empty: Any  # bool [B]: no token was left to sample from; the row's token means nothing
    bad_logits: Any  # bool [B]: a logit was NaN or +inf; the row's token and log-probabilities mean nothing


def sample(
    logits: Float[Array, "B V"],
    state: SamplingState,
    inputs: SamplingInputs,
    *,
    num_logprobs: int,
    processors: tuple[LogitsProcessor, ...] = (),
) -> tuple[SamplingState, SampleOutput]:
    """One token for each row, and the state that knows of it. See the module for the order of operations.

    `num_logprobs` (most log-probabilities that a request may ask for) and `processors` are static.
    """
    raw = logits.astype(jnp.float32)
    normalizer = log_normalizer(raw)
    adjusted = _adjust(raw, state, inputs, processors)
    greedy, peak = first_argmax(adjusted)
    # Tested element by element: XLA's maximum on a CPU may drop a NaN.
    bad = ~(normalizer < jnp.inf) | jnp.any(~(adjusted < jnp.inf), axis=-1)
    empty = (peak == -jnp.inf) & ~bad
    usable = inputs.valid & ~bad & ~empty  # other rows are neither drawn nor searched, and disturb none
    random = usable & (inputs.temperature > 0)
    draw = partial(_draw, inputs=inputs, random=random)
    tokens = jax.lax.cond(jnp.any(random), draw, lambda logits, peak, greedy: greedy, adjusted, peak, greedy)
    tokens = jnp.where(usable, tokens, 0)
    wanted = inputs.want_logprobs & inputs.valid
    rank, top_ids, top_logprobs = _describe(raw, normalizer, tokens, wanted, num_logprobs)
    output = SampleOutput(
        tokens=tokens,
        logprob=pick(raw, tokens) - normalizer,
        rank=rank,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        mask_empty=empty & inputs.valid,
        bad_logits=bad & inputs.valid,
    )
    return record_tokens(state, inputs.lane, tokens, inputs.valid), output


def _adjust(
    logits: Float[Array, "B V"],
    state: SamplingState,
    inputs: SamplingInputs,
    processors: tuple[LogitsProcessor, ...],
) -> Float[Array, "B V"]:
    """Everything that changes what the most likely token is: processors, bias, mask, penalties."""
    logits = apply_processors(logits, inputs.processor_params, processors)
    in_vocabulary = (inputs.bias_ids >= 0) & (inputs.bias_ids < logits.shape[-1])
    for needed, change in (
        (in_vocabulary, partial(_add_bias, inputs=inputs, used=in_vocabulary)),
        (inputs.use_mask, partial(_apply_mask, inputs=inputs)),
        (inputs.use_penalties, partial(_apply_penalties, state=state, inputs=inputs)),
    ):
        logits = jax.lax.cond(jnp.any(needed), change, lambda x: x, logits)
    return logits


def _add_bias(logits: Float[Array, "B V"], *, inputs: SamplingInputs, used: Bool[Array, "B E"]) -> Float[Array, "B V"]:
    rows = jnp.arange(logits.shape[0])[:, None]
    ids = jnp.where(used, inputs.bias_ids, logits.shape[-1])
    return logits.at[rows, ids].add(inputs.bias_values, mode="drop")


def _apply_mask(logits: Float[Array, "B V"], *, inputs: SamplingInputs) -> Float[Array, "B V"]:
    bits = (inputs.token_mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(logits.shape[0], -1)[:, : logits.shape[-1]].astype(bool)
    return jnp.where(allowed | ~inputs.use_mask[:, None], logits, -jnp.inf)


def _apply_penalties(
    logits: Float[Array, "B V"], *, state: SamplingState, inputs: SamplingInputs
) -> Float[Array, "B V"]:
    """Repetition (Keskar et al. 2019) over prompt and output; frequency and presence over the output alone."""
    counts = state.output_counts[inputs.lane]
    seen = (counts > 0) | state.prompt_seen[inputs.lane]
    repetition = inputs.repetition_penalty[:, None]
    changed = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    changed = changed - inputs.frequency_penalty[:, None] * counts
    changed = changed - inputs.presence_penalty[:, None] * (counts > 0)
    return jnp.where(inputs.use_penalties[:, None], changed, logits)


def _draw(
    logits: Float[Array, "B V"], peak: Array, greedy: Array, *, inputs: SamplingInputs, random: Bool[Array, " B"]
) -> Array:
    """A token from the distribution of each row in `random`; the `greedy` one in the others."""
    temperature = jnp.maximum(inputs.temperature, MIN_TEMPERATURE)[:, None]
    weights = jnp.exp((logits - peak[:, None]) / temperature)
    weights = kept_weights(
        logits,
        weights,
        # Off in the other rows, which must not make these pay for a search.
        top_k=jnp.where(random, inputs.top_k, 0),
        top_p=jnp.where(random, inputs.top_p, 1.0),
        min_p=jnp.where(random, inputs.min_p, 0.0),
        typical_p=jnp.where(random, inputs.typical_p, 1.0),
    )
    token = inverse_cdf(weights, uniforms(inputs.seed, inputs.choice, inputs.position))
    return jnp.where(random, token, greedy)


def _describe(
    logits: Float[Array, "B V"],
    normalizer: Float[Array, " B"],
    tokens: Array,
    wanted: Bool[Array, " B"],
    num_logprobs: int,
) -> tuple[Array, Array, Array]:
    """Rank of the sampled token, and ids and log-probabilities of the likeliest, for the rows that want them."""
    num_rows = tokens.shape[0]

    def describe() -> tuple[Array, Array, Array]:
        values, ids = top_tokens(logits, num_logprobs)
        shown = wanted[:, None]
        top_logprobs = jnp.where(shown, values - normalizer[:, None], 0.0)
        return jnp.where(wanted, ranks(logits, tokens), 0), jnp.where(shown, ids, 0), top_logprobs

    def nothing() -> tuple[Array, Array, Array]:
        width = (num_rows, num_logprobs)
        return jnp.zeros(num_rows, jnp.int32), jnp.zeros(width, jnp.int32), jnp.zeros(width, jnp.float32)

    return jax.lax.cond(jnp.any(wanted), describe, nothing)
