"""A request while it runs: what it asked for, its choices, and what of them is still to be reported."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

import numpy as np

from jaxinfer.engine.outputs import OutputState
from jaxinfer.engine.prompt_outputs import PromptOutput
from jaxinfer.metrics import ChoiceTimes, EngineMetrics
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
    deltas: list[str]
    metrics: EngineMetrics
    times: list[ChoiceTimes] = field(init=False)

    def __post_init__(self) -> None:
        self.times = [ChoiceTimes() for _ in self.states]

    @property
    def finished(self) -> bool:
        return all(state.output.finish_reason for state in self.states)

    @property
    def deadline_s(self) -> float:
        """On the monotonic clock; infinity without a time limit."""
        return self.arrival_s + (math.inf if self.options.timeout_s is None else self.options.timeout_s)

    def admitted(self) -> None:
        """A choice has got a lane."""
        if "queue_s" not in self.output.metrics:
            queue_s = time.monotonic() - self.arrival_s
            self.output.metrics["queue_s"] = queue_s
            self.metrics.admitted(queue_s)

    def moved(self, index: int, now_s: float | int) -> None:
        """The host has read what a step brought for a choice."""
        output, sequence, times = self.output, self.states[index].sequence, self.times[index]
        num_new = len(sequence.output_ids) - times.num_tokens
        if "ttft_s" not in output.metrics and (num_new or self.params.max_tokens == 0):
            ttft_s = now_s - self.arrival_s
            output.metrics["ttft_s"] = ttft_s
            self.metrics.first(ttft_s, len(output.prompt_token_ids), self.states[0].sequence.num_cached_tokens)
        if num_new:
            self.metrics.tokens(num_new, times.take(len(sequence.output_ids), now_s))

    def left(self) -> None:
        """The request is over; choices that had not ended were aborted."""
        for state, times in zip(self.states, self.times, strict=True):
            times.finish_reason = state.output.finish_reason or "abort"
        self.metrics.finished(self.times, time.monotonic() - self.arrival_s)

    def end(self, finish_reason: str, stop_reason: str | None = None) -> None:
        """End every choice that runs still."""
        for state in self.states:
            if not state.output.finish_reason:
                self.deltas[state.sequence.index] += state.end(finish_reason, stop_reason)

    def report(self) -> tuple[RequestOutput, list[str]]:
        """The request as it stands, and the text of each choice that is new."""
        output, (deltas, self.deltas) = self.output, (self.deltas, [""] * len(self.deltas))
        output.num_cached_tokens = self.states[0].sequence.num_cached_tokens
        output.num_generated_tokens = sum(len(state.sequence.output_ids) for state in self.states)
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
