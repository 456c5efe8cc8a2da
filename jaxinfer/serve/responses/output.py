"""The items of an answer as they grow, and the events that tell of it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, Literal

from jaxinfer.serve.responses.store import Item
from jaxinfer.serve.segments import Kind, Segment

Status = Literal["completed", "incomplete"]
_PREFIXES: dict[Kind, str] = {"reasoning": "rs", "text": "msg", "call": "fc"}
_DELTAS: dict[Kind, str] = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


class Output:
    """One answer's items, one after the other. Each method gives the events of what it does; whole answers leave them.

    Log-probabilities are those of all tokens of the answer, and stand with its text: with the next piece of it.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.reasoning = ""
        self._kind: Kind | None = None
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._waiting: list[dict[str, Any]] = []

    def add(self, segments: list[Segment], logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The answer goes on; `logprobs` are those of its tokens, as far as asked for."""
        self._waiting += logprobs
        for segment in segments:
            if segment.kind != self._kind or segment.call_id is not None:
                yield from self._close("completed")
                yield from self._open(segment)
            if segment.text:
                yield self._delta(segment.text)

    def finish(self, status: Status) -> Iterator[dict[str, Any]]:
        """The answer has ended. One without anything has an empty message."""
        if not self.items:
            yield from self._open(Segment("text", ""))
        if self._kind == "text" and self._waiting:
            yield self._delta("")
        yield from self._close(status)

    def _open(self, segment: Segment) -> Iterator[dict[str, Any]]:
        self._kind, self._texts, self._logprobs = segment.kind, [], []
        head = {"id": f"{_PREFIXES[segment.kind]}_{uuid.uuid4().hex}", "status": "in_progress"}
        if segment.kind == "call":
            call = {"call_id": segment.call_id, "name": segment.name, "arguments": ""}
            self.items.append({**head, "type": "function_call", **call})
        elif segment.kind == "reasoning":
            self.items.append({**head, "type": "reasoning", "summary": [], "content": []})
        else:
            self.items.append({**head, "type": "message", "role": "assistant", "content": []})
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": self.items[-1]}
        if segment.kind != "call":
            yield {"type": "response.content_part.added", **self._place(), "part": self._part("")}

    def _delta(self, text: str) -> dict[str, Any]:
        self._texts.append(text)
        told = {"type": f"{_DELTAS[self._kind or 'text']}.delta", **self._place(), "delta": text}
        if self._kind != "text":
            return told
        new, self._waiting = self._waiting, []
        self._logprobs += new
        brief = [{**_brief(each), "top_logprobs": [_brief(top) for top in each["top_logprobs"]]} for each in new]
        return {**told, "logprobs": brief}

    def _close(self, status: Status) -> Iterator[dict[str, Any]]:
        if self._kind is None:
            return
        text, place, kind = "".join(self._texts), self._place(), self._kind
        item = {**self.items[-1], "status": status}
        done = {"type": f"{_DELTAS[kind]}.done", **place}
        if kind == "call":
            item["arguments"] = text
            yield {**done, "name": item["name"], "arguments": text}
        else:
            self.reasoning += text if kind == "reasoning" else ""
            item["content"] = [part] = [self._part(text)]
            yield {**done, "text": text} | ({"logprobs": self._logprobs} if kind == "text" else {})
            yield {"type": "response.content_part.done", **place, "part": part}
        self.items[-1], self._kind = item, None
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def _place(self) -> dict[str, Any]:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return place if self._kind == "call" else {**place, "content_index": 0}


def _brief(entry: dict[str, Any]) -> dict[str, Any]:
    return {"token": entry["token"], "logprob": entry["logprob"]}
