"""Percentiles, limits and the search for a rate, against NumPy and against servers that are a formula."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.bench.serve.records import Record
from jaxinfer.bench.serve.search import find_rate
from jaxinfer.bench.serve.slo import goodput, meets, parse_slo
from jaxinfer.bench.serve.stats import percentile, summary

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(values, st.floats(0, 100))
def test_percentile_is_numpys(numbers, percent):
    ordered = sorted(numbers)
    assert percentile(ordered, percent) == pytest.approx(float(np.percentile(ordered, percent)), rel=1e-9, abs=1e-9)


@given(values)
def test_summary(numbers):
    found = summary(numbers)
    assert found is not None and found["num"] == len(numbers) and found["max"] == max(numbers)
    assert found["mean"] == pytest.approx(float(np.mean(numbers)), rel=1e-9, abs=1e-6)
    assert found["p50"] <= found["p90"] <= found["p95"] <= found["p99"] <= found["max"]
    assert found["p95"] == pytest.approx(float(np.percentile(numbers, 95)), rel=1e-9, abs=1e-9)


def test_nothing_has_no_percentile():
    assert summary([]) is None
    with pytest.raises(ValueError, match="needs values"):
        percentile([], 50)
    with pytest.raises(ValueError, match="from 0 to 100"):
        percentile([1], 101)


@given(st.sampled_from(["ttft", "tpot", "e2e"]), st.floats(1e-3, 1e6), st.sampled_from(["us", "ms", "s"]))
def test_limits_are_read_with_their_unit(name, number, unit):
    assert parse_slo(f"{name}:{number!r}{unit}") == (
        name,
        pytest.approx(number * {"us": 1e-6, "ms": 1e-3, "s": 1}[unit]),
    )


LIMITS = ["ttft", "ttft:", "ttft:5", "ttft:ms", "ttft:-5ms", "ttft:nans", "ttft:infs", "itl:5ms", ":5s", "ttft:0s"]


@pytest.mark.parametrize("text", [*LIMITS, "ttft:5min"])
def test_limits_without_sense(text):
    with pytest.raises(ValueError, match="must be"):
        parse_slo(text)


def record(first_s: float, last_s: float, num_tokens: int, error: str | None = None) -> Record:
    return Record(0, 0, 1.0, first_s=first_s, last_s=last_s, output_tokens=num_tokens, error=error)


def test_goodput_counts_what_meets_every_limit():
    slo = {"ttft": 0.5, "tpot": 0.1}
    in_time, late, slow = record(1.4, 2.4, 11), record(1.6, 2.0, 11), record(1.4, 3.0, 11)
    one_token, failed = record(1.4, 1.4, 1), record(1.4, 2.0, 11, "disconnected")
    records = [in_time, late, slow, one_token, failed]
    assert [meets(each, slo) for each in records] == [True, False, False, True, False]
    assert not meets(Record(0, 0, 0.0), slo)
    assert goodput(records, slo, 4.0) == {"num_met": 2, "share": 0.4, "requests_per_s": 0.5}
    assert goodput([], slo, 4.0)["share"] == 0
    assert (in_time.ttft_s, in_time.e2e_s, in_time.tpot_s) == pytest.approx((0.4, 1.4, 0.1))


@given(st.floats(0.01, 1000), st.floats(0.01, 1000), st.integers(1, 40))
def test_the_search_brackets_a_servers_limit(limit, start, max_runs):
    found = find_rate(lambda rate: rate <= limit, start, max_runs=max_runs)
    assert 1 <= len(found.tries) <= max_runs and found.tries[0][0] == start
    assert len({rate for rate, _ in found.tries}) == len(found.tries)
    if found.rate is not None:
        assert found.rate <= limit
    if found.failed_rate is not None:
        assert found.failed_rate > limit
    if max_runs == 40:  # enough to get from any start to any limit here
        assert found.rate is not None and found.failed_rate is not None and found.failed_rate <= found.rate * 1.1


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.floats(0.1, 100))
def test_a_noisy_server_cannot_lead_the_search_astray(outcomes, start):
    remaining = iter(outcomes)
    found = find_rate(lambda rate: next(remaining), start, max_runs=len(outcomes))
    passed = [rate for rate, ok in found.tries if ok]
    failed = [rate for rate, ok in found.tries if not ok]
    assert found.rate == (max(passed) if passed else None)
    assert found.failed_rate == (min(failed) if failed else None)
    assert not (passed and failed) or max(passed) < min(failed)


def test_searches_without_sense():
    for fields in ({"start": 0.0}, {"max_runs": 0}, {"tolerance": 0.0}):
        with pytest.raises(ValueError, match="must be above 0"):
            find_rate(lambda rate: True, **fields)
