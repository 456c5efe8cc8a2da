"""Whatever a record passes through, each format writes it, the same bytes each time, and none loses a record."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.batch import inputs
from jaxinfer.batch.outputs import RESERVED, SUFFIXES, write_results
from jaxinfer.batch.records import Choice, Result

TEXT = st.text(st.characters(codec="utf-8"), max_size=6)
NAMES = TEXT.filter(lambda name: "\0" not in name and name not in RESERVED)
INTS = st.integers(-(2**70), 2**70) | st.integers(-3, 3)
JSON = st.recursive(
    st.none() | st.booleans() | INTS | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)
VALUES = JSON | st.binary(max_size=4) | st.floats() | st.lists(st.binary(max_size=3) | TEXT, max_size=3)
# Made into Choices and Results by the test: what checks their types draws random numbers, which no strategy may.
CHOICES = st.fixed_dictionaries(
    {
        "text": TEXT,
        "token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=3),
        "finish_reason": st.sampled_from(["stop", "length"]),
        "stop_reason": st.none() | st.integers(0, 99) | TEXT,
        "cumulative_logprob": st.floats(max_value=0),
    }
)
RESULTS = st.lists(
    st.fixed_dictionaries(
        {
            "file": TEXT,
            "index": st.integers(0, 2**40),
            "choices": st.lists(CHOICES, max_size=2),
            "features": st.dictionaries(NAMES, VALUES, max_size=3),
            "error": st.none() | TEXT,
        }
    ),
    max_size=3,
)


@settings(max_examples=40)
@given(RESULTS, st.booleans())
def test_any_results_are_written_in_each_format(tmp_path_factory, drawn, from_examples):
    folder = tmp_path_factory.getbasetemp()
    results = [
        Result(**{**fields, "choices": tuple(Choice(**choice) for choice in fields["choices"])}, fingerprint="f00d")
        for fields in drawn
    ]
    for format in SUFFIXES:
        for name in ("a", "b"):
            write_results(format, folder / name, lambda: iter(results), from_examples=from_examples)
        assert (folder / "a").read_bytes() == (folder / "b").read_bytes()
        found = list(inputs.read(str(folder / "a"), format))
        assert [record.error for record in found] == [None] * len(results)
        for record, result in zip(found, results, strict=True):
            index, file = record.fields["source_index"], record.fields["source_file"]
            assert (index, file) in [(result.index, result.file), ([result.index], [result.file.encode()])]
            assert {name for name, value in result.features.items() if value is not None} <= set(record.fields)


@given(st.dictionaries(NAMES, JSON, max_size=3))
def test_json_passes_through_json_as_it_is(tmp_path_factory, features):
    path = tmp_path_factory.getbasetemp() / "a"
    write_results("jsonl", path, lambda: iter([Result("a", 0, "f", features=features)]))
    found = json.loads(path.read_text("utf-8"))
    assert {name: value for name, value in found.items() if name in features} == features


@given(st.dictionaries(NAMES, st.lists(st.binary(max_size=5)) | st.lists(st.integers(-(2**63), 2**63 - 1))))
def test_examples_pass_through_tfrecords_as_they_are(tmp_path_factory, features):
    path = tmp_path_factory.getbasetemp() / "a"
    write_results("tfrecord", path, lambda: iter([Result("a", 0, "f", features=features)]), from_examples=True)
    found = next(inputs.read(str(path), "tfrecord")).fields
    assert {name: value for name, value in found.items() if name in features} == features
