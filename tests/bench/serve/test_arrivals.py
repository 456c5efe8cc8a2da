"""Arrival processes: their rate, their spread, and that they can be repeated."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.bench.serve.arrivals import Load, arrival_times


def first(load: Load, number: int) -> list[float]:
    return list(itertools.islice(arrival_times(load), number))


@given(st.floats(0.01, 1e4), st.integers(0, 2**40), st.sampled_from(["poisson", "fixed", "gamma"]))
def test_moments_never_go_back_and_repeat_with_the_seed(rate, seed, process):
    load = Load(rate, process, num_requests=1, seed=seed)
    moments = first(load, 20)
    assert moments[0] == 0 and moments == sorted(moments) == first(load, 20)


@given(st.floats(0.01, 1e4), st.integers(1, 200))
def test_fixed_moments_do_not_drift(rate, number):
    moments = first(Load(rate, "fixed", num_requests=1), number)
    assert moments[-1] == pytest.approx((number - 1) / rate, rel=1e-12)


@pytest.mark.parametrize(
    ("load", "variation"),
    [
        (Load(5.0, num_requests=1), 1.0),
        (Load(5.0, "gamma", 1.0, num_requests=1), 1.0),
        (Load(5.0, "gamma", 0.25, num_requests=1), 2.0),
        (Load(5.0, "gamma", 4.0, num_requests=1), 0.5),
        (Load(5.0, "fixed", num_requests=1), 0.0),
    ],
)
def test_gaps_have_the_mean_and_the_variation_they_should(load, variation):
    moments = first(load, 20001)
    gaps = [after - before for before, after in zip(moments, moments[1:], strict=False)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.05, abs=1e-6)


def test_seeds_differ_and_a_burst_is_at_once():
    assert first(Load(5.0, num_requests=1, seed=1), 5) != first(Load(5.0, num_requests=1, seed=2), 5)
    assert first(Load(process="burst", num_requests=4), 4) == [0.0] * 4
    with pytest.raises(ValueError, match="closed loop"):
        first(Load(concurrency=1, num_requests=1), 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rate": -1.0, "num_requests": 1}, "rate=-1.0"),
        ({"rate": float("inf"), "num_requests": 1}, "rate=inf"),
        ({"rate": float("nan"), "num_requests": 1}, "rate=nan"),
        ({"concurrency": 0, "num_requests": 1}, "concurrency=0"),
        ({"rate": 1.0}, "a number of requests, a duration or both"),
        ({"num_requests": 1}, "give a rate, a concurrency"),
        ({"process": "burst", "duration_s": 1}, "a burst needs a number"),
        ({"process": "waves", "num_requests": 1}, "must be one of poisson"),
        ({"process": "gamma", "concurrency": 2, "num_requests": 1}, "gamma arrivals need a rate"),
    ],
)
def test_loads_without_sense(fields, message):
    with pytest.raises(ValueError, match=message):
        Load(**fields)
