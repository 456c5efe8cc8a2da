"""Tokenizers from GGUF metadata: the golden ids, both models against independent merging, and refusals."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from jaxinfer.tokenizer import Tokenizer, tokenizer_from_gguf
from jaxinfer.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from jaxinfer.tokenizer.token_bytes import byte_alphabet
from tests.tokenizer.conftest import sentencepiece_metadata


def test_ids_and_text_equal_the_golden_ones(smollm: Tokenizer, golden: dict[str, Any]):
    for item in golden["items"]:
        assert smollm.encode(item["prompt"]) == item["prompt_ids"], item["name"]
        assert smollm.decode(item["ids"]) == item["text"], item["name"]


def test_special_tokens_of_smollm(smollm: Tokenizer):
    assert smollm.encode("<|im_start|>user<|im_end|>") == [1, 4093, 2]
    assert (smollm.bos_token_id, smollm.eos_token_id, smollm.vocab_size) == (1, 2, 49152)
    assert smollm.eos_token_ids == (2, 0)
    assert {0, 1, 2} <= smollm.special_ids
    assert smollm.decode([1, 4093, 2]) == "<|im_start|>user<|im_end|>"
    assert smollm.decode([1, 4093, 2], skip_special_tokens=True) == "user"
    assert "SmolLM2" in repr(smollm) and "49152" in repr(smollm)


@pytest.fixture(scope="module")
def encodable(smollm: Tokenizer) -> set[int]:
    """The bytes that have a token of their own: SmolLM2 lacks a few control characters."""
    return {data[0] for token in range(300) if len(data := smollm.token_bytes(token)) == 1}


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60) | st.text("aB 1\n'é日🙂\u0301", max_size=60))
def test_byte_level_round_trip(smollm: Tokenizer, encodable: set[int], text: str):
    assume(set(text.encode()) <= encodable)
    ids = smollm.encode(text)
    assert smollm.decode(ids) == text
    assert b"".join(map(smollm.token_bytes, ids)) == text.encode()


def spell(data: bytes) -> str:
    """Bytes in the byte-level alphabet."""
    return "".join({byte: chr(char) for char, byte in byte_alphabet().items()}[byte] for byte in data)


def test_byte_alphabet_is_that_of_the_tokenizers_library():
    assert sorted(chr(char) for char in byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    text = "é\x00 \x7f\xad日"
    library = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert "".join(piece for piece, _ in library) == spell(text.encode())


# The same pre-tokenizers as the families' tokenizer.json files build them, from the library's own parts.
LIBRARY_FORMS = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "falcon": [
        pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ],
}


@pytest.mark.parametrize("name", LIBRARY_FORMS)
@settings(max_examples=100, deadline=None)
@given(text=st.text("aB 12\n\t'sé日🙂.,$`²", max_size=40))
def test_patterns_agree_with_the_library(name: str, text: str):
    expected = pre_tokenizers.Sequence(LIBRARY_FORMS[name]).pre_tokenize_str(text)
    assert [piece for piece, _ in PRE_TOKENIZERS[name].splitter().pre_tokenize_str(text)] == [p for p, _ in expected]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("llama-bpe", "I'LL pay 1234\r\n\n  now", ["I", "'LL", " pay", " ", "123", "4", "\r\n\n", " ", " now"]),
        ("qwen2", "x=12 don't", ["x", "=", "1", "2", " don", "'t"]),
        ("tekken", "HelloWorld 42 a/\n", ["Hello", "World", " ", "4", "2", " a", "/\n"]),
        ("gpt-4o", "HelloWORLD's 1234", ["Hello", "WORLD's", " ", "123", "4"]),
        ("deepseek-v3", "日本 abc12345!ok", ["日本", " abc", "123", "45", "!ok"]),
        ("deepseek-coder", "a, 12\n", ["a", ",", " ", "1", "2", "\n"]),
        ("command-r", "in 1984", ["in", " ", "1", "9", "8", "4"]),
        ("default", "a$b 1234", ["a", "$", "b", " ", "123", "4"]),
    ],
)  # fmt: skip
def test_patterns_by_example(name: str, text: str, pieces: list[str]):
    found = PRE_TOKENIZERS[name].splitter().pre_tokenize_str(text)
    assert [piece for piece, _ in found] == [spell(piece.encode()) for piece in pieces]


def bpe_metadata(merges: list[str], pre: str = "gpt-2", **flags: Any) -> dict[str, Any]:
    tokens = [spell(bytes([byte])) for byte in range(256)] + [merge.replace(" ", "") for merge in merges]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "<|end|>", "<usr>"],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(tokens),
        **{f"tokenizer.ggml.{key}": value for key, value in flags.items()},
    }


def test_qwen2_composes_characters_first():
    composed = tokenizer_from_gguf(bpe_metadata([], "qwen2"))
    assert composed.decode(composed.encode("e\u0301")) == "é"
    plain = tokenizer_from_gguf(bpe_metadata([]))
    assert plain.decode(plain.encode("e\u0301")) == "e\u0301"


def test_llama3_takes_whole_words_first():
    # "abc" is in the vocabulary, but its halves never meet.
    metadata = bpe_metadata(["b c", "a b"], "llama-bpe")
    metadata["tokenizer.ggml.tokens"][257] = "abc"
    metadata["tokenizer.ggml.merges"] = ["b c"]
    assert tokenizer_from_gguf(metadata).encode("abc") == [257]
    metadata["tokenizer.ggml.pre"] = "gpt-2"
    assert tokenizer_from_gguf(metadata).encode("abc") == [ord("a"), 256]


def test_added_tokens_and_wrapping():
    tokenizer = tokenizer_from_gguf(bpe_metadata(["a b"], bos_token_id=258, add_bos_token=True, add_eos_token=True))
    assert tokenizer.encode("ab<usr>") == [258, 256, 258, 257]
    assert tokenizer.encode("ab<usr>", add_special_tokens=False) == [256, 258]
    user = tokenizer_from_gguf(bpe_metadata(["a b"]))
    assert user.decode(user.encode("ab<usr><|end|>"), skip_special_tokens=True) == "ab<usr>"
    assert user.bos_token_id is None and user.eos_token_ids == (257,)


def greedy_reference(text: str, scored: dict[str, float]) -> list[str]:
    """SentencePiece BPE written down plainly: join the best-scored neighbours, the leftmost of equals, until none."""
    pieces = list(text)
    while True:
        best = max(
            (
                (scored[left + right], -at)
                for at, (left, right) in enumerate(pairwise(pieces))
                if left + right in scored
            ),
            default=None,
        )
        if best is None:
            return [
                one for piece in pieces
                for one in ([piece] if piece in scored else [f"<0x{byte:02X}>" for byte in piece.encode()])
            ]  # fmt: skip
        at = -best[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def overlaps_itself(piece: str) -> bool:
    """Whether two cuts of the piece can overlap in a text, where a merge list cannot say which comes first."""
    return any(
        piece[:size] == piece[-size:] for size in range(1, len(piece)) if size * 2 != len(piece) and len(piece) > 2
    )


@st.composite
def scored_vocabularies(draw: st.DrawFn) -> dict[str, float]:
    words = draw(st.lists(st.text("▁abc", min_size=2, max_size=5), max_size=25, unique=True))
    pieces = ["▁", "a", "b", "c", *[word for word in words if not overlaps_itself(word)]]
    order = draw(st.permutations(range(len(pieces))))
    return {piece: -float(rank) for piece, rank in zip(pieces, order, strict=True)}


@settings(max_examples=150, deadline=None)
@given(scored_vocabularies(), st.text("abc é🙂", max_size=30), st.booleans())
def test_sentencepiece_merging_equals_the_plain_algorithm(scored: dict[str, float], text: str, prefix: bool):
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(scored, add_space_prefix=prefix))
    assume("    " not in text)
    marked = ("▁" if prefix and text else "") + text.replace(" ", "▁")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.backend.id_to_token(token) for token in ids] == greedy_reference(marked, scored)
    assert tokenizer.decode(ids) == text


def test_sentencepiece_tokens(sentencepiece: Tokenizer):
    ids = sentencepiece.encode("ab<|turn|>é🙂")
    assert ids[0] == sentencepiece.bos_token_id == 1
    assert sentencepiece.token_bytes(ids[1]) == b" ab"
    assert ids[2] == sentencepiece.encode("<|turn|>", add_special_tokens=False)[0]
    assert [sentencepiece.token_bytes(token) for token in ids[-4:]] == [b"\xf0", b"\x9f", b"\x99", b"\x82"]
    assert sentencepiece.token_text(ids[-1]) == "\ufffd"
    assert sentencepiece.decode(ids, skip_special_tokens=True) == "ab é🙂"
    # A literal byte spelling is text, and user-defined tokens match the text as it is.
    assert sentencepiece.decode(sentencepiece.encode("<0x41>")[1:]) == "<0x41>"
    assert len(sentencepiece.encode("    ", add_special_tokens=False)) == 1


def test_a_vocabulary_that_takes_spaces_as_they_are():
    """As Gemma's: no space is put before the text, runs of spaces are pieces, a turn's end is a control token."""
    metadata = sentencepiece_metadata(
        {"▁": -1.0, "▁▁": -2.0, "h": -3.0, "i": -4.0, "hi": -5.0}, add_space_prefix=False, add_bos_token=True
    )
    turns = ["<start_of_turn>", "<end_of_turn>"]
    metadata["tokenizer.ggml.tokens"] += turns
    metadata["tokenizer.ggml.token_type"] += [3, 3]
    metadata["tokenizer.ggml.scores"] += [-1000.0, -1000.0]
    metadata["tokenizer.chat_template"] = (
        "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<start_of_turn>"
        "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n{% if message['content'] is string %}"
        "{{ message['content'] | trim }}{% endif %}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    )
    tokenizer = tokenizer_from_gguf(metadata)
    start, end = (metadata["tokenizer.ggml.tokens"].index(turn) for turn in turns)
    assert tokenizer.eos_token_ids == (2, end)
    for text in ("hi", " hi", "hi    hi ", "\n\thi é日🙂", "<start_of_turn>hi<end_of_turn>"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text and tokenizer.encode(text) == [1, *ids]
    ids = tokenizer.apply_chat_template([{"role": "user", "content": " hi "}])
    assert ids[:2] == [1, start] and ids.count(end) == 1
    assert tokenizer.decode(ids) == "<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n"
    with pytest.raises(ValueError, match="roles must alternate"):
        tokenizer.apply_chat_template([{"role": "assistant", "content": "hi"}])


def test_extra_whitespace_is_removed_where_the_file_says_so():
    tokenizer = tokenizer_from_gguf(
        sentencepiece_metadata({"▁": 0.0, "a": -1.0, "b": -2.0}, remove_extra_whitespaces=True)
    )
    assert tokenizer.decode(tokenizer.encode("  a   b ", add_special_tokens=False)) == "a b"


def broken(**changes: Any) -> dict[str, Any]:
    metadata = bpe_metadata(["a b"])
    for key, value in changes.items():
        metadata[f"tokenizer.ggml.{key}"] = value
    return metadata


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, r"tokenizer\.ggml\.model is None; known are gpt2, llama"),
        (broken(model="rwkv"), "'rwkv'; known are gpt2, llama"),
        (broken(pre="martian"), "'martian'; known are .*command-r.*smollm"),
        (broken(pre=["qwen2"]), "tokenizer.ggml.pre is"),
        (broken(tokens=[]), "tokens is empty"),
        (broken(tokens=None), "tokens is missing"),
        (broken(tokens="abc"), "tokens is not an array of str"),
        (broken(tokens=[1, 2]), "tokens is not an array of str"),
        (broken(token_type=[1, 2]), "token_type has 2 entries for 259 tokens"),
        (broken(merges=None), "merges is missing"),
        (broken(merges=["ab"]), r"merges\[0\] is 'ab'"),
        (broken(merges=["a zz"]), "do not fit the vocabulary"),
        (broken(eos_token_id="x"), "eos_token_id is 'x'"),
        (broken(eos_token_id=-1), "eos_token_id is -1"),
        (broken(add_bos_token=1), "expected true or false"),
        (broken(add_bos_token=True), "names no such token"),
        ({**broken(), "tokenizer.chat_template": 3}, "is not a string"),
        (broken(model="llama"), "scores is missing"),
        (broken(model="llama", scores=[0.0]), "scores has 1 entries"),
        (broken(model="llama", scores=[float("nan")] * 259), "NaN"),
        (sentencepiece_metadata({"a" * 600: 0.0}), "has 600 characters"),
    ],
)  # fmt: skip
def test_refusals_name_the_key(metadata: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        tokenizer_from_gguf(metadata, "model.gguf")


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["model", "pre", "tokens", "merges", "token_type", "eos_token_id", "add_bos_token", "scores"]),
    st.none() | st.integers() | st.text(max_size=3) | st.lists(st.text(max_size=3) | st.integers(), max_size=4),
    st.booleans(),
)
def test_malformed_metadata_raises_nothing_but_value_errors(key: str, value: Any, llama: bool):
    metadata = sentencepiece_metadata({"a": 0.0, "ab": 1.0, "b": 2.0}) if llama else broken()
    try:
        tokenizer = tokenizer_from_gguf({**metadata, f"tokenizer.ggml.{key}": value})
    except ValueError:
        return
    assert isinstance(tokenizer.decode(tokenizer.encode("ab c")), str)


def test_ids_outside_the_vocabulary(smollm: Tokenizer):
    assert smollm.decode([49152, 60000]) == "" and smollm.token_text(49152) == ""
    with pytest.raises(ValueError, match="-1 is negative"):
        smollm.decode([-1])
    with pytest.raises((TypeError, ValueError)):
        smollm.decode([1.5])  # type: ignore[list-item]


def test_text_must_be_text(smollm: Tokenizer):
    with pytest.raises(TypeError, match="str"):
        smollm.encode(b"x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lone surrogate at position 1"):
        smollm.encode("a\ud800")
