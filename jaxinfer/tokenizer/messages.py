"""The `messages` of a chat request, checked, and as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_ARGUMENTS_DEPTH = 100
_COMMON = ("role", "content", "name")
_ECHOED = ("refusal", "annotations", "audio", "function_call")  # clients send a reply's fields back, null or empty
# Keys of each role's messages, beside those that are null.
_KEYS = {
    "system": _COMMON,
    "developer": _COMMON,
    "user": _COMMON,
    "assistant": (*_COMMON, "tool_calls", "reasoning_content", "reasoning", *_ECHOED),
    "tool": (*_COMMON, "tool_call_id"),
}
_MEDIA = {
    "image_url": "images",
    "input_image": "images",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "file": "files",
}


class FieldError(ValueError):
    """A field of a request is wrong. `param` names it, as in `messages[0].content`."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


def template_messages(messages: Any) -> list[dict[str, Any]]:
    """A request's messages as chat templates expect them.

    Content is text: parts are joined by newlines, null is the empty text. "developer" becomes "system", its newer
    name's older one. The arguments of tool calls become objects. Null fields are dropped.

    Raises:
        FieldError: (a ValueError) a message of the wrong form, with the path of the field; images, audio, video and
            files are named as what a text model does not take.
    """
    if not isinstance(messages, list):
        raise FieldError("messages", "must be a list of messages")
    if not messages:
        raise FieldError("messages", "is empty; give at least one message")
    return [_read_message(f"messages[{number}]", message) for number, message in enumerate(messages)]


def _read_message(path: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise FieldError(path, "must be an object with role and content")
    given = {key: value for key, value in message.items() if value is not None}
    role = given.get("role")
    if role == "function":
        raise FieldError(f"{path}.role", '"function" is the old form; use "tool" with a tool_call_id')
    if not isinstance(role, str) or role not in _KEYS:
        raise FieldError(f"{path}.role", f"{role!r:.60} is not one of {', '.join(_KEYS)}")
    for key in given:
        if key not in _KEYS[role]:
            known = ", ".join(key for key in _KEYS[role] if key not in _ECHOED)
            raise FieldError(f"{path}.{key:.60}", f"a message of role {role} has no such field; it has {known}")
    for key in ("name", "tool_call_id", "reasoning_content", "reasoning", "refusal"):
        if not isinstance(given.get(key, ""), str):
            raise FieldError(f"{path}.{key}", f"{given[key]!r:.60} must be text")
    read: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": ""}
    if "name" in given:
        read["name"] = given["name"]
    if role == "assistant":
        return read | _read_assistant(path, given)
    if "content" not in given:
        raise FieldError(f"{path}.content", "is missing")
    if role == "tool":
        if "tool_call_id" not in given:
            raise FieldError(f"{path}.tool_call_id", "is missing: a tool's message says which call it answers")
        read["tool_call_id"] = given["tool_call_id"]
    return read | {"content": _read_content(f"{path}.content", given["content"], ("text",))}


def _read_assistant(path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    for key, remedy in (
        ("function_call", "is the old form; use tool_calls"),
        ("audio", "this model reads text only"),
        ("annotations", "cannot be given to the model"),
    ):
        if given.get(key):
            raise FieldError(f"{path}.{key}", remedy)
    read: dict[str, Any] = {}
    if "content" in given:
        read["content"] = _read_content(f"{path}.content", given["content"], ("text", "refusal"))
    elif "refusal" in given:
        read["content"] = given["refusal"]
    elif "tool_calls" not in given:
        raise FieldError(f"{path}.content", "is missing; it may be null only beside tool_calls")
    reasoning = given.get("reasoning_content", given.get("reasoning"))
    if reasoning is not None:
        read["reasoning_content"] = reasoning
    if given.get("tool_calls") == [] and "content" in read:
        return read  # clients send the empty list back
    if "tool_calls" in given:
        read["tool_calls"] = _read_calls(f"{path}.tool_calls", given["tool_calls"])
    return read


def _read_content(path: str, content: Any, kinds: tuple[str, ...]) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise FieldError(path, f"{content!r:.60} must be text, or a list of parts of type text")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind in _MEDIA:
            raise FieldError(f"{path}[{number}]", f"is of type {kind}, and this model takes no {_MEDIA[kind]}")
        if not isinstance(kind, str) or kind not in kinds or not isinstance(part.get(kind), str):
            raise FieldError(f"{path}[{number}]", f'{part!r:.60} must be {{"type": "text", "text": …}}')
        for key, value in part.items():
            # A mark for another API's cache; prefixes are cached here without it.
            if key not in ("type", kind, "cache_control") and value is not None:
                raise FieldError(f"{path}[{number}].{key:.60}", "is unknown; a part has type and text")
        texts.append(part[kind])
    return "\n".join(texts)


def _read_calls(path: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not calls:
        raise FieldError(path, "must be a list with at least one call")
    return [_read_call(f"{path}[{number}]", call) for number, call in enumerate(calls)]


def _read_call(path: str, call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping) or call.get("type", "function") != "function":
        raise FieldError(path, 'must be {"id": …, "type": "function", "function": {"name": …, "arguments": …}}')
    for key in call:
        if key not in ("id", "type", "function", "index"):  # "index": of a stream's deltas, put together
            raise FieldError(f"{path}.{key:.60}", "is unknown; a call has id, type and function")
    if not isinstance(call.get("id"), str):
        raise FieldError(f"{path}.id", "must be the call's id, a text")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise FieldError(f"{path}.function", "must be an object with name and arguments")
    for key in function:
        if key not in ("name", "arguments"):
            raise FieldError(f"{path}.function.{key:.60}", "is unknown; a function has name and arguments")
    arguments = _read_arguments(f"{path}.function.arguments", function.get("arguments"))
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _read_arguments(path: str, arguments: Any) -> dict[str, Any]:
    try:
        read = json.loads(arguments or "{}") if isinstance(arguments, str) else None
    except (ValueError, RecursionError) as error:
        raise FieldError(path, f"is not JSON: {error!s:.200}") from None
    if not isinstance(read, dict):
        raise FieldError(path, f"{arguments!r:.60} must be the text of a JSON object")
    level: list[Any] = [read]
    for _ in range(MAX_ARGUMENTS_DEPTH):
        inner = [list(value.values()) if isinstance(value, dict) else value for value in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return read
    raise FieldError(path, f"is nested more than {MAX_ARGUMENTS_DEPTH} deep")
