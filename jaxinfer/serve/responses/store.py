"""The answers that the server keeps, in memory and bounded: what is not used for the longest goes first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

Item = dict[str, Any]


@dataclass(frozen=True)
class StoredResponse:
    """An answer, the items it was made from, and the size of both as JSON, which is what the bound counts.

    The items of earlier turns are shared with the answers to those; they count for each.
    """

    response: dict[str, Any]
    input_items: tuple[Item, ...]
    size_bytes: int

    @property
    def items(self) -> tuple[Item, ...]:
        """The conversation with this answer at its end."""
        return (*self.input_items, *self.response["output"])


class ResponseStore:
    """Keeps up to `max_responses` answers of up to `max_bytes` in all, each for its owner alone.

    Where one has to go it is the least recently used of the owner that holds the most bytes, so that nobody can push
    out what others have.
    """

    def __init__(self, max_responses: int, max_bytes: int):
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._kept: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._bytes_of: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def fits(self, size_bytes: int) -> bool:
        """Whether an answer of this size could be kept."""
        return self.max_responses > 0 and size_bytes <= self.max_bytes

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Keep an answer that `fits`."""
        self._kept.setdefault(owner, OrderedDict())[stored.response["id"]] = stored
        self._count(owner, stored.size_bytes)
        while self.size_bytes > self.max_bytes or len(self) > self.max_responses:
            largest = max(self._bytes_of, key=lambda each: self._bytes_of[each])
            self.remove(largest, next(iter(self._kept[largest])))

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """An answer of this owner; it is now the last to go."""
        kept = self._kept.get(owner, OrderedDict())
        if response_id in kept:
            kept.move_to_end(response_id)
        return kept.get(response_id)

    def remove(self, owner: str, response_id: str) -> bool:
        """Forget an answer; False where there was none."""
        kept = self._kept.get(owner, OrderedDict())
        stored = kept.pop(response_id, None)
        if stored is None:
            return False
        self._count(owner, -stored.size_bytes)
        if not kept:
            del self._kept[owner], self._bytes_of[owner]
        return True

    def _count(self, owner: str, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self._bytes_of[owner] = self._bytes_of.get(owner, 0) + size_bytes
