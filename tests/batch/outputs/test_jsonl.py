"""Results as JSON lines: always the same shape, bytes and odd floats as JSON can hold them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from jaxinfer.batch.outputs import write_results
from jaxinfer.batch.records import Result

LONG, SHORT = math.log(0.5), math.log(0.25)  # as in conftest.py


def write(path: Path, results: list[Result], from_examples: bool = False) -> list[dict]:
    write_results("jsonl", path, lambda: iter(results), from_examples=from_examples)
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_bytes().splitlines()]


def test_every_field_comes_back(results, tmp_path):
    found = write(tmp_path / "a", results)
    assert found[0] == {
        "source_file": "dir/prompts.tfrecord",
        "source_index": 0,
        "fingerprint": "f00d",
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "choices": [
            {
                "text": "über", "token_ids": [5, 6], "finish_reason": "stop", "stop_reason": "END",
                "cumulative_logprob": LONG + SHORT, "logprobs": [LONG, SHORT],
                "top_logprobs": [[[5, LONG], [9, SHORT]], [[6, "-Infinity"]]],
            },
            {
                "text": "", "token_ids": [7], "finish_reason": "length", "stop_reason": None,
                "cumulative_logprob": SHORT, "logprobs": [SHORT], "top_logprobs": [[[7, SHORT]]],
            },
        ],
        "prompt_logprobs": [None, LONG, SHORT],
        "prompt_top_logprobs": [None, [[5, LONG], [9, SHORT]], [[6, "-Infinity"]]],
        "error": None,
        **results[0].features,
        "raw": {"base64": "/wA="},
        "words": ["a", {"base64": "/g=="}],
        "nested": {"a": [None, {"base64": "/w=="}, "NaN"]},
    }  # fmt: skip
    assert found[2]["error"] == "the record is no tf.train.Example" and found[2]["choices"] == []
    assert [found[2]["source_file"], list(found[2])] == ["bad\udcff.tfrecord", list(found[1])]
    assert "über".encode() in (tmp_path / "a").read_bytes()


def test_a_feature_of_one_value_is_that_value(tmp_path):
    features = {"id": [1], "many": [1, 2], "name": [b"Zo\xc3\xab"], "none": []}
    results = [Result("a", 0, "f", features=features)]
    found = write(tmp_path / "a", results, from_examples=True)[0]
    assert {name: found[name] for name in features} == {"id": 1, "many": [1, 2], "name": "Zoë", "none": []}
    assert write(tmp_path / "a", results)[0]["id"] == [1]


def test_the_bytes_are_a_function_of_the_results(results, tmp_path):
    write(tmp_path / "a", results)
    write(tmp_path / "b", results)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_what_is_no_format_is_refused(results, tmp_path):
    with pytest.raises(ValueError, match="'csv' is no format of outputs: give one of tfrecord, jsonl, parquet"):
        write_results("csv", tmp_path / "a", lambda: iter(results))
    assert not (tmp_path / "a").exists()


def test_a_full_disk_is_an_os_error(results):
    with pytest.raises(OSError, match="No space left"):
        write_results("jsonl", Path("/dev/full"), lambda: iter(results))
