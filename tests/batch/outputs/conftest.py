"""Results that have everything a result can have."""

from __future__ import annotations

import math

import pytest

from jaxinfer.batch.records import Choice, Result

LONG, SHORT = math.log(0.5), math.log(0.25)
TOP = [[(5, LONG), (9, SHORT)], [(6, -math.inf)]]
CHOICES = (
    Choice("über", [5, 6], "stop", "END", LONG + SHORT, [LONG, SHORT], TOP),
    Choice("", [7], "length", None, SHORT, [SHORT], [[(7, SHORT)]]),
)
FEATURES = {
    "id": [7], "name": "Zoë", "raw": b"\xff\x00", "flag": True, "score": 0.5, "many": [1, 2.5], "flags": [True, False],
    "words": ["a", b"\xfe"], "none": None, "nested": {"a": [None, b"\xff", math.nan]}, "mixed": [1, "a"], "empty": [],
    "huge": 2**70, "holes": [1, None],
}  # fmt: skip
RESULTS = [
    Result("dir/prompts.tfrecord", 0, "f00d", 3, 3, CHOICES, [None, LONG, SHORT], [None, *TOP], FEATURES),
    Result("dir/prompts.tfrecord", 1, "f00d", 1, 1, (Choice("x", [2**31 - 1], "stop", 0, -1.0),)),
    Result("bad\udcff.tfrecord", 2, "f00d", error="the record is no tf.train.Example"),
]


@pytest.fixture
def results() -> list[Result]:
    return RESULTS
