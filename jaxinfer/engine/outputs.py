"""What a sequence shows of its tokens: text, the reason it ended, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxinfer.engine.token_mask import BadWords, TokenMask
from jaxinfer.request import CompletionOutput, Logprob, SequenceState
from jaxinfer.tokenizer import IncrementalDetokenizer, StopStrings, Tokenizer
from jaxinfer.tokenizer.token_index import TokenIndex


class OutputState:
    """Follows one sequence: feed it each sampled token, and it says when the sequence is over and with what text."""

    def __init__(
        self,
        sequence: SequenceState,
        tokenizer: Tokenizer,
        vocab_size: int,
        token_index: Callable[[], TokenIndex],
    ):
        params = sequence.params
        self.sequence = sequence
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._detokenizer.prime(sequence.prompt_ids)
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._eos_ids = frozenset() if params.ignore_eos else frozenset(tokenizer.eos_token_ids)
        self.output = CompletionOutput(
            sequence.index, "", sequence.output_ids, None if params.logprobs is None else [], None
        )
        skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        bad_words = BadWords(params.bad_words, token_index(), skipped) if params.bad_words else None
        self._mask = TokenMask(params, vocab_size, self._eos_ids | self._stop_ids, bad_words)
        self._hidden: list[np.ndarray] = []
        self._logits: list[np.ndarray] = []

    def mask(self) -> np.ndarray | None:
        """The packed mask of the token that the scheduled step draws; None when any may come."""
        return self._mask.words(self.sequence.num_tokens - 1 - len(self.sequence.prompt_ids))

    def keep(self, hidden: np.ndarray | None, logits: np.ndarray | None) -> None:
        """Remember the state `[D]` and the logits `[V]` that the next token is drawn from, where they are wanted."""
        for kept, row in ((self._hidden, hidden), (self._logits, logits)):
            if row is not None:
                kept.append(row.copy())  # the row is a view of a buffer that the device takes back

    def add(self, token: int, logprob: float | int = 0.0, logprobs: dict[int, Logprob] | None = None) -> str:
        """Take the next token; returns the text that is new and final."""
        sequence, output = self.sequence, self.output
        sequence.output_ids.append(token)
        self._mask.add(token, self._tokenizer.token_bytes(token))
        output.cumulative_logprob += logprob
        if output.logprobs is not None and logprobs is not None:
            output.logprobs.append(logprobs)
        ends = token in self._eos_ids or token in self._stop_ids
        text, stop = "", None
        if not ends:
            text = self._detokenizer.add([token])
            if len(sequence.output_ids) >= sequence.params.min_tokens:  # text before that ends nothing
                text, stop = self._stops.add(text)
        if ends:
            output.finish_reason = "stop"
            output.stop_reason = token if token in self._stop_ids else None
        elif stop is not None:
            output.finish_reason, output.stop_reason = "stop", stop
        elif sequence.num_known >= sequence.max_total_tokens:
            output.finish_reason = "length"
        output.text += text
        if output.finish_reason:
            text += self.end(output.finish_reason, output.stop_reason, flush=stop is None)
        return text

    def end(self, finish_reason: str, stop_reason: str | int | None = None, flush: bool = True) -> str:
        """The sequence is over; returns the text that had been held back."""
        output = self.output
        output.finish_reason, output.stop_reason = finish_reason, stop_reason
        text = self._finish_text() if flush else ""
        output.text += text
        output.hidden_states = np.stack(self._hidden) if self._hidden else None
        output.logits = np.stack(self._logits) if self._logits else None
        return text

    def _finish_text(self) -> str:
        text, stop = self._stops.add(self._detokenizer.finish())
        return text if stop else text + self._stops.flush()
