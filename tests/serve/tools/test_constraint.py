"""The grammar that forces calls, as llguidance takes it, byte by byte; and that the parsers read what it allows."""

from __future__ import annotations

from typing import Any

import llguidance
import pytest

from jaxinfer.serve.tools.constraint import Reasoning, answer_grammar
from jaxinfer.serve.tools.definitions import read_tool_use
from jaxinfer.serve.tools.formats import TOOL_CALL_PARSERS, make_tool_call_parser
from jaxinfer.tokenizer.messages import FieldError

BYTES = llguidance.LLTokenizer("byte")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "pick",
            "strict": True,
            "parameters": {
                "properties": {"size": {"$ref": "#/$defs/Size"}},
                "required": ["size"],
                "additionalProperties": False,
                "$defs": {"Size": {"enum": ["small", "large"]}},
            },
        },
    },
]
NAMED = {"type": "function", "function": {"name": "pick"}}


def grammar(choice: Any, format: str = "hermes", reasoning: Reasoning = "none", parallel: bool = True) -> str:
    made = answer_grammar(read_tool_use(TOOLS, choice, parallel), format, reasoning)
    assert made is not None
    return made


def allows(grammar: str, text: str) -> bool:
    """Whether the grammar lets a model write exactly this text and end."""
    assert llguidance.LLMatcher.validate_grammar(grammar) == ""
    matcher = llguidance.LLMatcher(BYTES, grammar)
    taken = all(matcher.try_consume_tokens([byte]) for byte in text.encode())
    return taken and matcher.is_accepting()


def call(format: str, name: str, **arguments: Any) -> str:
    return TOOL_CALL_PARSERS[format].layout.write(name, arguments)


@pytest.fixture(params=["hermes", "llama"])
def format(request: pytest.FixtureRequest) -> str:
    return request.param


def test_required(format: str) -> None:
    add, pick = call(format, "add", a=1), call(format, "pick", size="small")
    both = add + TOOL_CALL_PARSERS[format].layout.separator + pick
    several, one = grammar("required", format), grammar("required", format, parallel=False)
    for text in (add, pick):
        assert allows(several, text) and allows(one, text)
    assert allows(several, both) and not allows(one, both)
    for text in ("", "Hello", f"Hello {add}", f"{add} Hello", call(format, "add", a="1"), call(format, "add"),
                 call(format, "pick", size="huge"), call(format, "pick", size="small", more=1), call(format, "rm", a=1),
                 add[:-1]):  # fmt: skip
        assert not allows(several, text), text
    read = make_tool_call_parser(format, ("add", "pick"), lambda: "id")
    calls = [*read.add(both).tool_calls, *read.finish().tool_calls]
    assert [(each.name, each.arguments) for each in calls] == [("add", '{"a": 1}'), ("pick", '{"size": "small"}')]


def test_functions_take_no_arguments_that_they_do_not_list() -> None:
    def made(**parameters: Any) -> str:
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        grammar = answer_grammar(read_tool_use(tools, "required"), "hermes")
        assert grammar is not None
        return grammar

    properties = {"a": {"type": "integer"}, "inner": {"type": "object", "properties": {"b": {"type": "integer"}}}}
    listed = made(properties=properties)
    assert allows(listed, call("hermes", "f", a=1, inner={"b": 2})) and allows(listed, call("hermes", "f"))
    assert not allows(listed, call("hermes", "f", z=1)) and not allows(listed, call("hermes", "f", inner={"z": 1}))
    assert allows(made(properties=properties, additionalProperties=True), call("hermes", "f", z=1))
    assert allows(made(type="object"), call("hermes", "f", z=1))
    # Both parts of this one hold for the same object.
    parts = [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}, "required": ["b"]}]
    assert allows(made(allOf=parts), call("hermes", "f", a=1, b=2))
    either = {
        "properties": {"a": {"type": "integer"}},
        "anyOf": [{"properties": {"b": {"const": 2}}, "required": ["b"]}],
    }
    assert allows(made(**either), call("hermes", "f", a=1, b=2))


def test_schemas_that_no_grammar_can_honour_are_refused_by_name() -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}
    with pytest.raises(FieldError, match="'not' at #/properties/a is not supported") as caught:
        answer_grammar(read_tool_use([TOOLS[0], bad], "required"), "hermes")
    assert caught.value.param == "tools[1].function.parameters"
    # Only where it is to be enforced.
    assert answer_grammar(read_tool_use([TOOLS[0], bad], "auto", False), "hermes") is not None


def test_named(format: str) -> None:
    named = grammar(NAMED, format)
    pick = call(format, "pick", size="large")
    assert allows(named, pick)
    assert not allows(named, call(format, "add", a=1))
    assert not allows(named, pick + TOOL_CALL_PARSERS[format].layout.separator + pick)


def test_auto_with_a_strict_function(format: str) -> None:
    auto, once = grammar("auto", format), grammar("auto", format, parallel=False)
    pick = call(format, "pick", size="small")
    both = pick + TOOL_CALL_PARSERS[format].layout.separator + pick
    # Only the strict function's arguments follow its schema.
    for text in ("", "Hello {1}\n{ <tool", pick, f"Let me see.\n{pick}", call(format, "add", b=[])):
        assert allows(auto, text) and allows(once, text), text
    assert allows(auto, both) and not allows(once, both)
    for text in (call(format, "pick", size="huge"), f"So:\n{call(format, 'pick')}", call(format, "rm")):
        assert not allows(auto, text), text


def test_reasoning_comes_first(format: str) -> None:
    pick = call(format, "pick", size="small")
    thought = f"I may {pick[:30]} and\n so on</think>\n\n"
    for choice in ("required", NAMED, "auto"):
        possible, opened = grammar(choice, format, "possible"), grammar(choice, format, "opened")
        assert allows(possible, pick) and allows(possible, f"<think>{thought}{pick}")
        assert allows(opened, f"{thought}{pick}") and not allows(opened, pick)
        assert not allows(possible, f"<think>{thought}{call(format, 'pick', size='huge')}")
        assert allows(opened, f"{thought}Hello") == (choice == "auto")


def test_where_no_grammar_is_needed() -> None:
    free = [TOOLS[0]]
    assert answer_grammar(read_tool_use(free), "hermes") is None
    assert answer_grammar(read_tool_use(TOOLS, "none"), "hermes") is None
    assert answer_grammar(read_tool_use(None), "hermes") is None
    assert answer_grammar(read_tool_use(free, "auto", False), "hermes") is not None
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{**free[0], "function": {"name": "add"}}]},
    }
    assert answer_grammar(read_tool_use(TOOLS, allowed), "hermes") is None


def test_content_with_a_schema(format: str) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    pick, content = call(format, "pick", size="small"), '{"ok": true}'
    use = read_tool_use(TOOLS)
    made = answer_grammar(use, format, content_schema=schema)
    assert made is not None
    assert allows(made, pick) and allows(made, content)
    assert not allows(made, "Hello") and not allows(made, content + pick) and not allows(made, call(format, "pick"))
    # Content that begins as Llama's calls do.
    named = {"type": "object", "properties": {"name": {"type": "string"}}}
    made = answer_grammar(use, format, content_schema=named)
    assert made is not None
    assert allows(made, pick) and allows(made, '{"name": "Bob"}') and allows(made, '{"nam": 1}') and allows(made, "{}")
    # Without tools only reasoning needs a grammar of its own; elsewhere the schema is one.
    assert answer_grammar(read_tool_use(), format, content_schema=schema) is None
    thinking = answer_grammar(read_tool_use(), format, "opened", schema)
    assert thinking is not None
    assert allows(thinking, f"so</think>\n\n{content}") and not allows(thinking, content)
    # Calls that must be made leave no content.
    forced = answer_grammar(read_tool_use(TOOLS, "required"), format, content_schema=schema)
    assert forced is not None
    assert allows(forced, pick) and not allows(forced, content)
