"""Results as the journal holds them."""

from __future__ import annotations

import json
import math

from jaxinfer.batch.records import Choice, Result


def test_a_result_comes_back_from_its_json():
    top = [[(5, -0.5), (9, -math.inf)], [(6, -1.0)]]
    choices = (Choice("é", [5, 6], "stop", "END", -1.5, [-0.5, -1.0], top), Choice("", [], "length"))
    features = {"id": [7], "raw": [b"\xff\x00", b""], "nested": {"a": [None, b"x", {"b": 1.5}]}, "text": "\0bytes"}
    result = Result("f", 3, "f00d", 2, 2, choices, [None, -2.0], [None, [(1, -0.5)]], features)
    again = Result.from_json(json.loads(json.dumps(result.as_json())))
    assert again == result and type(again.choices[0].top_logprobs[0][0]) is tuple
    failed = Result("f", 4, "f00d", error="f, record 4: no")
    assert Result.from_json(json.loads(json.dumps(failed.as_json()))) == failed
