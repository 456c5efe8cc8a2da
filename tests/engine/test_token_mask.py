"""The mask of the next token against brute force over the whole vocabulary."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.token_mask import BadWords, TokenMask
from jaxinfer.request import SamplingParams
from jaxinfer.sampling.inputs import unpack_mask
from jaxinfer.tokenizer.token_index import TokenIndex
from jaxinfer.tokenizer.tokenizer import Tokenizer

TEXTS = [b"a", b"b", b"ab", b"ba", b"aab", b"bb", b"c", b"abc", b"", b"\xc3", b"\xa9", b"x\xc3", b"<end>", b"c<"]
SPECIAL = 12


class Vocabulary(Tokenizer):
    """Only what an index asks of a tokenizer."""

    def __init__(self) -> None:
        self.vocab_size = len(TEXTS)

    def token_bytes(self, id: int) -> bytes:
        return TEXTS[id]


words = st.lists(st.text("abcé<", min_size=1, max_size=9), min_size=1, max_size=3)


@given(words, st.lists(st.integers(0, len(TEXTS) - 1), max_size=12), st.booleans())
def test_banned_tokens_are_those_that_complete_a_word(bad, output, skip_special):
    skipped = frozenset({SPECIAL} if skip_special else ())
    followed = BadWords(bad, TokenIndex(Vocabulary()), skipped)
    mask = TokenMask(SamplingParams(bad_words=bad), len(TEXTS), (), followed)
    text = b""
    for count, token in enumerate([*output, None]):
        allowed = unpack_mask(mask.words(count), len(TEXTS))
        for other, more in enumerate(TEXTS):
            shown = b"" if other in skipped else more
            completes = any(
                (text + shown).find(word.encode(), max(0, len(text) - len(word.encode()) + 1)) >= 0 for word in bad
            )
            assert allowed[other] == (not completes), (bad, text, more)
        if token is None or not allowed[token]:
            break
        mask.add(token, TEXTS[token])
        text += b"" if token in skipped else TEXTS[token]
    assert not any(word.encode() in text for word in bad)


def test_allowed_ids_and_early_ends_combine():
    params = SamplingParams(allowed_token_ids=[1, 2, 3], min_tokens=2, max_tokens=9)
    mask = TokenMask(params, 40, [2, 39])
    for count, expected in ((0, [1, 3]), (1, [1, 3]), (2, [1, 2, 3])):
        assert np.flatnonzero(unpack_mask(mask.words(count), 40)).tolist() == expected


def test_without_options_there_is_no_mask():
    mask = TokenMask(SamplingParams(), 40, [2])
    assert mask.words(0) is None
    early = TokenMask(SamplingParams(min_tokens=1), 40, [2])
    assert early.words(0) is not None and early.words(1) is None


@pytest.mark.parametrize("bad", ["Paris", [""], ["a", ""]])
def test_bad_words_must_be_a_list_of_texts(bad):
    with pytest.raises(ValueError, match="bad_words"):
        SamplingParams(bad_words=bad)


def test_a_long_bad_word_costs_no_more_than_the_text_it_is_looked_for_in():
    followed = BadWords(["a" * 1_000_000], TokenIndex(Vocabulary()), frozenset())
    begin_s = time.process_time()
    for _ in range(100):
        followed.add(0, b"a")
        assert not followed.next_ids()
    assert time.process_time() - begin_s < 1
