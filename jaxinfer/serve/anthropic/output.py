"""The content blocks of an answer as they grow, and the events that tell of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from jaxinfer.serve.segments import Kind, Segment

_DELTAS: dict[Kind, tuple[str, str]] = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class Blocks:
    """One answer's blocks, one after the other. Each method gives the events of what it does; whole answers leave them.

    An answer without anything has no block.
    """

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self._kind: Kind | None = None
        self._texts: list[str] = []

    def add(self, segments: list[Segment]) -> Iterator[dict[str, Any]]:
        """The answer goes on."""
        for segment in segments:
            if segment.kind != self._kind or segment.call_id is not None:
                yield from self.finish()
                yield self._open(segment)
            if segment.text:
                self._texts.append(segment.text)
                kind, key = _DELTAS[segment.kind]
                delta = {"type": kind, key: segment.text}
                yield {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}

    def finish(self) -> Iterator[dict[str, Any]]:
        """The block, if there is one, has ended."""
        if self._kind is None:
            return
        text = "".join(self._texts)
        changes = {"input": _object(text)} if self._kind == "call" else {_DELTAS[self._kind][1]: text}
        self.content[-1] = {**self.content[-1], **changes}
        self._kind = None
        yield {"type": "content_block_stop", "index": len(self.content) - 1}

    def _open(self, segment: Segment) -> dict[str, Any]:
        self._kind, self._texts = segment.kind, []
        if segment.kind == "call":
            block = {"type": "tool_use", "id": segment.call_id, "name": segment.name, "input": {}}
        elif segment.kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": "", "citations": None}
        self.content.append(block)
        return {"type": "content_block_start", "index": len(self.content) - 1, "content_block": block}


def _object(arguments: str) -> dict[str, Any]:
    """Arguments as an object: of those that were cut off the whole values, which is what clients read in streams."""
    try:
        found = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}
