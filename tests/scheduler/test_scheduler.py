"""The scheduler over a fake device: any load runs to its end, every row sees what it should, everything comes back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from jaxinfer.scheduler.scheduler import Schedule

from .fake_device import FakeEngine, expected_output


class Load(RuleBasedStateMachine):
    """Requests that come, fork, end early and are aborted, over caches from one sequence up."""

    requests = Bundle("requests")

    @initialize(
        num_pages=st.integers(10, 40),
        max_rows=st.integers(1, 6),
        budget=st.integers(6, 30),
        share=st.booleans(),
        overlap=st.booleans(),
        window=st.sampled_from([0, 0, 3, 8, 9]),
        ends=st.integers(2, 9),
    )
    def start(self, num_pages, max_rows, budget, share, overlap, window, ends):
        self.engine = FakeEngine(
            num_pages=num_pages,
            max_rows=max_rows,
            budget=budget,
            share=share,
            overlap=overlap,
            window=window,
            end=lambda sequence: hash(tuple(sequence.output_ids)) % ends == 0,
        )

    @rule(
        target=requests,
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=30),
        max_tokens=st.integers(0, 10),
        n=st.integers(1, 3),
        priority=st.integers(0, 2),
        tenant=st.sampled_from(["a", "b"]),
        cache_salt=st.sampled_from(["", "", "s"]),
        reads_prompt=st.booleans(),
    )
    def add(self, prompt, max_tokens, n, reads_prompt, **options):
        sequences = self.engine.add(prompt, max_tokens, n=n, **options)
        sequences[0].reads_prompt = reads_prompt
        return sequences

    @rule(sequences=consumes(requests))
    def abort(self, sequences):
        for sequence in sequences:
            self.engine.abort(sequence)

    @rule(count=st.integers(1, 12))
    def run(self, count):
        for _ in range(count):
            self.engine.step()

    @rule()
    def preempt(self):
        self.engine.scheduler.preempt_last()

    @invariant()
    def whole(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.run()
            self.engine.scheduler.check_integrity()


TestLoad = Load.TestCase
TestLoad.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


prompts = st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=30), st.integers(0, 8)), max_size=15)


@given(prompts, st.integers(10, 30), st.integers(1, 5), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_outputs_are_those_of_each_request_alone(loads, num_pages, max_rows, share, overlap):
    engine = FakeEngine(num_pages=num_pages, max_rows=max_rows, share=share, overlap=overlap)
    sequences = [(engine.add(prompt, count)[0], prompt, count) for prompt, count in loads]
    engine.run()
    for sequence, prompt, count in sequences:
        assert sequence.output_ids == expected_output(prompt, count)


@pytest.mark.parametrize("windows", [[0], [1, 3, 5, 9, 14]], ids=["all", "windows"])
def test_long_prompts_that_share_prefixes(windows):
    """Loads that hypothesis does not come to: prompts of many pages that begin alike, in caches of few sequences."""
    for seed in range(130):
        chance = random.Random(seed)
        bases = [[chance.randrange(2) for _ in range(60)] for _ in range(2)]
        engine = FakeEngine(
            num_pages=chance.randrange(18, 60),
            max_rows=chance.randrange(1, 7),
            budget=chance.randrange(7, 20),
            overlap=chance.random() < 0.7,
            window=chance.choice(windows),
            end=lambda sequence: hash(tuple(sequence.output_ids)) % 5 == 0,
        )
        sequences = []
        for _ in range(chance.randrange(2, 14)):
            prompt = chance.choice(bases)[: chance.randrange(1, 60)]
            prompt += [chance.randrange(2) for _ in range(chance.randrange(0, 4))]
            options = {"priority": chance.randrange(3), "tenant": chance.choice("ab")}
            sequences += engine.add(prompt, chance.randrange(0, 9), n=chance.choice([1, 1, 2]), **options)
            sequences[-1].reads_prompt = chance.random() < 0.1
            for _ in range(chance.choice([0, 0, 1, 3])):
                engine.step()
            if chance.random() < 0.1:
                engine.scheduler.preempt_last()
            if chance.random() < 0.1:
                engine.abort(sequences.pop(chance.randrange(len(sequences))))
        engine.run()
        for sequence in sequences:
            length = len(sequence.output_ids)
            assert sequence.output_ids == expected_output(sequence.prompt_ids, length)


def test_decodes_go_before_prefill_chunks():
    engine = FakeEngine(num_pages=100, budget=8, overlap=False)
    (short,) = engine.add([0, 1], 5)
    (long,) = engine.add([1] * 20, 2)
    plan = engine.step()
    assert [(row.sequence, row.num_tokens, row.samples) for row in plan.rows] == [(short, 2, True), (long, 6, False)]
    assert [(row.sequence, row.num_tokens) for row in engine.step().rows] == [(short, 1), (long, 7)]


def test_a_long_prompt_of_a_low_priority_leaves_the_budget_to_a_higher_one():
    engine = FakeEngine(num_pages=400, budget=8, max_rows=4)
    (low,) = engine.add([1] * 400, 2, priority=5)
    engine.step()
    (high,) = engine.add([2] * 9, 2, priority=0)
    assert [(row.sequence, row.num_tokens) for row in engine.step().rows] == [(high, 8)]
    assert [(row.sequence, row.num_tokens) for row in engine.step().rows] == [(high, 1), (low, 7)]
    engine.run()


@pytest.mark.parametrize("num_shared", [40, 39])  # whole pages, and one that is to be copied
def test_nobody_waits_for_a_page_that_a_lower_priority_computes(num_shared):
    """Requests of the high priority take all of the budget, so the low one gets to none of its pages."""
    engine = FakeEngine(num_pages=400, budget=8, max_rows=6)
    (low,) = engine.add([1] * num_shared + [0] * 20, 2, priority=5)
    engine.step()
    (high,) = engine.add([1] * num_shared + [2] * 3, 2, priority=0)
    for index in range(20):
        engine.add([3 + index] * 40, 1, priority=0)
    for _ in range(20):
        engine.step()
    assert high not in engine.live and low in engine.live
    engine.run()


def test_a_prompt_whose_last_token_another_has_computed_goes_on():
    engine = FakeEngine(num_pages=100, budget=8)
    (low,) = engine.add([1] * 12, 2, priority=1)
    engine.step()
    (reader,) = engine.add([1] * 12 + [0] * 4, 2, priority=0)
    reader.reads_prompt = True
    engine.run(100)
    assert low.output_ids == expected_output([1] * 12, 2)


def test_what_can_never_fit_is_refused():
    engine = FakeEngine(num_pages=4)
    with pytest.raises(ValueError, match="need 5 pages of 4 tokens and the cache has 4"):
        engine.add([1] * 10, 10)
    engine.add([1] * 6, 10)
    engine.run()


def test_a_cache_of_as_many_full_sequences_as_rows_runs_them_all_at_once():
    engine = FakeEngine(num_pages=4 * 3, max_rows=4, budget=100)
    requests = [engine.add([index] * 9, 3)[0] for index in range(4)]
    engine.step()
    assert all(request.lane >= 0 for request in requests)
    engine.run()
    assert engine.scheduler.num_preemptions == 0


def test_requests_that_arrive_together_compute_their_common_prefix_once():
    engine = FakeEngine(num_pages=500, max_rows=32, budget=64)
    common = [index % 7 for index in range(256)]
    requests = [engine.add([*common, index], 2)[0] for index in range(32)]
    engine.run()
    # The prefix once, and of each request its last prompt token and one of its two output tokens.
    assert sum(engine.num_computed.values()) == 256 + 32 * 2
    assert [request.num_cached_tokens for request in requests] == [0] + [256] * 31


def test_choices_copy_the_page_in_which_the_prompt_ends():
    engine = FakeEngine(num_pages=100)
    choices = engine.add([1, 0] * 5, 6, n=3)
    engine.run()
    assert [choice.num_cached_tokens for choice in choices] == [0, 9, 9]
    assert engine.num_computed == {"r1": 10 + 1 + 1 + 3 * 5}


def test_a_wholly_cached_prompt_runs_its_last_token():
    engine = FakeEngine(num_pages=100)
    prompt = [1, 0, 0] * 4
    for cached in (0, 11, 11):
        (request,) = engine.add(prompt, 1)
        engine.run()
        assert request.num_cached_tokens == cached


def test_a_conversation_that_goes_on_computes_only_what_is_new():
    engine = FakeEngine(num_pages=100)
    (first,) = engine.add([1] * 9, 6)
    engine.run()
    (second,) = engine.add([*[1] * 9, *first.output_ids, 2, 2, 2], 3)
    plan = engine.step()
    assert second.num_cached_tokens == 9 + 5 and not plan.copies  # all that was computed: the last token never is
    engine.run()


def test_prompts_of_other_salts_share_nothing():
    engine = FakeEngine(num_pages=100)
    found = []
    for salt in ("", "a", "b", "a"):
        (request,) = engine.add([1] * 9, 1, cache_salt=salt)
        engine.run()
        found.append(request.num_cached_tokens)
    assert found == [0, 0, 0, 8]


def test_a_request_that_reads_its_prompt_computes_all_of_it():
    engine = FakeEngine(num_pages=100)
    engine.add([1] * 18, 2)
    engine.run()
    (request,) = engine.add([1] * 18, 2, name="reader")
    request.reads_prompt = True
    engine.run()
    assert request.num_cached_tokens == 0 and engine.num_computed["reader"] == 19


def test_without_sharing_nothing_is_cached():
    engine = FakeEngine(num_pages=100, share=False)
    for _ in range(2):
        (request,) = engine.add([1] * 18, 2)
        engine.run()
        assert request.num_cached_tokens == 0 and engine.pages.tree.num_evictable == 0


def test_pages_run_out_and_the_newest_waits():
    engine = FakeEngine(num_pages=12, max_rows=4)
    requests = [engine.add([index] * 8, 24)[0] for index in range(4)]
    engine.run()
    assert engine.scheduler.num_preemptions > 0 and requests[0].num_preemptions == 0
    for index, request in enumerate(requests):
        assert request.output_ids == expected_output([index] * 8, 24)


def test_priorities_take_rows_and_pages_from_what_runs():
    engine = FakeEngine(num_pages=100, max_rows=2)
    low = [engine.add([index] * 8, 30, priority=5)[0] for index in range(3)]
    for _ in range(4):
        engine.step()
    (urgent,) = engine.add([9] * 8, 3)
    engine.step()
    assert urgent.lane >= 0 and low[0].lane >= 0 and low[1].num_preemptions == 1
    engine.run()
    assert all(each.output_ids == expected_output([index] * 8, 30) for index, each in enumerate(low))


def test_most_cached_goes_first_and_nobody_starves():
    engine = FakeEngine(num_pages=200, max_rows=1)
    engine.add([1] * 16, 2)
    engine.run()
    (other,) = engine.add([0] * 16, 2)
    cached = [engine.add([1] * 16 + [index], 2)[0] for index in range(40)]
    finished = []
    while engine.live:
        before = set(engine.live)
        engine.step()
        finished += before - engine.live
    assert finished[0] is cached[0] and 10 <= finished.index(other) <= 20


def test_pages_behind_the_window_of_every_layer_are_given_back():
    engine = FakeEngine(num_pages=8, window=8, budget=8)
    (request,) = engine.add([1] * 60, 40)  # 25 pages in all
    engine.run()
    assert request.output_ids == expected_output([1] * 60, 40) and request.num_preemptions == 0


def test_a_tenant_with_many_requests_delays_one_with_few_by_no_more_than_its_share():
    def steps_of_the_small_tenant(num_others: int, weights: dict[str, float] | None = None) -> int:
        engine = FakeEngine(num_pages=400, max_rows=4, budget=16, weights=weights)
        for index in range(num_others):
            engine.add([index % 5, index % 3, 2, 1] * 3, 8, tenant="large")
        for _ in range(6):
            engine.step()
        mine = [engine.add([3, index, 3] * 4, 8, tenant="small")[0] for index in range(4)]
        start = engine.num_steps
        while any(each in engine.live for each in mine):
            engine.step()
        return engine.num_steps - start

    alone, beside = steps_of_the_small_tenant(0), steps_of_the_small_tenant(100)
    # Half of the rows are its share, and a row is free only when what runs in it has ended.
    assert beside <= 2 * alone + 12
    assert steps_of_the_small_tenant(100, {"small": 8}) <= beside


def test_a_page_is_the_target_of_one_copy_only():
    """A sequence that was preempted after its copy was planned may leave the page to another one's copy."""
    engine = FakeEngine(num_pages=100)
    engine.add([1] * 10, 2)
    engine.run()
    first, second = (engine.add([1] * 9 + [2 + index], 2)[0] for index in range(2))
    plan = Schedule()
    for sequence in (first, second):
        sequence.lane = engine.scheduler._free_lanes.pop()
        engine.scheduler.waiting.remove(sequence)
        engine.scheduler.running.append(sequence)
        engine.pages.admit(sequence)
        engine.scheduler._take(sequence, 16, plan, set())
        if sequence is first:
            (taken,) = plan.copies
            engine.pages.allocator._free.append(taken)  # as eviction would: the next to be handed out
            engine.pages.allocator._used.remove(taken)
    assert list(plan.copies) == [taken]
