"""Reading a step that was dispatched: its tokens and what else its rows asked for go to their sequences' outputs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.engine.live import LiveRequest
from jaxinfer.engine.outputs import OutputState
from jaxinfer.engine.prompt_outputs import logprob_entry
from jaxinfer.engine.runner import ModelRunner
from jaxinfer.request import Logprob, SequenceState
from jaxinfer.sampling.sample import SampleOutput
from jaxinfer.scheduler.scheduler import ScheduledRow
from jaxinfer.tokenizer import Tokenizer

logger = logging.getLogger("jaxinfer")

READ = ("tokens", "logprob", "rank", "top_ids", "top_logprobs", "mask_empty", "bad_logits")
"""What the host reads of a `SampleOutput`."""


@dataclass(frozen=True)
class Step:
    """A step that was dispatched: its rows, and its outputs on the device."""

    rows: list[ScheduledRow]
    hidden: Any
    logits: Any
    sampled: SampleOutput | None


class StepReader:
    """Reads steps into the engine's live requests and the outputs of their sequences, which it shares."""

    def __init__(
        self,
        live: Mapping[str, LiveRequest],
        state_of: Mapping[SequenceState, OutputState],
        tokenizer: Tokenizer,
        runner: ModelRunner,
    ):
        self._live = live
        self._state_of = state_of
        self._tokenizer = tokenizer
        self._runner = runner

    def read(self, step: Step) -> list[SequenceState]:
        """Take the tokens of a step, of the sequences that have not left since it was dispatched."""
        rows = [(index, row) for index, row in enumerate(step.rows) if row.sequence in self._state_of]
        hidden = logits = None
        if any(row.sequence.reads_prompt or row.sequence.params.return_hidden_states for _, row in rows):
            hidden = np.asarray(step.hidden)
        if any(row.sequence.params.return_logits for _, row in rows):
            logits = np.asarray(step.logits)
        arrays = {name: np.asarray(getattr(step.sampled, name)) for name in READ if step.sampled is not None and rows}
        starts = np.cumsum([0] + [row.num_tokens for row in step.rows])
        moved = []
        for index, row in rows:
            sequence, state = row.sequence, self._state_of[row.sequence]
            if row.draws:
                sequence.num_pending -= 1
            try:
                own = None if hidden is None else hidden[starts[index] : starts[index + 1]]
                self._keep(row, own, None if logits is None else logits[index])
                if row.draws:
                    self._take(index, sequence, arrays)
            except Exception as error:  # the device is sound; this request's own data or options are not
                logger.exception("request %s failed", sequence.request_id)
                state.end("error", f"reading its token failed: {error!r}", flush=False)
            if row.samples or state.output.finish_reason:
                moved.append(sequence)
        return moved

    def _keep(self, row: ScheduledRow, hidden: np.ndarray | None, logits: np.ndarray | None) -> None:
        """What a row wants beside its token: states of the prompt, states and logits of the draw."""
        sequence, params = row.sequence, row.sequence.params
        prompt = self._live[sequence.request_id].prompt
        if prompt is not None and sequence.reads_prompt and hidden is not None:
            prompt.take(row.start, hidden, self._runner)
            sequence.reads_prompt = not prompt.complete
        if row.draws:
            self._state_of[sequence].keep(
                hidden[-1] if hidden is not None and params.return_hidden_states else None,
                logits if params.return_logits else None,
            )

    def _take(self, row: int, sequence: SequenceState, arrays: dict[str, np.ndarray]) -> None:
        live, state = self._live[sequence.request_id], self._state_of[sequence]
        if arrays["mask_empty"][row] or arrays["bad_logits"][row]:
            if arrays["mask_empty"][row]:
                state.fail_without_token()
            else:
                state.end("error", "the model's logits are not finite", flush=False)
            return
        token, logprob, rank = (arrays[name][row].item() for name in ("tokens", "logprob", "rank"))
        entry: dict[int, Logprob] | None = None
        if (wanted := sequence.params.logprobs) is not None:
            top_ids = arrays["top_ids"][row, :wanted]
            entry = logprob_entry(self._tokenizer, token, logprob, rank, top_ids, arrays["top_logprobs"][row])
        live.deltas[sequence.index] += state.add(token, logprob, entry)
