"""A tokenizer's vocabulary as llguidance sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from jaxinfer.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance


class _Wrapper:
    """What `LLTokenizer` asks of a tokenizer. Special tokens stand for no text there."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special_ids: list[int]):
        self.eos_token_id = special_ids[-1]
        self.tokens = tokens
        self.special_token_ids = special_ids
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return [each for each in self._tokenizer.encode(text, add_special_tokens=False) if each < len(self.tokens)]


def llguidance_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> llguidance.LLTokenizer:
    """The trie over a model's tokens, of which the tokenizer may have fewer or more, and one id after them.

    That one stands for the end where the tokenizer names none. Building takes about 5 µs a token.

    Raises:
        ValueError: a tokenizer whose tokens have no text.
    """
    from llguidance import LLTokenizer

    tokens = [*(tokenizer.token_bytes(token) for token in range(vocab_size)), b""]
    if not any(tokens):
        raise ValueError("structured_outputs: this model came without a tokenizer, so its tokens have no text")
    ends = [token for token in tokenizer.eos_token_ids if token < vocab_size] or [vocab_size]
    special = {token for token in (*tokenizer.special_ids, *ends) if token < vocab_size} | {vocab_size}
    wrapper = cast("llguidance.TokenizerWrapper", _Wrapper(tokenizer, tokens, sorted(special)))  # it asks no more
    return LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=ends)
