"""A model's text as a chat message: reasoning, content and tool calls, whole or as it arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxinfer.serve.reasoning import ReasoningSplitter
from jaxinfer.serve.tools.parser import Delta, ToolCall, ToolCallParser

# A whole text is read in pieces too, since parsers copy what is left of a piece at every line and tag.
_PIECE_CHARACTERS = 1 << 12


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    content: str
    reasoning: str
    tool_calls: list[ToolCall]

    def as_openai(self) -> dict[str, Any]:
        """As `choices[].message` of the chat completions API, with `reasoning_content` where there is reasoning."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [call.as_openai() for call in self.tool_calls]
        return message


def delta_as_openai(delta: Delta) -> dict[str, Any]:
    """As `choices[].delta` of the chat completions API; empty where the delta is."""
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.content:
        fields["content"] = delta.content
    if delta.tool_calls:
        fields["tool_calls"] = [call.as_openai() for call in delta.tool_calls]
    return fields


class ReplyReader:
    """Reads one answer with the parsers that apply to it; without any, its text is content as it stands."""

    def __init__(self, reasoning: ReasoningSplitter | None = None, tools: ToolCallParser | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []
        self._arguments: list[list[str]] = []

    @property
    def num_calls(self) -> int:
        """Tool calls that have begun."""
        return len(self._calls)

    def add(self, text: str) -> Delta:
        """What a piece of text adds to the message."""
        delta = self._reasoning.add(text) if self._reasoning else Delta(text)
        return self._keep(self._read_calls(delta))

    def finish(self) -> Delta:
        """What was held back, once the text has ended."""
        delta = self._read_calls(self._reasoning.finish() if self._reasoning else Delta())
        return self._keep(delta + self._tools.finish() if self._tools else delta)

    def read(self, text: str) -> Reply:
        """A whole answer at once; equals what the pieces give."""
        for start in range(0, len(text), _PIECE_CHARACTERS):
            self.add(text[start : start + _PIECE_CHARACTERS])
        self.finish()
        return self.reply()

    def reply(self) -> Reply:
        """The message so far."""
        pairs = zip(self._calls, self._arguments, strict=True)
        calls = [ToolCall(call.id, call.name, "".join(pieces)) for call, pieces in pairs]
        return Reply("".join(self._content), "".join(self._thoughts), calls)

    def _read_calls(self, delta: Delta) -> Delta:
        if self._tools is None or not delta.content:
            return delta
        read = self._tools.add(delta.content)
        read.reasoning = delta.reasoning
        return read

    def _keep(self, delta: Delta) -> Delta:
        self._content.append(delta.content)
        self._thoughts.append(delta.reasoning)
        for call in delta.tool_calls:
            if call.id is not None and call.name is not None:
                self._calls.append(ToolCall(call.id, call.name, ""))
                self._arguments.append([])
            self._arguments[call.index].append(call.arguments)
        return delta
