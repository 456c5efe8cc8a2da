"""Continuous batching: every step takes decodes and prefill chunks together, within a budget of tokens and rows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.config import SchedulerConfig
from jaxinfer.request import SequenceState


@dataclass(frozen=True)
class ScheduledRow:
    """`num_tokens` more tokens of a sequence; `samples` where they reach its last token, so that a new one follows."""

    sequence: SequenceState
    num_tokens: int
    samples: bool


class Scheduler:
    """First come, first served. A sequence is admitted when every page it can come to need is free.

    Running sequences go first, so that a decode never waits for a prefill; what is left of the budget goes to chunks.
    """

    def __init__(self, config: SchedulerConfig, allocator: PageAllocator, page_size: int):
        self.config = config
        self.allocator = allocator
        self.page_size = page_size
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self._free_lanes = list(range(config.max_num_seqs - 1, -1, -1))

    def pages_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence. Raises `ValueError` for one that the whole cache could not hold."""
        needed, total = self.pages_needed(sequence.max_total_tokens), self.allocator.num_pages - 1
        if needed > total:
            raise ValueError(
                f"{sequence.max_total_tokens} tokens (prompt and max_tokens) need {needed} pages of {self.page_size} "
                f"tokens and the cache has {total}: lower max_tokens or shorten the prompt"
            )
        self.waiting.append(sequence)

    def schedule(self) -> list[ScheduledRow]:
        """The rows of the next step, empty when nothing can run."""
        budget = self.config.max_num_batched_tokens
        rows: list[ScheduledRow] = []
        decodes_first = sorted(self.running, key=lambda seq: seq.num_tokens - seq.num_computed > 1)
        for sequence in decodes_first:
            budget -= self._take(sequence, budget, rows)
        while self.waiting and budget and self._free_lanes:
            pages = self.allocator.allocate(self.pages_needed(self.waiting[0].max_total_tokens))
            if pages is None:
                break
            sequence = self.waiting.popleft()
            sequence.pages, sequence.lane = pages, self._free_lanes.pop()
            self.running.append(sequence)
            budget -= self._take(sequence, budget, rows)
        return rows

    def _take(self, sequence: SequenceState, budget: int, rows: list[ScheduledRow]) -> int:
        missing = sequence.num_tokens - sequence.num_computed
        count = min(missing, budget)
        if count:
            rows.append(ScheduledRow(sequence, count, samples=count == missing))
        return count

    def commit(self, rows: list[ScheduledRow]) -> None:
        """The step of these rows ran: their tokens are in the cache."""
        for row in rows:
            row.sequence.num_computed += row.num_tokens

    def finish(self, sequence: SequenceState) -> None:
        """Take a sequence out, wherever it is, and free what it holds."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.allocator.free(sequence.pages)
            self._free_lanes.append(sequence.lane)
            sequence.pages, sequence.lane = [], -1
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless pages and lanes belong to exactly the sequences that hold them."""
        self.allocator.check_integrity()
        held = [page for sequence in self.running for page in sequence.pages]
        assert len(held) == len(set(held)) == self.allocator.num_used
        lanes = [sequence.lane for sequence in self.running] + self._free_lanes
        assert sorted(lanes) == list(range(self.config.max_num_seqs))
        assert all(sequence.num_computed <= sequence.num_tokens for sequence in self.running)
