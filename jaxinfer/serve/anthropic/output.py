"""The content blocks of an answer as they grow, and the events that tell of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Blocks:
    """One answer's blocks. Each method gives the events of what it does; whole answers leave them aside.

    An answer without text has no block.
    """

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self._texts: list[str] = []

    def add(self, text: str) -> Iterator[dict[str, Any]]:
        """The answer's text goes on."""
        if not text:
            return
        if not self.content:
            self.content.append({"type": "text", "text": "", "citations": None})
            yield {"type": "content_block_start", "index": 0, "content_block": self.content[0]}
        self._texts.append(text)
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}

    def finish(self) -> Iterator[dict[str, Any]]:
        """The answer has ended."""
        if self.content:
            self.content[-1] = {**self.content[-1], "text": "".join(self._texts)}
            yield {"type": "content_block_stop", "index": 0}
