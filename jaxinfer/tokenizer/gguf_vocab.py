"""Tokenizers from the metadata of a GGUF file.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (tokenizer). Two models are known: "gpt2", byte-level
BPE whose words are cut by the pre-tokenizer that `tokenizer.ggml.pre` names, and "llama", SentencePiece BPE, which
has scores in place of merges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxinfer.tokenizer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from jaxinfer.tokenizer.token_bytes import SPACE_MARK, Family
from jaxinfer.tokenizer.tokenizer import Tokenizer, TokenizerSpec

if TYPE_CHECKING:
    import tokenizers

_KEY = "tokenizer.ggml."
_MODELS = ("gpt2", "llama")
# Trying every cut of a piece costs the square of its length; SentencePiece's own limit is 16 by default.
_MAX_PIECE_CHARACTERS = 512
# Chat files often name only one of the tokens that end an answer.
_END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
)


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _Vocab:
    """The checked arrays of the metadata."""

    metadata: Mapping[str, Any]
    name: str
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]

    def of_type(self, *types: TokenType) -> list[int]:
        return [token_id for token_id, kind in enumerate(self.types) if kind in types]

    def token_id(self, key: str) -> int | None:
        """One of the special ids, or None; refuses what lies outside the vocabulary."""
        value = self.metadata.get(_KEY + key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{self.name}: {_KEY}{key} is {value!r}, not a token id")
        # Converters write ids of tokens that the vocabulary lacks as its size or as 2**32 - 1.
        return value if value < len(self.tokens) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(_KEY + key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.name}: {_KEY}{key} is {value!r}, expected true or false")
        return value

    def array(self, key: str, kind: type | tuple[type, ...]) -> list[Any]:
        """A required array; `kind` is what each element must be."""
        return _array(self.metadata, key, self.name, kind)


def tokenizer_from_gguf(metadata: Mapping[str, Any], name: str = "gguf") -> Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    SentencePiece merging joins the best-scored neighbours first, the leftmost of equals. The merge list made from
    the scores does the same except where two different cuts of one piece overlap in the text ("a|aa" and "aa|a").

    Args:
        metadata: the file's key-value pairs, arrays as lists.
        name: the file's name, for messages and the repr.

    Raises:
        ValueError: a key is missing, malformed, or names something unknown.
    """
    model = metadata.get(_KEY + "model")
    if model not in _MODELS:
        raise ValueError(
            f"{name}: tokenizer.ggml.model is {model!r}; known are {', '.join(_MODELS)}. Give the model's Hugging Face "
            "folder (tokenizer.json) as tokenizer="
        )
    vocab = _read_vocab(metadata, name)
    if model == "gpt2":
        pre = _pre_tokenizer(vocab)
        backend, family, add_bos = _byte_level(vocab, pre), Family.BYTE_LEVEL, pre.add_bos
        strip_leading_space = False
    else:
        backend, family, add_bos = _sentencepiece(vocab), Family.SENTENCEPIECE, True
        strip_leading_space = vocab.flag("add_space_prefix", True)
    spec = _spec(vocab, family, add_bos, strip_leading_space)
    _add_tokens(backend, vocab)
    return Tokenizer(backend, spec, len(vocab.tokens), vocab.tokens.__getitem__)


def _array(metadata: Mapping[str, Any], key: str, name: str, kind: type | tuple[type, ...]) -> list[Any]:
    value = metadata.get(_KEY + key)
    if value is None:
        raise ValueError(f"{name}: {_KEY}{key} is missing; the file has no usable tokenizer, give one as tokenizer=")
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple) or not all(isinstance(item, kind) for item in value):
        kinds = kind.__name__ if isinstance(kind, type) else " or ".join(one.__name__ for one in kind)
        raise ValueError(f"{name}: {_KEY}{key} is not an array of {kinds}")
    return list(value)


def _read_vocab(metadata: Mapping[str, Any], name: str) -> _Vocab:
    tokens = _array(metadata, "tokens", name, str)
    if not tokens:
        raise ValueError(f"{name}: {_KEY}tokens is empty")
    types = [int(TokenType.NORMAL)] * len(tokens)
    if metadata.get(_KEY + "token_type") is not None:
        types = _array(metadata, "token_type", name, int)
    if len(types) != len(tokens):
        raise ValueError(f"{name}: {_KEY}token_type has {len(types)} entries for {len(tokens)} tokens")
    # Of tokens spelled alike the first one encodes; all of them decode.
    ids = {token: token_id for token_id, token in reversed(list(enumerate(tokens)))}
    return _Vocab(metadata, name, tokens, types, ids)


def _pre_tokenizer(vocab: _Vocab) -> PreTokenizer:
    pre = vocab.metadata.get(_KEY + "pre", "default")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"{vocab.name}: tokenizer.ggml.pre is {pre!r}; known are {', '.join(sorted(PRE_TOKENIZERS))}. Give the "
            "model's Hugging Face folder (tokenizer.json) as tokenizer="
        )
    return PRE_TOKENIZERS[pre]


def _byte_level(vocab: _Vocab, pre: PreTokenizer) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import decoders

    merges = []
    for rank, merge in enumerate(vocab.array("merges", str)):
        # The first half may itself begin with a space.
        cut = merge.find(" ", 1)
        if cut < 0 or cut == len(merge) - 1:
            raise ValueError(f"{vocab.name}: {_KEY}merges[{rank}] is {merge!r}, not two tokens with a space between")
        merges.append((merge[:cut], merge[cut + 1 :]))
    backend = tokenizers.Tokenizer(_bpe(vocab, merges, ignore_merges=pre.whole_words))
    normalizer = pre.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre.splitter()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocab: _Vocab) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import Regex, decoders, normalizers

    unknown = vocab.token_id("unknown_token_id")
    model = _bpe(
        vocab,
        _merges_from_scores(vocab),
        unk_token=None if unknown is None else vocab.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    steps: list[normalizers.Normalizer] = []
    if vocab.flag("remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if vocab.flag("add_space_prefix", True):
        steps.append(normalizers.Prepend(SPACE_MARK))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _bpe(vocab: _Vocab, merges: list[tuple[str, str]], **options: Any) -> Any:
    from tokenizers.models import BPE

    try:
        return BPE(vocab.ids, merges, **options)
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"{vocab.name}: {_KEY}merges do not fit the vocabulary: {error}") from None


def _merges_from_scores(vocab: _Vocab) -> list[tuple[str, str]]:
    """Every way to make a normal piece from two others, best score first, the lower id first among equals."""
    scores = vocab.array("scores", (int, float))
    if len(scores) != len(vocab.tokens):
        raise ValueError(f"{vocab.name}: {_KEY}scores has {len(scores)} entries for {len(vocab.tokens)} tokens")
    if any(score != score for score in scores):
        raise ValueError(f"{vocab.name}: {_KEY}scores holds NaN; the file is damaged, download it again")
    pieces = {vocab.tokens[token_id] for token_id in vocab.of_type(TokenType.NORMAL)}
    merges = []
    for token_id in sorted(vocab.of_type(TokenType.NORMAL), key=lambda token_id: -scores[token_id]):
        piece = vocab.tokens[token_id]
        if len(piece) > _MAX_PIECE_CHARACTERS:
            raise ValueError(
                f"{vocab.name}: token {token_id} has {len(piece)} characters; at most {_MAX_PIECE_CHARACTERS} are taken"
            )
        cuts = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        merges += [(left, right) for left, right in cuts if left in pieces and right in pieces]
    return merges


def _add_tokens(backend: tokenizers.Tokenizer, vocab: _Vocab) -> None:
    """Have control and user-defined tokens matched in the text itself, before it is cut into words."""
    from tokenizers import AddedToken

    def added(kinds: tuple[TokenType, ...], special: bool) -> list[AddedToken]:
        tokens = dict.fromkeys(vocab.tokens[token_id] for token_id in vocab.of_type(*kinds))
        return [AddedToken(token, special=special, normalized=False) for token in tokens if token]

    backend.add_special_tokens(added((TokenType.CONTROL, TokenType.UNKNOWN), True))
    backend.add_tokens(added((TokenType.USER_DEFINED,), False))


def _spec(vocab: _Vocab, family: Family, add_bos: bool, strip_leading_space: bool) -> TokenizerSpec:
    named = {key: vocab.token_id(f"{key}_token_id") for key in ("bos", "eos", "unknown", "padding")}
    bos, eos = named["bos"], named["eos"]
    special = {*vocab.of_type(TokenType.CONTROL, TokenType.UNKNOWN), *(one for one in (bos, eos) if one is not None)}
    prefix = _wrapping(vocab, "add_bos_token", bos, add_bos)
    suffix = _wrapping(vocab, "add_eos_token", eos, False)
    strings = {"bos_token": bos, "eos_token": eos, "unk_token": named["unknown"], "pad_token": named["padding"]}
    return TokenizerSpec(
        name=vocab.name,
        family=family,
        added_ids=frozenset({*vocab.of_type(TokenType.USER_DEFINED), *special}),
        special_ids=frozenset(special),
        bos_token_id=bos,
        eos_token_id=eos,
        eos_token_ids=_end_ids(vocab, eos),
        prefix_ids=prefix,
        suffix_ids=suffix,
        strip_leading_space=strip_leading_space,
        chat_templates=_chat_templates(vocab),
        special_tokens={key: vocab.tokens[token_id] for key, token_id in strings.items() if token_id is not None},
    )


def _wrapping(vocab: _Vocab, key: str, token_id: int | None, default: bool) -> tuple[int, ...]:
    if not vocab.flag(key, default and token_id is not None):
        return ()
    if token_id is None:
        raise ValueError(f"{vocab.name}: {_KEY}{key} is true, but the file names no such token")
    return (token_id,)


def _end_ids(vocab: _Vocab, eos: int | None) -> tuple[int, ...]:
    """Every token that ends a generation: those the file names, and well-known control tokens."""
    named = [eos, vocab.token_id("eot_token_id"), vocab.token_id("eom_token_id")]
    known = [vocab.ids.get(token) for token in _END_OF_TURN]
    controls = [one for one in known if one is not None and vocab.types[one] == TokenType.CONTROL]
    return tuple(dict.fromkeys(one for one in [*named, *controls] if one is not None))


def _chat_templates(vocab: _Vocab) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {"default" if key == prefix else key[len(prefix) + 1 :]: value
             for key, value in vocab.metadata.items() if key == prefix or key.startswith(prefix + ".")}  # fmt: skip
    for key, value in found.items():
        if not isinstance(value, str):
            raise ValueError(f"{vocab.name}: chat template {key!r} is not a string")
    return found
