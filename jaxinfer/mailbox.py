"""How a request's outputs get from the engine's thread to the one who reads them in an event loop."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import threading
from typing import Any, Literal, get_args

from jaxinfer.request import CompletionOutput, RequestOutput

OutputKind = Literal["cumulative", "delta", "final"]
"""What each output of a request holds: all of it so far, what is new since the last output, or all of it, once."""


def check_output_kind(kind: str) -> None:
    """Raise `ValueError` for what is no `OutputKind`."""
    if kind not in get_args(OutputKind):
        raise ValueError(f"output_kind={kind!r:.60} must be one of {', '.join(get_args(OutputKind))}")


class Mailbox:
    """What the engine thread leaves for one reader: at most one item at a time, so a slow reader costs no memory.

    `kind` is one of `OutputKind`, or "text" for the new text alone.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, request_id: str, kind: OutputKind | Literal["text"]):
        self.loop = loop
        self.request_id = request_id
        self.ended = False
        self.last: RequestOutput | None = None  # the engine's own, which changes from step to step
        self._kind = kind
        self._taken = False
        self._item: RequestOutput | None = None
        self._texts: list[str] = []
        self._num_given: list[int] = []  # tokens of each choice that went into an item, of kind "delta"
        self._error: BaseException | None = None
        self._waiting = False
        self._wake = asyncio.Event()
        self._lock = threading.Lock()

    # In the engine's thread. Each returns True where the reader is to be woken.

    def take(self) -> bool:
        """The engine has accepted the request."""
        with self._lock:
            self._taken = True
            waited, self._waiting = self._waiting, False
            return waited

    def put(self, output: RequestOutput, deltas: list[str]) -> bool:
        """News of the request, and the new text of its choices."""
        self.last = output
        with self._lock:
            if self._kind == "text":
                self._texts += filter(None, deltas)
            elif self._kind == "delta":
                self._append(output, deltas)
            elif output.finished or (self._waiting and self._kind == "cumulative"):  # none is copied for nobody
                self._item = copied(output)
            self.ended = output.finished
            return self._leave_waiting()

    def end(self, error: BaseException | None = None) -> bool:
        """Nothing more will come."""
        with self._lock:
            self.ended, self._error = True, error
            return self._leave_waiting()

    def _append(self, output: RequestOutput, deltas: list[str]) -> None:
        """Add what is new to the item that waits."""
        self._num_given += [0] * (len(output.outputs) - len(self._num_given))
        news = [
            _new_part(choice, given, text)
            for choice, given, text in zip(output.outputs, self._num_given, deltas, strict=True)
        ]
        self._num_given = [len(choice.token_ids) for choice in output.outputs]
        if self._item is None:
            self._item = dataclasses.replace(output, outputs=news, metrics=output.metrics.copy())
            return
        waiting = self._item
        waiting.finished, waiting.metrics = output.finished, output.metrics.copy()
        waiting.num_cached_tokens = output.num_cached_tokens
        waiting.num_generated_tokens = output.num_generated_tokens
        for old, new in zip(waiting.outputs, news, strict=True):
            old.text += new.text
            old.token_ids += new.token_ids
            if old.logprobs is not None:
                old.logprobs += new.logprobs or []
            for name in ("finish_reason", "stop_reason", "cumulative_logprob", "hidden_states", "logits"):
                setattr(old, name, getattr(new, name))

    def _leave_waiting(self) -> bool:
        ready = self._waiting and (self.ended or bool(self._texts) or self._item is not None)
        self._waiting = self._waiting and not ready
        return ready

    # In the reader's event loop.

    def wake(self) -> None:
        self._wake.set()

    async def taken(self) -> None:
        """Wait until the engine has accepted the request. Raises what it has against it."""
        while True:
            with self._lock:
                if self._error is not None:
                    raise self._error
                if self._taken or self.ended:
                    return
                self._waiting = True
                self._wake.clear()
            await self._wake.wait()

    async def get(self) -> RequestOutput | str | None:
        """The newest output, or the text since the last call; None at the end. Raises what ended the request."""
        while True:
            with self._lock:
                item, self._item = self._item, None
                text, self._texts = "".join(self._texts), []
                if item is not None or text:
                    return item or text
                if self._error is not None:
                    raise self._error
                if self.ended:
                    return None
                self._waiting = True
                self._wake.clear()
            await self._wake.wait()


def _new_part(choice: CompletionOutput, given: int, text: str) -> CompletionOutput:
    logprobs = None if choice.logprobs is None else choice.logprobs[given:]
    return dataclasses.replace(choice, text=text, token_ids=choice.token_ids[given:], logprobs=logprobs)


def copied(value: Any) -> Any:
    """A dataclass of which later steps change nothing: its lists, dicts and dataclasses copied, their items shared."""
    new = copy.copy(value)
    for each in dataclasses.fields(value):
        held = getattr(value, each.name)
        if isinstance(held, list) and held and dataclasses.is_dataclass(held[0]):
            setattr(new, each.name, [copied(item) for item in held])
        elif isinstance(held, list | dict):
            setattr(new, each.name, held.copy())
    return new
