"""Tool calls in a model's text: what the parsers of all formats share."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from jaxinfer.serve.tools.call_reader import CallReader

# A regular expression; with `.` alone it would stop at a line's end.
ANY_TEXT = r"(.|\n)*"


@dataclass(frozen=True)
class CallLayout:
    """How a format spells its calls: `opening`, the name as JSON, `arguments`, the arguments, `closing`.

    `separator` stands between two calls, `text_before_call` may stand before the first; `no_call` is what a text
    without calls never is. Those two are regular expressions as they stand between slashes.
    """

    opening: str
    arguments: str
    closing: str
    separator: str
    text_before_call: str
    no_call: str

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call, as the format's models write it."""
        given = json.dumps(arguments, ensure_ascii=False)
        return f"{self.opening}{json.dumps(name)}{self.arguments}{given}{self.closing}"


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a call: the first of a call has its `id` and `name`, the others add to its arguments."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None

    def as_openai(self) -> dict[str, Any]:
        """As in `choices[].delta.tool_calls` of the chat completions API."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class ToolCall:
    """A call of a function; `arguments` is a JSON object's text, unless the model was cut off or wrote bad JSON."""

    id: str
    name: str
    arguments: str

    def as_openai(self) -> dict[str, Any]:
        """As in `choices[].message.tool_calls` of the chat completions API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass
class Delta:
    """What a piece of text adds to a message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __add__(self, other: Delta) -> Delta:
        return Delta(self.content + other.content, self.reasoning + other.reasoning, self.tool_calls + other.tool_calls)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


def new_call_id() -> str:
    """A call's id, in the form that OpenAI's have."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolCallParser(ABC):
    """Separates a model's text into content and tool calls, as it arrives.

    How the text is cut into pieces changes nothing but where the pieces of content and arguments are cut; any text is
    taken. What may become a call is held back until it is one. A call that names no function of `names`, or is
    malformed before its arguments begin, is content, as written. Once arguments have begun they are given on as the
    model writes them, so a call that breaks off later, or whose arguments turn out to be no JSON, stays a call with
    those arguments. Space around a call is dropped.

    Args:
        names: the functions that may be called.
        make_id: makes the ids of the calls.
    """

    layout: ClassVar[CallLayout]
    marks: ClassVar[tuple[str, ...]]
    """What is looked for in the text; models may write it as special tokens."""

    def __init__(self, names: Collection[str], make_id: Callable[[], str] = new_call_id) -> None:
        self.num_calls = 0
        self._names = frozenset(names)
        self._make_id = make_id
        self._buffer = ""
        self._delta = Delta()
        self._said: list[str] = []
        self._space = ""  # after content: dropped if a call follows
        self._after_call = False  # space that comes now is dropped
        self._state = self._start
        self._ended = False
        self._reader = CallReader(())
        self._held: list[str] = []  # what the call at hand was made of, while it may still fail
        self._opening = ""

    def add(self, text: str) -> Delta:
        """What this piece of text adds."""
        self._buffer += text
        return self._run()

    def finish(self) -> Delta:
        """What was held back, at the end of the text. Nothing may be added after it."""
        self._ended = True
        delta = self._run()
        delta.content += self._space
        self._space = ""
        return delta

    @abstractmethod
    def _start(self) -> bool:
        """The state outside calls. A state takes from the buffer; False where it needs more than there is."""

    @abstractmethod
    def _after(self) -> bool:
        """The state after a call's object, whether it ended well or was cut off."""

    @abstractmethod
    def _broken(self) -> bool:
        """The state inside arguments that are no JSON."""

    @abstractmethod
    def _make_reader(self) -> CallReader: ...

    def _run(self) -> Delta:
        while self._state():
            pass
        delta, self._delta = self._delta, Delta()
        delta.content, self._said = "".join(self._said), []
        return delta

    def _say(self, text: str) -> None:
        """Content."""
        if self._after_call:
            text = text.lstrip()
        if not text:
            return
        self._after_call = False
        shown = (self._space + text).rstrip()
        if shown:
            self._said.append(shown)
            self._space = text[len(text.rstrip()) :]
        else:
            self._space += text

    def _open(self, opening: str) -> None:
        """Go on with what looks like a call and was introduced by `opening`."""
        self._opening, self._held = opening, []
        self._reader = self._make_reader()
        self._state = self._header

    def _header(self) -> bool:
        for position, character in enumerate(self._buffer):
            self._held.append(character)
            arguments = self._reader.feed(character)
            if self._reader.status == "header":
                continue
            self._buffer = self._buffer[position + 1 :]
            if self._reader.status == "failed":
                self._give_up()
            else:
                self._begin_call(arguments)
            return True
        self._buffer = ""
        if self._ended and (self._held or self._opening):
            self._give_up()
            return True
        return False

    def _give_up(self) -> None:
        """It was no call: say what introduced it, and look at the rest again."""
        self._say(self._opening)
        self._buffer = "".join(self._held) + self._buffer
        self._held, self._opening = [], ""
        self._state = self._text

    def _text(self) -> bool:
        """The state in which what failed to be a call is read again."""
        self._state = self._start
        return True

    def _begin_call(self, arguments: str) -> None:
        self._held, self._space, self._after_call = [], "", True
        self._delta.tool_calls.append(ToolCallDelta(self.num_calls, "", self._make_id(), self._reader.name))
        self.num_calls += 1
        self._add_arguments(arguments)
        self._state = self._after if self._reader.status == "done" else self._arguments

    def _add_arguments(self, text: str) -> None:
        calls, index = self._delta.tool_calls, self.num_calls - 1
        if text and calls and calls[-1].index == index:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + text)
        elif text:
            calls.append(ToolCallDelta(index, text))

    def _arguments(self) -> bool:
        pieces: list[str] = []
        taken = len(self._buffer)
        for position, character in enumerate(self._buffer):
            pieces.append(self._reader.feed(character))
            if self._reader.status not in ("arguments", "tail"):
                taken = position + (self._reader.status == "done")
                break
        self._buffer = self._buffer[taken:]
        self._add_arguments("".join(pieces))
        if self._reader.status in ("arguments", "tail"):
            return False
        self._state = self._broken if self._reader.status == "broken" else self._after
        return True


def num_held(text: str, mark: str) -> int:
    """The length of the longest end of `text` that `mark` begins with and goes on after."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def split_broken(text: str) -> tuple[str, str]:
    """Arguments that are no JSON, and the end of the object around them, if that has come."""
    inner = text.rstrip().removesuffix("}").rstrip()
    return inner, text[len(inner) :]
