"""Sampling's device state and programs, and the arrays that carry each sequence's options to them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jaxinfer.engine.programs import Compiler, ProgramTable, abstract
from jaxinfer.engine.steps import memory_of
from jaxinfer.request import MAX_LOGPROBS, SamplingParams, SequenceState
from jaxinfer.sampling.inputs import MAX_LOGIT_BIAS, SamplingInputs
from jaxinfer.sampling.processors import ENABLED, LogitsProcessor
from jaxinfer.sampling.sample import SampleOutput, sample
from jaxinfer.sampling.state import SamplingState, init_state, set_lane

SamplingRow = tuple[SequenceState, np.ndarray, np.ndarray | None]
"""A sequence, its key, and the packed mask of its next token."""

_SCALARS = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class Sampler:
    """Samples the rows of a step. `programs` has one for each count of padded rows.

    It compiles and holds nothing on the device until `restore_state`.
    """

    def __init__(
        self,
        vocab_size: int,
        num_lanes: int,
        *,
        seed: int,
        processors: Sequence[LogitsProcessor] = (),
        compiler: Compiler | None = None,
    ):
        self.vocab_size = vocab_size
        self.num_lanes = num_lanes
        self.processors = {processor.name: processor for processor in processors}
        if len(self.processors) < len(processors):
            raise ValueError(
                f"logits_processors: two have one name; the names are {[each.name for each in processors]}"
            )
        self.state: SamplingState = jax.eval_shape(partial(init_state, num_lanes, vocab_size))
        self._seed = seed
        given = abstract(self.state), tuple(processors)
        self.programs: ProgramTable[int] = ProgramTable(partial(_compile, compiler or Compiler(), *given))

    def key_of(self, seed: int | None, arrival: int) -> np.ndarray:
        """The request's key, uint32 [2]: its own seed, or one from the engine's seed and its place in arrival."""
        if seed is not None:
            return np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
        return np.random.SeedSequence([self._seed, arrival]).generate_state(2)

    def compile(self, num_rows: int) -> Any:
        """The program for steps of `num_rows` padded rows, compiled now if it has not been."""
        return self.programs[num_rows]

    def memory_bytes(self, num_rows: int) -> tuple[int, int]:
        """Temporaries and outputs of the program for so many rows, by its own analysis, and the state."""
        state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.state))
        return sum(memory_of(self.compile(num_rows))), state_bytes

    def _inputs(self, num_rows: int) -> SamplingInputs:
        return SamplingInputs.greedy(
            num_rows, self.vocab_size, num_lanes=self.num_lanes, processors=list(self.processors.values())
        )

    def check(self, params: SamplingParams) -> None:
        """Raise `ValueError` for what these programs do not hold: a processor or parameter unknown, too many biases."""
        if len(params.logit_bias or ()) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias has more than {MAX_LOGIT_BIAS} entries")
        for name, values in params.processor_params.items():
            if name not in self.processors:
                known = sorted(self.processors) or "none: give them to LLM(logits_processors=[…])"
                raise ValueError(f"logits_processors: {name!r} is not registered; registered: {known}")
            self.processors[name].resolve(values)

    def restore_state(self) -> None:
        """An empty state: at the start, and after a failed step, which may have consumed the one there was."""
        self.state = init_state(self.num_lanes, self.vocab_size)

    def close(self) -> None:
        """Drop the state and the programs; nothing can run afterwards."""
        self.programs.clear()
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
        rows: Sequence[SamplingRow | None],
    ) -> SampleOutput:
        """One token for each row that is not None, given its sequence, key and packed mask (None allows all)."""
        inputs = self._inputs(logits.shape[0])
        for index, row in enumerate(rows):
            if row is not None:
                self._fill(inputs, index, *row)
        self.state, output = self.compile(logits.shape[0])(logits, self.state, inputs)
        return output

    def _fill(
        self, inputs: SamplingInputs, row: int, sequence: SequenceState, key: np.ndarray, mask: np.ndarray | None
    ) -> None:
        params = sequence.params
        for name in _SCALARS:
            getattr(inputs, name)[row] = getattr(params, name)
        inputs.top_k[row] = max(0, params.top_k)
        inputs.seed[row] = key
        inputs.choice[row] = sequence.index
        inputs.position[row] = sequence.num_tokens - 1  # the token that this step draws is counted
        inputs.lane[row] = sequence.lane
        inputs.use_penalties[row] = params.uses_penalties
        inputs.want_logprobs[row] = params.logprobs is not None
        inputs.valid[row] = True
        if mask is not None:
            inputs.use_mask[row] = True
            inputs.token_mask[row] = mask
        for slot, (token, bias) in enumerate((params.logit_bias or {}).items()):
            inputs.bias_ids[row, slot] = token
            inputs.bias_values[row, slot] = bias
        for name, values in params.processor_params.items():
            inputs.processor_params[name][ENABLED][row] = True
            for parameter, value in self.processors[name].resolve(values).items():
                inputs.processor_params[name][parameter][row] = value


def warm_lane_update(num_lanes: int, vocab_size: int) -> None:
    """Have jit compile the lane update, on a state that is thrown away."""
    counts, seen = np.zeros(vocab_size, np.int32), np.zeros(vocab_size, np.bool_)
    set_lane(init_state(num_lanes, vocab_size), num_lanes, counts, seen, 0)


def _compile(compiler: Compiler, state: SamplingState, processors: tuple[LogitsProcessor, ...], num_rows: int) -> Any:
    """The program that samples `num_rows` rows; `state` is abstract."""
    num_lanes, vocab_size = state.output_counts.shape[0] - 1, state.output_counts.shape[1]
    inputs = SamplingInputs.greedy(num_rows, vocab_size, num_lanes=num_lanes, processors=list(processors))
    logits = jax.ShapeDtypeStruct((num_rows, vocab_size), np.float32)

    def compile() -> dict[str, Any]:
        function = jax.jit(partial(sample, num_logprobs=MAX_LOGPROBS, processors=processors), donate_argnums=1)
        return {"sample": function.lower(logits, state, inputs).compile()}

    described = (logits, state, abstract(inputs), processors, MAX_LOGPROBS)
    return compiler.get(f"sampling of {num_rows} rows", described, compile)["sample"]
