"""Lines of requests: what is one, what is not, and where."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.jobs.records import Line, Record, RecordError, parse, read_lines

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def test_lines_are_numbered_and_blank_ones_left_out(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"\xef\xbb\xbffirst\n\n  \r\n" + b"y" * 11 + b"\n" + b"x" * 10 + b"\n" + b"z" * 200_000 + b"\nend")
    found = [(line.number, line.content) for line in read_lines(path, 10)]
    assert found == [(1, b"first\n"), (4, None), (5, b"x" * 10 + b"\n"), (6, None), (7, b"end")]


def test_a_request_is_read():
    assert parse(Line(1, json.dumps(GOOD).encode())) == Record("a", "/v1/completions", {"prompt": "x"})


@pytest.mark.parametrize(
    ("content", "param", "words"),
    [
        (None, None, "longer"),
        (b"{", None, "not JSON"),
        (b"\xff\xfe{}", None, "not JSON"),
        (b"[" * 100_000, None, "not JSON"),
        (b"[]", None, "JSON object"),
        ({"custom_id": 5}, "custom_id", "string"),
        ({"custom_id": ""}, "custom_id", "from 1"),
        ({"custom_id": "x" * 513}, "custom_id", "512"),
        ({"method": "GET"}, "method", "POST"),
        ({"method": None}, "method", "string"),
        ({"body": []}, "body", "object"),
        ({"url": 7}, "url", "string"),
        ({"extra": 1}, "extra", "no field"),
    ],
)
def test_what_is_no_request_is_refused_with_its_number(content, param, words):
    if isinstance(content, dict):
        content = json.dumps({**GOOD, **content}).encode()
    with pytest.raises(RecordError, match=f"line 7.*{words}") as error:
        parse(Line(7, content))
    assert error.value.param == param


@given(st.binary(max_size=40))
def test_any_bytes_are_a_request_or_an_error(content):
    with pytest.raises(RecordError):
        parse(Line(1, content))
