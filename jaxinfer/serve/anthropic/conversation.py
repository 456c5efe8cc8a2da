"""Conversations of the Messages API: content blocks in, the messages of a chat completion out."""

from __future__ import annotations

import json
from typing import Any

from jaxinfer.serve.anthropic.cache_control import check_cache_control
from jaxinfer.serve.anthropic.schemas import CountTokensRequest
from jaxinfer.serve.checks import check_keys, wrong
from jaxinfer.serve.schemas import ChatRequest

_ROLES = ("user", "assistant", "system")
_MEDIA = {"image": "images", "document": "documents", "search_result": "search results", "container_upload": "files"}
# The keys of each kind of block, and whose it may be.
_KEYS = {
    "text": ("type", "text", "cache_control", "citations"),
    "thinking": ("type", "thinking", "signature"),
    "tool_use": ("type", "id", "name", "input", "cache_control", "caller"),
    "tool_result": ("type", "tool_use_id", "content", "is_error", "cache_control"),
}
_KINDS = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}


def chat_of(body: CountTokensRequest, **fields: Any) -> ChatRequest:
    """The request as one for a chat completion. A last text of the assistant's is gone on with.

    Raises:
        ApiError: a message of the wrong form, or of a kind that this server does not have, by its path.
    """
    messages = _read_messages(body)
    last = messages[-1]
    continues = last["role"] == "assistant" and "tool_calls" not in last
    return ChatRequest(messages=messages, continue_final_message=continues or None, **fields)


def _read_messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    """Messages of one role that follow each other are one turn: many templates insist on it."""
    if not body.messages:
        raise wrong("messages", "is empty; give at least one message")
    turns: list[tuple[str, list[dict[str, Any]]]] = []
    if body.system is not None:
        turns.append(("system", _read_content("system", body.system, "system")))
    calls: set[str] = set()
    for index, message in enumerate(body.messages):
        path, role = f"messages[{index}]", message.get("role")
        if role not in _ROLES:
            raise wrong(f"{path}.role", f"{role!r:.60} is not one of {', '.join(_ROLES)}")
        check_keys(path, message, ("role", "content"))
        blocks = _read_content(f"{path}.content", message.get("content"), role)
        for block in blocks:
            if block["type"] == "tool_use":
                calls.add(block["id"])
            elif block["type"] == "tool_result" and block["tool_use_id"] not in calls:
                raise wrong(f"{path}.content", f"no tool_use {block['tool_use_id']!r:.80} stands before its result")
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    return [message for role, blocks in turns for message in _messages_of(role, blocks)]


def _messages_of(role: str, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A turn's blocks: results of tools are messages of their own, in front of what the user says."""
    results = [_result_of(block) for block in blocks if block["type"] == "tool_result"]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    calls = [_call_of(block) for block in blocks if block["type"] == "tool_use"]
    message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [*results, message] if texts or not results else results


def _result_of(block: dict[str, Any]) -> dict[str, Any]:
    content = "\n".join(each["text"] for each in block["content"])
    content = f"Error: {content}" if block.get("is_error") else content
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}


def _call_of(block: dict[str, Any]) -> dict[str, Any]:
    function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
    return {"id": block["id"], "type": "function", "function": function}


def _read_content(path: str, content: Any, role: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise wrong(path, f"{content!r:.60} must be a text, or a list of blocks")
    return [_read_block(f"{path}[{index}]", block, _KINDS[role]) for index, block in enumerate(content)]


def _read_block(path: str, block: Any, kinds: tuple[str, ...]) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise wrong(path, f'{block!r:.60} must be {{"type": "text", "text": …}}')
    if kind in _MEDIA:
        raise wrong(f"{path}.type", f"this model takes no {_MEDIA[kind]}")
    if kind not in kinds:
        raise wrong(f"{path}.type", f"{kind!r:.60} is not available; blocks here are of type {', '.join(kinds)}")
    check_keys(path, block, _KEYS[kind])
    check_cache_control(f"{path}.cache_control", block.get("cache_control"))
    if block.get("citations"):
        raise wrong(f"{path}.citations", "cannot be given to the model; leave them out")
    if block.get("caller") not in (None, {"type": "direct"}):
        raise wrong(f"{path}.caller", "calls here are made by the model itself")
    for key in {"text": ("text",), "thinking": ("thinking",), "tool_use": ("id", "name")}.get(kind, ("tool_use_id",)):
        if not isinstance(block.get(key), str):
            raise wrong(f"{path}.{key}", f"{block.get(key)!r:.60} must be a text")
    if kind == "tool_use" and not isinstance(block.get("input"), dict):
        raise wrong(f"{path}.input", f"{block.get('input')!r:.60} must be an object")
    if kind != "tool_result":
        return block
    if not isinstance(block.get("is_error"), bool | None):
        raise wrong(f"{path}.is_error", "must be true or false")
    given = block.get("content")
    return {**block, "content": [] if given is None else _read_content(f"{path}.content", given, "system")}
