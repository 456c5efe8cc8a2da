"""Conversations of the Responses API: items in, the messages of the chat template out."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from jaxinfer.serve.checks import check_keys, wrong
from jaxinfer.serve.responses.store import Item

_ROLES = ("user", "assistant", "system", "developer")
_MEDIA = {"input_image": "images", "input_file": "files", "input_audio": "audio"}
_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_ITEM_KEYS = {
    "message": ("type", "id", "status", "role", "content"),
    "reasoning": ("type", "id", "status", "summary", "content"),
    "function_call": ("type", "id", "status", "call_id", "name", "arguments"),
    "function_call_output": ("type", "id", "status", "call_id", "output"),
}
_PREFIXES = {"reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_PART_KEYS = {
    "input_text": ("type", "text", "prompt_cache_breakpoint"),  # a mark for another cache: prefixes need none here
    "output_text": ("type", "text", "annotations", "logprobs"),
    "refusal": ("type", "refusal"),
}


def read_input(given: str | list[dict[str, Any]]) -> list[Item]:
    """A body's `input` as items in the one form in which they are kept and told, each with an id.

    Raises:
        ApiError: an item of the wrong form, or of a kind that this server does not have, by its path.
    """
    if isinstance(given, str):
        return [_message("user", [{"type": "input_text", "text": given}])]
    if not given:
        raise wrong("input", "is empty; give a text or at least one item")
    return [_read_item(f"input[{index}]", item) for index, item in enumerate(given)]


def _message(role: str, content: list[dict[str, Any]], item_id: str | None = None) -> Item:
    item_id = item_id or f"msg_{uuid.uuid4().hex}"
    return {"id": item_id, "type": "message", "status": "completed", "role": role, "content": content}


def _read_item(path: str, item: dict[str, Any]) -> Item:
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in _ITEM_KEYS:
        kinds = ", ".join(_ITEM_KEYS)
        raise wrong(f"{path}.type", f"{kind!r:.60} is not available; items here are {kinds}", code="unsupported_value")
    check_keys(path, item, _ITEM_KEYS[kind])
    if item.get("status") not in (None, "in_progress", "completed", "incomplete"):
        raise wrong(f"{path}.status", f"{item['status']!r:.60} is not one of in_progress, completed, incomplete")
    if not isinstance(item.get("id"), str | None):
        raise wrong(f"{path}.id", f"{item['id']!r:.60} must be a text")
    if kind == "message":
        return _read_message(path, item)
    read = {"id": item.get("id") or f"{_PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "completed"}
    if kind == "reasoning":
        return read | _read_reasoning(path, item)
    for key in ("call_id", "name", "arguments") if kind == "function_call" else ("call_id",):
        if not isinstance(item.get(key), str):
            raise wrong(f"{path}.{key}", f"{item.get(key)!r:.60} must be a text")
        read[key] = item[key]
    if kind == "function_call":
        _check_arguments(f"{path}.arguments", item["arguments"])
        return read
    return read | {"output": _text_of(f"{path}.output", item.get("output"))}


def _check_arguments(path: str, arguments: str) -> None:
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise wrong(path, f"{arguments!r:.60} must be the text of a JSON object")


def _text_of(path: str, given: Any) -> str:
    """The text of a function's output, or of parts of it."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not given:
        raise wrong(path, f"{given!r:.60} must be a text, or a list of parts of type input_text")
    return "\n".join(_read_part(f"{path}[{index}]", part, "user")["text"] for index, part in enumerate(given))


def _read_reasoning(path: str, item: dict[str, Any]) -> Item:
    parts, summary = item.get("content") or [], item.get("summary") or []
    if not isinstance(summary, list) or summary:
        raise wrong(f"{path}.summary", "must be an empty list: this server makes no summaries")
    if not isinstance(parts, list) or not all(_is_reasoning(part) for part in parts):
        raise wrong(f"{path}.content", 'must be a list of {"type": "reasoning_text", "text": …}')
    return {"summary": [], "content": parts}


def _is_reasoning(part: Any) -> bool:
    known = isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "reasoning_text"
    return known and isinstance(part["text"], str)


def _read_message(path: str, item: dict[str, Any]) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        raise wrong(f"{path}.role", f"{role!r:.60} is not one of {', '.join(_ROLES)}")
    content, default = item.get("content"), "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        content = [{"type": default, "text": content}]
    if not isinstance(content, list) or not content:
        raise wrong(f"{path}.content", f"{content!r:.60} must be a text, or a list of parts of type {default}")
    parts = [_read_part(f"{path}.content[{index}]", part, role) for index, part in enumerate(content)]
    return _message(role, parts, item.get("id"))


def _read_part(path: str, part: Any, role: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _MEDIA:
        raise wrong(f"{path}.type", f"this model takes no {_MEDIA[kind]}", code="unsupported_value")
    kinds = tuple(_TEXTS) if role == "assistant" else ("input_text",)
    if not isinstance(kind, str) or kind not in kinds or not isinstance(part.get(_TEXTS[kind]), str):
        raise wrong(path, f'{part!r:.60} must be {{"type": "{kinds[len(kinds) > 1]}", "text": …}}')
    check_keys(path, part, _PART_KEYS[kind])
    if part.get("annotations"):
        raise wrong(f"{path}.annotations", "cannot be given to the model; leave them out")
    read = {"type": kind, _TEXTS[kind]: part[_TEXTS[kind]]}
    return {**read, "annotations": [], "logprobs": []} if kind == "output_text" else read


def check_calls(items: Sequence[Item]) -> None:
    """Raise `ApiError` for the output of a call that does not stand before it."""
    calls: set[str] = set()
    for item in items:
        if item["type"] == "function_call":
            calls.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in calls:
            raise wrong("input", f"no function call {item['call_id']!r:.80} stands before the output for it")


def messages_of(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """The messages of a chat completion.

    Those of the system at the beginning become one: many templates take no more. What an answer consists of, its
    reasoning, text and calls, becomes one too.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        message = _as_message(item)
        last = messages[-1] if messages else {}
        if message["role"] == "system" and [each["role"] for each in messages] == ["system"]:
            last["content"] += "\n\n" + message["content"]
        elif message["role"] == last.get("role") == "assistant" and not ("content" in message and "content" in last):
            _join(last, message)
        else:
            messages.append(message)
    for message in messages:
        if message["role"] == "assistant" and "tool_calls" not in message:
            message.setdefault("content", "")  # reasoning alone, which was cut off
    return messages


def _join(last: dict[str, Any], message: dict[str, Any]) -> None:
    for name, value in message.items():
        if name == "tool_calls":
            last[name] = last.get(name, []) + value
        elif name == "reasoning_content":
            last[name] = "\n".join(filter(None, (last.get(name), value)))
        else:
            last[name] = value


def _as_message(item: Item) -> dict[str, Any]:
    if item["type"] == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if item["type"] == "function_call_output":
        return {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
    if item["type"] == "reasoning":
        return {"role": "assistant", "reasoning_content": "\n".join(part["text"] for part in item["content"])}
    content = "\n".join(part[_TEXTS[part["type"]]] for part in item["content"])
    return {"role": "system" if item["role"] == "developer" else item["role"], "content": content}


def turn_starts(items: Sequence[Item]) -> list[int]:
    """Where the turns after the first begin: at those of the user's messages that follow something else."""
    return [index for index in range(1, len(items)) if _is_users(items[index]) and not _is_users(items[index - 1])]


def _is_users(item: Item) -> bool:
    return item.get("role") == "user"


def without_turns_before(items: Sequence[Item], start: int) -> list[Item]:
    """The items from `start`, after those before it that are the system's."""
    return [item for item in items[:start] if item.get("role") in ("system", "developer")] + list(items[start:])
