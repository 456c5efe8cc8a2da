"""Sends sessions as a `Load` says and returns a record of every request."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.bench.serve.arrivals import Load, arrival_times
from jaxinfer.bench.serve.client import Client
from jaxinfer.bench.serve.overhead import OverheadMonitor
from jaxinfer.bench.serve.prompts import Session, Turn, compose
from jaxinfer.bench.serve.records import Record


@dataclass(frozen=True)
class BodyFields:
    """What each request has beside its prompt; `extra` and a turn's own fields win over the others."""

    temperature: float | int | None = 0.0
    ignore_eos: bool = False
    logprobs: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, endpoint: str, model: str, turn: Turn, before: list[tuple[Turn, str]]) -> dict[str, Any]:
        """The body of a streaming request.

        Raises:
            ValueError: the turn's content is of another kind than the endpoint takes.
        """
        body: dict[str, Any] = {"model": model, **compose(endpoint, turn, before)}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if turn.max_tokens is not None:
            body["max_tokens"] = turn.max_tokens
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.logprobs:
            body["logprobs"] = True if endpoint == "chat" else 1
        return {**body, **self.extra, **turn.fields}


@dataclass
class Run:
    """`records` in the order in which they began; `duration_s` from the start to the last answer."""

    records: list[Record]
    duration_s: float
    monitor: OverheadMonitor


async def run_load(
    client: Client,
    sessions: Iterator[Session],
    load: Load,
    body: Callable[[Turn, list[tuple[Turn, str]]], dict[str, Any]],
    told: Callable[[], object] = lambda: None,
) -> Run:
    """Send as many sessions as `load` says; returns when each request has its answer.

    `body` makes a request's body of a turn and those before it; `told` is called after each answer.
    """
    gc.collect()  # now, rather than in the middle of the run
    async with OverheadMonitor() as monitor:
        sender = _Sender(client, load, body, told)
        await (_open(sender, sessions) if load.is_open else _closed(sender, sessions))
        duration_s = sender.now_s()
    return Run(sender.records, duration_s, monitor)


class _Sender:
    """The state of one run: its clock, its records, its places."""

    def __init__(self, client: Client, load: Load, body: Callable, told: Callable[[], object]):
        self.load = load
        self.records: list[Record] = []
        self._client, self._body, self._told = client, body, told
        limit = load.concurrency if load.is_open else None
        self._places: Any = contextlib.nullcontext() if limit is None else asyncio.Semaphore(limit)
        self._start_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._start_s

    @property
    def has_more(self) -> bool:
        """Whether another request may begin."""
        if self.load.num_requests is not None and len(self.records) >= self.load.num_requests:
            return False
        return self.load.duration_s is None or self.now_s() < self.load.duration_s

    async def run_session(self, number: int, session: Session, due_s: float, first: Record | None = None) -> float:
        """The turns of one conversation, each due when the last answer is complete; returns that moment."""
        before: list[tuple[Turn, str]] = []
        for index, turn in enumerate(session):
            if first is None and not self.has_more:
                break
            record = first or self.begin(number, index, turn, due_s)
            first = None
            record.woke_s = self.now_s()
            async with self._places:
                record.sent_s = self.now_s()
                await self._client.send(self._body(turn, before), record, self._start_s)
            self._told()
            due_s = self.now_s()
            if not record.ok:
                break  # without its answer there is no conversation
            before.append((turn, record.text))
        return due_s

    def begin(self, number: int, index: int, turn: Turn, due_s: float) -> Record:
        is_ids = isinstance(turn.content, list) and isinstance(turn.content[0], int)
        record = Record(number, index, due_s, turn.max_tokens, len(turn.content) if is_ids else None)
        self.records.append(record)
        return record


async def _open(sender: _Sender, sessions: Iterator[Session]) -> None:
    """Sessions begin at their moments; those that fall behind the end are not begun."""
    async with asyncio.TaskGroup() as tasks:
        for number, (due_s, session) in enumerate(zip(arrival_times(sender.load), sessions, strict=False)):
            if sender.load.duration_s is not None and due_s >= sender.load.duration_s:
                break
            if (wait_s := due_s - sender.now_s()) > 0:
                await asyncio.sleep(wait_s)
            if sender.load.num_requests is not None and len(sender.records) >= sender.load.num_requests:
                break
            # The record is made here, so that a burst ends at its number.
            first = sender.begin(number, 0, session[0], due_s)
            tasks.create_task(sender.run_session(number, session, due_s, first))


async def _closed(sender: _Sender, sessions: Iterator[Session]) -> None:
    """Each worker begins a session when its last one has ended."""
    numbers = itertools.count()

    async def work() -> None:
        due_s = 0.0
        while sender.has_more and (session := next(sessions, None)) is not None:
            due_s = await sender.run_session(next(numbers), session, due_s)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(sender.load.concurrency or 1):
            tasks.create_task(work())
