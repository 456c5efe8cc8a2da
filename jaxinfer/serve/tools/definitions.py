"""`tools`, `tool_choice` and `parallel_tool_calls` of a request, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxinfer.tokenizer.messages import FieldError

MAX_TOOLS = 128
MAX_SCHEMA_DEPTH = 100
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tool:
    """A function that the model may be told of. `parameters` is a JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool

    def as_template(self) -> dict[str, Any]:
        """In the form that chat templates expect, which is the OpenAI API's."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolUse:
    """What a request says about tools.

    `mode`: "none", no call may be made; "auto", the model decides; "required", one call at least; "named", one call of
    the one function in `names`. `names` are the functions that may be called, `parallel` whether more than one call.
    """

    tools: tuple[Tool, ...] = ()
    mode: Literal["none", "auto", "required", "named"] = "none"
    names: tuple[str, ...] = ()
    parallel: bool = True

    @property
    def callable_tools(self) -> list[Tool]:
        return [tool for tool in self.tools if tool.name in self.names]


def read_tool_use(tools: Any = None, tool_choice: Any = None, parallel_tool_calls: Any = None) -> ToolUse:
    """The request's three fields, as JSON has them; None is an absent field.

    Raises:
        FieldError: (a ValueError) a field of the wrong form, a function that is named twice or not declared.
    """
    if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
        raise FieldError("parallel_tool_calls", f"{parallel_tool_calls!r:.60} must be true or false")
    parallel = parallel_tool_calls is not False
    if tools is None:
        if tool_choice not in (None, "none"):
            raise FieldError("tool_choice", "is only allowed where tools are given")
        return ToolUse(parallel=parallel)
    declared = _read_tools(tools)
    names = tuple(tool.name for tool in declared)
    mode, chosen = _read_choice("auto" if tool_choice is None else tool_choice, names)
    return ToolUse(declared, mode, chosen, parallel and mode != "named")


def _read_tools(tools: Any) -> tuple[Tool, ...]:
    if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
        raise FieldError("tools", f"must be a list of 1 to {MAX_TOOLS} functions")
    read: dict[str, Tool] = {}
    for number, tool in enumerate(tools):
        path = f"tools[{number}]"
        _check_object(path, tool, ("type", "function"), ("type", "function"))
        if tool["type"] != "function":
            raise FieldError(f"{path}.type", f'{tool["type"]!r:.60} is not supported; the only type is "function"')
        function = _read_function(f"{path}.function", tool["function"])
        if function.name in read:
            raise FieldError(f"{path}.function.name", f"{function.name!r} is declared twice")
        read[function.name] = function
    return tuple(read.values())


def _read_function(path: str, function: Any) -> Tool:
    _check_object(path, function, ("name",), ("name", "description", "parameters", "strict"))
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise FieldError(f"{path}.name", f"{name!r:.80} must be 1 to 64 letters, digits, underscores and dashes")
    if description is not None and not isinstance(description, str):
        raise FieldError(f"{path}.description", "must be text")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise FieldError(f"{path}.strict", f"{strict!r:.60} must be true or false")
    if parameters is None:
        return Tool(name, description or "", _NO_PARAMETERS, strict is True)
    path += ".parameters"
    if not isinstance(parameters, dict):
        raise FieldError(path, "must be a JSON schema, an object")
    if parameters.get("type", "object") != "object":
        raise FieldError(f"{path}.type", f'{parameters["type"]!r:.60} must be "object": arguments are one')
    _check_depth(path, parameters)
    return Tool(name, description or "", parameters, strict is True)


def _check_depth(path: str, schema: Any) -> None:
    level = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise FieldError(path, f"is nested more than {MAX_SCHEMA_DEPTH} deep")


def _read_choice(
    choice: Any, names: tuple[str, ...]
) -> tuple[Literal["none", "auto", "required", "named"], tuple[str, ...]]:
    if choice == "none":
        return "none", ()
    if choice in ("auto", "required"):
        return choice, names
    if isinstance(choice, dict) and choice.get("type") == "function":
        return "named", (_named_function("tool_choice", choice, names),)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _read_allowed(choice, names)
    raise FieldError(
        "tool_choice",
        f'{choice!r:.80} must be "none", "auto", "required", {{"type": "function", "function": {{"name": …}}}}, '
        'or {"type": "allowed_tools", …}',
    )


def _read_allowed(choice: Any, names: tuple[str, ...]) -> tuple[Literal["auto", "required"], tuple[str, ...]]:
    _check_object("tool_choice", choice, ("allowed_tools",), ("type", "allowed_tools"))
    path, allowed = "tool_choice.allowed_tools", choice["allowed_tools"]
    _check_object(path, allowed, ("mode", "tools"), ("mode", "tools"))
    if allowed["mode"] not in ("auto", "required"):
        raise FieldError(f"{path}.mode", f'{allowed["mode"]!r:.60} must be "auto" or "required"')
    if not isinstance(allowed["tools"], list) or not allowed["tools"]:
        raise FieldError(f"{path}.tools", "must be a list of functions")
    chosen = [_named_function(f"{path}.tools[{number}]", tool, names) for number, tool in enumerate(allowed["tools"])]
    return allowed["mode"], tuple(name for name in names if name in chosen)


def _named_function(path: str, value: Any, names: tuple[str, ...]) -> str:
    _check_object(path, value, ("type", "function"), ("type", "function"))
    if value["type"] != "function":
        raise FieldError(f"{path}.type", f'{value["type"]!r:.60} must be "function"')
    _check_object(f"{path}.function", value["function"], ("name",), ("name",))
    name = value["function"]["name"]
    if name not in names:
        raise FieldError(f"{path}.function.name", f"{name!r:.80} is not among the tools: {', '.join(names)}"[:300])
    return name


def _check_object(path: str, value: Any, required: tuple[str, ...], known: tuple[str, ...]) -> None:
    if not isinstance(value, dict):
        raise FieldError(path, f"must be an object with {', '.join(required)}")
    for key in required:
        if value.get(key) is None:
            raise FieldError(f"{path}.{key}", "is missing")
    for key in value:
        if key not in known:
            raise FieldError(f"{path}.{key:.60}", f"is unknown; the fields are {', '.join(known)}")
