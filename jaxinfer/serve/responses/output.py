"""The items of an answer as they grow, and the events that tell of it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, Literal

from jaxinfer.serve.responses.store import Item

Status = Literal["completed", "incomplete"]


class Output:
    """One answer's items. Each method gives the events of what it does; whole answers leave them aside."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The answer's text goes on; `logprobs` are those of its tokens, as far as asked for."""
        if not self.items:
            yield from self._open()
        self._texts.append(text)
        self._logprobs += logprobs
        told = [{**_brief(each), "top_logprobs": [_brief(top) for top in each["top_logprobs"]]} for each in logprobs]
        yield {"type": "response.output_text.delta", **self._place(), "delta": text, "logprobs": told}

    def finish(self, status: Status) -> Iterator[dict[str, Any]]:
        """The answer has ended. One without text has an empty message."""
        if not self.items:
            yield from self._open()
        text = "".join(self._texts)
        part = _part(text, self._logprobs)
        self.items[-1] = item = {**self.items[-1], "status": status, "content": [part]}
        yield {"type": "response.output_text.done", **self._place(), "text": text, "logprobs": self._logprobs}
        yield {"type": "response.content_part.done", **self._place(), "part": part}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _open(self) -> Iterator[dict[str, Any]]:
        item_id = f"msg_{uuid.uuid4().hex}"
        item = {"id": item_id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": item}
        yield {"type": "response.content_part.added", **self._place(), "part": _part("", [])}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _brief(entry: dict[str, Any]) -> dict[str, Any]:
    return {"token": entry["token"], "logprob": entry["logprob"]}
