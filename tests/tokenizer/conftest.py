"""Vocabularies that several tokenizer tests share."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.checkpoint.gguf import GGUFCheckpoint
from jaxinfer.tokenizer import Tokenizer, tokenizer_from_gguf


@pytest.fixture(scope="session")
def smollm_metadata(smollm2_path: Path) -> dict[str, Any]:
    with GGUFCheckpoint(smollm2_path) as checkpoint:
        return checkpoint.config


@pytest.fixture(scope="session")
def smollm(smollm_metadata: dict[str, Any]) -> Tokenizer:
    return tokenizer_from_gguf(smollm_metadata, "SmolLM2")


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    return json.loads((Path(__file__).parents[1] / "golden" / "smollm2_f32.json").read_text(encoding="utf-8"))


def sentencepiece_metadata(scored: dict[str, float], **flags: Any) -> dict[str, Any]:
    """Metadata of a "llama" vocabulary: <unk> <s> </s>, 256 bytes, two added tokens, then the scored pieces."""
    fixed = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|turn|>", "    "]
    types = [2, 3, 3, *[6] * 256, 3, 4, *[1] * len(scored)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*fixed, *scored],
        "tokenizer.ggml.scores": [*[0.0] * len(fixed), *scored.values()],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in flags.items()},
    }


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    """A small vocabulary with words, a multi-byte character, and bytes for everything else."""
    pieces = ["▁", "a", "b", "c", "é", "▁a", "▁b", "ab", "▁ab", "bc", "▁▁", "é", "c▁"]
    return tokenizer_from_gguf(sentencepiece_metadata({piece: -float(rank) for rank, piece in enumerate(pieces)}), "sp")
