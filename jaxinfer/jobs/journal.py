"""An append-only file of JSON records, of which a crash at any moment loses nothing that was committed."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxinfer.jobs.durable import naming, sync_folder


class JournalError(ValueError):
    """A journal that is damaged elsewhere than at its end, so that committed records would be lost."""


class Journal:
    """Records, committed in groups: `append` returns when its group is on the disk, and it is there wholly or not.

    A group is a line: the CRC-32 of the rest in eight hexadecimal digits, its length in bytes, and the JSON array.

        1c291ca3 27 [{"line":1},{"line":2}]

    A line that is torn can only be the last, since a group is synced before the next one begins; opening drops it.
    Any other damage is an error. May be used by several threads.

    Raises:
        JournalError: damage, with its place.
    """

    def __init__(self, path: Path):
        self.path = path
        is_new = not path.exists()
        self._file: BinaryIO = open(path, "ab")  # noqa: SIM115 (held until close())
        self._lock = threading.Lock()
        self._broken = False
        try:
            self._end = _end_of(path)
            if self._end < path.stat().st_size:
                self._file.truncate(self._end)
                os.fsync(self._file.fileno())
            if is_new:
                sync_folder(path.parent)
        except BaseException:
            self._file.close()
            raise

    @property
    def num_bytes(self) -> int:
        return self._end

    def append(self, records: Sequence[Any]) -> int:
        """Commit records, all or none; returns the place of the group, for `read_group`.

        Raises:
            OSError: they could not be written; where nothing is known of what reached the disk, later calls fail too.
        """
        content = json.dumps(list(records), separators=(",", ":")).encode()
        sized = b"%d %s" % (len(content), content)
        with self._lock:
            if self._broken:
                raise OSError(f"{self.path}: the journal could not be written before; open it again")
            place = self._end
            self._broken = True  # until it is known to be whole
            with naming(self.path):
                try:
                    self._file.write(b"%08x %s\n" % (zlib.crc32(sized), sized))
                    self._file.flush()
                except OSError:
                    self._take_back()
                    raise
                os.fsync(self._file.fileno())
            self._end = self._file.tell()
            self._broken = False
        return place

    def _take_back(self) -> None:
        """Drop what a failed write left, in the file and in its buffer."""
        with contextlib.suppress(OSError):
            self._file.close()  # writes what is buffered, and fails again
        self._file = open(self.path, "ab")  # noqa: SIM115
        self._file.truncate(self._end)
        self._broken = False

    def close(self) -> None:
        """Wait for an append that runs, and close the file."""
        with self._lock:
            self._broken = True
            self._file.close()


def groups(path: Path) -> Iterator[tuple[int, list[Any]]]:
    """The groups of a journal with their places, in order; a torn one at the end is left out.

    Raises:
        JournalError: damage, with its place.
    """
    with open(path, "rb") as file:
        place = 0
        while line := file.readline():
            content = _content_of(line)
            if content is None:
                _check_torn(path, place, line, is_last=not file.read(1))
                return
            yield place, json.loads(content)
            place += len(line)


def read_group(file: BinaryIO, place: int) -> list[Any]:
    """The group at a place that `append` or `groups` gave. Raises `JournalError` where it is damaged."""
    file.seek(place)
    content = _content_of(file.readline())
    if content is None:
        raise JournalError(f"{file.name}: the group at byte {place} is damaged")
    return json.loads(content)


def _end_of(path: Path) -> int:
    """Where the whole groups of a file end."""
    with open(path, "rb") as file:
        place = 0
        while line := file.readline():
            if _content_of(line) is None:
                _check_torn(path, place, line, is_last=not file.read(1))
                return place
            place += len(line)
    return place


def _content_of(line: bytes) -> bytes | None:
    """The JSON of a line; None where it is not whole."""
    checksum, _, sized = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(sized):
        return None
    return sized.partition(b" ")[2]


def _check_torn(path: Path, place: int, line: bytes, is_last: bool) -> None:
    """Raise `JournalError` for a bad line that an interrupted append cannot have left: one that others follow."""
    size = line.split(b" ", 2)[1] if line.count(b" ") > 1 else b""
    head = line.find(b" ", 9) + 1
    too_long = size.isdigit() and len(size) < 16 and len(line) > head + int(size) + 1
    if not is_last or too_long:
        raise JournalError(f"{path}: the line at byte {place} is damaged, and others follow it; restore the file")
