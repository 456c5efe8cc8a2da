"""A model's answer as the sequence of its parts: reasoning, text and calls, in the order in which they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxinfer.serve.reply import ReplyReader
from jaxinfer.serve.tools.parser import Delta, ToolCallDelta

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Segment:
    """What a part goes on with, or begins with. `text` of a call is its arguments'; the first has `call_id`, `name`."""

    kind: Kind
    text: str
    call_id: str | None = None
    name: str | None = None


class SegmentReader:
    """Reads one answer; how its text is cut into pieces changes nothing but where segments are cut.

    `exact` where there may be calls: text before and after one are told apart, at the cost of reading by characters.
    """

    def __init__(self, reader: ReplyReader, exact: bool):
        self._reader = reader
        self._exact = exact

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._reader.num_calls

    def add(self, text: str) -> list[Segment]:
        """What a piece of text adds."""
        found: list[Segment] = []
        for piece in text if self._exact else (text,):
            _extend(found, self._reader.add(piece))
        return found

    def finish(self) -> list[Segment]:
        """What was held back, once the text has ended."""
        found: list[Segment] = []
        _extend(found, self._reader.finish())
        return found


def _extend(found: list[Segment], delta: Delta) -> None:
    if delta.reasoning:
        _append(found, Segment("reasoning", delta.reasoning))
    if delta.content:
        _append(found, Segment("text", delta.content))
    for call in delta.tool_calls:
        _append(found, _of_call(call))


def _of_call(call: ToolCallDelta) -> Segment:
    return Segment("call", call.arguments, call.id, call.name)


def _append(found: list[Segment], segment: Segment) -> None:
    if found and found[-1].kind == segment.kind and segment.call_id is None:
        found[-1].text += segment.text
    else:
        found.append(segment)
