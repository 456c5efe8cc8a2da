"""The grammar under which a model makes the calls that a request demands, and no others.

It is written in the Lark dialect of llguidance, in the very format that the tool-call parser reads, so the answer is
read back like any other. Each function's schema is a JSON grammar of its own: `$ref`s inside it mean what they say.
"""

from __future__ import annotations

import json
from typing import Literal

from jaxinfer.serve.tools.definitions import Tool, ToolUse
from jaxinfer.serve.tools.formats import TOOL_CALL_PARSERS
from jaxinfer.serve.tools.parser import ANY_TEXT, CallLayout

Reasoning = Literal["none", "possible", "opened"]


# Python's own spacing, which templates show to models; free spacing lets a model write spaces without end.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def call_grammar(use: ToolUse, format: str, reasoning: Reasoning = "none") -> str | None:
    """The grammar for an answer's tokens; None where the request leaves the model free.

    "required" and "named" demand calls, with arguments valid for the functions' schemas. "auto" needs a grammar where a
    function is `strict`, or where there may be one call at most.

    Args:
        format: a name of `TOOL_CALL_PARSERS`.
        reasoning: whether reasoning may, or must, since the prompt has opened it, come first.
    """
    if use.mode == "none" or (use.mode == "auto" and use.parallel and not any(t.strict for t in use.callable_tools)):
        return None
    layout = TOOL_CALL_PARSERS[format].layout
    lines = [_start(use, layout, reasoning)]
    functions = use.callable_tools
    lines.append("call: " + " | ".join(f"call_{number}" for number in range(len(functions))))
    for number, tool in enumerate(functions):
        before, after = json.dumps(json.dumps(tool.name) + layout.arguments), json.dumps(layout.closing)
        lines.append(f"call_{number}: {before} arguments_{number} {after}")
        lines.append(f"arguments_{number}: %json {_schema(tool, enforced=tool.strict or use.mode != 'auto')}")
    return "\n".join(lines) + "\n"


def _schema(tool: Tool, enforced: bool) -> str:
    parameters = dict(tool.parameters) if enforced else {}
    return json.dumps({**parameters, "type": "object", "x-guidance": _SPACING})


def _start(use: ToolUse, layout: CallLayout, reasoning: Reasoning) -> str:
    more = f" ({json.dumps(layout.separator + layout.opening)} call)*" if use.parallel else ""
    lines: list[str] = []
    if use.mode == "auto":
        # Rules with `lazy` end where they first match, so a call begins as soon as its opening has been written.
        not_thinking = r" & ~/\s*<think>(.|\n)*/" if reasoning == "possible" else ""
        lines += [
            f"answer: TEXT | before call{more}",
            f"TEXT: /{ANY_TEXT}/ & ~/{layout.no_call}/{not_thinking}",
            "before[lazy]: BEFORE",
            f"BEFORE: /{layout.text_before_call}{_escape(layout.opening)}/{not_thinking}",
        ]
    else:
        lines.append(f"answer: {json.dumps(layout.opening)} call{more}")
    start = {"none": "answer", "possible": "answer | thinking answer", "opened": "thinking answer"}[reasoning]
    if reasoning != "none":
        opening = r"\s*<think>" if reasoning == "possible" else ""
        lines += ["thinking: thought SPACE", f"thought[lazy]: /{opening}{ANY_TEXT}<\\/think>/", r"SPACE: /\n{0,2}/"]
    return "\n".join([f"start: {start}", *lines])


def _escape(text: str) -> str:
    """As a regular expression between slashes."""
    return "".join({"\n": r"\n", "/": r"\/", "{": r"\{", "|": r"\|"}.get(character, character) for character in text)
