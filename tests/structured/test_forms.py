"""Forms as requests write them."""

from __future__ import annotations

import pytest

from jaxinfer.structured.forms import FormError, form_of, reason
from jaxinfer.structured.params import StructuredOutputsParams

SCHEMA = {"type": "object"}
JSON = StructuredOutputsParams(json=SCHEMA)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"response_format": None, "guided_json": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "text"}, "guided_json": SCHEMA}, JSON),
        ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, JSON),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": None, "strict": True}}},
            StructuredOutputsParams(json={}),
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, JSON),
        ({"guided_json": '{"type": "object"}'}, JSON),
        ({"guided_json": False}, StructuredOutputsParams(json=False)),
        ({"guided_regex": "a"}, StructuredOutputsParams(regex="a")),
        ({"guided_choice": ["a", "b"]}, StructuredOutputsParams(choice=["a", "b"])),
        ({"guided_grammar": "root ::= x"}, StructuredOutputsParams(grammar="root ::= x")),
    ],
)
def test_fields_ask_for_forms(given, expected):
    assert form_of(given) == expected


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "give one of them"),
        ({"response_format": "json"}, "response_format", "must have a type"),
        ({"response_format": {"type": "xml"}}, "response_format", "must have a type"),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format", "belongs to"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format", "'x' is unknown"),
        ({"response_format": {"type": "json_schema", "json_schema": {"x": 1}}}, "response_format", "'x' is unknown"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs", "'regx' is unknown"),
        ({"structured_outputs": {"": 1}}, "structured_outputs", "'' is unknown"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": [1]}, "structured_outputs", "must be an object"),
        ({"guided_regex": 5}, "guided_regex", "must be text"),
        ({"guided_choice": "ab"}, "guided_choice", "must be a list of texts"),
        ({"guided_choice": [1]}, "guided_choice", "must be a list of texts"),
        ({"guided_json": [1]}, "guided_json", "must be an object or true or false or text"),
        ({"guided_json": "{"}, "guided_json", "is no JSON"),
        ({"guided_regex": "a" * 20_000}, "guided_regex", "is the most"),
    ],
)
def test_what_is_no_form_is_told_of_the_field_that_asks(given, field, words):
    with pytest.raises(FormError) as caught:
        form_of(given)
    assert caught.value.field == field and words in str(caught.value)
    assert str(caught.value).startswith(f"{field}: ") and "structured_outputs." not in str(caught.value)


def test_reasons_are_of_forms_only():
    assert reason(ValueError("structured_outputs.json: is odd")) == "is odd"
    assert reason(ValueError("temperature=-1 must be more")) is None
