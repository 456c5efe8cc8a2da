"""Tool calls read from text: examples of each format, and that how the text arrives changes nothing."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion_chunk import ChoiceDelta

from jaxinfer.serve.reply import Reply, ReplyReader, delta_as_openai
from jaxinfer.serve.tools.formats import TOOL_CALL_PARSERS, choose_tool_call_parser, make_tool_call_parser
from jaxinfer.serve.tools.json_scanner import JsonObjectScanner, is_json_object
from jaxinfer.serve.tools.parser import Delta, new_call_id

NAMES = ("get_weather", "add")
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2]}}\n</tool_call>'
ARGUMENTS = '{"city": "Zürich", "days": [1, 2]}'


def reader(format: str) -> ReplyReader:
    ids = itertools.count()
    return ReplyReader(tools=make_tool_call_parser(format, NAMES, lambda: f"call_{next(ids)}"))


def read(format: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    reply = reader(format).read(text)
    return reply.content, [(call.name, call.arguments) for call in reply.tool_calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (HERMES, "", [("get_weather", ARGUMENTS)]),
        (f"Let me look.\n\n{HERMES}\n", "Let me look.", [("get_weather", ARGUMENTS)]),
        (f"{HERMES}\n{HERMES}", "", [("get_weather", ARGUMENTS)] * 2),
        (f"{HERMES} Done.", "Done.", [("get_weather", ARGUMENTS)]),
        ('<tool_call>{"arguments": {"a": [{}]}, "name": "add"}</tool_call>', "", [("add", '{"a": [{}]}')]),
        ('<tool_call>{"id": 7, "name": "add", "arguments": {}, "z": null}</tool_call>', "", [("add", "{}")]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
        ('<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
        ('<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
        # Forgiven: a brace or a tag too few or too many, a line break inside a string.
        ('<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>x', "x", [("add", '{"a": 1}')]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}}</tool_call>x', "x", [("add", '{"a": 1}')]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', "", [("add", '{"a": 1}')]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}} and', "and", [("add", '{"a": 1}')]),
        ('<tool_call>{"name": "add", "arguments": {"a": "1\n2"}}</tool_call>', "", [("add", '{"a": "1\\n2"}')]),
        # Cut off, and no JSON.
        ('<tool_call>{"name": "add", "arguments": {"a": ', "", [("add", '{"a": ')]),
        ('<tool_call>{"name": "add", "arguments": {"a": \'b\'}}</tool_call>!', "!", [("add", "{\"a\": 'b'}")]),
        # No calls.
        ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', None, []),
        ('<tool_call>{"name": "add", "arguments": "no"}</tool_call>', None, []),
        ('<tool_call>{"name": "add", "arguments": "{\\"\\\\ud800\\": \\"\\ud800\\"}"}</tool_call>', None, []),
        ('<tool_call>{"arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": 5}</tool_call>', None, []),
        ("<tool_call>{'name': 'add'}</tool_call>", None, []),
        ('<tool_call>{"name": "add', None, []),
        ("a <tool_c", None, []),
        (" text \n", None, []),
        ('{"name": "add", "arguments": {}}', None, []),
        (f"<tool_call>[{HERMES}", "<tool_call>[", [("get_weather", ARGUMENTS)]),
    ],
)
def test_hermes(text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    assert read("hermes", text) == (text if content is None else content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
        ('\n<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
        ('{"type": "function", "name": "add", "parameters": {}}', "", [("add", "{}")]),
        ('{"name": "add", "arguments": {}}; {"name": "add", "parameters": {}}', "", [("add", "{}")] * 2),
        ('{"name": "add", "parameters": {}}\n{"name": "add", "parameters": {}}', "", [("add", "{}")] * 2),
        ('I add.\n{"name": "add", "parameters": {}}\nSo.', "I add.So.", [("add", "{}")]),
        ('Sum: <|python_tag|>{"name": "add", "parameters": {}}', "Sum:", [("add", "{}")]),
        ('{"name": "add", "parameters": {"a": oh}}', "", [("add", '{"a": oh}')]),
        ('{"name": "add", "parameters": {"a": 1}', "", [("add", '{"a": 1}')]),
        ("<|python_tag|>print(1)", None, []),
        ('{"name": "add"}', None, []),
        ('{"city": "add", "parameters": {}}', None, []),
        ('{"name": "Bob", "parameters": {}}', None, []),
        ('in line {"name": "add", "parameters": {}}', None, []),
        ("<|python", None, []),
        ("{\n{\n", None, []),
        ("", None, []),
    ],
)  # fmt: skip
def test_llama(text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    assert read("llama", text) == (text if content is None else content, calls)


# Pieces that steer into every state, and arbitrary text between.
PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "<tool_", "<|pyth", '{"name": "add", "arguments": {', "}}"),
        *('{"name": "get_weather", "parameters": ', '{"arguments": {"a": "x"}, "name": "add"}', '"a": "b\\u00e9\\n"'),
        *(
            "[1, -2.5e3, true, null]",
            "{",
            "}",
            "[",
            "]",
            '"',
            "\\",
            ",",
            ";",
            ":",
            " ",
            "\n",
            "\r",
            "\u2003",
            "word",
            "'",
        ),
        *(
            '"name"',
            '"add"',
            '"arguments"',
            '"a": 1',
            "12",
            "tru",
            "{}",
            '{"name": "add", "arguments": {}}',
            "é\U0001f600",
        ),
    ]
)
CALLS = st.sampled_from(
    [
        *('<tool_call>{"name": "add", "arguments": {', '<tool_call>{"arguments": {}, "name": "add"}</tool_call>'),
        *(HERMES, HERMES + "\n", HERMES[:-13], '\n{"name": "add", "parameters": {"a": "b"}}'),
        *('<|python_tag|>{"name": "add", "parameters": {}}', '<tool_call>{"name": "add", "arguments": {"a": no'),
    ]
)
TEXTS = st.lists(CALLS | PIECES | st.text(max_size=5), max_size=12).map("".join)


def check_delta(delta: Delta) -> None:
    """Any delta that says something is one that the OpenAI client knows."""
    fields = delta_as_openai(delta)
    parsed = ChoiceDelta.model_validate(fields, strict=True)
    assert parsed.content == fields.get("content")
    assert bool(fields) == bool(delta)


def in_pieces(format: str, pieces: list[str]) -> Reply:
    whole = reader(format)
    begun: set[int] = set()
    for delta in [*map(whole.add, pieces), whole.finish()]:
        check_delta(delta)
        for call in delta.tool_calls:
            assert (call.id is not None) == (call.name is not None) == (call.index not in begun)
            assert call.index in {*begun, len(begun)}
            begun.add(call.index)
    assert whole.num_calls == len(begun)
    return whole.reply()


@given(TEXTS, st.lists(st.integers(1, 7), min_size=1, max_size=30), st.sampled_from(["hermes", "llama"]))
def test_pieces_change_nothing(text: str, sizes: list[int], format: str) -> None:
    pieces: list[str] = []
    rest = text
    for size in itertools.cycle(sizes):
        pieces.append(rest[:size])
        rest = rest[size:]
        if not rest:
            break
    expected = reader(format).read(text)
    assert in_pieces(format, pieces) == expected
    assert in_pieces(format, list(text)) == expected
    ChatCompletionMessage.model_validate(expected.as_openai())


@given(TEXTS, st.sampled_from(["hermes", "llama"]))
def test_nothing_is_lost(text: str, format: str) -> None:
    """Without a call the text is content as it stands; with calls, content is made of the text's own characters."""
    reply = reader(format).read(text)
    if not reply.tool_calls:
        assert reply.content == text
    rest = iter(text)
    assert all(character in rest for character in reply.content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
OBJECTS = st.dictionaries(st.text(), JSON, max_size=3)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(NAMES), OBJECTS), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_round_trip(calls: list[tuple[str, dict]], ascii: bool, spaced: bool) -> None:
    def dumps(value: object) -> str:
        return json.dumps(value, ensure_ascii=ascii, separators=None if spaced else (",", ":"))

    hermes = "\n".join(
        f"<tool_call>\n{dumps({'name': name, 'arguments': given})}\n</tool_call>" for name, given in calls
    )
    llama = "; ".join(dumps({"name": name, "parameters": given}) for name, given in calls)
    for format, text in (("hermes", hermes), ("llama", llama)):
        reply = in_pieces(format, [text[start : start + 3] for start in range(0, len(text), 3)])
        assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == calls
        assert reply.content == ""


@given(OBJECTS, st.data())
def test_the_scanner_agrees_with_json(value: dict, data: st.DataObject) -> None:
    text = json.dumps(value)
    assert is_json_object(text)
    position = data.draw(st.integers(0, len(text) - 1))
    changed = text[:position] + data.draw(st.sampled_from('{}[]",:0-e. \\t')) + text[position + 1 :]
    try:
        expected = isinstance(json.loads(changed), dict)
    except ValueError:
        expected = False
    assert is_json_object(changed) == expected


def test_the_scanner_takes_any_depth() -> None:
    scanner = JsonObjectScanner()
    assert all(map(scanner.feed, '{"a": ' + "[" * 10_000 + "]" * 10_000 + "}"))
    assert scanner.done and not scanner.feed(" ") and not scanner.feed("}")
    assert not is_json_object("[]")


def test_a_format_is_chosen_and_named() -> None:
    assert choose_tool_call_parser(None) == choose_tool_call_parser("{{ messages }}") == "hermes"
    assert choose_tool_call_parser('{{ "<tool_call>" }} "parameters"') == "hermes"
    assert choose_tool_call_parser("{{ '<|python_tag|>' }}") == "llama"
    assert choose_tool_call_parser('{"name": function name, "parameters": …}') == "llama"
    with pytest.raises(ValueError, match="tool_call_parser='xml': the parsers are hermes"):
        make_tool_call_parser("xml", NAMES)
    assert set(TOOL_CALL_PARSERS) == {"hermes", "qwen", "llama", "llama3_json"}
    assert new_call_id() != new_call_id()
