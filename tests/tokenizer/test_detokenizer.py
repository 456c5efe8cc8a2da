"""Streaming text: pieces equal the whole decode and never split a character."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.tokenizer import IncrementalDetokenizer, Tokenizer

SETTINGS = settings(max_examples=150, deadline=None)


def pieces_of(detokenizer: IncrementalDetokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    pieces, at = [], 0
    for size in [*sizes, len(ids)]:
        pieces.append(detokenizer.add(ids[at : at + size]))
        at += size
    return [*pieces, detokenizer.finish()]


def test_golden_text_token_by_token(smollm: Tokenizer, golden: dict[str, Any]):
    for item in golden["items"]:
        detokenizer = IncrementalDetokenizer(smollm, skip_special_tokens=False)
        pieces = [detokenizer.add([token]) for token in item["ids"]]
        assert "".join(pieces) + detokenizer.finish() == item["text"]


@SETTINGS
@given(st.data(), st.booleans(), st.lists(st.integers(0, 4), max_size=20))
def test_random_ids_equal_the_whole_decode(smollm: Tokenizer, data: st.DataObject, skip: bool, sizes: list[int]):
    # Ids 3 to 250 are mostly single bytes: broken UTF-8 of every kind.
    ids = data.draw(st.lists(st.integers(0, 260) | st.integers(0, 49151), max_size=40))
    pieces = pieces_of(IncrementalDetokenizer(smollm, skip_special_tokens=skip), ids, sizes)
    assert "".join(pieces) == smollm.decode(ids, skip_special_tokens=skip)


@SETTINGS
@given(st.lists(st.integers(0, 273), max_size=30), st.booleans(), st.lists(st.integers(0, 4), max_size=20))
def test_sentencepiece_ids_equal_the_whole_decode(
    sentencepiece: Tokenizer, ids: list[int], skip: bool, sizes: list[int]
):
    pieces = pieces_of(IncrementalDetokenizer(sentencepiece, skip_special_tokens=skip), ids, sizes)
    assert "".join(pieces) == sentencepiece.decode(ids, skip_special_tokens=skip)


@SETTINGS
@given(st.text("aé日🙂\u0301", max_size=20))
def test_whole_characters_only(smollm: Tokenizer, text: str):
    detokenizer = IncrementalDetokenizer(smollm)
    pieces = [detokenizer.add([token]) for token in smollm.encode(text)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text and detokenizer.finish() == ""


def test_an_unfinished_character_waits_for_finish(smollm: Tokenizer):
    ids = smollm.encode("🙂")
    assert len(ids) > 1
    detokenizer = IncrementalDetokenizer(smollm)
    assert [detokenizer.add([token]) for token in ids[:-1]] == [""] * (len(ids) - 1)
    assert detokenizer.finish() == "\ufffd" == smollm.decode(ids[:-1])


@SETTINGS
@given(st.text("ab é日", min_size=1, max_size=12), st.integers(0, 12))
def test_primed_output_continues_the_prompt(sentencepiece: Tokenizer, text: str, cut: int):
    ids = sentencepiece.encode(text)
    prompt, output = ids[:cut], ids[cut:]
    detokenizer = IncrementalDetokenizer(sentencepiece)
    detokenizer.prime(prompt)
    shown = "".join(detokenizer.add([token]) for token in output) + detokenizer.finish()
    before = sentencepiece.decode(prompt, skip_special_tokens=True).rstrip("\ufffd")
    whole = sentencepiece.decode(ids, skip_special_tokens=True)
    # A character begun in the prompt is shown whole, so the prompt's part is what lies before it.
    assert whole == before + shown


def test_no_spaces_come_between_special_tokens(smollm: Tokenizer):
    detokenizer = IncrementalDetokenizer(smollm, skip_special_tokens=False)
    assert detokenizer.add([1, 2, 2]) == "<|im_start|><|im_end|><|im_end|>"
