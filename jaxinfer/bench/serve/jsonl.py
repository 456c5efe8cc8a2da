"""Prompts of one's own: a file with one request a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxinfer.bench.serve.prompts import Session, Turn

OURS = ("model", "stream", "stream_options")


def read_jsonl(path: str, endpoint: str, default_max_tokens: int | None = None) -> list[Session]:
    """The sessions of a file, one a line; empty lines are skipped.

    A line is an object with `prompt` (a text or token ids; a text becomes a user's message where the endpoint is chat)
    or `messages`, and `max_tokens` if it likes; what else it has goes into the request's body.

    Raises:
        ValueError: the file cannot be read or a line makes no sense; the message names the file and the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ValueError(f"{path}: {reason}") from None
    sessions: list[Session] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            sessions.append((_turn(line, endpoint, default_max_tokens),))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not sessions:
        raise ValueError(f"{path}: holds no requests")
    return sessions


def _turn(line: str, endpoint: str, default_max_tokens: int | None) -> Turn:
    try:
        fields = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(fields, dict):
        raise ValueError("must be an object")
    if ("prompt" in fields) == ("messages" in fields):
        raise ValueError("must have either prompt or messages")
    if ours := [name for name in OURS if name in fields]:
        raise ValueError(f"{ours[0]} is set by the load generator; remove it")
    content = _prompt(fields.pop("prompt"), endpoint) if "prompt" in fields else _messages(fields, endpoint)
    max_tokens = fields.pop("max_tokens", default_max_tokens)
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1):
        raise ValueError(f"max_tokens={max_tokens!r}: must be a whole number from 1 up")
    return Turn(content, max_tokens, fields)


def _prompt(prompt: Any, endpoint: str) -> str | list[int]:
    if isinstance(prompt, str) and prompt:
        return prompt
    is_ids = isinstance(prompt, list) and prompt and all(type(each) is int and each >= 0 for each in prompt)
    if not is_ids:
        raise ValueError("prompt must be a text or a list of token ids, and not empty")
    if endpoint == "chat":
        raise ValueError("token ids need --endpoint completions")
    return prompt


def _messages(fields: dict[str, Any], endpoint: str) -> list[dict[str, Any]]:
    messages = fields.pop("messages")
    if endpoint != "chat":
        raise ValueError("messages need --endpoint chat")
    good = isinstance(messages, list) and messages
    if not good or not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages):
        raise ValueError("messages must be a list of objects with a role, and not empty")
    return messages
