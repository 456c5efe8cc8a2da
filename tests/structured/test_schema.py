"""Schemas: what is refused, by keyword and path, and what conforms to those that are taken."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.structured.grammar import GrammarCompiler
from jaxinfer.structured.params import StructuredOutputsParams
from jaxinfer.structured.schema import check_schema, without_no_ops

from . import vocabulary as vocab

TOKENIZER = vocab.vocabulary()
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)


def compile(schema: Any, **fields: Any):
    return COMPILER.compile(StructuredOutputsParams(json=schema, **fields))


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"not": STRING}}}, "'not' at #/properties/a is not supported"),
        ({"items": {"if": {}}}, "'if' at #/items is not supported"),
        ({"$defs": {"x/y~": {"uniqueItems": True}}}, "'uniqueItems' at #/$defs/x~1y~0 is not supported"),
        ({"anyOf": [{}, {"contains": {}}]}, "'contains' at #/anyOf/1 is not supported"),
        ({"properties": {"a": {"nullable": True}}}, "'nullable' at #/properties/a is not supported; use \"type\""),
        ({"x-guidance": {"lenient": True}}, "'x-guidance' at # is not supported"),
        ({"prefixItems": [{"minlength": 1}]}, "'minlength' at #/prefixItems/0 is no keyword; did you mean minLength"),
        ({"$ref": "https://example.com/a"}, "'$ref' at # 'https://example.com/a' is not inside this schema"),
        ({"$ref": "#/$defs/gone"}, "'$ref' at # cannot be honoured: Pointer '/$defs/gone' does not exist"),
        ({"type": "integer", "maximum": 1e300}, "'maximum' at # is beyond ±9007199254740992"),
        (
            {"properties": {"a": {"format": "nonesuch"}}},
            "'format' at #/properties/a cannot be honoured: Unknown format",
        ),
        (
            {"items": {"pattern": "(?=x)y"}},
            "'pattern' at #/items cannot be honoured: invalid regular expression: look-",
        ),
        ({"allOf": [{}, {"items": {"type": "text"}}]}, "'type' at #/allOf/1/items cannot be honoured: Invalid type"),
        ({"oneOf": [STRING, {"minLength": 3}]}, "'oneOf' at # cannot be honoured: its options cannot be shown"),
        ({"type": "string", "minLength": 5, "maxLength": 3}, "'minLength' at # cannot be honoured: Unsatisfiable"),
        ({"minProperties": 2, "properties": {"a": {}}}, "'minProperties' at # cannot be honoured: min/maxProperties"),
        ({"items": {"multipleOf": 99999989}}, "'multipleOf' at #/items is too much"),
        (
            {"allOf": [{"multipleOf": 0.997}, {"multipleOf": 991}]},
            "'multipleOf' at #/allOf/1 is too much with",
        ),
        ({"$ref": "#"}, "structured_outputs.json: no text matches it"),
        (False, "False is a schema that nothing matches"),
        (nested(70), "nested more than 60 levels"),
        ({"anyOf": [{}] * 6000}, "more than 5000 subschemas"),
        ({"properties": {f"p{index}": {} for index in range(1001)}}, "'properties' at # has 1001 entries"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_its_path(schema, message):
    with pytest.raises(ValueError) as raised:
        compile(schema)
    assert message in str(raised.value) and str(raised.value).startswith("structured_outputs.json")


def test_keywords_that_say_nothing_are_taken():
    annotated = {
        "title": "A",
        "examples": [1],
        "x-order": 3,
        "discriminator": {"propertyName": "a"},
        "deprecated": True,
    }
    idle = {"uniqueItems": False, "nullable": False}
    schema = {"type": "object", "properties": {"not": {"type": "array", **idle}, "a": annotated}, **annotated}
    check_schema(schema)  # a property may be called as it likes
    assert without_no_ops(schema)["properties"] == {"not": {"type": "array"}, "a": annotated}
    compile(schema)


def keywords(chance: st.DrawFn, name: str, low: int, high: int) -> dict[str, int]:
    first, second = sorted((chance(st.integers(low, high)), chance(st.integers(low, high))))
    names = {"number": ("minimum", "maximum"), "length": ("minLength", "maxLength"), "items": ("minItems", "maxItems")}
    return dict(zip(names[name], (first, second), strict=True))


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> dict[str, Any]:
    kinds = ["null", "boolean", "integer", "string", "pattern", "enum", "const"]
    kind = draw(st.sampled_from(kinds + ["array", "tuple", "object", "map", "anyOf", "ref"] * bool(depth)))
    inner = schemas(depth=depth - 1)
    match kind:
        case "integer":
            more = draw(st.sampled_from([{}, {"multipleOf": 7}, {"multipleOf": 50}]))
            return {"type": "integer", **more, **({} if more else keywords(draw, "number", -200, 200))}
        case "string":
            return {"type": "string", **keywords(draw, "length", 0, 6)}
        case "pattern":
            return {"type": "string", "pattern": draw(st.sampled_from(["^a+b?$", "^[0-9]{2}-[xyz]$", "^(foo|bär)$"]))}
        case "enum":
            return {"enum": draw(st.lists(st.sampled_from(["a", 1, None, True, 'é"\\', [1], {"k": "v"}]), min_size=1))}
        case "const":
            return {"const": draw(st.sampled_from(["x", 12, False, {"a": [None]}]))}
        case "array":
            return {"type": "array", "items": draw(inner), **keywords(draw, "items", 0, 3)}
        case "tuple":
            return {"type": "array", "prefixItems": draw(st.lists(inner, min_size=1, max_size=2)), "items": False}
        case "object":
            properties = draw(st.dictionaries(st.sampled_from(["a", "b", 'q"', "é"]), inner, max_size=3))
            required = [name for name in properties if draw(st.booleans())]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "map":
            return {"type": "object", "additionalProperties": draw(inner), "maxProperties": 2}
        case "anyOf":
            return {"anyOf": draw(st.lists(inner, min_size=1, max_size=3))}
        case "ref":
            return {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 3}
        case _:
            return {"type": kind}


@given(schemas(), st.randoms(use_true_random=False))
def test_what_is_written_conforms(schema, chance):
    schema = {**schema, "$defs": {"leaf": {"type": ["integer", "null"]}}}
    text, ended = vocab.walk(compile(schema), TOKENIZER, chance)
    if ended:
        jsonschema.validate(json.loads(text.decode()), schema)


def test_nearly_every_walk_ends():
    # Else the test above would say little.
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    }
    schema["additionalProperties"] = False
    grammar = compile(schema)
    texts = [vocab.walk(grammar, TOKENIZER, random.Random(seed)) for seed in range(30)]
    assert sum(ended for _, ended in texts) > 20
    assert all(json.loads(text.decode()).keys() == {"a", "b"} for text, ended in texts if ended)


@pytest.mark.parametrize(
    ("fields", "longest"), [({}, 64), ({"disable_any_whitespace": True}, 0), ({"whitespace_pattern": " "}, 1)]
)
def test_white_space_is_bounded(fields, longest):
    grammar = compile({"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 1}, **fields)
    space = next(token for token in range(3, TOKENIZER.vocab_size) if TOKENIZER.token_bytes(token) == b" ")
    matcher = grammar.matcher()
    for piece in (b"[",):
        matcher.add(3 + piece[0])
    count = 0
    while space in vocab.allowed_ids(matcher.mask()) and count < 100:
        matcher.add(space)
        count += 1
    assert count == longest
