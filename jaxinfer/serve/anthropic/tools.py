"""Functions of the Messages API, as chat completions declare them."""

from __future__ import annotations

from typing import Any

from jaxinfer.serve.anthropic.cache_control import check_cache_control
from jaxinfer.serve.anthropic.schemas import CountTokensRequest
from jaxinfer.serve.checks import check_keys, repathed, wrong
from jaxinfer.serve.tools.definitions import ToolUse, read_tool_use

_KEYS = ("type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming")


def tool_use_of(body: CountTokensRequest) -> ToolUse:
    """What a body says about tools.

    Raises:
        ApiError: a tool of the wrong form, or of another kind than the client's own, by its path.
    """
    tools = [_function(f"tools[{index}]", tool) for index, tool in enumerate(body.tools or ())] or None
    choice, parallel = _choice(body.tool_choice)
    if tools is None and choice == "auto":
        choice = None
    with repathed((".function.parameters", ".input_schema"), (".function", "")):
        return read_tool_use(tools, choice, parallel)


def _function(path: str, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        why = "is not available; tools here are of type custom, which the client runs"
        raise wrong(f"{path}.type", f"{tool['type']!r:.60} {why}")
    check_keys(path, tool, _KEYS)
    check_cache_control(f"{path}.cache_control", tool.get("cache_control"))
    if not isinstance(tool.get("eager_input_streaming"), bool | None):  # inputs are always streamed as they come
        raise wrong(f"{path}.eager_input_streaming", "must be true or false")
    if not isinstance(tool.get("input_schema"), dict):
        raise wrong(f"{path}.input_schema", "must be a JSON schema, an object")
    function = {key: tool[key] for key in ("name", "description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _choice(choice: dict[str, Any] | None) -> tuple[Any, bool | None]:
    """`tool_choice` and `parallel_tool_calls` of a chat completion."""
    if choice is None:
        return None, None
    check_keys("tool_choice", choice, ("type", "name", "disable_parallel_tool_use"))
    alone = choice.get("disable_parallel_tool_use")
    if not isinstance(alone, bool | None):
        raise wrong("tool_choice.disable_parallel_tool_use", "must be true or false")
    kind, parallel = choice.get("type"), None if alone is None else not alone
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    if kind not in ("auto", "any", "none") or choice.get("name") is not None:
        raise wrong("tool_choice", f'{choice!r:.80} must be of type auto, any, none, or {{"type": "tool", "name": …}}')
    return {"any": "required"}.get(kind, kind), parallel
