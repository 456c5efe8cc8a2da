"""Which tokens a sequence may sample next, on the host: allowed ids, banned words, no end before `min_tokens`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from jaxinfer.request import SamplingParams
from jaxinfer.sampling.inputs import pack_mask
from jaxinfer.tokenizer.token_index import TokenIndex


class BadWords:
    """Follows an output and tells which tokens would complete one of `words` in its text, in whatever tokens.

    A word ends up in the text in two ways: a token holds it, which bans that token for good, or a token continues what
    the text ends with, which bans it now.
    """

    def __init__(self, words: Sequence[str], index: TokenIndex, skipped_ids: Collection[int]):
        self._words = [word.encode() for word in words]
        self._index = index
        self._skipped = skipped_ids  # they leave no text
        self._longest = max(len(word) for word in self._words) - 1
        self._tail = b""
        self.always = {token for word in self._words for token in index.containing(word)} - set(skipped_ids)

    def add(self, token: int, token_bytes: bytes) -> None:
        """Follow the output by one token."""
        if token not in self._skipped and self._longest:
            self._tail = (self._tail + token_bytes)[-self._longest :]

    def next_ids(self) -> set[int]:
        """The tokens that would complete a word now, besides `always`."""
        found: set[int] = set()
        for word in self._words:
            for length in range(1, len(word)):
                if self._tail.endswith(word[:length]):
                    found.update(self._index.starting_with(word[length:]))
        return found.difference(self._skipped)


class TokenMask:
    """The packed mask of one sequence's next token."""

    def __init__(
        self, params: SamplingParams, vocab_size: int, end_ids: Collection[int], bad_words: BadWords | None = None
    ):
        self._bad_words = bad_words
        self._min_tokens = params.min_tokens if end_ids else 0
        always = bad_words.always if bad_words else ()
        # A model's vocabulary may be smaller or larger than its tokenizer's.
        banned = [token for token in always if token < vocab_size]
        self._late = None
        if bad_words is not None or params.allowed_token_ids is not None:
            self._late = pack_mask(vocab_size, allowed_ids=params.allowed_token_ids, banned_ids=banned)
        self._early = self._late
        if self._min_tokens:
            ends = [token for token in end_ids if token < vocab_size]
            self._early = pack_mask(vocab_size, allowed_ids=params.allowed_token_ids, banned_ids=[*banned, *ends])
        self._vocab_size = vocab_size

    def add(self, token: int, token_bytes: bytes) -> None:
        """Follow the output by one token."""
        if self._bad_words is not None:
            self._bad_words.add(token, token_bytes)

    def words(self, num_output_tokens: int) -> np.ndarray | None:
        """The mask, uint32 [ceil(V / 32)], for the token after so many; None when every token is allowed."""
        mask = self._early if num_output_tokens < self._min_tokens else self._late
        banned = self._bad_words.next_ids() if self._bad_words is not None else ()
        if mask is None or not banned:
            return mask
        return mask & pack_mask(self._vocab_size, banned_ids=[token for token in banned if token < self._vocab_size])
