"""Reasoning models: what stands between `<think>` and `</think>` apart from the answer."""

from __future__ import annotations

from jaxinfer.serve.tools.parser import Delta, num_held

OPEN = "<think>"
CLOSE = "</think>"
REASONING_MARKS = (OPEN, CLOSE)
# "think": an answer that begins with the tag, or whose prompt ended with it, has reasoning (Qwen3, Hermes 4, SmolLM3).
# "deepseek_r1": an answer begins with reasoning, whether a tag says so or not, unless the prompt closed it.
REASONING_PARSERS = {"think": False, "qwen3": False, "deepseek_r1": True}


def choose_reasoning_parser(chat_template: str | None) -> str | None:
    """The parser for a model with this template: "think" where it mentions the tags, else none."""
    return "think" if chat_template and (OPEN in chat_template or CLOSE in chat_template) else None


def begins_in_reasoning(parser: str, prompt: str) -> bool:
    """Whether the answer to `prompt`, a rendered conversation or its end, begins inside the reasoning.

    Raises:
        ValueError: there is no such parser.
    """
    if parser not in REASONING_PARSERS:
        raise ValueError(f"reasoning_parser={parser!r:.60}: the parsers are {', '.join(REASONING_PARSERS)}")
    return prompt.rstrip().endswith(OPEN) or (REASONING_PARSERS[parser] and not ends_reasoning(prompt))


def ends_reasoning(prompt: str) -> bool:
    """Whether the prompt has closed the reasoning, so that the answer has none."""
    return prompt.rstrip().endswith(CLOSE)


class ReasoningSplitter:
    """Separates reasoning from the answer, as the text arrives; how it is cut into pieces does not matter.

    The tags and the space around the reasoning are dropped. Reasoning that never ends is all of the text. Tags further
    on are content.

    Args:
        opened: the prompt has opened the reasoning, so only its closing tag will come.
    """

    def __init__(self, opened: bool = False) -> None:
        self._buffer = ""
        self._state = "opened" if opened else "start"
        self._space = ""  # dropped unless reasoning follows
        self._has_begun = False
        self._ended = False

    def add(self, text: str) -> Delta:
        """What this piece of text adds: reasoning, content or both."""
        self._buffer += text
        delta = Delta()
        if self._state in ("start", "opened"):
            self._begin()
        if self._state == "reasoning":
            delta.reasoning = self._reason()
        if self._state == "closed":
            self._buffer = self._buffer.lstrip()
            self._state = "content" if self._buffer else "closed"
        if self._state == "content":
            delta.content, self._buffer = self._buffer, ""
        return delta

    def finish(self) -> Delta:
        """What was held back, at the end of the text."""
        self._ended = True
        return self.add("")

    def _begin(self) -> None:
        """At the start of the text, where an opening tag may stand even after one in the prompt."""
        text = self._buffer.lstrip()
        if text.startswith(OPEN):
            self._buffer = text[len(OPEN) :]
            self._state = "reasoning"
        elif self._ended or not OPEN.startswith(text):
            self._state = "reasoning" if self._state == "opened" else "content"

    def _reason(self) -> str:
        position = self._buffer.find(CLOSE)
        end = position if position >= 0 else len(self._buffer) - (0 if self._ended else num_held(self._buffer, CLOSE))
        text, self._buffer = self._space + self._buffer[:end], self._buffer[end:]
        if position >= 0:
            self._buffer = self._buffer[len(CLOSE) :]
            self._state = "closed"
        if not self._has_begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._has_begun = self._has_begun or bool(shown)
        return shown
