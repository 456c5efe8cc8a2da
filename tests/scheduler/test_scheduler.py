"""The scheduler over a fake device: any load runs to its end within every limit, and everything comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.config import SchedulerConfig
from jaxinfer.request import SamplingParams, SequenceState
from jaxinfer.scheduler.scheduler import Scheduler

PAGE_SIZE = 4


def make(prompt: int, output: int, name: str = "a") -> SequenceState:
    return SequenceState(name, 0, [1] * prompt, SamplingParams(max_tokens=output), prompt + output)


requests = st.tuples(st.integers(1, 40), st.integers(1, 10), st.integers(0, 30))


@given(st.lists(requests, max_size=20), st.integers(1, 6), st.integers(1, 30), st.integers(13, 60), st.data())
def test_any_load_runs_to_its_end(loads, max_rows, budget, num_pages, data):
    budget = max(budget, max_rows)
    scheduler = Scheduler(SchedulerConfig(50, max_rows, budget), PageAllocator(num_pages + 1), PAGE_SIZE)
    for prompt, output, _ in loads:
        scheduler.add(make(prompt, output))
    unfinished = len(loads)
    for _ in range(2000):
        rows = scheduler.schedule()
        if not rows:
            break
        assert sum(row.num_tokens for row in rows) <= budget and len(rows) <= max_rows
        scheduler.commit(rows)
        for row in rows:
            assert row.sequence.num_computed <= len(row.sequence.pages) * PAGE_SIZE
            if row.samples:
                row.sequence.output_ids.append(7)
                if row.sequence.num_tokens >= row.sequence.max_total_tokens:
                    scheduler.finish(row.sequence)
                    unfinished -= 1
        if scheduler.running and data.draw(st.integers(0, 9)) == 0:
            scheduler.finish(scheduler.running[0])
            unfinished -= 1
        scheduler.check_integrity()
    assert unfinished == 0 and scheduler.allocator.num_used == 0


def test_decodes_go_before_prefill_chunks():
    scheduler = Scheduler(SchedulerConfig(100, 4, 8), PageAllocator(100), PAGE_SIZE)
    long, short = make(20, 2, "long"), make(2, 5, "short")
    scheduler.add(short)
    scheduler.add(long)
    rows = scheduler.schedule()
    assert [(row.num_tokens, row.samples) for row in rows] == [(2, True), (6, False)]
    scheduler.commit(rows)
    short.output_ids.append(3)
    assert [(row.sequence.request_id, row.num_tokens) for row in scheduler.schedule()] == [("short", 1), ("long", 7)]


def test_what_can_never_fit_is_refused():
    scheduler = Scheduler(SchedulerConfig(1000, 4, 8), PageAllocator(5), PAGE_SIZE)
    with pytest.raises(ValueError, match="need 5 pages of 4 tokens and the cache has 4"):
        scheduler.add(make(10, 10))


def test_the_allocator_refuses_what_it_did_not_give():
    allocator = PageAllocator(4)
    assert allocator.allocate(4) is None and allocator.num_free == 3
    pages = allocator.allocate(2)
    assert pages is not None and 0 not in pages
    allocator.free(pages)
    with pytest.raises(ValueError, match="not in use"):
        allocator.free(pages[:1])
    with pytest.raises(ValueError, match="num_pages=1"):
        PageAllocator(1)
