"""The lines of a file of requests as the OpenAI Batch API has them: `{"custom_id", "method", "url", "body"}`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_CUSTOM_ID_CHARACTERS = 512
_FIELDS = {"custom_id": str, "method": str, "url": str, "body": dict}


class RecordError(ValueError):
    """A line that is no request. `param` is the field at fault, `custom_id` the line's own where it could be read."""

    def __init__(self, message: str, param: str | None = None, custom_id: str | None = None):
        super().__init__(message)
        self.param = param
        self.custom_id = custom_id


@dataclass(frozen=True)
class Line:
    """A line of a file, counted from 1; `content` is None where it is longer than allowed."""

    number: int
    content: bytes | None


@dataclass(frozen=True)
class Record:
    """One request of a file."""

    custom_id: str
    url: str
    body: dict[str, Any]


def read_lines(path: Path, max_line_bytes: int) -> Iterator[Line]:
    """The lines that are not blank. One that is longer than `max_line_bytes` is passed over and not held."""
    with open(path, "rb") as file:
        number = 0
        while content := file.readline(max_line_bytes + 1):
            number += 1
            whole = len(content) <= max_line_bytes or content.endswith(b"\n")
            if not whole:
                while (more := file.readline(1 << 16)) and not more.endswith(b"\n"):
                    pass
                yield Line(number, None)
            elif content.strip():
                yield Line(number, content.removeprefix(b"\xef\xbb\xbf") if number == 1 else content)


def parse(line: Line) -> Record:
    """The request of a line.

    Raises:
        RecordError: it is none, with the line's number and what is wrong.
    """
    if line.content is None:
        raise RecordError(f"line {line.number} is longer than a request may be")
    try:
        found = json.loads(line.content)
    except (ValueError, RecursionError) as error:  # of bytes that are no UTF-8 too
        raise RecordError(f"line {line.number} is not JSON: {error}"[:300]) from None
    if not isinstance(found, dict):
        raise RecordError(f"line {line.number} must be a JSON object with custom_id, method, url and body")
    try:
        return check(found)
    except RecordError as error:
        raise RecordError(f"line {line.number}: {error}", error.param, error.custom_id) from None


def check(found: dict[str, Any]) -> Record:
    """The request that a line's object is.

    Raises:
        RecordError: it is none, with what is wrong.
    """
    given = found.get("custom_id")
    custom_id = given if isinstance(given, str) and len(given) <= MAX_CUSTOM_ID_CHARACTERS else None

    def wrong(param: str, words: str) -> RecordError:
        return RecordError(f"{param} {words}", param, custom_id)

    for name, kind in _FIELDS.items():
        if name not in found:
            raise wrong(name, "is missing")
        if not isinstance(found[name], kind):
            raise wrong(name, f"must be {'an object' if kind is dict else 'a string'}, not {found[name]!r:.60}")
    if unknown := sorted(set(found) - set(_FIELDS)):
        raise wrong(unknown[0][:60], "is no field of a request; remove it")
    if not custom_id:
        raise wrong("custom_id", f"must have from 1 up to {MAX_CUSTOM_ID_CHARACTERS} characters")
    if found["method"] != "POST":
        raise wrong("method", f"must be POST, not {found['method']!r:.60}")
    return Record(custom_id, found["url"], found["body"])
