"""A JSON object read one character at a time, so that its end is known the moment it comes."""

from __future__ import annotations

import re

_SPACE = frozenset(" \t\n\r")
_ESCAPES = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")
_LITERAL_START = frozenset("-0123456789tfn")
_LITERAL = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_LITERAL_CHARACTERS = frozenset("+-.0123456789eEtrufalsn")

_BEFORE_END = frozenset(("comma or end", "key or end", "value or end"))
_OPENED_BY = {"}": "{", "]": "["}


class JsonObjectScanner:
    """Accepts the characters of one JSON object (RFC 8259), with no limit on its depth.

    One thing is taken that JSON forbids, since models write it: control characters inside strings.

    `expects` says what may come next: "object", "key or end", "key", "colon", "value", "value or end", "comma or end",
    or nothing once `done`.
    """

    def __init__(self) -> None:
        self.expects = "object"
        self.in_string = False
        self._stack: list[str] = []
        self._is_key = False
        self._num_escaped = 0  # characters of the escape that are still due; -1: the one after the backslash
        self._literal: list[str] = []

    @property
    def depth(self) -> int:
        """Containers that are open."""
        return len(self._stack)

    @property
    def done(self) -> bool:
        return self.expects == ""

    @property
    def in_literal(self) -> bool:
        """Inside a number, true, false or null, whose end shows only in what follows."""
        return bool(self._literal)

    def feed(self, character: str) -> bool:
        """Take a character; False where no JSON object goes on like this, after which the scanner is of no use."""
        if self.in_string:
            return self._feed_string(character)
        if self._literal:
            if character in _LITERAL_CHARACTERS:
                self._literal.append(character)
                return True
            literal, self._literal = "".join(self._literal), []
            if not _LITERAL.fullmatch(literal):
                return False
        if character in _SPACE and self.expects:
            return True
        return self._feed_structure(character)

    def _feed_structure(self, character: str) -> bool:
        expects = self.expects
        if expects == "comma or end" and character == ",":
            self.expects = "key" if self._stack[-1] == "{" else "value"
        elif character in "}]" and expects in _BEFORE_END and self._stack[-1] == _OPENED_BY[character]:
            self._close()
        elif expects in ("key", "key or end") and character == '"':
            self.in_string = self._is_key = True
        elif expects == "colon" and character == ":":
            self.expects = "value"
        elif expects == "object" and character == "{":
            self._open(character)
        elif expects in ("value", "value or end"):
            return self._begin_value(character)
        else:
            return False
        return True

    def _begin_value(self, character: str) -> bool:
        if character in "{[":
            self._open(character)
            return True
        self.expects = "comma or end"
        if character == '"':
            self.in_string = True
        elif character in _LITERAL_START:
            self._literal = [character]
        else:
            return False
        return True

    def _open(self, bracket: str) -> None:
        self._stack.append(bracket)
        self.expects = "key or end" if bracket == "{" else "value or end"

    def _close(self) -> None:
        self._stack.pop()
        self.expects = "comma or end" if self._stack else ""

    def _feed_string(self, character: str) -> bool:
        if self._num_escaped:
            good = character in (_ESCAPES if self._num_escaped < 0 else _HEX)
            due = 4 if character == "u" else 0
            self._num_escaped = due if self._num_escaped < 0 else self._num_escaped - 1
            return good
        if character == "\\":
            self._num_escaped = -1
        elif character == '"':
            self.in_string = False
            self.expects = "colon" if self._is_key else "comma or end"
            self._is_key = False
        return True


def is_json_object(text: str) -> bool:
    """Whether a text is one JSON object, however deep, with nothing but space around it."""
    scanner = JsonObjectScanner()
    text = text.rstrip(" \t\n\r")
    return all(not scanner.done and scanner.feed(character) for character in text) and scanner.done
