"""Phases of a decode step with and without overlap, and the part of it in which the device has nothing to do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from jaxinfer.bench.phases import PHASES, StepRecord, StepTimer
from jaxinfer.bench.spread import spread
from jaxinfer.bench.workload import run_streams

STEPS_PER_BLOCK = 4
"""Steps measured in one way before the next takes its turn."""
_DROPPED = 2
"""Steps before them: the first after a prefill, and one that found the device as the way before had left it."""
_BLOCKING = "blocking"


def tokens_needed(num_ways: int) -> int:
    """Output tokens of each stream while steps are timed in so many ways, the blocking one included."""
    return num_ways * (STEPS_PER_BLOCK + _DROPPED) + 4


def measure_profile(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    *,
    repeats: int,
    overlap: Sequence[bool],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Decode all `prompts` together, and time blocking steps and steps with each setting of `overlap` in turn.

    The host's share of a step comes by two routes. `host_share` adds up, in each step, how long the device had rested
    when work came. `host_share_by_difference` is what a block's mean step takes beyond the two programs' time, each
    run alone, over the step. On CPUs the host's work also takes cores from the device's, which only the second sees.

    Raises:
        RuntimeError: the prompts never decode together.
    """
    # With overlap comes last: what is in flight then is dropped with its requests.
    blocks: dict[bool | str, list[list[StepRecord]]] = {_BLOCKING: []} | {each: [] for each in sorted(overlap)}
    setting = engine.config
    try:
        with StepTimer(engine, clock) as timer:
            for _ in range(repeats):
                _add_blocks(engine, timer, prompts, blocks, clock)
    finally:
        engine.config = setting
    forward_s, sampling_s = (
        [statistics.fmean(each.device_s[program] for each in block) for block in blocks[_BLOCKING]]
        for program in range(2)
    )
    total_s = [sum(both) for both in zip(forward_s, sampling_s, strict=True)]
    return {
        "num_streams": len(prompts),
        "device": {
            "forward_s": spread(forward_s),
            "sampling_s": spread(sampling_s),
        },
        "steps": [{"overlap": each, **_describe(blocks[each], total_s)} for each in overlap],
    }


def _add_blocks(
    engine: Any,
    timer: StepTimer,
    prompts: Sequence[Sequence[int]],
    blocks: dict[bool | str, list[list[StepRecord]]],
    clock: Callable[[], float],
) -> None:
    ways = list(blocks)

    def take_turn() -> None:
        timer.blocking = ways[0] == _BLOCKING
        engine.config = replace(engine.config, overlap=ways[0] is True)

    take_turn()
    block: list[StepRecord] = []
    with closing(run_streams(engine, prompts, tokens_needed(len(ways)), clock, timer.step)) as steps:
        for step in steps:
            if step.is_decode and timer.record is not None:
                block.append(timer.record)
            if len(block) < _DROPPED + STEPS_PER_BLOCK:
                continue
            blocks[ways.pop(0)].append(block[_DROPPED:])
            if not ways:
                return
            block = []
            take_turn()
    raise RuntimeError(f"the {len(prompts)} streams did not decode together")


def _describe(blocks: Sequence[Sequence[StepRecord]], device_s: Sequence[float]) -> dict[str, Any]:
    steps = [each for block in blocks for each in block]
    means_s = [statistics.fmean(each.step_s for each in block) for block in blocks]
    return {
        "step_s": spread([each.step_s for each in steps]),
        "idle_s": spread([each.idle_s for each in steps]),
        "host_share": spread([each.idle_s / each.step_s for each in steps]),
        "host_share_by_difference": spread([1 - own / mean for own, mean in zip(device_s, means_s, strict=True)]),
        "phases_s": {name: spread([each.phases_s[name] for each in steps]) for name in PHASES},
    }
