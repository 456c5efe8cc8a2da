"""Builds steps from `reference.Options`, one a row, and runs them compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.sampling.inputs import SamplingInputs, pack_mask
from jaxinfer.sampling.processors import LogitsProcessor
from jaxinfer.sampling.sample import SampleOutput, sample
from jaxinfer.sampling.state import SamplingState, init_state

from .reference import Options

SCALARS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def inputs_for(
    rows: Sequence[Options], vocab_size: int, *, max_bias: int = 8, processors: tuple[LogitsProcessor, ...] = ()
) -> SamplingInputs:
    """Host inputs with row b on lane b, seeded by b; every row valid."""
    num_rows = len(rows)
    inputs = SamplingInputs.greedy(num_rows, vocab_size, num_lanes=num_rows, max_bias=max_bias, processors=processors)
    for b, options in enumerate(rows):
        for name in SCALARS:
            getattr(inputs, name)[b] = getattr(options, name)
        inputs.use_penalties[b] = bool(options.prompt or options.output)
        inputs.seed[b] = (b, 7)
        inputs.lane[b] = b
        inputs.valid[b] = True
        for i, (token, value) in enumerate(options.bias.items()):
            inputs.bias_ids[b, i], inputs.bias_values[b, i] = token, value
        if options.allowed is not None:
            inputs.use_mask[b] = True
            inputs.token_mask[b] = pack_mask(vocab_size, allowed_ids=options.allowed)
    return inputs


def state_for(rows: Sequence[Options], vocab_size: int) -> SamplingState:
    """Device state in which lane b has row b's prompt and output."""
    counts = np.zeros((len(rows) + 1, vocab_size), np.int32)
    seen = np.zeros((len(rows) + 1, vocab_size), bool)
    for b, options in enumerate(rows):
        np.add.at(counts[b], options.output, 1)
        seen[b, options.prompt] = True
    empty = init_state(len(rows), vocab_size)
    return dataclasses.replace(empty, output_counts=jnp.asarray(counts), prompt_seen=jnp.asarray(seen))


def take(inputs: SamplingInputs, rows: np.ndarray) -> SamplingInputs:
    """The inputs of some rows, in that order."""
    return jax.tree.map(lambda leaf: leaf[rows], inputs)


@cache
def compiled(num_logprobs: int, processors: tuple[LogitsProcessor, ...] = ()):
    return jax.jit(partial(sample, num_logprobs=num_logprobs, processors=processors))


def run(
    logits: np.ndarray,
    inputs: SamplingInputs,
    state: SamplingState,
    *,
    num_logprobs: int = 5,
    processors: tuple[LogitsProcessor, ...] = (),
) -> tuple[SamplingState, SampleOutput]:
    """One compiled step, results as NumPy arrays."""
    return jax.tree.map(np.asarray, compiled(num_logprobs, processors)(jnp.asarray(logits), state, inputs))
