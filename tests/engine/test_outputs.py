"""What a sequence shows of its tokens: stops before min_tokens, and text that continues the prompt."""

from __future__ import annotations

import pytest

from jaxinfer.engine.outputs import OutputState
from jaxinfer.request import SamplingParams, SequenceState
from jaxinfer.tokenizer import Tokenizer, tokenizer_from_gguf
from jaxinfer.tokenizer.token_index import TokenIndex


def spelled(pieces: list[str]) -> Tokenizer:
    """A SentencePiece vocabulary: <unk> <s> </s>, 256 bytes, then the pieces."""
    fixed = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*fixed, *pieces],
        "tokenizer.ggml.scores": [0.0] * len(fixed) + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return tokenizer_from_gguf(metadata, "sp")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return spelled(["▁is", "▁Paris", "a", "b", ".", "c", "d"])


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
