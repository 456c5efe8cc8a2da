"""Which tokens a sequence may sample next: allowed ids, banned words, a form, no end before `min_tokens`. Host code."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from jaxinfer.request import SamplingParams
from jaxinfer.sampling.inputs import pack_mask
from jaxinfer.structured.grammar import Matcher
from jaxinfer.tokenizer.token_index import TokenIndex

_NO_TOKEN, _BAD_FORM = "no token is allowed", "structured_outputs"


def is_of_options(reason: str) -> bool:
    """Whether a sequence that failed for this reason failed by what its request asks: by `TokenMask.why_empty`."""
    return reason.startswith((f"{_NO_TOKEN}: ", f"{_BAD_FORM}: "))


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
            # No token is longer than the longest, so the text must hold nearly all of a long word.
            shortest = max(1, len(word) - self._index.longest_bytes)
            for length in range(shortest, min(len(word), len(self._tail) + 1)):
                if self._tail.endswith(word[:length]):
                    found.update(self._index.starting_with(word[length:]))
        return found.difference(self._skipped)


class TokenMask:
    """The packed mask of one sequence's next token.

    `end_ids` end the sequence. With a `matcher`, those of them in `ignored_ids` are allowed only where its form leaves
    nothing else.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        end_ids: Collection[int],
        bad_words: BadWords | None = None,
        matcher: Matcher | None = None,
        ignored_ids: Collection[int] = (),
    ):
        self._params = params
        self._bad_words = bad_words
        self._matcher = matcher
        self._min_tokens = params.min_tokens if end_ids else 0
        self._vocab_size = vocab_size
        # A model's vocabulary may be smaller or larger than its tokenizer's.
        self._ends = [token for token in end_ids if token < vocab_size]
        self._not_ignored = self._without(ignored_ids) if ignored_ids else None
        always = [token for token in bad_words.always if token < vocab_size] if bad_words else ()
        self._late = None
        if bad_words is not None or params.allowed_token_ids is not None:
            self._late = pack_mask(vocab_size, allowed_ids=params.allowed_token_ids, banned_ids=always)
        self._early = self._late
        if self._min_tokens:
            banned = [*always, *self._ends]
            self._early = pack_mask(vocab_size, allowed_ids=params.allowed_token_ids, banned_ids=banned)

    def _without(self, banned: Collection[int]) -> np.ndarray:
        return pack_mask(self._vocab_size, banned_ids=[token for token in banned if token < self._vocab_size])

    def add(self, token: int, token_bytes: bytes) -> None:
        """Follow the output by one token, which does not end it."""
        if self._bad_words is not None:
            self._bad_words.add(token, token_bytes)
        if self._matcher is not None:
            self._matcher.add(token)

    @property
    def may_end(self) -> bool:
        """Whether a token that ends a text does so here; a grammar may ask for one elsewhere, by its name."""
        return self._matcher is None or self._matcher.accepting

    @property
    def complete(self) -> bool:
        """Whether the output has the form asked for, and nothing can follow."""
        return self._matcher is not None and self._matcher.complete

    @property
    def error(self) -> str:
        """Why the output can no longer be followed, else empty."""
        return self._matcher.error if self._matcher is not None else ""

    def words(self, num_output_tokens: int) -> np.ndarray | None:
        """The mask, uint32 [ceil(V / 32)], for the token after so many; None when every token is allowed."""
        mask = self._early if num_output_tokens < self._min_tokens else self._late
        banned = self._bad_words.next_ids() if self._bad_words is not None else ()
        if mask is not None and banned:
            mask = mask & self._without(banned)
        if self._matcher is None:
            return mask
        form = self._form(self._matcher)
        return form if mask is None else mask & form

    def _form(self, matcher: Matcher) -> np.ndarray:
        form = matcher.mask()
        if self._not_ignored is not None and (text := form & self._not_ignored).any():
            return text
        return form

    def why_empty(self, num_output_tokens: int) -> str:
        """Why the mask for the token after so many allows none: the options that do not go together."""
        masks: dict[str, np.ndarray] = {}
        if self._matcher is not None:
            masks["structured_outputs"] = self._form(self._matcher)
        if self.error:
            return f"{_BAD_FORM}: {self.error}"
        if num_output_tokens < self._min_tokens:
            masks[f"min_tokens={self._min_tokens}"] = self._without(self._ends)
        if self._params.allowed_token_ids is not None:
            masks["allowed_token_ids"] = pack_mask(self._vocab_size, allowed_ids=self._params.allowed_token_ids)
        if self._bad_words is not None:
            masks["bad_words"] = self._without([*self._bad_words.always, *self._bad_words.next_ids()])
        needed = [name for name in masks if _leave_some([masks[other] for other in masks if other != name])]
        names = needed or list(masks)
        together = " and ".join(names) + (" together leave none" if len(names) > 1 else " leaves none")
        return f"{_NO_TOKEN}: {together} after {num_output_tokens} tokens"


def _leave_some(masks: list[np.ndarray]) -> bool:
    return not masks or bool(np.bitwise_and.reduce(masks).any())
