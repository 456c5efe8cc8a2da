"""Events come out the same however their bytes are cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.bench.serve.client import StreamError, take
from jaxinfer.bench.serve.records import Record
from jaxinfer.bench.serve.sse import LineTooLongError, SseParser

STREAM = ': ping\r\n\r\ndata: {"a": "é"}\r\n\r\nevent: x\nid: 4\ndata:one\ndata:  two\n\ndata: [DONE]\n\n'.encode()
EVENTS = ['{"a": "é"}'.encode(), b"one\n two", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_any_cut_gives_the_same_events(cuts):
    parser, found = SseParser(), []
    edges = [0, *sorted(cuts), len(STREAM)]
    for begin, end in zip(edges, edges[1:], strict=False):
        found += parser.feed(STREAM[begin:end])
    assert found == EVENTS and not parser.unfinished


@given(st.integers(1, len(STREAM) - 2))
def test_what_is_cut_off_is_seen(end):
    parser = SseParser()
    found = parser.feed(STREAM[:end])
    assert found == EVENTS[: len(found)]
    if STREAM[:end].endswith((b"}", b"one", b"[DONE]", b"da")):
        assert parser.unfinished


def test_a_line_has_a_bound():
    parser = SseParser(max_line_bytes=10)
    assert parser.feed(b"data: 1234") == []
    with pytest.raises(LineTooLongError, match="more than 10 bytes"):
        parser.feed(b"5")
    with pytest.raises(LineTooLongError):
        SseParser(max_line_bytes=10).feed(b"data: 123456\n")


NAMES = ["choices", "usage", "delta", "text", "content", "logprobs", "tokens", "finish_reason", "error"]
NAMES += ["completion_tokens", "tool_calls", "function", "arguments", "prompt_tokens_details"]
scalars = st.none() | st.booleans() | st.integers() | st.text()
events = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(NAMES), inner))


@given(events)
def test_no_event_breaks_the_client(content):
    texts: list[str] = []
    record = Record(0, 0, 0.0)
    try:
        take(json.dumps(content).encode(), record, texts, 1.0)
    except StreamError:
        return
    assert "".join(texts) or not record.text_s
    assert record.finish_reason is None or isinstance(record.finish_reason, str)
    assert all(value is None or isinstance(value, int) for value in (record.output_tokens, record.prompt_tokens))


@given(st.binary())
def test_no_bytes_break_the_client(data):
    try:
        take(data, Record(0, 0, 0.0), [], 1.0)
    except StreamError as error:
        assert str(error)


def test_reasoning_and_tool_calls_are_text():
    record, texts = Record(0, 0, 0.0), []
    take(b'{"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}', record, texts, 1.0)
    assert record.first_s is None
    take(b'{"choices": [{"delta": {"reasoning_content": "hm"}}]}', record, texts, 2.0)
    take(b'{"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "{}"}}]}}]}', record, texts, 3.0)
    take(b'{"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}', record, texts, 4.0)
    assert "".join(texts) == "hm{}" and record.text_s == [2.0, 3.0]
    assert (record.first_s, record.last_s, record.finish_reason) == (2.0, 4.0, "tool_calls")
