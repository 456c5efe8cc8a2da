"""What a batch's lines have come to: committed one by one, and written out in the order of the input at the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinfer.jobs.journal import Journal
from jaxinfer.jobs.records import RecordError, parse, read_lines
from jaxinfer.jobs.results import Committed
from jaxinfer.serve.file_store import Part


@dataclass(frozen=True)
class Result:
    """What came of a request; `told` is its line in the output or, where not `good`, the error file.

    index: of the request among those of the file, from 0: blank lines do not count.
    """

    index: int
    good: bool
    told: dict[str, Any]

    def record(self) -> dict[str, Any]:
        """As the journal holds it."""
        return {"index": self.index, "good": self.good, "told": self.told}


def told(line_id: str, custom_id: str | None, response: Any = None, error: Any = None) -> dict[str, Any]:
    """A line of the output or error file, in the shape of the OpenAI API."""
    return {"id": line_id, "custom_id": custom_id, "response": response, "error": error}


class Committer:
    """Commits results in a journal, those that wait together with one sync."""

    def __init__(self, journal: Journal):
        self._journal = journal
        self._waiting: list[tuple[Result, asyncio.Future[None]]] = []
        self._lock = asyncio.Lock()

    @property
    def num_bytes(self) -> int:
        """What the journal takes."""
        return self._journal.num_bytes

    async def commit(self, result: Result) -> None:
        """Returns when the result is on the disk.

        Raises:
            OSError: it could not be written.
        """
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((result, written))
        async with self._lock:
            if not written.done():
                group, self._waiting = self._waiting, []
                records = [each.record() for each, _ in group]
                failure: OSError | None = None
                try:
                    # Shielded: a thread that writes cannot be stopped, and what it writes is committed.
                    await asyncio.shield(asyncio.to_thread(self._journal.append, records))
                except OSError as error:
                    failure = error
                for _, future in group:
                    if failure is not None:
                        future.set_exception(failure)
                    elif not future.done():
                        future.set_result(None)
        await written


def write_out(
    source: Path,
    journal: Path,
    max_line_bytes: int,
    parts: tuple[Part, Part],
    undone: Callable[[str | None], dict[str, Any] | None],
) -> tuple[int, int, int]:
    """Write results in the order of the input: good ones into the first part, the others into the second.

    `undone(custom_id)` is the line of a request that has no result, or None for no line. Returns how many were good,
    failed and undone.

    Raises:
        JournalError, OSError: the journal or the input cannot be read, or the parts not written.
    """
    committed = Committed(journal)
    counts = [0, 0, 0]
    for index, line in enumerate(read_lines(source, max_line_bytes)):
        if index in committed:
            record = committed.read(index)
            found, kind = record["told"], 0 if record["good"] else 1
        else:
            try:
                custom_id = parse(line).custom_id
            except RecordError as error:
                custom_id = error.custom_id
            found, kind = undone(custom_id), 2
        counts[kind] += 1
        if found is None:
            continue
        part = parts[min(kind, 1)]
        content = json.dumps(found, separators=(",", ":")).encode() + b"\n"
        part.count(len(content))
        part.write(content)
    return counts[0], counts[1], counts[2]
