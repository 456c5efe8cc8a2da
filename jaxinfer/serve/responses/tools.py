"""Functions of the Responses API, whose declarations are flatter than those of chat completions."""

from __future__ import annotations

from typing import Any

from jaxinfer.serve.checks import check_keys, repathed, wrong
from jaxinfer.serve.responses.schemas import ResponsesRequest
from jaxinfer.serve.tools.definitions import ToolUse, read_tool_use

_KEYS = ("type", "name", "description", "parameters", "strict")


def tool_use_of(body: ResponsesRequest) -> ToolUse:
    """What a body says about tools. Without any, choosing among them is no more than a client's habit.

    Raises:
        ApiError: a tool of the wrong form, or of another kind than functions, by its path.
    """
    tools = [_function(f"tools[{index}]", tool) for index, tool in enumerate(body.tools or ())] or None
    choice = _choice(body.tool_choice)
    if tools is None and choice == "auto":
        choice = None
    with repathed((".function", ""), (".allowed_tools", "")):
        return read_tool_use(tools, choice, body.parallel_tool_calls)


def _function(path: str, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        why = "is not available; tools here are functions, which the client runs"
        raise wrong(f"{path}.type", f"{tool.get('type')!r:.60} {why}", code="unsupported_value")
    check_keys(path, tool, _KEYS)
    return {"type": "function", "function": {key: value for key, value in tool.items() if key in _KEYS[1:]}}


def _choice(choice: Any) -> Any:
    """As in a chat completion; what is of another form goes on as it is, to be refused there."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {key: value for key, value in choice.items() if key != "type"}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        allowed = {key: value for key, value in choice.items() if key != "type"}
        return {"type": "allowed_tools", "allowed_tools": {**allowed, "tools": [_choice(t) for t in choice["tools"]]}}
    return choice
