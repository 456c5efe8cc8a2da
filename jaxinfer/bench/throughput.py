"""Many streams: output tokens/s against one stream, and the host's share of a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxinfer.bench.spread import spread
from jaxinfer.bench.step_profile import measure_profile
from jaxinfer.bench.workload import random_prompts, run_streams


def measure_throughput(
    engine: Any,
    probe: Callable[[], float],
    weight_bytes: int,
    *,
    streams: Sequence[int],
    num_prompt_tokens: int,
    num_output_tokens: int,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Run each number of streams in turn, `repeats` times over. `streams` must hold 1, the base of `over_one_stream`.

    `output_tokens_per_s` counts whole runs, prefill included; `decode_step_s` the steps in which every stream decodes.
    """
    prompts = random_prompts(max(streams), num_prompt_tokens, engine.config.model.vocab_size)
    for _ in run_streams(engine, prompts, 2, clock):
        pass  # warm-up
    rates: dict[int, list[float]] = {count: [] for count in streams}
    steps_s: dict[int, list[float]] = {count: [] for count in streams}
    floor_ratios: dict[int, list[float]] = {count: [] for count in streams}
    bandwidths = []
    for _ in range(repeats):
        for count in streams:
            before = probe()
            steps = list(run_streams(engine, prompts[:count], num_output_tokens, clock))
            bandwidths += [before, probe()]
            rates[count].append(count * num_output_tokens / sum(step.elapsed_s for step in steps))
            decode_s = [step.elapsed_s for step in steps if step.is_decode]
            steps_s[count] += decode_s
            floor_ratios[count].append(statistics.fmean(decode_s) * statistics.fmean(bandwidths[-2:]) / weight_bytes)
    rows = []
    for count in streams:
        scaling = [many / one for many, one in zip(rates[count], rates[1], strict=True)]
        rows.append(
            {
                "num_streams": count,
                "output_tokens_per_s": spread(rates[count], higher_is_better=True),
                "over_one_stream": spread(scaling, higher_is_better=True),
                "decode_step_s": spread(steps_s[count]),
                "decode_step_over_floor": spread(floor_ratios[count]),
            }
        )
    return {
        "streams": rows,
        "read_bandwidth_bytes_per_s": spread(bandwidths, higher_is_better=True),
        "weight_bytes": weight_bytes,
        "weight_read_floor_s": spread([weight_bytes / value for value in bandwidths]),
        "host": measure_profile(engine, prompts, repeats=repeats, overlap=[engine.config.overlap], clock=clock),
    }
