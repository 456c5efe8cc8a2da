"""A request while it runs: what it asked for, its choices, and what of them is still to be reported."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

import numpy as np

from jaxinfer.engine.outputs import OutputState
from jaxinfer.engine.prompt_outputs import PromptOutput
from jaxinfer.request import CompletionOutput, RequestOptions, RequestOutput, SamplingParams


@dataclass
class LiveRequest:
    """A request that has not finished. `arrival_s` is on the monotonic clock."""

    output: RequestOutput
    params: SamplingParams
    options: RequestOptions
    states: list[OutputState]
    prompt: PromptOutput | None
    key: np.ndarray
    arrival_s: float
    deltas: list[str] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(state.output.finish_reason for state in self.states)

    @property
    def deadline_s(self) -> float:
        """On the monotonic clock; infinity without a time limit."""
        return self.arrival_s + (math.inf if self.options.timeout_s is None else self.options.timeout_s)

    def end(self, finish_reason: str, stop_reason: str | None = None) -> None:
        """End every choice that runs still."""
        for state in self.states:
            if not state.output.finish_reason:
                self.deltas[state.sequence.index] += state.end(finish_reason, stop_reason)

    def report(self) -> tuple[RequestOutput, list[str]]:
        """The request as it stands, and the text of each choice that is new."""
        output, (deltas, self.deltas) = self.output, (self.deltas, [""] * len(self.deltas))
        output.num_cached_tokens = self.states[0].sequence.num_cached_tokens
        if self.finished:
            if self.params.num_choices > self.params.n:
                output.outputs = _best([state.output for state in self.states], self.params.n)
                deltas = [choice.text for choice in output.outputs]
            output.finished = True
            output.metrics["e2e_s"] = time.monotonic() - self.arrival_s
        return output, deltas


def _best(choices: list[CompletionOutput], num: int) -> list[CompletionOutput]:
    """The choices with the highest mean log-probability a token, numbered anew.

    Those without a token, as where time ran out before they began, come after all others, and failed ones last.
    """

    def rank(choice: CompletionOutput) -> tuple[bool, bool, float]:
        return (
            choice.finish_reason == "error",
            not choice.token_ids,
            -choice.cumulative_logprob / max(1, len(choice.token_ids)),
        )

    return [replace(choice, index=index) for index, choice in enumerate(sorted(choices, key=rank)[:num])]
