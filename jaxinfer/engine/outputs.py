"""What a sequence shows of its tokens: text, the reason it ended, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxinfer.engine.token_mask import BadWords, TokenMask
from jaxinfer.request import CompletionOutput, Logprob, SequenceState
from jaxinfer.structured.grammar import Grammar
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
        grammar: Grammar | None = None,
    ):
        params = sequence.params
        self.sequence = sequence
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._detokenizer.prime(sequence.prompt_ids)
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._stop_ids = frozenset(params.stop_token_ids or ())
        eos_ids = frozenset(tokenizer.eos_token_ids)
        ignored = eos_ids if params.ignore_eos else frozenset()
        # A form allows an ignored end where it leaves nothing else, and then it is the end.
        self._eos_ids = eos_ids - ignored if grammar is None else eos_ids
        self.output = CompletionOutput(
            sequence.index, "", sequence.output_ids, None if params.logprobs is None else [], None
        )
        skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        bad_words = BadWords(params.bad_words, token_index(), skipped) if params.bad_words else None
        matcher = None if grammar is None else grammar.matcher()
        self._mask = TokenMask(params, vocab_size, self._eos_ids | self._stop_ids, bad_words, matcher, ignored)
        self._hidden: list[np.ndarray] = []
        self._logits: list[np.ndarray] = []

    def mask(self) -> np.ndarray | None:
        """The packed mask of the token that the scheduled step draws; None when any may come."""
        return self._mask.words(self.sequence.num_tokens - 1 - len(self.sequence.prompt_ids))

    def check_first(self) -> None:
        """Raise `ValueError` where a form and the other options leave no first token."""
        if self.sequence.params.structured_outputs is not None and not np.any(self._mask.words(0)):
            raise ValueError(self._mask.why_empty(0))

    def fail_without_token(self) -> None:
        """The sequence is over: none of its next tokens was allowed."""
        self.end("error", self._mask.why_empty(len(self.sequence.output_ids)), flush=False)

    def keep(self, hidden: np.ndarray | None, logits: np.ndarray | None) -> None:
        """Remember the state `[D]` and the logits `[V]` that the next token is drawn from, where they are wanted."""
        for kept, row in ((self._hidden, hidden), (self._logits, logits)):
            if row is not None:
                kept.append(row.copy())  # the row is a view of a buffer that the device takes back

    def add(self, token: int, logprob: float | int = 0.0, logprobs: dict[int, Logprob] | None = None) -> str:
        """Take the next token; returns the text that is new and final."""
        sequence, output = self.sequence, self.output
        sequence.output_ids.append(token)
        output.cumulative_logprob += logprob
        if output.logprobs is not None and logprobs is not None:
            output.logprobs.append(logprobs)
        ends = token in self._stop_ids or (token in self._eos_ids and self._mask.may_end)
        text, stop = "", None
        if not ends:
            self._mask.add(token, self._tokenizer.token_bytes(token))
            text = self._detokenizer.add([token])
            if len(sequence.output_ids) >= sequence.params.min_tokens:  # text before that ends nothing
                text, stop = self._stops.add(text)
        if ends:
            output.finish_reason = "stop"
            output.stop_reason = token if token in self._stop_ids else None
        elif stop is not None:
            output.finish_reason, output.stop_reason = "stop", stop
        elif self._mask.error:
            output.finish_reason, output.stop_reason = "error", f"structured_outputs: {self._mask.error}"
        elif self._mask.complete:
            output.finish_reason, output.stop_reason = self._at_end_of_form()
        elif sequence.num_known >= sequence.max_total_tokens:
            output.finish_reason = "length"
        output.text += text
        if output.finish_reason:
            text += self.end(output.finish_reason, output.stop_reason, flush=stop is None)
        return text

    def _at_end_of_form(self) -> tuple[str, str | None]:
        num, needed = len(self.sequence.output_ids), self.sequence.params.min_tokens
        if num >= needed:
            return "stop", None
        return (
            "error",
            f"structured_outputs is complete after {num} tokens, and min_tokens={needed} forbids to end there",
        )

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
