from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.engine.buckets import MIN_ROWS, choose_bucket, expected_waste, plan_buckets, plan_sizes


@given(st.data(), st.integers(1, 2048), st.integers(1, 100))
def test_every_step_within_the_limits_has_a_bucket(data, max_tokens, max_rows):
    buckets = plan_buckets(max_tokens, max_rows)
    lens = data.draw(st.lists(st.integers(1, max_tokens), min_size=1, max_size=max_rows))
    while sum(lens) > max_tokens:
        lens.pop()
    if not lens:
        return
    bucket = choose_bucket(buckets, lens)
    assert bucket.holds(lens)
    assert bucket.num_tokens >= MIN_ROWS and bucket.num_rows >= MIN_ROWS
    assert buckets[0].holds(lens), "the catch-all comes first"
    assert all(each.num_tokens % 8 == 0 and each.num_rows % 8 == 0 for each in buckets)


@settings(max_examples=30)
@given(st.integers(1, 8192), st.integers(1, 600))
def test_no_more_programs_than_doubling_and_a_smaller_one_for_a_smaller_step(max_tokens, max_rows):
    buckets = plan_buckets(max_tokens, max_rows)
    assert len(buckets) == len(set(buckets))
    assert len(buckets) <= len(doubling(32, max(32, max_tokens))) + len(doubling(8, max(8, max_rows))) + 2
    chunks = [each.num_tokens for each in buckets if each.tile_queries > 1]
    assert chunks == sorted(chunks, reverse=True) and chunks[0] >= max_tokens
    assert max(each.num_rows for each in buckets if each.tile_queries == 1) >= max_rows


def doubling(first, last):
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(2 * sizes[-1], last))
    return sizes


def waste_by_sum(sizes):
    """Padding over all tokens, one step of each length n in proportion to 1/n."""
    lengths = range(1, sizes[-1] + 1)
    padded = sum((min(size for size in sizes if size >= n) - n) / n for n in lengths)
    return padded / (padded + len(lengths))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6, unique=True))
def test_expected_waste_is_what_a_sum_over_all_steps_gives(sizes):
    sizes = sorted(sizes)
    assert expected_waste(sizes) == pytest.approx(waste_by_sum(sizes), abs=1e-12)


@pytest.mark.parametrize(("first", "last", "num_sizes"), [(8, 96, 3), (16, 104, 4), (8, 8, 2), (32, 200, 2)])
def test_planned_sizes_are_the_best_of_all(first, last, num_sizes):
    candidates = range(first, last, 8)
    every = (
        [*rest, last]
        for count in range(num_sizes)
        for rest in itertools.combinations(candidates, min(count, len(candidates)))
    )
    best = min(waste_by_sum(sizes) for sizes in every)
    planned = plan_sizes(first, last, num_sizes)
    assert len(planned) <= num_sizes and planned[-1] == last
    assert waste_by_sum(planned) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("last", [512, 2048, 8192])
def test_planned_sizes_pad_less_than_doubling(last):
    sizes = doubling(32, last)
    planned = plan_sizes(32, last, len(sizes))
    assert len(planned) == len(sizes)
    assert expected_waste(planned) < 0.97 * expected_waste(sizes)


def test_more_programs_pad_less_and_one_is_too_few():
    buckets = {count: plan_buckets(512, 32, num_programs=count) for count in range(2, 12)}
    assert [len(each) for each in buckets.values()] == list(buckets)
    wastes = [
        expected_waste(sorted(each.num_tokens for each in planned if each.tile_queries > 1))
        for planned in buckets.values()
    ]
    assert wastes == sorted(wastes, reverse=True) and wastes[-1] < wastes[0] / 2
    with pytest.raises(ValueError, match="num_programs=1 must be at least 2"):
        plan_buckets(512, 32, num_programs=1)


def test_a_single_row_is_one_more():
    assert set(plan_buckets(512, 32, single_row=True)) - set(plan_buckets(512, 32)) == {
        each for each in plan_buckets(512, 32, single_row=True) if each.num_tokens == 1
    }


def test_decode_steps_take_decode_buckets():
    buckets = plan_buckets(512, 32)
    assert choose_bucket(buckets, [1] * 9).tile_queries == 1
    assert choose_bucket(buckets, [1, 2]).tile_queries > 1


def test_too_large_a_step_is_refused():
    with pytest.raises(ValueError, match="exceeds every bucket"):
        choose_bucket(plan_buckets(64, 8), [65])
