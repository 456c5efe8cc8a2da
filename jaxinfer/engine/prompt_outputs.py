"""What a request wants of its own prompt: log-probabilities and hidden states, gathered chunk by chunk."""

from __future__ import annotations

import numpy as np

from jaxinfer.engine.runner import ModelRunner
from jaxinfer.request import Logprob, RequestOutput, SamplingParams
from jaxinfer.tokenizer import Tokenizer


class PromptOutput:
    """Fills `prompt_logprobs` and `prompt_hidden_states` of one request's output.

    `first_scored` is the first position whose log-probability is wanted; the entries before it stay None.
    """

    def __init__(self, output: RequestOutput, params: SamplingParams, tokenizer: Tokenizer, first_scored: int = 1):
        self._output = output
        self._wanted = params.prompt_logprobs
        self._keep_states = params.return_hidden_states
        self._tokenizer = tokenizer
        self._first_scored = max(1, first_scored)
        self._states: list[np.ndarray] = []
        self._num_taken = 0
        if self._wanted is not None:
            output.prompt_logprobs = [None for _ in output.prompt_token_ids]

    @property
    def complete(self) -> bool:
        return self._num_taken == len(self._output.prompt_token_ids)

    def take(self, start: int, hidden: np.ndarray, runner: ModelRunner) -> None:
        """The states `[n, D]` of positions start … start + n - 1, in order of position.

        Positions that come again after a preemption, and those past the prompt, are left out.
        """
        ids = self._output.prompt_token_ids
        hidden = hidden[max(0, self._num_taken - start) : len(ids) - start]
        start = max(start, self._num_taken)
        if not len(hidden):
            return
        self._num_taken = start + len(hidden)
        if self._keep_states:
            self._states.append(hidden.copy())  # `hidden` may be a view of a buffer that the device takes back
            if start + len(hidden) == len(ids):
                self._output.prompt_hidden_states = np.concatenate(self._states)
        if self._output.prompt_logprobs is None or self._wanted is None:
            return
        first = max(start, self._first_scored - 1)  # the state at position p scores the token at p + 1
        targets = ids[first + 1 : start + len(hidden) + 1]
        if not targets:
            return
        scores = runner.score(hidden[first - start :][: len(targets)], np.asarray(targets, np.int32))
        for index, (target, logprob, rank, top_ids, top_logprobs) in enumerate(zip(targets, *scores, strict=True)):
            self._output.prompt_logprobs[first + 1 + index] = logprob_entry(
                self._tokenizer, target, logprob.item(), rank.item(), top_ids[: self._wanted], top_logprobs
            )


def logprob_entry(
    tokenizer: Tokenizer, token: int, logprob: float | int, rank: int, top_ids: np.ndarray, top_logprobs: np.ndarray
) -> dict[int, Logprob]:
    """`{token_id: Logprob}` of one place: its own token first, then the likeliest."""
    found = {token: Logprob(logprob, rank, tokenizer.token_text(token))}
    for index, other in enumerate(top_ids.tolist()):
        found.setdefault(other, Logprob(float(top_logprobs[index]), index + 1, tokenizer.token_text(other)))
    return found
