"""Records on their way to the engine: read, encoded and sorted ahead of it, in a thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxinfer.batch.errors import JobError
from jaxinfer.batch.inputs import read
from jaxinfer.batch.records import InputRecord, size_of
from jaxinfer.batch.requests import Ask, LongPromptError, RecordError, Requests
from jaxinfer.batch.shard import OpenShard

WINDOW_BYTES = 32 << 20
"""A window has about so many at most, so that long records take no more memory than short ones."""
_TOKEN_BYTES = 32

PREFIX_TOKENS = 32
"""Prompts that begin with the same tokens, this many, run beside each other."""

_WAIT_S = 0.2
_POLL_S = 0.005


@dataclass(frozen=True)
class Item:
    """A record to be run, or one that cannot be, with the reason; `features` are copied to its result."""

    shard: OpenShard
    record: InputRecord
    ask: Ask | None
    features: dict[str, Any]
    error: str | None = None
    is_too_long: bool = False

    @property
    def place(self) -> str:
        byte = "" if self.record.offset is None else f" (byte {self.record.offset:,})"
        return f"{self.shard.shard.path}, record {self.record.index}{byte}"


class Feed:
    """Takes shards as they are needed, and gives their records without a result, sorted within windows.

    At most three windows are held: one that is given, one that waits, one that is made. No shard is taken while
    `enough` records are ahead of the engine, so that other workers find some.
    """

    def __init__(self, take_shard: Callable[[], OpenShard | None], requests: Requests, window: int, enough: int):
        self._take_shard = take_shard
        self._requests = requests
        self._window = window
        self._enough = enough
        self._num_read = 0  # by this thread alone, as the next is by the worker's
        self._num_given = 0
        self._queue: queue.Queue[list[Item] | BaseException | None] = queue.Queue(1)
        self._ready: Iterator[Item] = iter(())
        self._stopped = threading.Event()
        self.ended = False
        self._thread = threading.Thread(target=self._run, name="jaxinfer-batch-feed", daemon=True)
        self._thread.start()

    def take(self, wait: bool) -> Item | None:
        """The next record; None where all were given (`ended`), or where none is ready, soon if `wait`.

        Raises what reading raised.
        """
        while not self.ended:
            if (item := next(self._ready, None)) is not None:
                self._num_given += 1
                return item
            try:
                found = self._queue.get(block=wait, timeout=_WAIT_S)
            except queue.Empty:
                return None
            if isinstance(found, BaseException):
                raise found
            if found is None:
                self.ended = True
            else:
                self._ready = iter(found)
        return None

    def stop(self) -> None:
        """Read no further."""
        self._stopped.set()
        while self._thread.is_alive():
            try:  # it may wait for room
                self._queue.get(timeout=0.01)
            except queue.Empty:
                continue
        self.ended = True

    def _run(self) -> None:
        end: BaseException | None = None
        try:
            for window in self._windows():
                self._queue.put(in_order(window))
        except BaseException as error:  # whatever it is, the one who takes is to have it
            end = error
        self._queue.put(end)

    def _windows(self) -> Iterator[list[Item]]:
        window: list[Item] = []
        num_bytes = 0
        while not self._stopped.is_set() and (shard := self._take_shard()) is not None:
            for item in self._items(shard):
                if self._stopped.is_set():
                    return
                window.append(item)
                self._num_read += 1
                num_bytes += _size(item)
                if len(window) == self._window or num_bytes > WINDOW_BYTES:
                    yield window
                    window, num_bytes = [], 0
            if window and self._num_ahead >= self._enough:
                yield window
                window, num_bytes = [], 0
            while self._num_ahead >= self._enough and not self._stopped.is_set():
                time.sleep(_POLL_S)
        if window:
            yield window

    @property
    def _num_ahead(self) -> int:
        """Records that were read and not given yet."""
        return self._num_read - self._num_given

    def _items(self, shard: OpenShard) -> Iterator[Item]:
        source = shard.shard
        if shard.is_complete:
            return
        num_read = 0
        for record in read(source.path, source.format, (source.first, source.offset), source.count):
            num_read += 1
            if not shard.has(record.index):
                yield self._item(shard, record)
        if num_read < source.count:
            raise JobError(
                f"{source.path} has fewer records than when the job began ({num_read} of {source.count} from "
                f"record {source.first} on): give what it began with, or begin another with a new --output and "
                "--state"
            )

    def _item(self, shard: OpenShard, record: InputRecord) -> Item:
        if record.error is not None:
            return Item(shard, record, None, {}, record.error)
        try:
            ask = self._requests.make(shard.shard.path, record)
            return Item(shard, record, ask, ask.features)
        except RecordError as error:
            features = self._requests.features(record)
            return Item(shard, record, None, features, str(error), isinstance(error, LongPromptError))


def _size(item: Item) -> int:
    """About how many bytes it takes."""
    num_tokens = len(item.ask.prompt_ids) if item.ask is not None else 0
    return num_tokens * _TOKEN_BYTES + size_of(item.record.fields)


def in_order(window: list[Item]) -> list[Item]:
    """Prompts that begin alike beside each other, and long ones before short ones, which fill the gaps at the end."""
    longest: dict[Any, int] = {}

    def ids(item: Item) -> list[int]:
        return item.ask.prompt_ids if item.ask is not None else []

    def prefix(item: Item) -> tuple[int, ...]:
        return tuple(ids(item)[:PREFIX_TOKENS])

    for item in window:
        longest[prefix(item)] = max(longest.get(prefix(item), 0), len(ids(item)))
    return sorted(window, key=lambda item: (-longest[prefix(item)], ids(item)))
