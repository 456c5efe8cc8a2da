"""The form that an output must have, as requests write it: in the spellings of the OpenAI API and of vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxinfer.structured.params import StructuredOutputsParams

FORM_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
_SCHEMA = (dict, bool, str)
_KINDS: dict[str, tuple[type, ...]] = {
    "json": _SCHEMA,
    "regex": (str,),
    "choice": (list, tuple),
    "grammar": (str,),
    "json_object": (bool,),
    "disable_any_whitespace": (bool,),
    "whitespace_pattern": (str,),
}
_WORDS = {dict: "an object", bool: "true or false", str: "text", list: "a list of texts"}


class FormError(ValueError):
    """What a field asks for is no form, or cannot stand beside another."""

    def __init__(self, field: str, why: str):
        super().__init__(f"{field}: {why}")
        self.field = field
        self.why = why


def form_of(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """What fields ask for, of `FORM_FIELDS` as JSON has them; None where any text may come. Null is absent.

    Raises:
        FormError: two of the fields ask, or one of them for what cannot be had.
    """
    asking = [name for name in FORM_FIELDS if given.get(name) is not None]
    if "response_format" in asking and _format_type(given["response_format"]) == "text":
        asking.remove("response_format")
    if len(asking) > 1:
        raise FormError(asking[1], f"{asking[0]} says what form the output has; give one of them")
    if not asking:
        return None
    (field,) = asking
    value = given[field]
    if field == "response_format":
        return _of_kinds(field, _of_response_format(value))
    return _of_kinds(field, value if field == "structured_outputs" else {field.removeprefix("guided_"): value})


def reason(error: ValueError) -> str | None:
    """What an error says of `SamplingParams.structured_outputs`, without its name; None of other errors."""
    found = re.match(r"structured_outputs(?:\.\w+)?:? *", str(error))
    return None if found is None else str(error)[found.end() :]


def _format_type(value: Any) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise FormError("response_format", f"{value!r:.60} must have a type: text, json_object or json_schema")
    _check_keys("response_format", value, ("type", "json_schema"))
    if kind != "json_schema" and value.get("json_schema") is not None:
        raise FormError("response_format", "json_schema belongs to type 'json_schema'")
    return kind


def _of_response_format(value: Any) -> dict[str, Any]:
    if _format_type(value) == "json_object":
        return {"json_object": True}
    schema = value.get("json_schema")
    if not isinstance(schema, Mapping):
        raise FormError("response_format", "type 'json_schema' needs json_schema: {name, schema}")
    _check_keys("response_format", schema, ("name", "schema", "description", "strict"))
    return {"json": {} if schema.get("schema") is None else schema["schema"]}


def _check_keys(field: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    if unknown := [name for name in value if name not in known]:
        raise FormError(field, f"{unknown[0]!r:.60} is unknown; there are {', '.join(known)}")


def _of_kinds(field: str, given: Any) -> StructuredOutputsParams:
    """The parameters of their fields, whose types are checked first."""
    if not isinstance(given, Mapping):
        raise FormError(field, f'{given!r:.60} must be an object such as {{"regex": "[0-9]+"}}')
    _check_keys(field, given, tuple(_KINDS))
    for name, value in given.items():
        kinds = _KINDS[name]
        texts = not isinstance(value, list | tuple) or all(isinstance(each, str) for each in value)
        if value is not None and not (isinstance(value, kinds) and texts):
            words = " or ".join(_WORDS[kind] for kind in kinds if kind in _WORDS)
            raise FormError(field, f"{name}: {value!r:.60} must be {words}")
    try:
        return StructuredOutputsParams(**{name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        raise FormError(field, reason(error) or str(error)) from None
