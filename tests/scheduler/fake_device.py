"""A device that remembers, for each slot, which tokens its keys and values were computed from."""

from __future__ import annotations

from collections.abc import Callable

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.cache.page_manager import PageManager
from jaxinfer.config import SchedulerConfig
from jaxinfer.request import RequestOptions, SamplingParams, SequenceState
from jaxinfer.scheduler.scheduler import Schedule, ScheduledRow, Scheduler

PAGE_SIZE = 4


def next_token(tokens: list[int]) -> int:
    """What the model says after these tokens: few different ones, so that outputs share prefixes too."""
    return hash(tuple(tokens)) % 3


class FakeEngine:
    """Runs a scheduler as the engine does, with the overlap or without, and checks what every row can see.

    `end` says whether a sequence ends with its newest token, for a reason that the scheduler cannot foresee.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        max_rows: int = 4,
        budget: int = 16,
        share: bool = True,
        window: int = 0,
        overlap: bool = True,
        weights: dict[str, float] | None = None,
        end: Callable[[SequenceState], bool] = lambda sequence: False,
    ):
        limits = SchedulerConfig(10_000, max_rows, budget, weights or {})
        allocator = PageAllocator(num_pages + 1)
        self.pages = PageManager(allocator, PAGE_SIZE, share=share, window=window, max_chunk=budget)
        self.scheduler = Scheduler(limits, self.pages)
        self.window, self.overlap, self.end = window, overlap, end
        self.slots: dict[int, list[tuple[int, ...] | None]] = {
            page: [None] * PAGE_SIZE for page in range(num_pages + 1)
        }
        self.in_flight: list[tuple[ScheduledRow, int | None]] = []
        self.on_device: dict[SequenceState, list[int]] = {}  # tokens sampled and not read
        self.live: set[SequenceState] = set()
        self.num_computed: dict[str, int] = {}
        self.num_steps = 0
        self._arrivals = 0

    def add(self, prompt: list[int], max_tokens: int = 4, name: str = "", n: int = 1, **options) -> list[SequenceState]:
        self._arrivals += 1
        params = SamplingParams(max_tokens=max_tokens)
        name, total = name or f"r{self._arrivals}", len(prompt) + max_tokens
        sequences = [
            SequenceState(name, index, list(prompt), params, total, self._arrivals, RequestOptions(**options))
            for index in range(n)
        ]
        for sequence in sequences:
            self.scheduler.add(sequence)
        self.live.update(sequences)
        return sequences

    def abort(self, sequence: SequenceState) -> None:
        self.scheduler.finish(sequence)
        self.live.discard(sequence)

    def step(self) -> Schedule:
        if not self.overlap:
            self.read()
        plan = self.scheduler.schedule()
        limits = self.scheduler.config
        assert sum(row.num_tokens for row in plan.rows) <= limits.max_num_batched_tokens
        assert len(plan.rows) <= limits.max_num_seqs
        assert len({row.sequence for row in plan.rows}) == len(plan.rows)
        self.num_steps += bool(plan.rows)
        before, self.in_flight = self.in_flight, []
        self._run(plan)
        ran, self.in_flight = self.in_flight, before
        self.read()
        self.in_flight = ran
        self.scheduler.check_integrity()
        return plan

    def _run(self, plan: Schedule) -> None:
        copied = {to: list(self.slots[source]) for to, source in plan.copies.items()}
        self.slots.update(copied)
        for row in plan.rows:  # all keys and values are written before any row attends to them
            tokens = self._tokens(row.sequence)
            for position in range(row.start, row.start + row.num_tokens):
                page = row.sequence.pages[position // PAGE_SIZE]
                assert page != 0
                self.slots[page][position % PAGE_SIZE] = tuple(tokens[: position + 1])
        for row in plan.rows:
            tokens, end = self._tokens(row.sequence), row.start + row.num_tokens
            first = max(0, row.start - self.window + 1) if self.window else 0
            for position in range(first, end):
                held = self.slots[row.sequence.pages[position // PAGE_SIZE]][position % PAGE_SIZE]
                assert held == tuple(tokens[: position + 1]), (row, position)
            name = row.sequence.request_id
            self.num_computed[name] = self.num_computed.get(name, 0) + row.num_tokens
            token = None
            if row.samples and row.sequence.params.max_tokens != 0:
                token = next_token(tokens[:end])
                self.on_device.setdefault(row.sequence, []).append(token)
            self.in_flight.append((row, token))

    def _tokens(self, sequence: SequenceState) -> list[int]:
        return sequence.tokens(0, sequence.num_known) + self.on_device.get(sequence, [])

    def read(self) -> None:
        """Take the tokens of the step before."""
        for row, token in self.in_flight:
            sequence = row.sequence
            if token is not None:
                sequence.num_pending -= 1
                self.on_device[sequence].pop(0)
            if sequence not in self.live or not row.samples:
                continue
            if token is not None:
                sequence.output_ids.append(token)
                self.scheduler.read(sequence)
            if sequence.num_known >= sequence.max_total_tokens or self.end(sequence):
                self.abort(sequence)
        self.in_flight = []

    def run(self, max_steps: int = 5000) -> None:
        """To the end of every request."""
        for _ in range(max_steps):
            if not self.live:
                break
            self.step()
        assert not self.live, "the load did not end"
        self.read()
        pages = self.pages
        assert pages.num_available == pages.allocator.num_pages - 1, "pages leaked"


def expected_output(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]
