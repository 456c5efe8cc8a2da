"""The tokenizer of a model that came without one: prompts are token ids, and outputs have no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from jaxinfer.tokenizer.token_bytes import Family
from jaxinfer.tokenizer.tokenizer import Tokenizer, TokenizerSpec

_REMEDY = "this model came without a tokenizer: pass tokenizer=, or prompts as {'prompt_token_ids': […]}"


class _BlankTokenizer(Tokenizer):
    def encode(self, text: str, add_special_tokens: bool = True) -> NoReturn:
        raise ValueError(_REMEDY)

    def apply_chat_template(self, messages: Any, **options: Any) -> NoReturn:
        raise ValueError(_REMEDY)


def blank_tokenizer(vocab_size: int, eos_token_ids: Sequence[int] = ()) -> Tokenizer:
    """A tokenizer whose ids decode to nothing; `encode` and `apply_chat_template` raise `ValueError`."""
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({}, unk_token=""))
    eos = tuple(eos_token_ids)
    spec = TokenizerSpec(
        "(none)",
        Family.BYTE_LEVEL,
        frozenset(),
        frozenset(eos),
        eos_token_id=eos[0] if eos else None,
        eos_token_ids=eos,
    )
    return _BlankTokenizer(backend, spec, vocab_size, lambda _: None)
