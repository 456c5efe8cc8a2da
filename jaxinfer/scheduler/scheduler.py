"""Continuous batching: every step takes decodes and prefill chunks together, within a budget of tokens and rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxinfer.cache.page_manager import PageManager
from jaxinfer.config import SchedulerConfig
from jaxinfer.request import SequenceState
from jaxinfer.scheduler.fairness import VirtualTokenCounters
from jaxinfer.scheduler.waiting import WaitingQueue

RELAX_STEPS = 64
"""Steps after which a limit on rows, set when memory ran out, is relaxed."""


@dataclass(frozen=True)
class ScheduledRow:
    """Tokens start … start + num_tokens - 1 of a sequence; `samples` where they reach its last, so that one may follow.

    `draws` where it does: not when the request asks for no token.
    """

    sequence: SequenceState
    start: int
    num_tokens: int
    samples: bool

    @property
    def draws(self) -> bool:
        return self.samples and self.sequence.params.max_tokens != 0


@dataclass
class Schedule:
    """What the next step does: pages are copied, then the rows run. `admitted` have got new lanes.

    `copies` has the source of each target: one target twice would leave to the device which copy comes last.
    """

    rows: list[ScheduledRow] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)
    admitted: list[SequenceState] = field(default_factory=list)


class Scheduler:
    """Decides who runs. Of each priority, decodes go before prefill chunks, which take what is left of the budget.

    Pages are taken as they are needed. Where none is left, the sequence of the highest rank (the lowest priority, then
    the newest) gives up its own and waits; what it has computed stays in the prefix cache while there is room. The
    sequence of the lowest rank is never made to wait, so a cache that holds one sequence serves any load to its end.
    """

    def __init__(self, config: SchedulerConfig, pages: PageManager):
        self.config = config
        self.pages = pages
        self.counters = VirtualTokenCounters(config.tenant_weights)
        self.waiting = WaitingQueue(self.counters, pages.cached_tokens)
        self.running: list[SequenceState] = []
        self.num_preemptions = 0
        self.row_limit = config.max_num_seqs
        self._limited_at = 0
        self._free_lanes = list(range(config.max_num_seqs - 1, -1, -1))
        self._step = 0

    def check_fits(self, num_tokens: int) -> None:
        """Raise `ValueError` for a sequence that the whole cache could not hold."""
        needed, total = self.pages.pages_needed(num_tokens), self.pages.allocator.num_pages - 1
        if needed > total:
            raise ValueError(
                f"{num_tokens} tokens (prompt and max_tokens) need {needed} pages of {self.pages.page_size} "
                f"tokens and the cache has {total}: lower max_tokens or shorten the prompt"
            )

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence. Raises `ValueError` for one that the whole cache could not hold."""
        self.check_fits(sequence.max_total_tokens)
        self.counters.enter(sequence.tenant)
        self.waiting.add(sequence)

    def schedule(self) -> Schedule:
        """The next step; no rows when nothing can run.

        From here on its rows count as computed: the steps that follow run after it.
        """
        self._step += 1
        if self.row_limit < self.config.max_num_seqs and self._step >= self._limited_at + RELAX_STEPS:
            self.limit_rows(min(2 * self.row_limit, self.config.max_num_seqs))
        self._make_way()
        plan, scheduled = Schedule(), set[SequenceState]()
        budget = self.config.max_num_batched_tokens
        order = sorted(self.running, key=self._turn)
        num_decodes = sum(1 for sequence in order if sequence.num_missing == 1)
        for sequence in order:
            if sequence.lane < 0:
                continue  # preempted for one before it
            decodes = sequence.num_missing == 1
            # Else a long prompt of a low priority would keep the budget from those that wait.
            budget = self._admit(plan, budget, num_decodes, scheduled, before=sequence.priority)
            num_decodes -= decodes
            budget -= self._take(sequence, budget - num_decodes, plan, scheduled)
        self._admit(plan, budget, 0, scheduled)
        return plan

    def schedule_alone(self, sequence: SequenceState) -> Schedule:
        """A step of this sequence only. Others are preempted where they hold what it needs."""
        plan = Schedule()
        while True:
            self._step += 1
            if sequence.lane < 0 and self._can_admit(sequence):
                self._enter(sequence, plan)
            if sequence.lane >= 0:
                self._take(sequence, self.config.max_num_batched_tokens, plan, set())
            others = [each for each in self.running if each is not sequence]
            if plan.rows or not others:
                return plan
            self._preempt(max(others, key=lambda each: each.rank))

    def limit_rows(self, num_rows: int) -> None:
        """Run fewer sequences at once from now on; the limit doubles every `RELAX_STEPS` steps."""
        self.row_limit = max(1, num_rows)
        self._limited_at = self._step

    def _turn(self, sequence: SequenceState) -> tuple[int, bool, float, int, int]:
        prefills = sequence.num_missing > 1
        served = self.counters.served(sequence.tenant) if prefills else 0.0
        return sequence.priority, prefills, served, *sequence.order

    def _take(self, sequence: SequenceState, budget: int, plan: Schedule, scheduled: set[SequenceState]) -> int:
        """Give a running sequence its tokens of the step; returns how many."""
        if sequence.num_missing <= 0 or (sequence.num_pending and sequence.needs_token):
            return 0
        if (copy := self.pages.advance(sequence, self._step)) is not None:
            source, target = copy
            plan.copies.pop(target, None)  # of a sequence that was preempted since
            plan.copies[target] = source
        count = self.pages.runnable(sequence, min(sequence.num_missing, budget))
        if count <= 0 or not self._allocate(sequence, sequence.num_computed + count, scheduled):
            return 0
        start = sequence.num_computed
        self.pages.computed(sequence, count, self._step)
        row = ScheduledRow(sequence, start, count, samples=sequence.num_computed == sequence.num_tokens)
        plan.rows.append(row)
        scheduled.add(sequence)
        sequence.num_pending += row.draws
        fresh = min(sequence.num_computed, len(sequence.prompt_ids)) - max(start, sequence.num_charged)
        sequence.num_charged = max(sequence.num_charged, sequence.num_computed)
        self.counters.charge(sequence.tenant, num_input=max(0, fresh), num_output=row.draws)
        return count

    def _allocate(self, sequence: SequenceState, num_tokens: int, scheduled: set[SequenceState]) -> bool:
        """Pages for so many tokens, taken from sequences of higher rank that are not in this step, if need be."""
        while not self.pages.allocate(sequence, num_tokens):
            others = (each for each in self.running if each not in scheduled and each.rank > sequence.rank)
            victim = max(others, key=lambda each: each.rank, default=None)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, sequence: SequenceState) -> None:
        self._stop(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(sequence)

    def preempt_last(self) -> bool:
        """Make the running sequence of the highest rank wait; False where none runs."""
        victim = max(self.running, key=lambda each: each.rank, default=None)
        if victim is not None:
            self._preempt(victim)
        return victim is not None

    def _make_way(self) -> None:
        """Where rows or pages are short, preempt for a waiting request what runs at a lower priority."""
        while (best := self.waiting.best_priority) is not None:
            victim = max(self.running, key=lambda each: each.rank, default=None)
            if victim is None or victim.priority <= best:
                return
            sequence = self.waiting.next()
            if sequence is None or victim.priority <= sequence.priority or self._can_admit(sequence):
                return
            self._preempt(victim)

    @property
    def _has_lane(self) -> bool:
        return bool(self._free_lanes) and len(self.running) < self.row_limit

    def _can_admit(self, sequence: SequenceState) -> bool:
        """Whether there is a lane, and pages for this one beside what the running ones will soon take."""
        if not self._has_lane:
            return False
        reserved = sum(self.pages.reserved(each) for each in self.running)
        return self.pages.admission_cost(sequence) + reserved <= self.pages.num_available

    def _admit(
        self, plan: Schedule, budget: int, reserved: int, scheduled: set[SequenceState], before: int | None = None
    ) -> int:
        """Admit who waits, of a lower priority number than `before`; returns the budget that is left.

        `reserved` tokens of it are for the decodes that are still to come.
        """
        while budget > reserved and self._has_lane:
            if before is not None and (self.waiting.best_priority is None or self.waiting.best_priority >= before):
                break
            sequence = self.waiting.next()
            if sequence is None or (before is not None and sequence.priority >= before):
                break
            if not self._can_admit(sequence):
                break
            self._enter(sequence, plan)
            budget -= self._take(sequence, budget - reserved, plan, scheduled)
        return budget

    def _enter(self, sequence: SequenceState, plan: Schedule) -> None:
        self.waiting.passed_over(sequence)
        self.waiting.remove(sequence)
        sequence.lane = self._free_lanes.pop()
        self.running.append(sequence)
        plan.admitted.append(sequence)
        self.pages.admit(sequence)

    def _stop(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)
        self.pages.release(sequence)
        self._free_lanes.append(sequence.lane)
        sequence.lane = -1

    def read(self, sequence: SequenceState) -> None:
        """The host has read a sampled token of the sequence: the pages that it fills can be shared."""
        if sequence.lane >= 0:
            self.pages.learn(sequence)

    def finish(self, sequence: SequenceState) -> None:
        """Take a sequence out, wherever it is, and free what it holds. One that has left is no error."""
        if sequence.lane >= 0:
            self._stop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            return
        self.counters.leave(sequence.tenant)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless pages and lanes belong to exactly the sequences that hold them."""
        self.pages.check_integrity(self.running)
        lanes = [sequence.lane for sequence in self.running] + self._free_lanes
        assert sorted(lanes) == list(range(self.config.max_num_seqs))
        assert all(sequence.num_computed <= sequence.num_tokens for sequence in self.running)
        assert all(sequence.lane < 0 and not sequence.pages for sequence in self.waiting)
