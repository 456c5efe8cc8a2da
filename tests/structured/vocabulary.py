"""Vocabularies whose every byte has a token, and walks through a grammar by chance."""

from __future__ import annotations

import random

import numpy as np

from jaxinfer.structured.grammar import Grammar
from jaxinfer.tokenizer import Tokenizer, tokenizer_from_gguf

NUM_FIXED = 259  # <unk> <s> </s> and the bytes
END = 2
PIECES = ["a", "b", "ab", "ba", "aab", '{"', '":', "},", "true", "12", "▁▁", "é"]


def vocabulary(pieces: list[str] = PIECES) -> Tokenizer:
    fixed = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*fixed, *pieces],
        "tokenizer.ggml.scores": [0.0] * len(fixed) + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return tokenizer_from_gguf(metadata, "sp")


def allowed_ids(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(grammar: Grammar, tokenizer: Tokenizer, chance: random.Random, max_tokens: int = 400) -> tuple[bytes, bool]:
    """An output by chance, which closes what it can close, and whether it came to its end."""
    matcher, text = grammar.matcher(), b""
    closing = [token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) in (b'"', b"}", b"]")]
    for _ in range(max_tokens):
        if matcher.complete:
            return text, True
        allowed = allowed_ids(matcher.mask())
        assert allowed and not matcher.error, (text, matcher.error)
        ends = [token for token in closing if token in allowed]
        if END in allowed and chance.random() < 0.5:
            return text, True
        token = chance.choice(ends if ends and chance.random() < 0.5 else [each for each in allowed if each != END])
        matcher.add(token)
        text += tokenizer.token_bytes(token)
    return text, False
