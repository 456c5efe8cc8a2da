"""Sampling's device state and programs, and the arrays that carry each sequence's options to them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jaxinfer.request import SequenceState
from jaxinfer.sampling.inputs import SamplingInputs, pack_mask
from jaxinfer.sampling.sample import SampleOutput, sample
from jaxinfer.sampling.state import SamplingState, init_state, set_lane


class Sampler:
    """Samples the rows of a step. Programs are compiled per row count by `compile`; `num_compiles` counts them."""

    def __init__(self, vocab_size: int, num_lanes: int, *, max_logprobs: int, seed: int):
        self.vocab_size = vocab_size
        self.num_lanes = num_lanes
        self.max_logprobs = max_logprobs
        self.num_compiles = 0
        self.state = init_state(num_lanes, vocab_size)
        self._seed = seed
        self._programs: dict[int, Any] = {}

    def key_of(self, seed: int | None, arrival: int) -> np.ndarray:
        """The request's key, uint32 [2]: its own seed, or one from the engine's seed and its place in arrival."""
        if seed is not None:
            return np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
        return np.random.SeedSequence([self._seed, arrival]).generate_state(2)

    def compile(self, num_rows: int) -> Any:
        """The program for steps of `num_rows` padded rows, compiled now if it has not been."""
        if num_rows not in self._programs:
            function = jax.jit(partial(sample, num_logprobs=self.max_logprobs), donate_argnums=1)
            logits = jax.ShapeDtypeStruct((num_rows, self.vocab_size), np.float32)
            inputs = SamplingInputs.greedy(num_rows, self.vocab_size, num_lanes=self.num_lanes)
            self._programs[num_rows] = function.lower(logits, self.state, inputs).compile()
            self.num_compiles += 1
        return self._programs[num_rows]

    def warm_lane_update(self) -> None:
        """Compile the lane update on the padding lane, where it changes nothing of value."""
        counts, seen = np.zeros(self.vocab_size, np.int32), np.zeros(self.vocab_size, np.bool_)
        self.state = set_lane(self.state, self.num_lanes, counts, seen, 0)

    def restore_state(self) -> None:
        """After a failed step, which may have consumed the state: an empty one."""
        self.state = init_state(self.num_lanes, self.vocab_size)

    def close(self) -> None:
        """Drop the state and the programs; nothing can run afterwards."""
        self._programs = {}
        self.state = SamplingState(None, None, None)

    def enter(self, sequence: SequenceState) -> None:
        """Put an admitted sequence's token counts into its lane, where it has penalties that need them."""
        if not sequence.params.uses_penalties:
            return
        seen = np.zeros(self.vocab_size, np.bool_)
        seen[sequence.prompt_ids] = True
        counts = np.bincount(sequence.output_ids, minlength=self.vocab_size).astype(np.int32)
        self.state = set_lane(self.state, sequence.lane, counts, seen, 0)

    def run(
        self,
        logits: Array,
        rows: Sequence[tuple[SequenceState, np.ndarray, frozenset[int]] | None],
    ) -> SampleOutput:
        """One token for each row that is not None, given its sequence, key and banned ids."""
        inputs = SamplingInputs.greedy(logits.shape[0], self.vocab_size, num_lanes=self.num_lanes)
        for index, row in enumerate(rows):
            if row is not None:
                self._fill(inputs, index, *row)
        self.state, output = self.compile(logits.shape[0])(logits, self.state, inputs)
        return output

    def _fill(self, inputs: SamplingInputs, row: int, sequence: SequenceState, key: np.ndarray, banned: frozenset[int]):
        params = sequence.params
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            getattr(inputs, name)[row] = getattr(params, name)
        inputs.top_k[row] = max(0, params.top_k)
        inputs.seed[row] = key
        inputs.choice[row] = sequence.index
        inputs.position[row] = sequence.num_tokens
        inputs.lane[row] = sequence.lane
        inputs.use_penalties[row] = params.uses_penalties
        inputs.want_logprobs[row] = params.logprobs is not None
        inputs.valid[row] = True
        if banned or params.allowed_token_ids is not None:
            inputs.use_mask[row] = True
            inputs.token_mask[row] = pack_mask(self.vocab_size, allowed_ids=params.allowed_token_ids, banned_ids=banned)
        for slot, (token, bias) in enumerate((params.logit_bias or {}).items()):
            inputs.bias_ids[row, slot] = token
            inputs.bias_values[row, slot] = bias
