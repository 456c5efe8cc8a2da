"""Conversations of the Responses API: items in, the messages of the chat template out."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from jaxinfer.serve.checks import check_keys, wrong
from jaxinfer.serve.responses.store import Item

_ROLES = ("user", "assistant", "system", "developer")
_MEDIA = {"input_image": "images", "input_file": "files", "input_audio": "audio"}
_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
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
    if kind != "message":
        raise wrong(f"{path}.type", f"{kind!r:.60} is not available; items here are messages", code="unsupported_value")
    role = item.get("role")
    if role not in _ROLES:
        raise wrong(f"{path}.role", f"{role!r:.60} is not one of {', '.join(_ROLES)}")
    check_keys(path, item, ("type", "role", "content", "id", "status"))
    if item.get("status") not in (None, "in_progress", "completed", "incomplete"):
        raise wrong(f"{path}.status", f"{item['status']!r:.60} is not one of in_progress, completed, incomplete")
    if not isinstance(item.get("id"), str | None):
        raise wrong(f"{path}.id", f"{item['id']!r:.60} must be a text")
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


def messages_of(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """The chat template's messages. Those of the system at the beginning become one: many templates take no more."""
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    for item in items:
        role = "system" if item["role"] == "developer" else item["role"]
        content = "\n".join(part[_TEXTS[part["type"]]] for part in item["content"])
        if role == "system" and [each["role"] for each in messages] == ["system"]:
            messages[0] = {"role": "system", "content": f"{messages[0]['content']}\n\n{content}"}
        else:
            messages.append({"role": role, "content": content})
    return messages


def turn_starts(items: Sequence[Item]) -> list[int]:
    """Where the turns after the first begin: at those of the user's messages that follow something else."""
    return [index for index in range(1, len(items)) if _is_users(items[index]) and not _is_users(items[index - 1])]


def _is_users(item: Item) -> bool:
    return item["role"] == "user"


def without_turns_before(items: Sequence[Item], start: int) -> list[Item]:
    """The items from `start`, after those before it that are the system's."""
    return [item for item in items[:start] if item["role"] in ("system", "developer")] + list(items[start:])
