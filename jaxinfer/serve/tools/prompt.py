"""Tools in the prompt: by the model's own template where it knows them, else by a system message in Hermes's manner."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.serve.tools.definitions import Tool
from jaxinfer.serve.tools.parser import CallLayout
from jaxinfer.tokenizer import ChatTemplateError

Messages = Sequence[Mapping[str, Any]]
# A chat template: (messages, tools) to text.
Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str]

_PROBE_NAME = "probe_function"
_PROBE_VALUE = "probe_value"
_PROBE_CALL = "call12345"  # Mistral's templates take ids of nine characters only
_PROBE_RESULT = "probe_result"
_INSTRUCTIONS = """# Tools

You can call these functions to help with the user's request. Each line describes one, with a JSON schema of its
arguments:
<tools>
{tools}
</tools>

To call a function, write its name and arguments as JSON in exactly this form, once for each call:
{example}"""


@dataclass(frozen=True)
class TemplateTraits:
    """What a chat template does with tools, found by trying.

    knows_tools: it writes the functions into the prompt.
    knows_calls: it writes earlier calls, and their results, into the prompt.
    text_arguments: it wants the arguments of calls as text rather than as objects.
    null_content: it writes calls only where their message's content is null.
    """

    knows_tools: bool
    knows_calls: bool
    text_arguments: bool = False
    null_content: bool = False


def probe_template(render: Render) -> TemplateTraits:
    """Try a template. One that fails in every way knows nothing of tools."""
    user = {"role": "user", "content": "question"}
    tool = Tool(_PROBE_NAME, "", {"type": "object", "properties": {}}, strict=False).as_template()
    knows_tools = _shows(render, [user], [tool], (_PROBE_NAME,))
    for null_content in (False, True):
        for text_arguments in (False, True):
            traits = TemplateTraits(knows_tools, True, text_arguments, null_content)
            function = {"name": _PROBE_NAME, "arguments": {"key": _PROBE_VALUE}}
            call = {"id": _PROBE_CALL, "type": "function", "function": function}
            chat = [
                user,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": _PROBE_CALL, "name": _PROBE_NAME, "content": _PROBE_RESULT},
            ]
            tools = [tool] if knows_tools else None
            if _shows(render, _fit_calls(chat, traits), tools, (_PROBE_NAME, _PROBE_VALUE, _PROBE_RESULT)):
                return traits
    return TemplateTraits(knows_tools, False)


def prompt_with_tools(
    messages: Messages, tools: Sequence[Tool], traits: TemplateTraits, layout: CallLayout
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools for the template, given `template_messages` and the functions that the model is told of.

    A template that knows of no tools gets them in the system message; one that knows of no calls gets those, and their
    results, as text: a result is a user's message then, since such templates know no other role for it.
    """
    chat = [dict(message) for message in messages]
    if any("tool_calls" in message or message["role"] == "tool" for message in chat):
        chat = _fit_calls(chat, traits) if traits.knows_calls else _write_calls(chat, layout)
    if not tools:
        return chat, None
    if traits.knows_tools:
        return chat, [tool.as_template() for tool in tools]
    described = "\n".join(json.dumps(tool.as_template(), ensure_ascii=False) for tool in tools)
    example = layout.write("function_name", {"argument": "value"})
    instructions = _INSTRUCTIONS.format(tools=described, example=example)
    if chat and chat[0]["role"] == "system":
        chat[0]["content"] = f"{chat[0]['content']}\n\n{instructions}"
    else:
        chat.insert(0, {"role": "system", "content": instructions})
    return chat, None


def _shows(
    render: Render, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, words: tuple[str, ...]
) -> bool:
    try:
        text = render(messages, tools)
    except (ChatTemplateError, TypeError):
        return False
    return all(word in text for word in words)


def _fit_calls(messages: list[dict[str, Any]], traits: TemplateTraits) -> list[dict[str, Any]]:
    fitted = []
    for message in messages:
        if "tool_calls" in message:
            message = dict(message)
            if traits.null_content and not message["content"]:
                message["content"] = None
            if traits.text_arguments:
                message["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
        fitted.append(message)
    return fitted


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _write_calls(messages: list[dict[str, Any]], layout: CallLayout) -> list[dict[str, Any]]:
    written: list[dict[str, Any]] = []
    previous = ""
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            text = f"<tool_response>\n{content}\n</tool_response>"
            if previous == "tool":  # the results of one message's calls are one turn
                written[-1]["content"] += f"\n{text}"
            else:
                written.append({"role": "user", "content": text})
        elif "tool_calls" in message:
            functions = [call["function"] for call in message["tool_calls"]]
            calls = layout.separator.join(layout.write(each["name"], each["arguments"]) for each in functions)
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            written.append({**rest, "content": f"{content}\n{calls}" if content else calls})
        else:
            written.append(message)
        previous = role
    return written
