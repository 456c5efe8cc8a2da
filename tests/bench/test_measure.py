"""The arithmetic of each benchmark, on an engine and a clock whose durations are known."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from jaxinfer.bench.latency import measure_latency
from jaxinfer.bench.phases import PHASES, StepTimer
from jaxinfer.bench.spread import slope, spread
from jaxinfer.bench.step_profile import measure_profile
from jaxinfer.bench.throughput import measure_throughput
from jaxinfer.bench.workload import random_prompts, run_streams

_spec = importlib.util.spec_from_file_location("bench_fakes", Path(__file__).parent / "fakes.py")
assert _spec and _spec.loader
fakes = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = fakes  # dataclasses look their module up
_spec.loader.exec_module(fakes)

# A step of 4 s without overlap: 3.25 s of the device's, which starts after 0.5 s and rests for the last 0.25 s.
HOST_S = {
    "schedule": 0.125,
    "build_inputs": 0.125,
    "dispatch": 0.25,
    "sampling_inputs": 0.25,
    "sampling_dispatch": 0.125,
    "take": 0.25,
}


@pytest.fixture
def clock():
    return fakes.Clock()


@pytest.fixture
def engine(clock):
    return fakes.FakeEngine(clock, HOST_S)


def test_spread():
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "best": 1.0, "worst": 3.0, "num": 3}
    assert spread([3.0, 1.0], higher_is_better=True) == {"median": 2.0, "best": 3.0, "worst": 1.0, "num": 2}
    with pytest.raises(ValueError, match="nothing was measured"):
        spread([])


def test_slope():
    assert slope([1, 2, 3, 10], [5, 7, 9, 23]) == pytest.approx(2)
    with pytest.raises(ValueError, match="two different"):
        slope([4, 4], [1, 2])


def test_streams_are_timed_without_what_happens_between_steps(engine, clock):
    steps = []
    for step in run_streams(engine, [[1], [2]], 3, clock):
        steps.append((step.elapsed_s, step.num_new_tokens, step.is_decode))
        clock.tick(100)
    assert steps == [(2, 1, False), (2, 1, False), (4, 2, True), (4, 2, True)]
    assert engine.requests == {} and engine.num_forgets == 1


def test_streams_leave_nothing_behind_when_abandoned(engine, clock):
    next(run := run_streams(engine, [[1], [2]], 3, clock))
    run.close()
    assert engine.requests == {} and len(engine.aborted) == 2


def test_a_request_that_ends_early_is_an_error(engine, clock):
    engine.finish_early_with = "error"
    with pytest.raises(RuntimeError, match="after 1 of 3 tokens: error"):
        list(run_streams(engine, [[1]], 3, clock))


def test_latency(engine, clock):
    def probe():
        clock.tick(50)
        return 500.0

    found = measure_latency(
        engine, probe, 1000, num_prompt_tokens=8, num_output_tokens=21, repeats=3, clock=clock
    )  # fmt: skip
    assert found["ttft_s"] == {"median": 2, "best": 2, "worst": 2, "num": 3}
    assert found["prefill_tokens_per_s"]["median"] == 4
    assert found["tpot_s"] == {"median": 4, "best": 4, "worst": 4, "num": 3}
    assert found["decode_step_s"]["num"] == 60
    assert found["weight_read_floor_s"]["median"] == 2
    assert found["decode_step_over_floor"] == {"median": 2, "best": 2, "worst": 2, "num": 3}
    assert found["read_bandwidth_bytes_per_s"]["num"] == 4


def test_latency_holds_a_repeat_against_the_probes_around_it(engine, clock):
    bandwidths = iter([500.0, 700.0, 900.0])
    found = measure_latency(
        engine, lambda: next(bandwidths), 1000, num_prompt_tokens=8, num_output_tokens=17, repeats=2, clock=clock
    )
    assert found["decode_step_over_floor"] == {"median": 2.8, "best": 2.4, "worst": 3.2, "num": 2}


def test_throughput(engine, clock):
    found = measure_throughput(
        engine, lambda: 500.0, 1000, streams=[1, 4], num_prompt_tokens=5, num_output_tokens=6, repeats=2, clock=clock
    )
    one, four = found["streams"]
    assert (one["num_streams"], four["num_streams"]) == (1, 4)
    assert one["output_tokens_per_s"]["median"] == pytest.approx(6 / (2 + 5 * 4))
    assert four["output_tokens_per_s"]["median"] == pytest.approx(24 / (4 * 2 + 5 * 4))
    assert one["over_one_stream"] == {"median": 1, "best": 1, "worst": 1, "num": 2}
    assert four["over_one_stream"]["median"] == pytest.approx((24 / 28) / (6 / 22))
    assert four["decode_step_s"] == {"median": 4, "best": 4, "worst": 4, "num": 10}
    assert four["decode_step_over_floor"]["median"] == 2
    assert found["host"]["num_streams"] == 4


def records_of(engine, clock, num_output_tokens=8, blocking=False):
    """What the timer says of the steps in which both requests decode."""
    own_step, records = engine.step, []
    with StepTimer(engine, clock) as timer:
        timer.blocking = blocking
        for step in run_streams(engine, [[1], [2]], num_output_tokens, clock, timer.step):
            if step.is_decode:
                records.append(timer.record)
            else:
                assert timer.record is None
    assert engine.step == own_step and "_take" not in vars(engine)
    return records


def test_phases_without_overlap(engine, clock):
    first, *others = records_of(engine, clock)
    assert len(others) == 6 and first.step_s == 4
    for record in others:
        assert record.phases_s == HOST_S | {"wait": 2.875} and set(record.phases_s) == set(PHASES)
        assert (record.step_s, record.idle_s) == (4, 0.75)


def test_phases_with_overlap(clock):
    engine = fakes.FakeEngine(clock, HOST_S, overlap=True)
    # The last step only reads; the first that dispatches one ahead finds a device that works already.
    *full, last = records_of(engine, clock)
    assert last is None and len(full) == 6
    for record in full[1:]:
        assert record.phases_s == HOST_S | {"wait": 3.25 - sum(HOST_S.values())}
        assert (record.step_s, record.idle_s) == (3.25, 0)


@pytest.mark.parametrize(
    ("device_s", "idle_s"),
    [
        # The forward ends while sampling's inputs are made, and sampling with the inputs of the next. Work comes at
        # the end of a dispatch, and the device counts as resting from the start of the phase in which it ended.
        ((0.0625, 0.4), (0.25 + 0.125) + (0.125 + 0.25)),
        ((0.25, 0.1), (0.25 + 0.125) + (0.25 + 0.125 + 0.125 + 0.25)),
        # The forward ends with the sampling's dispatch under way, sampling in the step after.
        ((0.3, 0.375), 0.125 + 0.125 + 0.25),
    ],
)
def test_a_short_device_step_rests_in_spite_of_overlap(clock, device_s, idle_s):
    engine = fakes.FakeEngine(clock, HOST_S, device_s, overlap=True)
    records = records_of(engine, clock)[2:-1]
    assert [record.idle_s for record in records] == [idle_s] * len(records)


@pytest.mark.parametrize("overlap", [True, False])
def test_blocking_steps_tell_what_each_program_takes(clock, overlap):
    engine = fakes.FakeEngine(clock, HOST_S, overlap=overlap)
    records = records_of(engine, clock, blocking=True)
    assert {record.device_s for record in records if record} == {(3.0, 0.25)}


def test_profile_by_both_routes(engine, clock):
    setting = engine.config
    found = measure_profile(engine, [[1], [2]], repeats=3, overlap=[True, False], clock=clock)
    with_overlap, without = found["steps"]
    assert (with_overlap["overlap"], without["overlap"]) == (True, False)
    assert without["step_s"] == {"median": 4, "best": 4, "worst": 4, "num": 12}
    assert without["host_share"] == {"median": 0.1875, "best": 0.1875, "worst": 0.1875, "num": 12}
    assert without["host_share_by_difference"] == {"median": 0.1875, "best": 0.1875, "worst": 0.1875, "num": 3}
    assert with_overlap["host_share"]["worst"] == with_overlap["host_share_by_difference"]["worst"] == 0
    assert with_overlap["phases_s"]["wait"]["median"] == 3.25 - sum(HOST_S.values())
    assert found["device"]["forward_s"]["median"] == 3 and found["device"]["sampling_s"]["median"] == 0.25
    assert found["num_streams"] == 2 and engine.config == setting and engine.requests == {}


def test_profile_without_steps_that_have_every_phase(engine, clock):
    engine._read = lambda ids, tokens: dict(zip(ids, engine._sampled(ids), strict=True))
    with pytest.raises(RuntimeError, match="the 1 streams did not decode together"):
        measure_profile(engine, [[1]], repeats=1, overlap=[True], clock=clock)


def test_prompts_are_the_same_each_time():
    assert random_prompts(2, 5, 10) == random_prompts(2, 5, 10) != random_prompts(2, 5, 10, seed=1)
    assert {len(prompt) for prompt in random_prompts(3, 7, 4)} == {7}
