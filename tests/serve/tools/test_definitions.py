"""`tools` and `tool_choice`, right and wrong."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.serve.tools.definitions import read_tool_use
from jaxinfer.tokenizer.messages import FieldError


def function(name: Any = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def deep(depth: int) -> Any:
    return {} if depth == 0 else {"items": [deep(depth - 1)]}


TWO = [function("f", description="does f", parameters={"type": "object"}, strict=True), function("g", parameters=None)]
F = {"type": "function", "function": {"name": "f"}}


def allowed(mode: Any, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize(
    ("choice", "parallel", "mode", "names", "parallel_now"),
    [
        (None, None, "auto", ("f", "g"), True),
        ("auto", False, "auto", ("f", "g"), False),
        ("none", None, "none", (), True),
        ("required", True, "required", ("f", "g"), True),
        (F, True, "named", ("f",), False),
        (allowed("auto", F, F), None, "auto", ("f",), True),
        (allowed("required", F), False, "required", ("f",), False),
    ],
)
def test_choices(choice: Any, parallel: Any, mode: str, names: tuple[str, ...], parallel_now: bool) -> None:
    use = read_tool_use(TWO, choice, parallel)
    assert (use.mode, use.names, use.parallel) == (mode, names, parallel_now)
    assert [tool.name for tool in use.tools] == ["f", "g"]
    assert [tool.name for tool in use.callable_tools] == list(names)


def test_a_function() -> None:
    f, g = read_tool_use(TWO).tools
    assert (f.description, f.parameters, f.strict) == ("does f", {"type": "object"}, True)
    # Without parameters a function takes none.
    assert g.parameters == {"type": "object", "properties": {}, "additionalProperties": False} and not g.strict
    assert f.as_template() == function("f", description="does f", parameters={"type": "object"})


def test_no_tools() -> None:
    for choice in (None, "none"):
        assert read_tool_use(None, choice).mode == "none"
    assert not read_tool_use(None, None, False).parallel


@pytest.mark.parametrize(
    ("tools", "choice", "parallel", "param", "message"),
    [
        ([], None, None, "tools", "1 to 128"),
        ([function(f"f{i}") for i in range(129)], None, None, "tools", "1 to 128"),
        ({}, None, None, "tools", "list"),
        (["f"], None, None, "tools[0]", "must be an object"),
        ([{"type": "function"}], None, None, "tools[0].function", "missing"),
        ([{"type": "custom", "function": {}}], None, None, "tools[0].type", "'custom' is not supported"),
        ([{**function(), "x": 1}], None, None, "tools[0].x", "unknown"),
        ([function(x=1)], None, None, "tools[0].function.x", "unknown"),
        ([function(None)], None, None, "tools[0].function.name", "missing"),
        ([function("a b")], None, None, "tools[0].function.name", "letters"),
        ([function("a\n")], None, None, "tools[0].function.name", "letters"),
        ([function("a" * 65)], None, None, "tools[0].function.name", "1 to 64"),
        ([function(), function()], None, None, "tools[1].function.name", "declared twice"),
        ([function(description=1)], None, None, "tools[0].function.description", "text"),
        ([function(strict=1)], None, None, "tools[0].function.strict", "true or false"),
        ([function(parameters=[])], None, None, "tools[0].function.parameters", "JSON schema"),
        ([function(parameters={"type": "string"})], None, None, "tools[0].function.parameters.type", "object"),
        ([function(parameters=deep(60))], None, None, "tools[0].function.parameters", "nested"),
        (None, "auto", None, "tool_choice", "where tools are given"),
        (None, F, None, "tool_choice", "where tools are given"),
        (TWO, "any", None, "tool_choice", "'any' must be"),
        (TWO, function("h"), None, "tool_choice.function.name", "'h' is not among the tools: f, g"),
        (TWO, function([]), None, "tool_choice.function.name", "not among"),
        (TWO, {"type": "function"}, None, "tool_choice.function", "missing"),
        (TWO, {"type": "allowed_tools"}, None, "tool_choice.allowed_tools", "missing"),
        (TWO, allowed("x", F), None, "tool_choice.allowed_tools.mode", '"auto" or "required"'),
        (TWO, allowed("auto"), None, "tool_choice.allowed_tools.tools", "a list of functions"),
        (TWO, allowed("auto", {**F, "type": "x"}), None, "tool_choice.allowed_tools.tools[0].type", "must be"),
        (TWO, None, "yes", "parallel_tool_calls", "true or false"),
    ],
)
def test_what_is_refused(tools: Any, choice: Any, parallel: Any, param: str, message: str) -> None:
    with pytest.raises(FieldError) as caught:
        read_tool_use(tools, choice, parallel)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ") and message in str(caught.value)


WORDS = st.sampled_from(["type", "function", "name", "parameters", "allowed_tools", "mode", "tools", "auto", "f"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=10,
)


@given(st.lists(VALUES, min_size=1, max_size=2) | VALUES, VALUES, VALUES)
def test_anything_else_is_a_field_error(tools: Any, choice: Any, parallel: Any) -> None:
    for given_tools in (tools, TWO):
        try:
            read_tool_use(given_tools, choice, parallel)
        except FieldError as error:
            assert error.param.split(".")[0].split("[")[0] in ("tools", "tool_choice", "parallel_tool_calls")
