"""Messages of a request, as templates take them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.tokenizer.messages import FieldError, template_messages

USER = {"role": "user", "content": "hi"}

RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "7"}


def called(arguments: Any = '{"a": 1}', **fields: Any) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}, **fields}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("message", "read"),
    [
        (USER, USER),
        ({"role": "developer", "content": "be brief", "name": None}, {"role": "system", "content": "be brief"}),
        (
            {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "name": "Ann", "content": "a\nb"},
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
            {"role": "user", "content": "a"},
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "content": "no"},
        ),
        (called(), {**called({"a": 1}), "content": ""}),
        (called(""), {**called({}), "content": ""}),
        (RESULT, RESULT),
        # What clients send back of an answer.
        (
            {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None,
             "function_call": None, "tool_calls": [], "reasoning_content": "hm"},
            {"role": "assistant", "content": "x", "reasoning_content": "hm"},
        ),
        ({"role": "assistant", "refusal": "no"}, {"role": "assistant", "content": "no"}),
        (
            {"role": "assistant", "content": "x", "reasoning": "hm"},
            {"role": "assistant", "content": "x", "reasoning_content": "hm"},
        ),
    ],
)  # fmt: skip
def test_messages(message: dict[str, Any], read: dict[str, Any]) -> None:
    assert template_messages([message]) == [read]


@pytest.mark.parametrize(
    ("message", "param", "text"),
    [
        ("hi", "", "object with role"),
        ({"content": "x"}, ".role", "None is not one of system, developer, user"),
        ({"role": ["user"], "content": "x"}, ".role", "not one of"),
        ({"role": "function", "content": "x"}, ".role", "old form"),
        ({**USER, "extra": 1}, ".extra", "role user has no such field"),
        ({**USER, "tool_calls": []}, ".tool_calls", "no such field"),
        ({**USER, "name": 1}, ".name", "text"),
        ({"role": "user"}, ".content", "missing"),
        ({"role": "user", "content": 1}, ".content", "must be text"),
        ({"role": "user", "content": []}, ".content", "must be text"),
        ({"role": "user", "content": ["x"]}, ".content[0]", '"type": "text"'),
        ({"role": "user", "content": [{"type": "text"}]}, ".content[0]", '"type": "text"'),
        ({"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}, ".content[0].y", "unknown"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, ".content[0]", "takes no images"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, ".content[0]", "takes no audio"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, ".content[0]", "must be"),
        ({"role": "tool", "content": "x"}, ".tool_call_id", "missing"),
        ({"role": "assistant"}, ".content", "only beside tool_calls"),
        ({"role": "assistant", "content": "x", "audio": {"id": "1"}}, ".audio", "text only"),
        ({"role": "assistant", "function_call": {"name": "f"}}, ".function_call", "old form"),
        ({"role": "assistant", "content": "x", "annotations": [1]}, ".annotations", "cannot"),
        ({"role": "assistant", "tool_calls": []}, ".tool_calls", "at least one"),
        ({"role": "assistant", "tool_calls": ["x"]}, ".tool_calls[0]", "must be"),
        (called(type="custom"), ".tool_calls[0]", "must be"),
        (called(id=7), ".tool_calls[0].id", "text"),
        (called(x=1), ".tool_calls[0].x", "unknown"),
        (called(function={"arguments": "{}"}), ".tool_calls[0].function", "name and arguments"),
        (called(function={"name": "f", "x": 1}), ".tool_calls[0].function.x", "unknown"),
        (called("{"), ".tool_calls[0].function.arguments", "is not JSON"),
        (called("[" * 100_000), ".tool_calls[0].function.arguments", "is not JSON"),
        (called("[]"), ".tool_calls[0].function.arguments", "JSON object"),
        (called({"a": 1}), ".tool_calls[0].function.arguments", "JSON object"),
        (called('{"a":' * 200 + "1" + "}" * 200), ".tool_calls[0].function.arguments", "nested"),
    ],
)  # fmt: skip
def test_what_is_refused(message: Any, param: str, text: str) -> None:
    with pytest.raises(FieldError) as caught:
        template_messages([USER, message])
    assert caught.value.param == f"messages[1]{param}"
    assert text in str(caught.value)


def test_no_messages() -> None:
    for messages, words in (
        ([], "is empty"),
        (None, "must be a list"),
        ("hi", "must be a list"),
        ({}, "must be a list"),
    ):
        with pytest.raises(FieldError, match=f"messages: {words}"):
            template_messages(messages)


KEYS = st.sampled_from(["role", "content", "type", "text", "tool_calls", "id", "function", "name", "arguments"])
LEAVES = st.sampled_from([None, 1, "user", "assistant", "tool", "text", "function", "{}", "x"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)
ROLES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"])},
    optional={"content": VALUES, "tool_calls": VALUES, "tool_call_id": VALUES},
)


@given(st.lists(VALUES | ROLES, max_size=3) | VALUES)
def test_anything_is_read_or_refused_by_name(messages: Any) -> None:
    try:
        read = template_messages(messages)
    except FieldError as error:
        assert error.param.startswith("messages")
    else:
        assert all(isinstance(message["content"], str) for message in read)
