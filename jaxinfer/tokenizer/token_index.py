"""Which tokens of a vocabulary hold or begin with a text: what banning a word needs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache
from itertools import accumulate

from jaxinfer.tokenizer.tokenizer import Tokenizer


class TokenIndex:
    """The vocabulary's tokens in byte order. Building it takes about a microsecond a token, so build it when needed."""

    def __init__(self, tokenizer: Tokenizer):
        entries = sorted((tokenizer.token_bytes(token), token) for token in range(tokenizer.vocab_size))
        self._texts = [text for text, _ in entries]
        self._ids = [token for _, token in entries]
        self._joined = b"".join(self._texts)
        self._starts = list(accumulate(map(len, self._texts), initial=0))
        self.longest_bytes = max(map(len, self._texts), default=0)
        self.containing = lru_cache(maxsize=1024)(self._containing)

    def _containing(self, text: bytes) -> tuple[int, ...]:
        """The tokens whose bytes hold `text`, which is not empty."""
        found = []
        at = self._joined.find(text)
        while at >= 0:
            place = bisect_right(self._starts, at) - 1
            end = self._starts[place + 1]
            inside = at + len(text) <= end  # else it lies across two tokens
            if inside:
                found.append(self._ids[place])
            at = self._joined.find(text, end if inside else at + 1)
        return tuple(found)

    def starting_with(self, text: bytes) -> list[int]:
        """The tokens whose bytes begin with `text`, which is not empty."""
        first = bisect_left(self._texts, text)
        last = first
        while last < len(self._texts) and self._texts[last].startswith(text):
            last += 1
        return self._ids[first:last]
