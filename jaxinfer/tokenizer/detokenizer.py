"""Text from tokens as they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from jaxinfer.tokenizer.tokenizer import Tokenizer

_LONGEST_CHARACTER_BYTES = 4


class IncrementalDetokenizer:
    """Turns a growing list of token ids into text, piece by piece, at a constant cost a token.

    The pieces of `add` and `finish`, joined, equal `tokenizer.decode(ids, skip_special_tokens)`. No piece ends inside
    a character: its bytes wait for the rest, or for `finish`.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_next = tokenizer.strip_leading_space

    def prime(self, prompt_ids: Sequence[int]) -> None:
        """Take the output as a continuation of a prompt, before the first `add`.

        The pieces then are what decoding prompt and output together gives beyond the prompt's own text: a
        SentencePiece word keeps its leading space, and a character begun in the prompt is completed.
        """
        tail: list[bytes] = []
        num_bytes = 0
        for token in reversed(prompt_ids):
            if num_bytes >= _LONGEST_CHARACTER_BYTES:
                break
            if token not in self._skipped:
                tail.append(self._tokenizer.token_bytes(token))
                num_bytes += len(tail[-1])
        self._decoder.decode(b"".join(reversed(tail)))
        self._strip_next = self._strip_next and not num_bytes

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        skipped, token_bytes = self._skipped, self._tokenizer.token_bytes
        data = b"".join([token_bytes(token) for token in token_ids if token not in skipped])
        return self._strip(self._decoder.decode(data))

    def finish(self) -> str:
        """The rest: U+FFFD where the tokens end inside a character."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._strip_next and text:
            self._strip_next = False
            return text[1:] if text[0] == " " else text
        return text
