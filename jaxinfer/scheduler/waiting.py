"""Who is admitted next: the best priority, in it the tenant served least, of it the request with most in the cache."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator

from jaxinfer.request import SequenceState
from jaxinfer.scheduler.fairness import VirtualTokenCounters

LOOKAHEAD = 16
"""Requests of a tenant that are compared by what the cache holds of them."""
MAX_PASSED = 16
"""How often a tenant's oldest request lets another go first before it goes itself."""

_Line = OrderedDict[tuple[int, int], SequenceState]


class WaitingQueue:
    """Sequences that wait, one line for each priority and tenant, in order of arrival.

    `cached_tokens(sequence)` says how much of a sequence the prefix cache holds now.
    """

    def __init__(self, counters: VirtualTokenCounters, cached_tokens: Callable[[SequenceState], int]):
        self._counters = counters
        self._cached_tokens = cached_tokens
        self._lines: dict[int, dict[str, _Line]] = {}

    def __len__(self) -> int:
        return sum(len(line) for tenants in self._lines.values() for line in tenants.values())

    def __iter__(self) -> Iterator[SequenceState]:
        for tenants in self._lines.values():
            for line in tenants.values():
                yield from line.values()

    def __contains__(self, sequence: SequenceState) -> bool:
        line = self._lines.get(sequence.priority, {}).get(sequence.tenant, {})
        return line.get(sequence.order) is sequence

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence; one that was preempted goes before those that have not run."""
        line = self._lines.setdefault(sequence.priority, {}).setdefault(sequence.tenant, OrderedDict())
        line[sequence.order] = sequence
        if sequence.num_preemptions:
            resumed = {*itertools.takewhile(lambda key: line[key].num_preemptions, line), sequence.order}
            for order in sorted(resumed, reverse=True):
                line.move_to_end(order, last=False)

    def remove(self, sequence: SequenceState) -> None:
        tenants = self._lines[sequence.priority]
        line = tenants[sequence.tenant]
        del line[sequence.order]
        if not line:
            del tenants[sequence.tenant]
        if not tenants:
            del self._lines[sequence.priority]

    @property
    def best_priority(self) -> int | None:
        """The lowest number of those that wait; None where nobody does."""
        return min(self._lines, default=None)

    def next(self) -> SequenceState | None:
        """The sequence to admit next; it stays in the queue. None while every line waits for a sampled token."""
        for priority in sorted(self._lines):
            tenants = self._lines[priority]
            for tenant in sorted(tenants, key=self._counters.served):
                if (chosen := self._of(tenants[tenant])) is not None:
                    return chosen
        return None

    def _of(self, line: _Line) -> SequenceState | None:
        first = [each for each in itertools.islice(line.values(), LOOKAHEAD) if not each.num_pending]
        if not first:
            return None
        if len(first) == 1 or first[0].num_preemptions or first[0].num_passed >= MAX_PASSED:
            return first[0]
        return max(first, key=self._cached_tokens)  # the oldest of equals

    def passed_over(self, chosen: SequenceState) -> None:
        """`chosen` is admitted: count that the oldest of its line was passed over."""
        oldest = next(iter(self._lines[chosen.priority][chosen.tenant].values()))
        if oldest is not chosen:
            oldest.num_passed += 1
