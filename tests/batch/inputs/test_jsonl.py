"""JSONL files: what is a line, what is none, and that every damage is a record with an error."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.batch import inputs


def records(path, start=(0, 0), count=None):
    return list(inputs.read(str(path), "jsonl", start, count))


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zlib.compress])
def test_lines_are_counted_without_blank_ones_and_have_their_offset(tmp_path, compress):
    path, lines = tmp_path / "a", ['\ufeff{"a": 1}', "", "  \t", '{"a": "ü"}\r', "[1]", '{"a": null}']
    path.write_bytes(compress("\n".join(lines).encode()))
    found = records(path)
    assert [record.fields for record in found] == [{"a": 1}, {"a": "ü"}, {}, {"a": None}]
    assert [record.index for record in found] == [0, 1, 2, 3]
    assert [record.offset for record in found] == [0, 17, 30, 34]
    assert found[2].error == "the line is no JSON object, but a list"
    scanned = inputs.scan(str(path), "jsonl", 3)
    assert (scanned.num_records, scanned.starts) == (4, [(0, 0), (3, 34)])
    assert scanned.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert records(path, (3, 34)) == found[3:]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "the line is no JSON: "),
        (b'{"a": NaN}', "NaN is no number of JSON"),
        (b'{"a": -Infinity}', "-Infinity is no number of JSON"),
        (b'{"a": "\xff"}', "the line is no UTF-8 (its byte 7, invalid start byte)"),
        ('{"a": 1}'.encode("utf-16-le"), "the line is no JSON: "),
        (b'"text"', "no JSON object, but a string"),
        (b"null", "no JSON object, but null"),
        (b'{"a": {"b\\u0000c": 1}}', "the field's name 'b\\x00c' has a NUL: rename the field"),
        (b'{"a": ["\\ud83d"]}', "half of a surrogate pair"),
        (b'{"\\uDE00": 1}', "half of a surrogate pair"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "nests deeper than 64 levels"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nests deeper than 64 levels"),
        (b'{"a": ' + b"9" * 5000 + b"}", "the line is no JSON: "),
        (b'\xef\xbb\xbf{"a": 1}', "the line is no JSON: "),
    ],
)
def test_a_line_that_is_no_object_is_an_error_and_the_others_are_read(tmp_path, line, words):
    path = tmp_path / "a"
    path.write_bytes(b'{"id": 0}\n' + line + b'\n{"id": 2}')
    found = records(path)
    assert [found[0].fields, found[1].fields, found[2].fields] == [{"id": 0}, {}, {"id": 2}]
    assert words in str(found[1].error)
    assert found[2].offset == 10 + len(line) + 1


def test_what_looks_odd_and_is_not_is_read(tmp_path):
    path, value = tmp_path / "a", {"a": ["😀", "\0", [[1]] * 70]}
    path.write_text(json.dumps(value))
    assert records(path)[0].fields == value


def test_a_line_longer_than_one_may_be_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxinfer.batch.inputs.jsonl.MAX_RECORD_BYTES", 20)
    path, long = tmp_path / "a", b'{"a": "' + b"x" * 600_000 + b'"}\n'
    path.write_bytes(b'{"a": 123456789012}\n' + long + b'{"id": 2}\n' + long[:-1])
    found = records(path)
    assert (found[0].fields, found[2].fields) == ({"a": 123456789012}, {"id": 2})
    assert found[1].error == f"the line has {len(long)} bytes, more than one may have (20)"
    assert found[2].offset == 20 + len(long)
    assert f"{len(long) - 1} bytes" in str(found[3].error)


def test_compressed_data_that_breaks_off_is_a_record(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 100)[:-9])
    found = records(path)
    assert found[0].fields == {"a": 1} and "GZIP data ends early" in str(found[-1].error)
    assert inputs.scan(str(path), "jsonl", 1).num_records == len(found)


WHOLE = (
    b'{"prompt": "one", "n": [1, 2.5, null]}\n{"prompt": "\\u00fc\\ud83d\\ude00"}\n\n{"messages": [{"role": "user"}]}\n'
)


@given(
    st.sampled_from([WHOLE, gzip.compress(WHOLE)]),
    st.lists(st.tuples(st.integers(0, len(WHOLE)), st.binary(max_size=6), st.integers(0, 9)), max_size=3),
    st.integers(1, 3),
)
def test_damage_of_any_kind_ends_in_records(tmp_path_factory, stored, changes, every):
    for at, new, num_bytes in changes:
        stored = stored[:at] + new + stored[at + num_bytes :]
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(stored)
    found, scanned = records(path), inputs.scan(str(path), "jsonl", every)
    assert [record.index for record in found] == list(range(scanned.num_records))
    assert scanned.starts == [(record.index, record.offset) for record in found[::every]]
    for start in scanned.starts:
        assert records(path, start, every) == found[start[0] : start[0] + every]
