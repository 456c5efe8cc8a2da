"""Llama-3-style calls: `{"name": …, "parameters": {…}}` at the start of a line, several after `;` or on lines."""

from __future__ import annotations

from jaxinfer.serve.tools.call_reader import ARGUMENT_KEYS, CallReader
from jaxinfer.serve.tools.parser import ANY_TEXT, CallLayout, ToolCallParser, num_held, split_broken

PYTHON_TAG = "<|python_tag|>"
_KEYS = ("type", "name", "id", *ARGUMENT_KEYS)
_TAG = PYTHON_TAG.replace("|", r"\|")


class LlamaParser(ToolCallParser):
    """A call is a bare object, introduced by `<|python_tag|>` or not; an object of any other kind is content."""

    layout = CallLayout(
        opening='{"name": ',
        arguments=', "parameters": ',
        closing="}",
        separator="; ",
        text_before_call=rf"({ANY_TEXT}\n)?({_TAG})?",
        no_call=rf'(({ANY_TEXT}\n)?|{ANY_TEXT}{_TAG})\s*\{{\s*"({"|".join(_KEYS)})"{ANY_TEXT}',
    )
    marks = (PYTHON_TAG,)

    def _start(self) -> bool:
        """At the beginning of a line."""
        text = self._buffer.lstrip(" \t\n\r;," if self._after_call else " \t\n\r")
        if not self._after_call:
            self._say(self._buffer[: len(self._buffer) - len(text)])
        self._buffer = text
        tagged = text.startswith(PYTHON_TAG)
        if not tagged and PYTHON_TAG.startswith(text) and not self._ended:
            return False
        rest = text[len(PYTHON_TAG) :].lstrip(" \t\n\r") if tagged else text
        if tagged and not rest and not self._ended:
            return False
        if not rest.startswith("{"):
            self._say(text[:1])
            self._buffer = text[1:]
            self._state = self._text
            return bool(text)
        self._buffer = rest
        self._open(text[: len(text) - len(rest)])
        return True

    def _text(self) -> bool:
        """Inside a line that is content."""
        tag = self._buffer.find(PYTHON_TAG)
        line = self._buffer.find("\n")
        if line >= 0 and not 0 <= tag < line:
            self._say(self._buffer[: line + 1])
            self._buffer = self._buffer[line + 1 :]
            self._state = self._start
            return True
        end = tag if tag >= 0 else len(self._buffer) - (0 if self._ended else num_held(self._buffer, PYTHON_TAG))
        self._say(self._buffer[:end])
        self._buffer = self._buffer[end:]
        self._state = self._start if tag >= 0 else self._text
        return tag >= 0

    def _make_reader(self) -> CallReader:
        return CallReader(self._names, only_keys=_KEYS, needs_arguments=True)

    def _after(self) -> bool:
        self._buffer = self._buffer.lstrip("}")
        if not self._buffer and not self._ended:
            return False
        self._state = self._start
        return True

    def _broken(self) -> bool:
        """Nothing tells where such a call ends, so it is the rest of the text."""
        arguments, rest = split_broken(self._buffer)
        self._add_arguments(arguments)
        self._buffer = "" if self._ended else rest
        return False
