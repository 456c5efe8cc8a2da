"""The arithmetic of each benchmark, on an engine and a clock whose durations are known."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from jaxinfer.bench.latency import measure_latency
from jaxinfer.bench.phases import PHASES, HostShare, StepTimer
from jaxinfer.bench.spread import slope, spread
from jaxinfer.bench.throughput import measure_throughput
from jaxinfer.bench.workload import random_prompts, run_streams

_spec = importlib.util.spec_from_file_location("bench_fakes", Path(__file__).parent / "fakes.py")
assert _spec and _spec.loader
fakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fakes)

# 0.5 s of a step of 4 s with nothing on the device, and 0.25 s between the dispatches.
PHASES_S = dict(zip(PHASES, (0.125, 0.125, 0.125, 0.25, 0.125, 3.125, 0.125), strict=True))


@pytest.fixture
def clock():
    return fakes.Clock()


@pytest.fixture
def engine(clock):
    return fakes.FakeEngine(clock, PHASES_S)


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
    assert engine.requests == {}


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
    # Blocks of 8, 8 and 4 steps, with a probe before each and after the last.
    assert found["decode_step_over_floor"] == {"median": 2, "best": 2, "worst": 2, "num": 9}
    assert found["read_bandwidth_bytes_per_s"]["num"] == 12


def test_latency_holds_a_block_against_the_probes_around_it(engine, clock):
    bandwidths = iter([500.0, 700.0, 900.0])
    found = measure_latency(
        engine, lambda: next(bandwidths), 1000, num_prompt_tokens=8, num_output_tokens=17, repeats=1, clock=clock
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


def test_phases_make_the_whole_step(engine, clock):
    engine.prefill_s = 0.0
    own_step = engine.step
    with StepTimer(engine, clock) as timer:
        for step in run_streams(engine, [[1], [2]], 2, clock, timer.step):
            if not step.is_decode:
                assert timer.phases_s == {}
        assert timer.phases_s == PHASES_S and timer.step_s == sum(PHASES_S.values())
    assert engine.step == own_step and "_take" not in vars(engine)


def add_pair(share, timer, phases_s, step_s, forward_s, device_s):
    """One blocking step and one plain one."""
    timer.phases_s = phases_s
    timer.blocking, timer.forward_s, timer.device_s = True, forward_s, device_s
    share.add()
    assert not timer.blocking
    timer.step_s = step_s
    share.add()
    assert timer.blocking


def test_host_share(engine, clock):
    timer = StepTimer(engine, clock)
    share = HostShare(timer)
    add_pair(share, timer, PHASES_S, step_s=4.0, forward_s=3.0, device_s=3.5)
    found = share.report()
    assert found["host_share"]["median"] == 0.125  # 0.5 s of 4 s
    assert found["host_share_by_difference"] == 0.125
    assert set(found["phases_s"]) == set(PHASES)


def test_host_share_counts_the_gap_after_a_short_forward(engine, clock):
    timer = StepTimer(engine, clock)
    share = HostShare(timer)
    add_pair(share, timer, PHASES_S, step_s=4.0, forward_s=0.125, device_s=0.25)
    assert share.report()["host_share"]["median"] == (0.5 + 0.125) / 4


def test_prompts_are_the_same_each_time():
    assert random_prompts(2, 5, 10) == random_prompts(2, 5, 10) != random_prompts(2, 5, 10, seed=1)
    assert {len(prompt) for prompt in random_prompts(3, 7, 4)} == {7}
