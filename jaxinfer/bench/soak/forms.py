"""Forms that a soak asks for, and whether a text has them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SCHEMAS: dict[str, dict[str, Any]] = {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 4},
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two digits.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"enum": [1, 2, 3]}, "b": {"enum": [1, 2, 3]}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


@dataclass(frozen=True)
class Form:
    """The fields that ask for it, and what tells it."""

    fields: dict[str, Any]
    holds: Callable[[str], bool]


def _is_person(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"name", "age"}:
        return False
    name, age = value["name"], value["age"]
    return isinstance(name, str) and len(name) <= 8 and type(age) is int and 0 <= age <= 150


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 4 and all(type(each) is int and 0 <= each <= 9 for each in value)


def _json(check: Callable[[Any], bool]) -> Callable[[str], bool]:
    def holds(text: str) -> bool:
        try:
            return check(json.loads(text))
        except ValueError:
            return False

    return holds


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def _json_schema(name: str) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": SCHEMAS[name]}}}


FORMS = {
    "person": Form(_json_schema("person"), _json(_is_person)),
    "numbers": Form({"structured_outputs": {"json": SCHEMAS["numbers"]}}, _json(_are_numbers)),
    "object": Form({"response_format": {"type": "json_object"}}, _json(lambda value: isinstance(value, dict))),
    "date": Form({"guided_regex": r"\d{4}-\d{2}-\d{2}"}, _matches(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")),
    "words": Form({"structured_outputs": {"regex": "[a-z]{2,5}( [a-z]{2,5}){1,3}"}}, _matches(r"[a-z ]+")),
    "choice": Form({"guided_choice": ["yes", "no", "neither of them"]}, _matches("yes|no|neither of them")),
    "grammar": Form({"guided_grammar": 'start: "a" | "(" start ")"'}, lambda text: _is_nested(text)),
}


def _is_nested(text: str) -> bool:
    depth = len(text) // 2
    return text == "(" * depth + "a" + ")" * depth


def has_form(name: str, text: str) -> bool:
    """Whether a text has a form of `FORMS`, or one that is named `regex:PATTERN`."""
    if name.startswith("regex:"):
        return _matches(name.removeprefix("regex:"))(text)
    return FORMS[name].holds(text)
