"""Reasoning split from the answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.serve.reasoning import ReasoningSplitter, begins_in_reasoning, choose_reasoning_parser
from jaxinfer.serve.reply import ReplyReader
from jaxinfer.serve.tools.formats import make_tool_call_parser


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        (False, "<think>\nWell, 2.\n\n</think>\n\nTwo. ", "Well, 2.", "Two. "),
        (False, "\n <think></think>x", "", "x"),
        (False, "<think> so", "so", ""),
        (False, "plain </think> text", "", "plain </think> text"),
        (False, " x <think>y</think>", "", " x <think>y</think>"),
        (False, "<thi", "", "<thi"),
        (False, " ", "", " "),
        (True, "Well.\n</think>\nTwo.", "Well.", "Two."),
        (True, "\n<think>Well</think>Two</think>", "Well", "Two</think>"),
        (True, "Well </thi", "Well </thi", ""),
        (True, "<think", "<think", ""),
    ],
)
def test_split(opened: bool, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        reader = ReplyReader(ReasoningSplitter(opened))
        for piece in pieces:
            reader.add(piece)
        reader.finish()
        assert (reader.reply().reasoning, reader.reply().content) == (reasoning, content)


PARTS = st.sampled_from(["<think>", "</think>", "<thi", "</", "nk>", " ", "\n", "a", "<tool_call>"])
CALL = st.just('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')


@given(st.booleans(), st.lists(PARTS | CALL | st.text(max_size=3), max_size=12).map("".join), st.integers(1, 5))
def test_pieces_change_nothing(opened: bool, text: str, size: int) -> None:
    def reader() -> ReplyReader:
        return ReplyReader(ReasoningSplitter(opened), make_tool_call_parser("hermes", ["f"], lambda: "id"))

    whole, pieced = reader().read(text), reader()
    for start in range(0, len(text), size):
        pieced.add(text[start : start + size])
    pieced.finish()
    assert pieced.reply() == whole
    if "</think>" not in text and opened:
        assert not whole.content and not whole.tool_calls


def test_calls_inside_reasoning_are_none() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    reader = ReplyReader(ReasoningSplitter(), make_tool_call_parser("hermes", ["f"], lambda: "id"))
    reply = reader.read(f"<think>I could {call}</think>{call}")
    assert reply.reasoning == f"I could {call}" and len(reply.tool_calls) == 1
    assert reply.as_openai() == {
        "role": "assistant",
        "content": None,
        "reasoning_content": f"I could {call}",
        "tool_calls": [{"id": "id", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }


def test_where_an_answer_begins() -> None:
    assert begins_in_reasoning("think", "<|assistant|><think>\n")
    assert not begins_in_reasoning("qwen3", "<|assistant|>")
    assert not begins_in_reasoning("qwen3", "<think>\n\n</think>\n\n")
    assert begins_in_reasoning("deepseek_r1", "<|assistant|>")
    assert not begins_in_reasoning("deepseek_r1", "<think>\n\n</think>\n\n")
    with pytest.raises(ValueError, match="reasoning_parser='o1': the parsers are think"):
        begins_in_reasoning("o1", "")
    assert choose_reasoning_parser(None) is choose_reasoning_parser("{{ messages }}") is None
    assert choose_reasoning_parser("{{ '</think>' }}") == "think"
