"""The pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`.

A GGUF file has only the name; what it means is fixed by the tokenizer of the model family it was made for. Each is a
list of patterns applied one after another: a pattern cuts every piece into its matches and what lies between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import normalizers, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%(tail)s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%(tail)s|"
    rf"\p{{N}}{{%(digits)s}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r" ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)


@dataclass(frozen=True)
class PreTokenizer:
    """`patterns` in order; `nfc` for families that compose characters first; `whole_words` for those that look a
    piece up before merging; `add_bos` is what they do when the file does not say."""

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False

    def splitter(self) -> pre_tokenizers.PreTokenizer:
        """The patterns and the byte-level alphabet, as one pre-tokenizer of the `tokenizers` library."""
        from tokenizers import Regex, pre_tokenizers

        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        from tokenizers import normalizers

        return normalizers.NFC() if self.nfc else None


_DIGITS_THEN_GPT2 = PreTokenizer((_DIGIT, _GPT2))
_LLAMA3 = PreTokenizer((_CL100K % "1,3",), whole_words=True, add_bos=True)
_QWEN2 = PreTokenizer((_CL100K % "1",), nfc=True)
_O200K = PreTokenizer((_CASED % {"tail": _CONTRACTION + "?", "digits": "1,3"},))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    # What files written before the key existed mean.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), PreTokenizer((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone"), _DIGITS_THEN_GPT2),
    "command-r": PreTokenizer((_DIGIT, _GPT2), nfc=True),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_CL100K % "1,3",))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": PreTokenizer((_CASED % {"tail": "", "digits": "1"},), whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _O200K),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
}
