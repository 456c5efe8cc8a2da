"""What a sequence shows of its tokens: text, the reason it ended, log-probabilities."""

from __future__ import annotations

from jaxinfer.request import CompletionOutput, Logprob, SequenceState
from jaxinfer.tokenizer import IncrementalDetokenizer, StopStrings, Tokenizer


class OutputState:
    """Follows one sequence: feed it each sampled token, and it says when the sequence is over and with what text."""

    def __init__(self, sequence: SequenceState, tokenizer: Tokenizer):
        params = sequence.params
        self.sequence = sequence
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._eos_ids = frozenset() if params.ignore_eos else frozenset(tokenizer.eos_token_ids)
        self.output = CompletionOutput(
            sequence.index, "", sequence.output_ids, None if params.logprobs is None else [], None
        )

    @property
    def banned_ids(self) -> frozenset[int]:
        """Tokens that would end the sequence before `min_tokens`."""
        early = len(self.sequence.output_ids) < self.sequence.params.min_tokens
        return self._eos_ids | self._stop_ids if early else frozenset()

    def add(self, token: int, logprobs: dict[int, Logprob] | None = None) -> str:
        """Take the next token; returns the text that is new and final."""
        sequence, output = self.sequence, self.output
        sequence.output_ids.append(token)
        if output.logprobs is not None and logprobs is not None:
            output.logprobs.append(logprobs)
        ends = token in self._eos_ids or token in self._stop_ids
        text, stop = "", None
        if not ends:
            text, stop = self._stops.add(self._detokenizer.add([token]))
            if stop is not None and len(sequence.output_ids) < sequence.params.min_tokens:
                stop, text = None, text + self._stops.flush()
        if ends:
            output.finish_reason = "stop"
            output.stop_reason = token if token in self._stop_ids else None
        elif stop is not None:
            output.finish_reason, output.stop_reason = "stop", stop
        elif sequence.num_tokens >= sequence.max_total_tokens:
            output.finish_reason = "length"
        if output.finish_reason and stop is None:
            text += self._finish_text()
        output.text += text
        return text

    def _finish_text(self) -> str:
        text, stop = self._stops.add(self._detokenizer.finish())
        return text if stop else text + self._stops.flush()
