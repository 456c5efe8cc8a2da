"""What a sequence shows of its tokens: stops before min_tokens, and text that continues the prompt."""

from __future__ import annotations

import pytest

from jaxinfer.engine.outputs import OutputState
from jaxinfer.request import SamplingParams, SequenceState
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.tokenizer.token_index import TokenIndex
from tests.structured.vocabulary import vocabulary


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return vocabulary(["▁is", "▁Paris", "a", "b", ".", "c", "d"])


def follow(tokenizer: Tokenizer, prompt: list[int], ids: list[int], **fields) -> OutputState:
    sequence = SequenceState("0", 0, prompt, SamplingParams(max_tokens=20, **fields), len(prompt) + 20)
    state = OutputState(sequence, tokenizer, tokenizer.vocab_size, lambda: TokenIndex(tokenizer))
    for token in ids:
        if state.output.finish_reason is None:
            state.add(token)
    return state


def ids_of(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    backend = tokenizer.backend
    return [backend.token_to_id(piece) for piece in pieces]


def test_a_stop_string_before_min_tokens_is_text(tokenizer):
    ids = ids_of(tokenizer, "a", "b", ".", "c", "d", "a", ".", "b")
    state = follow(tokenizer, [1], ids, stop=["."], min_tokens=6)
    assert (state.output.text, state.output.finish_reason, state.output.stop_reason) == ("ab.cda", "stop", ".")
    assert len(state.output.token_ids) == 7
    assert follow(tokenizer, [1], ids, stop=["."]).output.text == "ab"


def test_text_continues_the_prompt(tokenizer):
    (is_, paris) = ids_of(tokenizer, "▁is", "▁Paris")
    assert follow(tokenizer, [1, is_], [paris]).output.text == " Paris"
    assert follow(tokenizer, [1], [paris]).output.text == "Paris"
