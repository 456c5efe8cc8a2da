"""Parquet files: values as JSON has them, any start, and damage that costs what it must and no more."""

from __future__ import annotations

import datetime
import decimal
import hashlib
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.batch import inputs

NUM_ROWS = 700


def records(path, start=(0, None), count=None):
    return list(inputs.read(str(path), "parquet", start, count))


def written(path, group_rows=300, checksums=True):
    prompts = [f"prompt {row} " * 5 for row in range(NUM_ROWS)]
    table = pa.table({"prompt": prompts, "id": list(range(NUM_ROWS))})
    options = {"use_dictionary": False, "compression": "none", "write_page_checksum": checksums}
    pq.write_table(table, path, row_group_size=group_rows, data_page_size=1000, **options)
    return path


def test_rows_are_records(tmp_path):
    path = written(tmp_path / "a")
    found = records(path)
    assert [record.fields["id"] for record in found] == [record.index for record in found] == list(range(NUM_ROWS))
    assert found[3].fields == {"prompt": "prompt 3 " * 5, "id": 3}
    scanned = inputs.scan(str(path), "parquet", 250)
    assert (scanned.num_records, scanned.starts) == (NUM_ROWS, [(0, None), (250, None), (500, None)])
    assert (scanned.num_bytes, scanned.sha256) == (
        path.stat().st_size,
        hashlib.sha256(path.read_bytes()).hexdigest(),
    )
    for start in (1, 256, 299, 300, 650, 699):
        assert records(path, (start, None), 70) == found[start : start + 70]


def test_values_are_what_json_has(tmp_path):
    when = datetime.datetime(2024, 1, 2, 3, 4, 5)
    table = pa.table(
        {
            "nanoseconds": pa.array([1], pa.timestamp("ns")),
            "price": [decimal.Decimal("1.50")],
            "date": [when.date()],
            "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
            "struct": [{"when": when, "none": None, "list": [b"\xff"]}],
            "half": pa.array(np.array([1.5], np.float16)),
            "word": pa.array(["x"]).dictionary_encode(),
            "none": [None],
        }
    )
    pq.write_table(table, tmp_path / "a")
    assert records(tmp_path / "a")[0].fields == {
        "nanoseconds": "1970-01-01 00:00:00.000000001",
        "price": "1.50",
        "date": "2024-01-02",
        "map": [["a", 1]],
        "struct": {"when": "2024-01-02 03:04:05", "none": None, "list": [b"\xff"]},
        "half": 1.5,
        "word": "x",
        "none": None,
    }


def test_a_file_that_is_no_parquet_is_one_record(tmp_path):
    path = tmp_path / "a"
    for content in (b"", b"PAR1", b"x" * 100, written(tmp_path / "b").read_bytes()[:-20]):
        path.write_bytes(content)
        scanned = inputs.scan(str(path), "parquet", 10)
        assert (scanned.num_records, scanned.starts) == (1, [(0, None)])
        assert "is no Parquet file, or its footer is damaged" in str(records(path)[0].error)


def test_damaged_pages_cost_the_rest_of_their_row_group(tmp_path):
    path = written(tmp_path / "a")
    content = bytearray(path.read_bytes())
    at = content.index(b"prompt 350 ")
    content[at : at + 6] = b"PROMPT"
    path.write_bytes(content)
    found = records(path)
    assert [record.index for record in found] == list(range(NUM_ROWS))
    bad = [record.index for record in found if record.error is not None]
    assert bad and bad == list(range(bad[0], 600)) and 300 <= bad[0] <= 350
    assert "row group 1 of the file cannot be read from here on: " in str(found[350].error)
    for start in (310, 350, 500, 620):
        assert records(path, (start, None)) == found[start:]


def test_a_value_that_is_no_text_costs_its_row(tmp_path):
    path = written(tmp_path / "a", checksums=False)
    content = bytearray(path.read_bytes())
    content[content.index(b"prompt 350 ")] = 0xFF
    path.write_bytes(content)
    found = records(path)
    assert [record.index for record in found if record.error is not None] == [350]
    assert "a value that cannot be read: 'utf-8' codec" in str(found[350].error)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (pa.table([[1], [2]], ["a", "a"]), "two columns of the file have the same name"),
        (pa.table({"a": [{"b\0c": 1}]}), "a column's name has a NUL"),
    ],
)
def test_names_that_cannot_be_told_apart_are_refused(tmp_path, table, words):
    pq.write_table(table, tmp_path / "a")
    assert words in str(records(tmp_path / "a")[0].error)
    assert inputs.scan(str(tmp_path / "a"), "parquet", 1).num_records == 1


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=4)), min_size=1, max_size=2), st.booleans())
def test_damage_of_any_kind_ends_in_records(tmp_path_factory, changes, at_the_end):
    folder = tmp_path_factory.getbasetemp()
    content = bytearray(written(folder / "whole", group_rows=400).read_bytes())
    for where, new in changes:
        at = len(content) - 1 - int(where * 600) if at_the_end else int(where * len(content))
        content[at : at + len(new)] = new
    (folder / "damaged").write_bytes(content)
    scanned = inputs.scan(str(folder / "damaged"), "parquet", 300)
    found = records(folder / "damaged")
    assert [record.index for record in found] == list(range(scanned.num_records))


def test_pyarrow_loads_where_it_is_used():
    code = "import sys, jaxinfer.batch.inputs, jaxinfer.batch.outputs; print({'pyarrow', 'fsspec'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
