"""The grammar under which a model makes the calls that a request demands, and no others.

It is written in the Lark dialect of llguidance, in the very format that the tool-call parser reads, so the answer is
read back like any other. Each function's schema is a JSON grammar of its own: `$ref`s inside it mean what they say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from jaxinfer.serve.tools.definitions import Tool, ToolUse
from jaxinfer.serve.tools.formats import TOOL_CALL_PARSERS
from jaxinfer.serve.tools.parser import ANY_TEXT, CallLayout
from jaxinfer.structured.schema import check_schema, subschemas, without_no_ops
from jaxinfer.tokenizer.messages import FieldError

Reasoning = Literal["none", "possible", "opened"]


_TOGETHER = frozenset(("$ref", "anyOf", "oneOf"))
# Python's own spacing, which templates show to models; free spacing lets a model write spaces without end.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def answer_grammar(
    use: ToolUse, format: str, reasoning: Reasoning = "none", content_schema: Mapping[str, Any] | None = None
) -> str | None:
    """The grammar for an answer's tokens; None where the tools leave the model free and nothing comes before content.

    "required" and "named" demand calls, with arguments valid for the functions' schemas. "auto" needs a grammar where a
    function is `strict`, where there may be one call at most, or where content must be JSON unless calls are made.

    Args:
        format: a name of `TOOL_CALL_PARSERS`.
        reasoning: whether reasoning may, or must, since the prompt has opened it, come first.
        content_schema: the JSON schema of content, where it has one, as `spaced_schema` gives it.

    Raises:
        FieldError: (a ValueError) a function's schema has a keyword that no grammar can honour.
    """
    if not _needs_grammar(use, reasoning, content_schema is not None):
        return None
    layout = TOOL_CALL_PARSERS[format].layout
    lines = [*_start(reasoning), *_answer(use, layout, reasoning, content_schema)]
    functions = use.callable_tools
    if functions:
        lines.append("call: " + " | ".join(f"call_{number}" for number in range(len(functions))))
    for number, tool in enumerate(functions):
        before, after = json.dumps(json.dumps(tool.name) + layout.arguments), json.dumps(layout.closing)
        lines.append(f"call_{number}: {before} arguments_{number} {after}")
        schema = _enforced_schema(use, tool) if tool.strict or use.mode != "auto" else {}
        lines.append(f"arguments_{number}: %json {json.dumps({**schema, 'type': 'object', 'x-guidance': _SPACING})}")
    return "\n".join(lines) + "\n"


def _needs_grammar(use: ToolUse, reasoning: Reasoning, has_schema: bool) -> bool:
    if use.mode == "none":
        return has_schema and reasoning != "none"
    return use.mode != "auto" or has_schema or not use.parallel or any(tool.strict for tool in use.callable_tools)


def _enforced_schema(use: ToolUse, tool: Tool) -> dict[str, Any]:
    try:
        check_schema(tool.parameters)
    except ValueError as error:
        path = f"tools[{use.tools.index(tool)}].function.parameters"
        raise FieldError(path, str(error).removeprefix("structured_outputs.json").lstrip(": ")) from None
    return _closed(without_no_ops(tool.parameters))


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema where objects that list their properties have no others, unless it says so.

    Schemas of functions seldom say it, and mean it. Where parts of a schema hold for one object together, closing one
    would shut out the others' properties, so such a schema stays as it is.
    """
    objects = [each for _, each in subschemas(schema) if isinstance(each, dict)]
    if any("allOf" in each or ("properties" in each and _TOGETHER & each.keys()) for each in objects):
        return schema
    for each in objects:
        if "properties" in each and "patternProperties" not in each:
            each.setdefault("additionalProperties", False)
    return schema


def _start(reasoning: Reasoning) -> list[str]:
    if reasoning == "none":
        return ["start: answer"]
    # Rules with `lazy` end where they first match: reasoning at its closing tag, text before a call at its opening.
    start, opening = ("answer | thinking answer", r"\s*<think>") if reasoning == "possible" else ("thinking answer", "")
    thought = rf"thought[lazy]: /{opening}{ANY_TEXT}<\/think>/"
    return [f"start: {start}", "thinking: thought SPACE", thought, r"SPACE: /\n{0,2}/"]


def _answer(
    use: ToolUse, layout: CallLayout, reasoning: Reasoning, content_schema: Mapping[str, Any] | None
) -> list[str]:
    more = f" ({json.dumps(layout.separator + layout.opening)} call)*" if use.parallel else ""
    calls = f"{json.dumps(layout.opening)} call{more}"
    if use.mode in ("required", "named"):
        return [f"answer: {calls}"]
    if content_schema is not None:
        # A call that begins as JSON does is cut where JSON's words are: the lexer takes the longest word for good.
        opening = ["{", '"name"', ":", " "] if layout.opening.startswith("{") else [layout.opening]
        calls = f"{' '.join(map(json.dumps, opening))} call{more}"
        answer = "content" if use.mode == "none" else f"content | {calls}"
        return [f"answer: {answer}", f"content: %json {json.dumps({'x-guidance': _SPACING, **content_schema})}"]
    not_thinking = r" & ~/\s*<think>(.|\n)*/" if reasoning == "possible" else ""
    return [
        f"answer: TEXT | before call{more}",
        f"TEXT: /{ANY_TEXT}/ & ~/{layout.no_call}/{not_thinking}",
        "before[lazy]: BEFORE",
        f"BEFORE: /{layout.text_before_call}{_escape(layout.opening)}/{not_thinking}",
    ]


def _escape(text: str) -> str:
    """As a regular expression between slashes."""
    return "".join({"\n": r"\n", "/": r"\/", "{": r"\{", "|": r"\|"}.get(character, character) for character in text)
