"""Conversations of the Messages API: content blocks in, the messages of the chat template out."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from jaxinfer.serve.anthropic.schemas import CacheControl, CountTokensRequest
from jaxinfer.serve.checks import check_keys, wrong
from jaxinfer.serve.schemas import ChatRequest

_ROLES = ("user", "assistant", "system")
_MEDIA = {"image": "images", "document": "documents", "search_result": "search results", "container_upload": "files"}


def chat_of(body: CountTokensRequest, **fields: Any) -> ChatRequest:
    """The request as one for a chat completion. A last message of the assistant's is gone on with.

    Raises:
        ApiError: a message of the wrong form, or of a kind that this server does not have, by its path.
    """
    messages = _read_messages(body)
    continues = messages[-1]["role"] == "assistant"
    return ChatRequest(messages=messages, continue_final_message=continues or None, **fields)


def _read_messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    """Of one text each. Messages of one role that follow each other are one turn: many templates insist on it."""
    if not body.messages:
        raise wrong("messages", "is empty; give at least one message")
    texts: list[tuple[str, list[str]]] = []
    if body.system is not None:
        texts.append(("system", _read_content("system", body.system)))
    for index, message in enumerate(body.messages):
        path = f"messages[{index}]"
        role = message.get("role")
        if role not in _ROLES:
            raise wrong(f"{path}.role", f"{role!r:.60} is not one of {', '.join(_ROLES)}")
        check_keys(path, message, ("role", "content"))
        content = _read_content(f"{path}.content", message.get("content"))
        if texts and texts[-1][0] == role:
            texts[-1][1].extend(content)
        else:
            texts.append((role, content))
    return [{"role": role, "content": "\n".join(content)} for role, content in texts]


def _read_content(path: str, content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise wrong(path, f"{content!r:.60} must be a text, or a list of blocks of type text")
    return [_read_block(f"{path}[{index}]", block) for index, block in enumerate(content)]


def _read_block(path: str, block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in _MEDIA:
        raise wrong(f"{path}.type", f"this model takes no {_MEDIA[kind]}")
    if isinstance(kind, str) and kind != "text":
        raise wrong(f"{path}.type", f"{kind!r:.60} is not available; blocks here are of type text")
    if kind is None or not isinstance(block.get("text"), str):
        raise wrong(path, f'{block!r:.60} must be {{"type": "text", "text": …}}')
    check_keys(path, block, ("type", "text", "cache_control", "citations"))
    if block.get("citations"):
        raise wrong(f"{path}.citations", "cannot be given to the model; leave them out")
    check_cache_control(f"{path}.cache_control", block.get("cache_control"))
    return block["text"]


def check_cache_control(path: str, value: Any) -> None:
    """Raise `ApiError` for a mark of another form; otherwise there is nothing to do, as every prefix is cached."""
    if value is None:
        return
    try:
        CacheControl.model_validate(value)
    except ValidationError:
        raise wrong(
            path, f'{value!r:.60} must be {{"type": "ephemeral"}}, with a ttl of "5m" or "1h" or none'
        ) from None
