"""One tool call, `{"name": …, "arguments": {…}}`, read while it is written."""

from __future__ import annotations

import json
from collections.abc import Collection

from jaxinfer.serve.tools.json_scanner import JsonObjectScanner, is_json_object

ARGUMENT_KEYS = ("arguments", "parameters")


class CallReader:
    """Reads a call character by character and gives its arguments on as soon as the function's name is known.

    `status` is
    - "header": nothing has been given on; may still fail;
    - "arguments": the text that `feed` returns is the arguments object, as the model writes it;
    - "tail": the arguments are complete, the object around them is not;
    - "done": the object is complete;
    - "cut": the arguments are complete, but the object does not go on like this; the last character was not taken;
    - "broken": the arguments have begun and are no JSON; the last character was not taken;
    - "failed": this is no call of a known function; nothing has been given on.

    Args:
        names: the functions that may be called.
        only_keys: keys beyond which the object is no call; None allows any.
        needs_arguments: an object without arguments is no call; otherwise they are then `{}`.
    """

    def __init__(
        self, names: Collection[str], only_keys: Collection[str] | None = None, needs_arguments: bool = False
    ) -> None:
        self.status = "header"
        self.name: str | None = None
        self._names = names
        self._only_keys = only_keys
        self._needs_arguments = needs_arguments
        self._scanner = JsonObjectScanner()
        self._key = ""
        self._text: list[str] = []  # of the key or value at hand
        self._collecting = ""  # "key", "value", or neither
        self._arguments: str | None = None

    def feed(self, character: str) -> str:
        """The arguments' text that this character adds."""
        if self.status == "arguments":
            return self._feed_arguments(character)
        before, depth, was_literal = self._scanner.expects, self._scanner.depth, self._scanner.in_literal
        if not self._scanner.feed(character):
            self.status = "cut" if self.status == "tail" else "failed"
            return ""
        if self.status == "tail":
            self.status = "done" if self._scanner.done else "tail"
            return ""
        if depth == 1 and was_literal and not self._scanner.in_literal:
            self._end_value()
        elif depth == 1 and not self._collecting and not character.isspace():
            self._begin(before, character)
        if self._collecting:
            self._collect(character)
        if self._scanner.done and self.status == "header":
            return self._finish()
        return self._text.pop() if self.status == "arguments" else ""

    def _begin(self, expected: str, character: str) -> None:
        if expected in ("key", "key or end") and character == '"':
            self._collecting = "key"
        elif expected == "value":
            self._collecting = "value"
            if self._key in ARGUMENT_KEYS and self.name is not None and character == "{" and self._arguments is None:
                self.status = "arguments"

    def _collect(self, character: str) -> None:
        self._text.append(_escaped(character) if self._scanner.in_string else character)
        scanner = self._scanner
        if self.status == "arguments" or scanner.in_string or scanner.in_literal or scanner.depth != 1:
            return
        if self._collecting == "value":
            self._end_value()
            return
        self._key = json.loads("".join(self._text))
        self._text, self._collecting = [], ""
        if self._only_keys is not None and self._key not in self._only_keys:
            self.status = "failed"

    def _end_value(self) -> None:
        text = "".join(self._text)
        self._text, self._collecting = [], ""
        if self._key == "name":
            name = json.loads(text) if text.startswith('"') else None
            self.name = name if name in self._names else None
            if self.name is None:
                self.status = "failed"
        elif self._key in ARGUMENT_KEYS:
            self._arguments = _as_object(text)
            if self._arguments is None:
                self.status = "failed"

    def _finish(self) -> str:
        if self.name is None or (self._arguments is None and self._needs_arguments):
            self.status = "failed"
            return ""
        self.status = "done"
        return self._arguments or "{}"

    def _feed_arguments(self, character: str) -> str:
        in_string = self._scanner.in_string
        if not self._scanner.feed(character):
            self.status = "broken"
            return ""
        if self._scanner.depth == 1:
            self.status = "tail"
            self._text, self._collecting = [], ""
        return _escaped(character) if in_string else character


def _escaped(character: str) -> str:
    """A control character as JSON strings write it."""
    return json.dumps(character)[1:-1] if character < " " else character


def _as_object(text: str) -> str | None:
    """The JSON object that is a call's arguments, which some models write inside a string; None for anything else."""
    if text == "null":
        return "{}"
    if text.startswith('"'):
        text = json.loads(text)
        if any("\ud800" <= character <= "\udfff" for character in text):
            return None  # half a character, which no reply can hold
    return text if is_json_object(text) else None
