"""What of a JSON schema the grammar can honour: each keyword is enforced, of no effect on what is valid, or refused."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

MAX_DEPTH = 60  # of the JSON text: llguidance stops reading at 128
MAX_SUBSCHEMAS = 5000
MAX_PROPERTIES = 1000  # of one object: the time to compile them grows with the square of those not required
MAX_INTEGER = 2**53  # llguidance computes bounds in 64-bit numbers
MAX_DIVISOR = 10_000  # without its factors 2 and 5

Path = tuple[str | int, ...]

# Those of drafts 3 to 2020-12, and OpenAPI's, that say what is valid and that no grammar here expresses.
# fmt: off
_UNSUPPORTED = {
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "uniqueItems", "contains",
    "minContains", "maxContains", "unevaluatedProperties", "unevaluatedItems", "propertyNames", "$dynamicRef",
    "$recursiveRef", "divisibleBy", "disallow", "extends", "nullable", "x-guidance",
}
_SUPPORTED = {
    "$ref", "$defs", "definitions", "$id", "$anchor", "$schema", "type", "enum", "const", "allOf", "anyOf", "oneOf",
    "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties", "items",
    "prefixItems", "additionalItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
}
# fmt: on
_IGNORED_WHEN: Mapping[str, Any] = {"uniqueItems": False, "nullable": False}  # values that say nothing
_REMEDIES = {"nullable": 'use "type": [..., "null"]', "x-guidance": "use the other fields of structured_outputs"}
_BY_LOWER = {keyword.lower(): keyword for keyword in _SUPPORTED | _UNSUPPORTED}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LAST_BLAMED = ("type", "properties", "items", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("additionalProperties", "additionalItems", "items")


def check_schema(schema: Mapping[str, Any] | bool) -> None:
    """Raise `ValueError` with the keyword and its path for what a grammar cannot honour, or a schema out of bounds.

    Keywords that no draft knows are annotations, as JSON Schema has it, unless they differ from a known one only in
    upper and lower case.
    """
    _check_depth(schema)
    divisors = _Divisors()
    for count, (path, each) in enumerate(subschemas(schema)):
        if count >= MAX_SUBSCHEMAS:
            raise ValueError(f"structured_outputs.json has more than {MAX_SUBSCHEMAS} subschemas")
        if isinstance(each, Mapping):
            for keyword, value in each.items():
                _check_keyword(path, keyword, value)
                if keyword == "multipleOf":
                    divisors.add(path, value)


def _check_keyword(path: Path, keyword: str, value: Any) -> None:
    if keyword in _UNSUPPORTED and not (keyword in _IGNORED_WHEN and value is _IGNORED_WHEN[keyword]):
        raise _error(path, keyword, f"is not supported{_remedy(keyword)}")
    known = _BY_LOWER.get(keyword.lower(), keyword)
    if known != keyword:
        raise _error(path, keyword, f"is no keyword; did you mean {known}?")
    if keyword == "$ref" and not (isinstance(value, str) and value.startswith("#")):
        raise _error(path, keyword, f"{value!r:.60} is not inside this schema; only '#…' can be followed")
    if keyword == "properties" and isinstance(value, Mapping) and len(value) > MAX_PROPERTIES:
        raise _error(path, keyword, f"has {len(value)} entries; {MAX_PROPERTIES} is the most")
    if keyword in _BOUNDS and isinstance(value, int | float) and abs(value) > MAX_INTEGER:
        raise _error(path, keyword, f"is beyond ±{MAX_INTEGER}, which cannot be enforced exactly")


class _Divisors:
    """Keeps the automata small that tell multiples: one has a state for each remainder.

    Factors of ten cost nothing, as the last digits tell; schemas that are joined are divisible by both divisors.
    """

    def __init__(self) -> None:
        self._common, self._sum = 1, 0

    def add(self, path: Path, value: Any) -> None:
        if not isinstance(value, int | float) or not value > 0:
            return  # llguidance refuses it
        numerator = int("".join(map(str, Decimal(str(value)).as_tuple().digits)))
        for factor in (2, 5):
            while numerator % factor == 0:
                numerator //= factor
        self._common = math.lcm(self._common, numerator)
        self._sum += numerator
        if self._common > MAX_DIVISOR or self._sum > 10 * MAX_DIVISOR:
            raise _error(
                path, "multipleOf", f"is too much with the others: their least common multiple is over {MAX_DIVISOR}"
            )


def _remedy(keyword: str) -> str:
    return f"; {_REMEDIES[keyword]}" if keyword in _REMEDIES else ""


def _error(path: Path, keyword: str | None, why: str) -> ValueError:
    shown = pointer(path)
    return ValueError(f"structured_outputs.json: {shown if keyword is None else f'{keyword!r} at {shown}'} {why}")


def pointer(path: Path) -> str:
    """A path as a JSON pointer in a URI fragment (RFC 6901)."""
    return "#" + "".join("/" + str(part).replace("~", "~0").replace("/", "~1")[:80] for part in path)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for each in level for item in _children(each)]
        if not level:
            return
    raise ValueError(f"structured_outputs.json is nested more than {MAX_DEPTH} levels deep")


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def without_no_ops(schema: Any) -> Any:
    """The schema without keywords whose values say nothing, which llguidance does not know."""
    if not isinstance(schema, Mapping):
        return schema
    kept = {key: value for key, value in schema.items() if key not in _IGNORED_WHEN}
    for key in kept:
        value = kept[key]
        if key in _MAPS and isinstance(value, Mapping):
            kept[key] = {name: without_no_ops(each) for name, each in value.items()}
        elif key in _LISTS and isinstance(value, list):
            kept[key] = [without_no_ops(each) for each in value]
        elif key in _SINGLE:
            kept[key] = without_no_ops(value)
    return kept


def subschemas(schema: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The schema and all inside it, outer ones first."""
    yield path, schema
    for step, each in _inner(schema):
        yield from subschemas(each, (*path, *step))


def _inner(schema: Any) -> Iterator[tuple[Path, Any]]:
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, Mapping):
            yield from (((keyword, name), each) for name, each in value.items())
        elif keyword in _LISTS and isinstance(value, list):
            yield from (((keyword, index), each) for index, each in enumerate(value))
        elif keyword in _SINGLE and isinstance(value, Mapping):
            yield (keyword,), value


def explain(schema: Any, complaint: str, compile: Callable[[Any], str], timeout_s: float = 0.5) -> ValueError:
    """The error for a schema that llguidance refused with `complaint`: at the innermost place that it refuses alone.

    `compile` gives what it says of a schema, "" where it is content. The search ends after `timeout_s`.
    """
    path: Path = ()
    here = schema
    roots = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    end_s = time.monotonic() + timeout_s

    def complaint_of(part: Any) -> str:
        return compile({**roots, **part}) if isinstance(part, Mapping) and time.monotonic() < end_s else ""

    while inner := next(
        ((step, each, said) for step, each in _inner(here) if (said := complaint_of(each))),
        None,
    ):
        step, here, complaint = inner
        path = (*path, *step)
    # What narrows a type or limits properties fails no more without them, so they are tried last.
    for keyword in sorted(here, key=lambda keyword: (keyword in _LAST_BLAMED, keyword not in complaint)):
        rest = {name: value for name, value in here.items() if name != keyword}
        if keyword not in roots and time.monotonic() < end_s and not complaint_of(rest):
            return _error(path, keyword, f"cannot be honoured: {complaint}")
    return _error(path, None, f"cannot be honoured: {complaint}")
