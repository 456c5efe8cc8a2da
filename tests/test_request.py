"""Fields of a request as callers give them: plain values inside, or an error that names the field."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxinfer.request import SamplingParams, plain_ids


def test_whatever_counts_as_a_number_becomes_a_plain_one():
    params = SamplingParams(temperature=1, top_k=5, logit_bias={3: 1})
    assert type(params.temperature) is float and params.logit_bias == {3: 1.0}
    assert plain_ids("ids", np.array([1, 2])) == [1, 2]
    assert {type(token) for token in plain_ids("ids", np.array([1, 2]))} == {int}
    assert plain_ids("ids", iter([5])) == [5]


@pytest.mark.parametrize("bad", [[None], [True], [1.0], [-1], [10], "12", b"12", 5, None, {1: 2}, [[1]]])
def test_what_is_no_list_of_token_ids_is_refused_by_name(bad):
    with pytest.raises(ValueError, match="^ids"):
        plain_ids("ids", bad, 10)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 10**400), ("temperature", 10**400), ("seed", 10**400), ("temperature", math.inf), ("top_k", True),
        ("repetition_penalty", 1e-46), ("stop", ["a", ""]), ("bad_words", ["\ud800"]), ("best_of", 0),
        ("stop_token_ids", [-1]), ("logit_bias", {-1: 1}), ("logit_bias", {1: math.nan}), ("prompt_logprobs", 21),
        ("logits_processors", {"scale": {"f": math.nan}}), ("typical_p", 0),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_processors_by_name_alone_keep_their_defaults():
    assert SamplingParams(logits_processors=["scale"]).processor_params == {"scale": {}}
    assert SamplingParams().processor_params == {}
