"""Which records of a journal are committed, and reading them in the order of the input."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxinfer.jobs.journal import JournalError, groups, read_group

CACHE_BYTES = 8 << 20
"""Of JSON: how much of a journal is held decoded, beside the group that was read last."""
_NONE = -1


class Committed:
    """The committed records of one input: JSON objects that hold their index in it, from 0, under `key`.

    `places` has 64 bits for each index up to the last that is committed (or `count`, where it is given): the place of
    its group in the journal, or -1. Results are committed nearly in the order of the input, so reading them in that
    order decodes nearly every group once; a record that has been read is let go. Of a record that was committed twice
    the first counts. Used by one thread at a time.
    """

    def __init__(
        self,
        journal: Path,
        count: int | None = None,
        key: str = "index",
        on_record: Callable[[dict[str, Any]], object] = lambda record: None,
        cache_bytes: int = CACHE_BYTES,
    ):
        """Go through a journal, if there is one. `on_record` is shown each record that counts, in journal order.

        Raises:
            JournalError: the journal is damaged, or of another input: a record without an index below `count`.
            OSError: it cannot be read.
        """
        self.places = array("q", [_NONE]) * (count or 0)
        self._journal, self._count, self._key = journal, count, key
        self._cache_bytes = cache_bytes
        self._num_cached_bytes = 0
        self._cache: OrderedDict[int, tuple[int, dict[int, dict[str, Any]]]] = OrderedDict()
        self._num_committed = 0
        if journal.exists():
            for place, records in groups(journal):
                for record in records:
                    if self.add(self._index_of(record, place), place):
                        on_record(record)

    def __contains__(self, index: int) -> bool:
        return 0 <= index < len(self.places) and self.places[index] != _NONE

    def __len__(self) -> int:
        return self._num_committed

    def add(self, index: int, place: int) -> bool:
        """Note a record of the group that `Journal.append` has put at a place; False where it was committed before."""
        missing = index + 1 - len(self.places)
        if missing > 0:
            self.places.extend(array("q", [_NONE]) * missing)
        elif self.places[index] != _NONE:
            return False
        self.places[index] = place
        self._num_committed += 1
        return True

    def read(self, index: int) -> dict[str, Any]:
        """A committed record, which is the caller's to keep or change.

        Raises:
            KeyError: it is not committed.
            JournalError: its group is damaged.
            OSError: the journal cannot be read.
        """
        if index not in self:
            raise KeyError(index)
        place = self.places[index]
        size, left = self._cache.pop(place, (0, {}))
        self._num_cached_bytes -= size
        if index not in left:
            size, left = self._decode(place)
        if index not in left:
            raise JournalError(f"{self._journal}: the group at byte {place} has no record {index}; restore the file")
        record = left.pop(index)
        if left:
            self._cache[place] = size, left
            self._num_cached_bytes += size
            while self._num_cached_bytes > self._cache_bytes and len(self._cache) > 1:
                _, (dropped, _) = self._cache.popitem(last=False)
                self._num_cached_bytes -= dropped
        return record

    def _decode(self, place: int) -> tuple[int, dict[int, dict[str, Any]]]:
        """The size of a group in bytes, and those of its records that count."""
        with open(self._journal, "rb") as file:  # anew, since a file held open may have read ahead what is taken back
            records = read_group(file, place)
            size = file.tell() - place
        found: dict[int, dict[str, Any]] = {}
        for record in records:
            index = self._index_of(record, place)
            if index in self and self.places[index] == place:
                found.setdefault(index, record)
        return size, found

    def _index_of(self, record: Any, place: int) -> int:
        index = record.get(self._key) if isinstance(record, dict) else None
        most = float("inf") if self._count is None else self._count
        if type(index) is not int or not 0 <= index < most:
            raise JournalError(
                f"{self._journal}: the group at byte {place} has a record with {self._key} {index!r:.40}, "
                "which is none of this input: it is of another job or version"
            )
        return index
