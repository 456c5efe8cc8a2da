from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.buckets import MIN_ROWS, choose_bucket, plan_buckets


@given(st.data(), st.integers(1, 4096), st.integers(1, 300))
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
    if sum(lens) >= 32:
        assert bucket.num_tokens < 2 * max(sum(lens), MIN_ROWS) or bucket.num_tokens == 32


def test_decode_steps_take_decode_buckets():
    buckets = plan_buckets(512, 32)
    assert choose_bucket(buckets, [1] * 9).tile_queries == 1
    assert choose_bucket(buckets, [1, 2]).tile_queries > 1


def test_too_large_a_step_is_refused():
    with pytest.raises(ValueError, match="exceeds every bucket"):
        choose_bucket(plan_buckets(64, 8), [65])
