"""Hermes-style calls: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes, Qwen and others write them."""

from __future__ import annotations

from jaxinfer.serve.tools.call_reader import CallReader
from jaxinfer.serve.tools.parser import ANY_TEXT, CallLayout, ToolCallParser, num_held, split_broken

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser(ToolCallParser):
    """Each call stands between tags; a missing closing brace or tag is forgiven."""

    layout = CallLayout(
        opening=f'{OPEN}\n{{"name": ',
        arguments=', "arguments": ',
        closing=f"}}\n{CLOSE}",
        separator="\n",
        text_before_call=ANY_TEXT,
        no_call=f"{ANY_TEXT}{OPEN}{ANY_TEXT}",
    )
    marks = (OPEN, CLOSE)

    def _start(self) -> bool:
        position = self._buffer.find(OPEN)
        if position >= 0:
            self._say(self._buffer[:position])
            self._buffer = self._buffer[position + len(OPEN) :]
            self._open(OPEN)
            return True
        keep = 0 if self._ended else num_held(self._buffer, OPEN)
        self._say(self._buffer[: len(self._buffer) - keep])
        self._buffer = self._buffer[len(self._buffer) - keep :]
        return False

    def _make_reader(self) -> CallReader:
        return CallReader(self._names)

    def _after(self) -> bool:
        self._buffer = self._buffer.lstrip(" \t\n\r}")
        if self._buffer.startswith(CLOSE):
            self._buffer = self._buffer[len(CLOSE) :]
        elif CLOSE.startswith(self._buffer):
            self._buffer = "" if self._ended else self._buffer
            return False
        self._state = self._start
        return True

    def _broken(self) -> bool:
        position = self._buffer.find(CLOSE)
        ended = self._ended or position >= 0
        end = position if position >= 0 else len(self._buffer) - (0 if ended else num_held(self._buffer, CLOSE))
        arguments, rest = split_broken(self._buffer[:end])
        self._add_arguments(arguments)
        if not ended:
            self._buffer = rest + self._buffer[end:]
            return False
        self._buffer = self._buffer[end + len(CLOSE) :]
        self._state = self._start
        return True
