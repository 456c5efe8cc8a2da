"""Tools in the prompt, through templates of several kinds."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from jaxinfer.serve.tools.definitions import read_tool_use
from jaxinfer.serve.tools.formats import TOOL_CALL_PARSERS
from jaxinfer.serve.tools.prompt import TemplateTraits, probe_template, prompt_with_tools
from jaxinfer.tokenizer import render_chat_template
from jaxinfer.tokenizer.messages import template_messages

END = "{{ '\\n' }}{% endfor %}"
TURN = "[{{ m.role }}]{{ m.content }}"
PLAIN = "{% for m in messages %}" + TURN + END
TOOLS_FIRST = "{% if tools %}TOOLS {{ tools | tojson }}{{ '\\n' }}{% endif %}"
# Arguments as objects, as most templates have them.
OBJECTS = (
    TOOLS_FIRST + "{% for m in messages %}" + TURN + "{% for c in m.tool_calls or [] %}"
    "<{{ c.function.name }} {{ c.function.arguments | items | list }}>{% endfor %}" + END
)
# Arguments as text, and calls only where there is no content.
TEXTS = (
    TOOLS_FIRST + "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}"
    "{{ '<' + c.function.name + ' ' + c.function.arguments + '>' }}{% endfor %}{% else %}" + TURN + "{% endif %}" + END
)
STRICT = "{{ raise_exception('no') }}"
HERMES, LLAMA = TOOL_CALL_PARSERS["hermes"].layout, TOOL_CALL_PARSERS["llama"].layout
TOOLS = read_tool_use(
    [{"type": "function", "function": {"name": "add", "description": "Größe", "parameters": {"type": "object"}}}]
).tools


def call(id: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "add", "arguments": '{"a": "é"}'}}


CHAT = template_messages(
    [
        {"role": "user", "content": "two sums"},
        {"role": "assistant", "content": None, "tool_calls": [call("1"), call("2")]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "tool", "tool_call_id": "2", "content": "4"},
        {"role": "assistant", "content": "3 and 4"},
    ]
)


def renderer(source: str) -> Any:
    return lambda messages, tools: render_chat_template(source, messages, tools=tools)


def prompt(source: str, messages: Any = CHAT, tools: Any = TOOLS, layout: Any = HERMES) -> str:
    traits = probe_template(renderer(source))
    return renderer(source)(*prompt_with_tools(messages, tools, traits, layout))


@pytest.mark.parametrize(
    ("source", "traits"),
    [
        (PLAIN, TemplateTraits(False, False)),
        (OBJECTS, TemplateTraits(True, True)),
        (TEXTS, TemplateTraits(True, True, text_arguments=True, null_content=True)),
        (STRICT, TemplateTraits(False, False)),
    ],
)
def test_traits(source: str, traits: TemplateTraits) -> None:
    assert probe_template(renderer(source)) == traits


def test_templates_that_know_tools_are_given_them() -> None:
    described = (
        'TOOLS [{"type": "function", "function": '
        '{"name": "add", "description": "Größe", "parameters": {"type": "object"}}}]\n'
    )
    assert prompt(OBJECTS) == (
        f"{described}[user]two sums\n[assistant]<add [('a', 'é')]><add [('a', 'é')]>\n[tool]3\n[tool]4\n"
        "[assistant]3 and 4\n"
    )
    assert prompt(TEXTS) == (
        f'{described}[user]two sums\n<add {{"a": "é"}}><add {{"a": "é"}}>\n[tool]3\n[tool]4\n[assistant]3 and 4\n'
    )


def test_a_plain_template_gets_tools_and_calls_as_text() -> None:
    text = prompt(PLAIN)
    system, rest = text.split("[user]", 1)
    assert system.startswith("[system]# Tools")
    assert '"name": "add", "description": "Größe"' in system
    assert HERMES.write("function_name", {"argument": "value"}) in system
    written = '<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>'
    results = "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    assert rest == f"two sums\n[assistant]{written}\n{written}\n[user]{results}\n[assistant]3 and 4\n"
    assert 'exactly this form, once for each call:\n{"name": "function_name"' in prompt(PLAIN, layout=LLAMA)
    assert '{"name": "add", "parameters": {"a": "é"}}; {"name": "add"' in prompt(PLAIN, layout=LLAMA)


def test_a_system_message_of_the_request_stays_first() -> None:
    chat = template_messages([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}])
    assert prompt(PLAIN, chat).startswith("[system]Be brief.\n\n# Tools")
    assert chat[0]["content"] == "Be brief."


def test_without_tools_nothing_is_added() -> None:
    chat = template_messages([{"role": "user", "content": "hi"}])
    for source in (PLAIN, OBJECTS):
        assert prompt(source, chat, ()) == "[user]hi\n"
    said = template_messages([{"role": "assistant", "content": "Look:", "tool_calls": [call("1")]}])
    assert prompt(PLAIN, said, ()).startswith("[assistant]Look:\n<tool_call>")


def test_the_default_model_is_told_of_tools(smollm2_path: Any) -> None:
    from jaxinfer.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(smollm2_path)
    traits = probe_template(
        lambda messages, tools: tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    )
    assert traits == TemplateTraits(False, False)
    messages, tools = prompt_with_tools(CHAT, TOOLS, traits, HERMES)
    assert tools is None
    text = partial(tokenizer.apply_chat_template, tokenize=False)(messages)
    assert text.startswith("<|im_start|>system\n# Tools") and text.count("<tool_response>") == 2
