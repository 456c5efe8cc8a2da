"""Results in TFRecords: every field comes back, by our reader and by TensorFlow's own."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.batch import inputs
from jaxinfer.batch.outputs import RESERVED, write_results
from jaxinfer.batch.records import Result

LONG, SHORT = math.log(0.5), math.log(0.25)  # as in conftest.py


def single(value: float) -> float:
    return float(np.float32(value))


EXPECTED: list[dict[str, list[Any]]] = [
    {
        "source_file": [b"dir/prompts.tfrecord"], "source_index": [0], "fingerprint": [b"f00d"],
        "prompt_tokens": [3], "completion_tokens": [3], "text": ["über".encode(), b""], "token_ids": [5, 6, 7],
        "num_tokens": [2, 1], "finish_reason": [b"stop", b"length"], "stop_reason": [b'"END"', b"null"],
        "cumulative_logprob": [single(LONG + SHORT), single(SHORT)],
        "logprobs": [single(LONG), single(SHORT), single(SHORT)],
        "prompt_logprobs": [math.nan, single(LONG), single(SHORT)],
        "prompt_top_logprobs": [f'[null,[[5,{LONG}],[9,{SHORT}]],[[6,"-Infinity"]]]'.encode()],
        "id": [7], "name": ["Zoë".encode()], "raw": [b"\xff\x00"], "flag": [1], "score": [0.5], "many": [1.0, 2.5],
        "flags": [1, 0], "words": [b"a", b"\xfe"], "nested": [b'{"a":[null,{"base64":"/w=="},"NaN"]}'],
        "mixed": [b'[1,"a"]'], "empty": [], "huge": [str(2**70).encode()], "holes": [b"[1,null]"],
    },
    {
        "source_file": [b"dir/prompts.tfrecord"], "source_index": [1], "fingerprint": [b"f00d"], "prompt_tokens": [1],
        "completion_tokens": [1], "text": [b"x"], "token_ids": [2**31 - 1], "num_tokens": [1],
        "finish_reason": [b"stop"], "stop_reason": [b"0"], "cumulative_logprob": [-1.0],
    },
    {
        "source_file": [rb"bad\udcff.tfrecord"], "source_index": [2], "fingerprint": [b"f00d"], "prompt_tokens": [0],
        "completion_tokens": [0], "error": [b"the record is no tf.train.Example"],
    },
]  # fmt: skip
TOP_JSON = [[[[5, LONG], [9, SHORT]], [[6, "-Infinity"]]], [[[7, SHORT]]]]


def write(path: Path, results: list[Result]) -> bytes:
    write_results("tfrecord", path, lambda: iter(results))
    return path.read_bytes()


def check(found: list[dict[str, list[Any]]]) -> None:
    assert [json.loads(each) for each in found[0].pop("top_logprobs")] == TOP_JSON
    for features, expected in zip(found, EXPECTED, strict=True):
        assert sorted(features) == sorted(expected)
        for name, values in features.items():
            np.testing.assert_equal(values, expected[name], err_msg=name)


def test_every_field_comes_back(results, tmp_path):
    write(tmp_path / "a", results)
    found = [record.fields for record in inputs.read(str(tmp_path / "a"), "tfrecord")]
    check(found)
    assert {name for features in found for name in features} - set(results[0].features) <= RESERVED


def test_tensorflow_reads_every_field(results, tmp_path):
    tf = pytest.importorskip("tensorflow")
    write(tmp_path / "a", results)
    found = []
    for data in tf.data.TFRecordDataset([str(tmp_path / "a")]).as_numpy_iterator():
        features = tf.train.Example.FromString(data).features.feature
        kinds = {name: feature.WhichOneof("kind") for name, feature in features.items()}
        found.append({name: list(getattr(features[name], kind).value) if kind else [] for name, kind in kinds.items()})
    check(found)


def test_the_bytes_are_a_function_of_the_results(results, tmp_path):
    """Over what was there before, and the same in every version of Python and protobuf."""
    (tmp_path / "b").write_bytes(b"x" * 10_000)
    assert write(tmp_path / "a", results) == write(tmp_path / "b", results)
    assert hashlib.sha256(write(tmp_path / "a", results)).hexdigest()[:16] == "9890a4377a509433"


def test_a_full_disk_is_an_os_error(results):
    with pytest.raises(OSError, match="No space left"):
        write_results("tfrecord", Path("/dev/full"), lambda: iter(results))
