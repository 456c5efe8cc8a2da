"""What may be asked of an output's form."""

from __future__ import annotations

import dataclasses
import json

import pytest
from jaxtyping import config

from jaxinfer import SamplingParams, StructuredOutputsParams
from jaxinfer.structured.params import MAX_TEXT_CHARS

DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]
CYCLE: dict = {}
CYCLE["properties"] = CYCLE


@pytest.fixture(autouse=True)
def unchecked():
    """Users run without the checks of types that tests run under."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object; none of them is given"),
        ({"json_object": False}, "none of them"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice is given"),
        ({"json": False, "json_object": True}, "json and json_object is given"),
        ({"regex": ""}, "regex '' must be a text"),
        ({"regex": 5}, "regex 5 must be a text"),
        ({"regex": "a" * 20_000}, "regex has 20000 characters"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"grammar": "a" * (MAX_TEXT_CHARS + 1)}, "grammar has"),
        ({"choice": "yes"}, "choice 'yes' must be a list"),
        ({"choice": []}, "must be a list"),
        ({"choice": ["a", ""]}, "choice '' must be a text"),
        ({"choice": ["a", 1]}, "choice 1 must be a text"),
        ({"choice": ["a"] * 10_001}, "choice has 10001 entries"),
        ({"choice": ["a" * 50_000] * 3}, "choice has 150000 characters"),
        ({"json": "{"}, "json is no JSON"),
        ({"json": "[1]"}, "must be a JSON schema"),
        ({"json": 5}, "must be a JSON schema"),
        ({"json": {"const": object()}}, "json is no JSON"),
        ({"json": {"const": float("nan")}}, "not JSON compliant"),
        ({"json": {"const": DEEP}}, "nested too deeply"),
        ({"json": "[" * 100_000}, "nested too deeply"),
        ({"json": CYCLE}, "Circular reference"),
        ({"json": {"const": "a" * MAX_TEXT_CHARS}}, "characters as JSON text"),
        ({"json_object": 1}, "json_object 1 must be True or False"),
        ({"json_object": True, "disable_any_whitespace": None}, "disable_any_whitespace None must be"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace is of JSON only"),
        ({"choice": ["a"], "whitespace_pattern": " "}, "whitespace_pattern is of JSON only"),
        ({"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "}, "exclude each other"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=f"structured_outputs.*{message}"):
        StructuredOutputsParams(**fields)


def test_a_schema_is_kept_as_text_in_its_order():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    params = StructuredOutputsParams(json=schema)
    assert params.json == json.dumps(schema) and params.kind == "json"
    assert params == StructuredOutputsParams(json=json.dumps(schema, indent=2)) and hash(params)
    schema["type"] = "array"  # not the request's any more
    assert json.loads(str(params.json))["type"] == "object"
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.json = None


def test_sampling_params_take_nothing_else():
    params = StructuredOutputsParams(choice=["a", "b"])
    assert SamplingParams(structured_outputs=params).structured_outputs is params and params.choice == ("a", "b")
    with pytest.raises(ValueError, match="structured_outputs=.* must be a StructuredOutputsParams"):
        SamplingParams(structured_outputs={"choice": ["a"]})
