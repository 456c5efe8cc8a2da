"""Stop strings: against a character-by-character reference, whatever the pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.tokenizer import StopStrings

STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Grow the text by one character at a time; stop at the longest stop string that it ends with."""
    for end in range(1, len(text) + 1):
        ended = max((stop for stop in stops if text[:end].endswith(stop)), key=len, default=None)
        if ended is not None:
            return text[: end if include else end - len(ended)], ended
    return text, None


@settings(max_examples=400, deadline=None)
@given(st.lists(st.text("abc", max_size=5), max_size=8), STOPS, st.booleans())
def test_any_pieces_give_the_reference(pieces: list[str], stops: list[str], include: bool):
    finder = StopStrings(stops, include)
    shown, matched = "", None
    for piece in pieces:
        safe, matched = finder.add(piece)
        shown += safe
    shown += finder.flush()
    assert (shown, matched) == reference("".join(pieces), stops, include)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("abc", max_size=3), max_size=8), STOPS)
def test_only_what_may_become_a_stop_string_is_held(pieces: list[str], stops: list[str]):
    finder = StopStrings(stops)
    text, shown = "", ""
    for piece in pieces:
        text += piece
        safe, matched = finder.add(piece)
        shown += safe
        if matched:
            return
        held = text[len(shown) :]
        beginnings = [text[at:] for at in range(len(text)) if any(stop.startswith(text[at:]) for stop in stops)]
        assert held == max(beginnings, key=len, default="")


def test_a_stop_string_across_tokens():
    finder = StopStrings(["\n\nUser:"])
    assert finder.add("Hi!\n") == ("Hi!", None)
    assert finder.add("\nUs") == ("", None)
    assert finder.add("er: bye") == ("", "\n\nUser:")
    assert finder.add("more") == ("", "\n\nUser:")
    assert finder.flush() == ""


def test_a_false_alarm_is_shown():
    finder = StopStrings(["<end>"])
    assert finder.add("a<en") == ("a", None)
    assert finder.add("ough") == ("<enough", None)


def test_included_stop_string_and_ties():
    assert StopStrings(["lo"], include_in_output=True).add("hello world") == ("hello", "lo")
    # Both end at the same character: the longer one takes more away.
    assert StopStrings(["lo", "ello"]).add("hello") == ("h", "ello")
    # The one complete first wins, though the other begins earlier.
    assert StopStrings(["abcd", "bc"]).add("abcd") == ("a", "bc")
    assert StopStrings([]).add("anything") == ("anything", None)


def test_refusals():
    with pytest.raises(ValueError, match="stop string is empty"):
        StopStrings(["a", ""])
    with pytest.raises(TypeError, match="list of strings"):
        StopStrings("ab")
