"""Results in Parquet: typed columns, read back by pyarrow's own reader and by ours."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxinfer.batch import inputs
from jaxinfer.batch.outputs import parquet, write_results
from jaxinfer.batch.records import Choice, Result

LONG, SHORT = math.log(0.5), math.log(0.25)  # as in conftest.py


def write(path: Path, results: list[Result], from_examples: bool = False) -> pa.Table:
    write_results("parquet", path, lambda: iter(results), from_examples=from_examples)
    return pq.read_table(path, page_checksum_verification=True)


def column(tmp_path: Path, *values, from_examples: bool = False) -> tuple[str, list]:
    results = [Result("a", i, "f", features={"x": value}) for i, value in enumerate(values)]
    found = write(tmp_path / "a", results, from_examples)["x"]
    return str(found.type).replace("element: ", "").replace("item: ", ""), found.to_pylist()


def test_every_field_comes_back(results, tmp_path):
    table = write(tmp_path / "a", results)
    found = table.to_pylist()
    assert found[0] == {
        "source_file": "dir/prompts.tfrecord", "source_index": 0, "fingerprint": "f00d", "prompt_tokens": 3,
        "completion_tokens": 3, "text": ["über", ""], "token_ids": [[5, 6], [7]],
        "finish_reason": ["stop", "length"], "stop_reason": ['"END"', None],
        "cumulative_logprob": [LONG + SHORT, SHORT], "logprobs": [[LONG, SHORT], [SHORT]],
        "top_logprobs": [
            [
                [{"id": 5, "logprob": LONG}, {"id": 9, "logprob": SHORT}],
                [{"id": 6, "logprob": -math.inf}],
            ],
            [[{"id": 7, "logprob": SHORT}]],
        ],
        "prompt_logprobs": [None, LONG, SHORT], "error": None,
        "prompt_top_logprobs": [
            None, [{"id": 5, "logprob": LONG}, {"id": 9, "logprob": SHORT}], [{"id": 6, "logprob": -math.inf}],
        ],
        "id": [7], "name": "Zoë", "raw": b"\xff\x00", "flag": True, "score": 0.5, "many": [1.0, 2.5],
        "flags": [True, False], "words": [b"a", b"\xfe"], "none": None,
        "nested": '{"a":[null,{"base64":"/w=="},"NaN"]}', "mixed": '[1,"a"]', "empty": [], "huge": str(2**70),
        "holes": "[1,null]",
    }  # fmt: skip
    assert (found[1]["stop_reason"], found[1]["logprobs"], found[1]["id"]) == (["0"], [None], None)
    assert (found[2]["error"], found[2]["text"]) == ("the record is no tf.train.Example", [])
    assert found[2]["source_file"] == r"bad\udcff.tfrecord"
    types = {name: str(table.schema.field(name).type) for name in ("source_index", "text", "token_ids", "score", "raw")}
    assert types == {
        "source_index": "int64", "text": "list<element: string>",
        "token_ids": "list<element: list<element: int32>>", "score": "double", "raw": "binary",
    }  # fmt: skip
    assert len(list(inputs.read(str(tmp_path / "a"), "parquet"))) == 3


def test_a_column_has_the_type_of_all_its_values(tmp_path):
    assert column(tmp_path, 1, 2.5, None) == ("double", [1.0, 2.5, None])
    assert column(tmp_path, 1, 2**60) == ("int64", [1, 2**60])
    assert column(tmp_path, 2**60, 0.5) == ("string", [str(2**60), "0.5"])  # no float holds it exactly
    assert column(tmp_path, b"a", "ü") == ("string", ["a", "ü"])
    assert column(tmp_path, b"\xff", "ü") == ("binary", [b"\xff", "ü".encode()])
    assert column(tmp_path, True, 1) == ("string", ["true", "1"])
    assert column(tmp_path, 1, "a") == ("string", ["1", '"a"'])
    assert column(tmp_path, [1], [], None) == ("list<int64>", [[1], [], None])
    assert column(tmp_path, [1], 1) == ("string", ["[1]", "1"])
    assert column(tmp_path, [], [[1]]) == ("string", ["[]", "[[1]]"])
    assert column(tmp_path, None) == ("string", [None])


def test_features_of_examples_are_single_where_all_are(tmp_path):
    assert column(tmp_path, [1], [2], from_examples=True) == ("int64", [1, 2])
    assert column(tmp_path, [1], [2, 3], [], from_examples=True) == ("list<int64>", [[1], [2, 3], []])
    assert column(tmp_path, [b"a"], [b"\xff"], from_examples=True) == ("binary", [b"a", b"\xff"])
    assert column(tmp_path, [b"a"], [1], from_examples=True) == ("string", ['["a"]', "[1]"])


def test_memory_is_bounded_by_groups_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "_MAX_GROUP_ROWS", 4)
    monkeypatch.setattr(parquet, "_MAX_GROUP_NUMBERS", 20)
    lengths = [1] * 6 + [15, 15, 1]
    results = [Result("a", i, "f", choices=(Choice("", [0] * n, "stop"),)) for i, n in enumerate(lengths)]
    write(tmp_path / "a", results)
    metadata = pq.ParquetFile(tmp_path / "a").metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [4, 4, 1]


def test_the_bytes_are_a_function_of_the_results(results, tmp_path):
    write(tmp_path / "a", results)
    write(tmp_path / "b", results)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_no_results_are_a_file_too(tmp_path):
    assert write(tmp_path / "a", []).num_rows == 0


def test_a_full_disk_is_an_os_error(results):
    with pytest.raises(OSError, match="No space left"):
        write_results("parquet", Path("/dev/full"), lambda: iter(results))


def test_a_missing_package_is_said_with_its_remedy(results, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "jaxinfer.batch.outputs.parquet")
    monkeypatch.delattr("jaxinfer.batch.outputs.parquet")
    with pytest.raises(ImportError, match=r"Parquet files need pyarrow: pip install 'jaxinfer\[batch\]'"):
        write_results("parquet", tmp_path / "a", lambda: iter(results))
